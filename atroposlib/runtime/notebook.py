"""An environment as an object in a notebook or a script, without a hub: `BaseEnv.create` and what it returns.

Outside of `async with`, each call is a whole run like a command: setup, work, close. Inside, `setup` runs once, and
the block's end closes the environment. Overlapping calls run one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import inspect
import io
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic_core import to_jsonable_python

from atroposlib.envs.collecting import close
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import require
from atroposlib.runtime.env_command import build_environment
from atroposlib.runtime.process import process
from atroposlib.scored_data import IGNORE_INDEX, ScoredDataGroup


@dataclass(slots=True, kw_only=True)
class _State:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call that runs."""
    num_open: int = 0
    """Runs and `async with` blocks that are open; the outermost sets up and closes."""
    logged: dict[str, Any] | None = None
    """What the evaluation gave to `evaluate_log`."""


SHOWN = 40
"""Sequences in the table of a notebook."""
SHOWN_CHARS = 200


class Rollouts(list[ScoredDataGroup]):
    """Groups as `process` writes them, which a notebook shows as a table with a row per sequence."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what a table has of each sequence; `tokens` are the trained ones."""
        for number, group in enumerate(self):
            row: Mapping[str, Any] = group
            scores = row["scores"]
            nothing = [None] * len(scores)
            texts = row.get("completions") or nothing
            reasons = row.get("finish_reasons") or nothing
            for i, (score, masks) in enumerate(zip(scores, row["masks"], strict=True)):
                yield {
                    "group": number,
                    "item": row.get("item"),
                    "score": score,
                    "tokens": sum(label != IGNORE_INDEX for label in masks),
                    "finish_reason": reasons[i],
                    "completion": texts[i],
                }

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame of `rows`. Raises MissingDependency without pandas."""
        return require("pandas", extra="view").DataFrame(self.rows())

    def __repr__(self) -> str:
        scores = [score for group in self for score in group["scores"]]
        mean = f", mean score {sum(scores) / len(scores):.3g}" if scores else ""
        return f"<{len(self)} groups, {len(scores)} sequences{mean}>"

    def _repr_html_(self) -> str:
        """Return the first sequences as a table; texts are escaped."""
        rows = list(itertools.islice(self.rows(), SHOWN))
        cells = [[html.escape(_shown(value)) for value in row.values()] for row in rows]
        head = "".join(f"<th>{name}</th>" for name in (rows[0] if rows else ()))
        body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells)
        return f"<p>{html.escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>"


class NotebookEnv(EnvHooks):
    """What `create` adds to the author's class; it comes first in the order of methods."""

    notebook_state: _State
    """In one attribute, so that no name of the author's is overridden."""

    async def rollouts(self, n: int = 1) -> Rollouts:
        """Return `n` checked groups, as `process` writes them.

        Fewer if the items run out, more if the last item gives several. They are also written to
        `data_path_to_save_groups` if `create` got it. Raises what `process` raises.
        """
        async with self.notebook_state.turn:
            asked = self.config.data_path_to_save_groups
            with tempfile.TemporaryDirectory() as folder:
                self.config.data_path_to_save_groups = asked or str(Path(folder, "groups.jsonl"))
                self.config.total_steps = n
                try:
                    result = await process(self)
                finally:
                    self.config.data_path_to_save_groups = asked
                if not result.num_groups:
                    return Rollouts()  # and no file
                lines = result.path.read_bytes().split(b"\n")[:-1]
                return Rollouts(msgspec.json.decode(line) for line in lines)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the author's evaluation; return what it returns, or else the metrics it logged."""
        async with self.notebook_state.turn, self:
            self.notebook_state.logged = None
            returned = await super().evaluate(*args, **kwargs)  # type: ignore[safe-super]  # the author's
            return self.notebook_state.logged if returned is None else returned

    async def evaluate_log(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.notebook_state.logged = {**(self.notebook_state.logged or {}), **metrics}
        await super().evaluate_log(metrics, *args, **kwargs)

    async def setup(self) -> None:
        """Call the author's `setup`, unless the environment is open."""
        if self.notebook_state.num_open == 0:
            await super().setup()
        self.notebook_state.num_open += 1

    async def close(self) -> None:
        """Call the author's `close` at the end of the outermost run or block."""
        self.notebook_state.num_open = max(0, self.notebook_state.num_open - 1)
        if self.notebook_state.num_open == 0:
            closing = super().close()
            if inspect.isawaitable(closing):
                await closing

    async def __aenter__(self) -> Self:
        await self.setup()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await close(self)


def create(
    env_cls: type[EnvHooks], model: str | None, base_url: str | None, settings: Mapping[str, Any]
) -> NotebookEnv:
    """Build the environment as `process` does, with these values as its flags; ConfigError for a wrong one.

    No file and no wandb run unless `settings` ask for them.
    """
    flags: dict[str, Any] = {"env.data_path_to_save_groups": None, "env.use_wandb": False}
    if model is not None:
        flags |= {"openai.model_name": model, "env.tokenizer_name": model}
    if base_url is not None:
        flags["openai.base_url"] = base_url
    argv = [f"--{name}={_text(value)}" for name, value in {**flags, **settings}.items()]
    made = type(
        env_cls.__name__,
        (NotebookEnv, env_cls),
        {"__module__": env_cls.__module__, "__doc__": env_cls.__doc__},
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the configuration
        env = build_environment(made, "process", argv, prog=f"{env_cls.__name__}.create")
    assert isinstance(env, NotebookEnv)
    env.notebook_state = _State()
    return env


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _text(value: Any) -> str:
    """Return a value as it is written on a command line."""
    plain = to_jsonable_python(value)
    if plain is None:
        return "None"
    return plain if isinstance(plain, str) else json.dumps(plain)
