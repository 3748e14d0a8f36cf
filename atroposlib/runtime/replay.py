"""Score stored rollouts again: run today's environment on the requests and answers of a row.

The policy, judges and teachers are replaced by a server that gives each request the next answer that the row has for
its prompt, with the row's own tokens and logprobs where the row has them. So any environment can be scored again that
asks what it asked when the row was made. Tools, sandboxes and reward functions run. A request that the row does not
have makes the group's replay fail with the reason. Called by `atropos-env rescore`, `atropos-env pin` and by pinned
tests through `replay_scores`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import io
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from atroposlib.envs.collecting import close, collect
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.in_process_policy import answerer
from atroposlib.errors import EnvError, MissingDependency, cause_of
from atroposlib.inference.servers.sampling_notes import ItemRecord, noting_sampling, position
from atroposlib.runtime.env_command import build_environment
from atroposlib.runtime.group_rows import item_json
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.recording import Recording, key_of, replace_servers
from atroposlib.runtime.recording import Row as Row
from atroposlib.runtime.stored_items import item_of

logger = logging.getLogger(__name__)

NUM_AT_ONCE = 16
"""Groups that are scored at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A stored group and what today's code makes of it."""

    row: Row
    scores: list[float | None]
    """[num_sequences] today's score of each stored sequence; None: today's code leaves the sequence out."""
    advantages: list[Any] | None = None
    """[num_sequences] those that today's code gives in place of the trainer's; None: none, or not to every sequence."""
    num_added: int = 0
    """Sequences that today's group has and the stored one does not."""
    fault: str | None = None
    """Why the group cannot be scored again; then all `scores` are None."""
    has_raised: bool = False
    """Whether the fault is an exception of today's code."""
    is_repeatable: bool = True
    """False if the same code gave other scores when it ran twice: the reward is random, or depends on time or on which
    of several equal requests, asked at once, got which answer."""

    @property
    def changed(self) -> list[int]:
        """Return the sequences whose score differs; [] for a group that cannot be scored again."""
        if self.fault is not None:
            return []
        pairs = zip(self.row["scores"], self.scores, strict=True)
        return [i for i, (old, new) in enumerate(pairs) if not is_same(old, new)]

    @property
    def is_changed(self) -> bool:
        """Whether today's group has other scores or more sequences."""
        return bool(self.changed or self.num_added)


class Replayer:
    """An environment that scores rows again; `async with` sets it up and closes it."""

    def __init__(self, env: EnvHooks, *, rows: Sequence[Any] | None = None) -> None:
        """Take over `env`: it must not run in another way afterwards.

        `rows`, for a `DatasetEnv`, take the place of its data, which is not loaded.
        """
        self._env = env
        self._made = _Made()
        env.config.use_wandb = False
        env.group_sink = Outbox(env, log=self._made)
        if isinstance(env, DatasetEnv) and rows is not None:
            given = [item_of(type(env), row) for row in rows]
            env.load_rows = lambda split: given if split == "train" else []  # type: ignore[method-assign]

    async def __aenter__(self) -> Self:
        env = self._env
        replace_servers(env)
        if isinstance(env, DatasetEnv):
            # `setup` would refuse a reward that fails its gold answers, and no score would be seen.
            env.gold_answer = lambda row: None  # type: ignore[method-assign]
            env.audit.budget.share = 0.0  # a recording has no answers to its questions
        try:
            await env.setup()
        except BaseException:
            await close(env)
            raise
        vars(env).pop("gold_answer", None)
        replace_servers(env)  # those made in `setup`
        return self

    async def __aexit__(self, *exc: object) -> None:
        await close(self._env)

    async def replays(self, rows: Iterable[Row]) -> AsyncGenerator[Replay, None]:
        """Yield the replay of each row, in order; at most `NUM_AT_ONCE` rows are read ahead.

        A group whose scores differ is scored once more, for `is_repeatable`.
        """
        running: deque[asyncio.Task[Replay]] = deque()
        group_size = None
        try:
            for row in rows:
                # Rows at the same time share the environment's configuration.
                while running and row.get("group_size") != group_size:
                    yield await running.popleft()
                group_size = row.get("group_size")
                running.append(asyncio.create_task(self._replay_twice(row)))
                if len(running) == NUM_AT_ONCE:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def replay(self, row: Row, *, is_reversed: bool = False) -> Replay:
        """Score one row again, answered as in `Recording`. Raises MissingDependency alone: it affects every row."""
        unscored: list[float | None] = [None] * len(row["scores"])
        if row.get("calls") is None:
            fault = "the line holds no requests: those of items above 1 MB and of other programs have none"
            return Replay(row=row, scores=unscored, fault=fault)
        recording = Recording(row, is_reversed=is_reversed)
        has_raised = False
        token = answerer.set(recording)
        position.set(None)  # as at the start of an item, also when a row is replayed again
        try:
            made = await self._collect(row)
        except MissingDependency:
            raise
        except Exception as raised:
            error = cause_of(raised)
            logger.debug("group %s", row.get("group_id"), exc_info=error)
            has_raised = recording.fault is None
            recording.fail(f"today's code raised {type(error).__name__}: {error}")
            made = []
        finally:
            answerer.reset(token)
        if recording.fault is not None:
            return Replay(row=row, scores=unscored, fault=recording.fault, has_raised=has_raised)
        pairs = [(group, _pairs(row, group)) for group in made]
        if not pairs:
            return Replay(row=row, scores=unscored)
        group, found = max(pairs, key=lambda pair: sum(i is not None for i in pair[1]))
        scores = [None if i is None else group["scores"][i] for i in found]
        given = group.get("advantages")
        advantages = given and [None if i is None else given[i] for i in found]
        num_added = len(group["scores"]) - sum(i is not None for i in found)
        return Replay(row=row, scores=scores, advantages=advantages, num_added=num_added)

    async def _replay_twice(self, row: Row) -> Replay:
        first = await self.replay(row)
        if not first.is_changed:
            return first
        again = await self.replay(row, is_reversed=True)
        return dataclasses.replace(first, is_repeatable=again.scores == first.scores)

    async def _collect(self, row: Row) -> list[Row]:
        """Run the author's code as `process` does; return the rows that it would write."""
        env = self._env
        item = item_of(type(env), copy.deepcopy(row["item"]))  # the code may write to it
        env.config.group_size = row.get("group_size") or env.config.group_size
        with noting_sampling(ItemRecord(item=item_json(item))), self._made.collected() as made:
            groups, _ = await collect(env, item)
            if groups:
                await env.handle_send_to_api(
                    groups, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
                )
        return made


