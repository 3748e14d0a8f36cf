"""Rows of a `DatasetEnv`: where they come from, which are held out for evaluation, and their order in an epoch."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from atroposlib.errors import ConfigError, require

logger = logging.getLogger(__name__)

SAMPLE = "sample"
"""Value of `--env.dataset_path` that means `samples/<name>.jsonl` next to the environment's file or folder."""

CHARS_PER_TOKEN = 4
"""Rough size of a token of English text."""


class RowSource(Protocol):
    """A split of a data set."""

    def load(self) -> list[dict[str, Any]]:
        """Return its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRows:
    """A split of a data set on the Hugging Face hub (extra `datasets`), downloaded on first use."""

    path: str
    config: str | None = None
    split: str = "train"
    files: tuple[str, ...] = ()
    """Files of the rows; `path` is then their format, such as "json". For data sets that are loaded by a script."""

    def load(self) -> list[dict[str, Any]]:
        """Download the split, or read it from the cache, and return its rows. ConfigError if it cannot be had."""
        datasets = require("datasets", extra="datasets")
        try:
            files = {"data_files": list(self.files)} if self.files else {}
            return list(datasets.load_dataset(self.path, self.config, split=self.split, **files))
        except Exception as error:
            raise ConfigError(
                f"cannot load the data set {self.path!r} ({type(error).__name__}: {str(error)[:300]}); give a file"
                " of its rows as JSONL with --env.dataset_path, or `sample` for the few that come with the environment"
            ) from error


class ChatPrompt(NamedTuple):
    """A conversation that ends with a request, and the data set's own answer to it."""

    messages: list[dict[str, str]]
    answer: str | None

    def text(self) -> str:
        """Return all messages as one text, for a judge."""
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in self.messages)


def chat_prompt(row: dict[str, Any], *, max_tokens: int | None = None) -> ChatPrompt | None:
    """Return a conversation up to its last user message, and the answer to that; None without a user message.

    Reads the column `conversation` or `messages` (a list of messages), or `prompt` (a text or messages). Also None if
    the conversation has more than about `max_tokens` tokens, counted as `CHARS_PER_TOKEN` characters each.

    >>> chat_prompt({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]})
    ChatPrompt(messages=[{'role': 'user', 'content': 'Hi'}], answer='Hello')
    """
    given: Any = next(
        (row[key] for key in ("conversation", "messages", "prompt") if row.get(key)), []
    )
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in given]
    requests = [i for i, turn in enumerate(messages) if turn["role"] == "user"]
    if not requests:
        return None
    end = requests[-1] + 1
    answers = [turn["content"] for turn in messages[end:] if turn["role"] == "assistant"]
    prompt = ChatPrompt(messages=messages[:end], answer=answers[0] if answers else None)
    is_too_long = max_tokens is not None and len(prompt.text()) > CHARS_PER_TOKEN * max_tokens
    return None if is_too_long else prompt


class ChatRows:
    """Rows of conversations whose last request the model answers; a mixin for a `DatasetEnv`, named before it."""

    config: Any
    train_data = HubRows(path="allenai/WildChat", split="train[:20000]")

    def parse_row(self, row: dict[str, Any]) -> ChatPrompt | None:
        """Return the conversation up to its last request; one that is too long is skipped."""
        return chat_prompt(row, max_tokens=self.config.max_token_length)

    def prompt(self, row: ChatPrompt) -> list[dict[str, str]]:
        return row.messages


def sample_path(env_cls: type, name: str) -> str:
    """Return the sample of the environment `env_cls`; ConfigError if it has none."""
    folder = Path(inspect.getfile(env_cls)).resolve().parent
    candidates = [parent / "samples" / f"{name}.jsonl" for parent in (folder, folder.parent)]
    for path in candidates:
        if path.is_file():
            return str(path)
    raise ConfigError(f"{name} has no sample: {candidates[0]} does not exist")


def read_jsonl(path: str, *, flag: str = "dataset_path") -> list[Any]:
    """Read one JSON value per line; ConfigError names `--env.<flag>` if it cannot be read or has no rows."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"--env.{flag} {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"--env.{flag} {path}, line {number}: {error}") from error
    if not rows:
        raise ConfigError(f"--env.{flag} {path}: the file has no rows")
    return rows


class Splits(NamedTuple):
    train: list[Any]
    eval: list[Any]


@functools.cache
def _warn_once(message: str) -> None:
    """Log what is wrong with a data set once per process, however often it is loaded."""
    logger.warning(message)


def hold_out(rows: Sequence[Any], wanted: int, *, seed: int) -> Splits:
    """Return the rows without those held out for evaluation: `wanted` of them, but at most half; log if fewer."""
    order = list(range(len(rows)))
    random.Random(f"{seed}:held out").shuffle(order)
    num_held_out = min(wanted, len(rows) // 2)
    if num_held_out < wanted:
        _warn_once(
            f"{num_held_out} of the {len(rows)} training rows are held out for evaluation (num_eval_rows is {wanted},"
            " at most half are); to train on all, give evaluation rows or --env.num_eval_rows 0"
        )
    held_out = set(order[:num_held_out])
    splits = Splits([], [])
    for i, row in enumerate(rows):
        (splits.eval if i in held_out else splits.train).append(row)
    return splits


def _plain(value: Any) -> Any:
    return value.tolist() if callable(getattr(value, "tolist", None)) else repr(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def content_of(row: Any) -> bytes | str:
    """Return what rows of equal content share in this process, for example to find repeated ones.

    Objects that have no `__repr__` of their own share it with none but themselves.
    """
    try:
        return _encode(row)
    except (OverflowError, RecursionError, TypeError, ValueError):  # msgpack has no such value
        return repr(row)


def without_evaluated(rows: Sequence[Any], evaluated: Sequence[Any]) -> list[Any]:
    """Return the training rows that are no evaluation rows; log how many are left out.

    If all are evaluation rows, return them all, with a warning: there would be nothing to train on.
    """
    held_out = set(map(content_of, evaluated))
    kept = [row for row in rows if content_of(row) not in held_out]
    if not kept:
        _warn_once(
            f"all {len(rows)} training rows are evaluation rows, so evaluation measures what was trained on;"
            " return None for the split 'eval' to hold out some"
        )
        return list(rows)
    if num_left_out := len(rows) - len(kept):
        _warn_once(f"{num_left_out} training rows are left out: they are evaluation rows")
    return kept


@functools.lru_cache(maxsize=1)
def epoch_order(num_rows: int, *, seed: int, epoch: int) -> list[int]:
    """Return the order of the rows in one epoch: a permutation determined by seed and epoch.

    >>> sorted(epoch_order(5, seed=0, epoch=1))
    [0, 1, 2, 3, 4]
    """
    order = list(range(num_rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order