def replay_scores(
    env_cls: type[EnvHooks],
    row: Row | Path,
    *,
    flags: Sequence[str] = (),
    loads_data: bool = False,
) -> list[float | None]:
    """Return the score that today's code gives each sequence of a stored group, in order; for tests.

    None: today's code leaves the sequence out. `row` may be a JSON file. Raises EnvError if the group cannot be
    replayed; `replay_row` describes the rest.
    """
    stored: Row = row if isinstance(row, Mapping) else msgspec.json.decode(row.read_bytes())
    replay = asyncio.run(replay_row(env_cls, stored, flags=flags, loads_data=loads_data))
    if replay.fault is not None:
        raise EnvError(f"group {stored.get('group_id')} cannot be replayed: {replay.fault}")
    return replay.scores


async def replay_row(
    env_cls: type[EnvHooks], row: Row, *, flags: Sequence[str] = (), loads_data: bool = False
) -> Replay:
    """Score one row again, on an environment made from `flags` (those of `process`).

    The data of a `DatasetEnv` are not loaded unless `loads_data`: its only row is the group's item. Raises ConfigError
    for a wrong flag.
    """
    env = environment_for(env_cls, flags=flags, prog="replay", row=row)
    async with Replayer(env, rows=None if loads_data else [row["item"]]) as replayer:
        return await replayer.replay(row)


def environment_for(
    env_cls: type[EnvHooks], *, flags: Sequence[str], prog: str, row: Row | None = None
) -> EnvHooks:
    """Construct an environment with flags of `process` that writes no files and can replay `row`.

    For a row without token ids the tokenizer may be unavailable, as it may have been when the row was made.
    """
    needs_tokens = row is None or row.get("has_token_ids") is not False
    arguments = ["--env.data_path_to_save_groups=None", *flags]
    with contextlib.redirect_stdout(io.StringIO()):  # it names an engine, which is not used
        return build_environment(
            env_cls, "process", arguments, prog=prog, needs_tokens=needs_tokens
        )


class _Made:
    """Keeps the rows of each replay instead of writing them."""

    def __init__(self) -> None:
        self._rows: ContextVar[list[Row]] = ContextVar("_rows")

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[Row]]:
        rows: list[Row] = []
        token = self._rows.set(rows)
        try:
            yield rows
        finally:
            self._rows.reset(token)

    def write(self, line: bytes) -> None:
        self._rows.get().append(msgspec.json.decode(line))


def _pairs(old: Row, new: Row) -> list[int | None]:
    """Return for each sequence of a stored group the same one in today's group; None if it is not there.

    Sequences are the same if their tokens are, or without token ids their messages, or else their last answers.
    """
    found: list[int | None] = [None] * len(old["scores"])
    left = list(range(len(new["scores"])))
    for same_by in (_tokens, _messages, _completion):
        for i in (i for i, there in enumerate(found) if there is None):
            key = same_by(old, i)
            match = next((j for j in left if key is not None and same_by(new, j) == key), None)
            if match is not None:
                found[i] = match
                left.remove(match)
    return found


def _tokens(row: Row, i: int) -> Hashable:
    return tuple(row["tokens"][i]) or None


def _messages(row: Row, i: int) -> Hashable:
    return key_of(row["messages"][i]) if row.get("messages") else None


def _completion(row: Row, i: int) -> Hashable:
    completions: Sequence[str | None] = row.get("completions") or ()
    return completions[i] if i < len(completions) else None


def is_same(old: float, new: float | None) -> bool:
    """Whether two scores differ by rounding at most; None is no score."""
    return new is not None and math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)
