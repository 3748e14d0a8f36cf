"""Score stored rollouts again: run today's environment on the requests and answers of a row of `process`.

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
import functools
import inspect
import io
import logging
import math
import typing
from collections import abc, defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from pydantic import BaseModel, PydanticUserError, TypeAdapter

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close, collect
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.in_process_policy import (
    InProcessPolicy,
    PolicyAnswer,
    PolicyRequest,
    answerer,
)
from atroposlib.errors import ConfigError, EngineRejected, EnvError, MissingDependency, cause_of
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import HttpPeer
from atroposlib.inference.servers.sampling_notes import ItemRecord, noting_sampling
from atroposlib.inference.servers.token_ids import encode_prompt
from atroposlib.runtime.command import build_environment
from atroposlib.runtime.outbox import Outbox
from atroposlib.runtime.rows import Provenance, item_json, plain
from atroposlib.scored_data import IGNORE_INDEX

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""One line of the JSONL file of `process`."""

NUM_AT_ONCE = 16
"""Groups that are scored at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A stored group and what today's code makes of it."""

    row: Row
    scores: list[float | None]
    """[num_sequences] today's score of each stored sequence; None: today's code leaves the sequence out."""
    num_added: int = 0
    """Sequences that today's group has and the stored one does not."""
    fault: str | None = None
    """Why the group cannot be scored again; then all `scores` are None."""
    has_raised: bool = False
    """Whether the fault is an exception of today's code."""
    is_repeatable: bool = True
    """False if the same code gave other scores when it ran twice: the reward is random or depends on time."""

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

    def __init__(self, env: BaseEnv, *, rows: Sequence[Any] | None = None) -> None:
        """Take over `env`: it must not run in another way afterwards.

        `rows`, for a `DatasetEnv`, take the place of its data, which is not loaded.
        """
        self._env = env
        self._made = _Made()
        env.config.use_wandb = False
        env.group_sink = Outbox(
            env, environment=env.registered_name, log=self._made, provenance=Provenance(env)
        )
        if isinstance(env, DatasetEnv) and rows is not None:
            given = [item_of(type(env), row) for row in rows]
            env.load_rows = lambda split: given if split == "train" else []  # type: ignore[method-assign]

    async def __aenter__(self) -> Self:
        env = self._env
        _replace_servers(env)
        if isinstance(env, DatasetEnv):
            # `setup` would refuse a reward that fails its gold answers, and no score would be seen.
            env.gold_answer = lambda row: None  # type: ignore[method-assign]
        try:
            await env.setup()
        except BaseException:
            await close(env)
            raise
        vars(env).pop("gold_answer", None)
        _replace_servers(env)  # those made in `setup`
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

    async def replay(self, row: Row) -> Replay:
        """Score one row again. Raises MissingDependency alone: it affects every row."""
        unscored: list[float | None] = [None] * len(row["scores"])
        if row.get("calls") is None:
            fault = "the file holds no requests of it: only lines that process wrote have them"
            return Replay(row=row, scores=unscored, fault=fault)
        recording = Recording(row)
        has_raised = False
        token = answerer.set(recording)
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
        num_added = len(group["scores"]) - sum(i is not None for i in found)
        return Replay(row=row, scores=scores, num_added=num_added)

    async def _replay_twice(self, row: Row) -> Replay:
        first = await self.replay(row)
        if not first.is_changed:
            return first
        again = await self.replay(row)
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
    env_cls: type[BaseEnv],
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
    env_cls: type[BaseEnv], row: Row, *, flags: Sequence[str] = (), loads_data: bool = False
) -> Replay:
    """Score one row again, on an environment made from `flags` (those of `process`).

    The data of a `DatasetEnv` are not loaded unless `loads_data`: its only row is the group's item. Raises ConfigError
    for a wrong flag.
    """
    arguments = ["--env.data_path_to_save_groups=None", *flags]
    with contextlib.redirect_stdout(io.StringIO()):  # it names an engine, which is not used
        env = build_environment(env_cls, "process", arguments, prog="replay")
    async with Replayer(env, rows=None if loads_data else [row["item"]]) as replayer:
        return await replayer.replay(row)


def item_of(env_cls: type[BaseEnv], stored: Any) -> Any:
    """Return a stored item in the type that the code declares: a NamedTuple, a dataclass, a pydantic model, a list.

    The type is that of a parameter `row` or `item` of one of its methods, or a subclass. Without one, or where the
    item does not fit it, the item stays as JSON gives it.
    """
    for kind, adapter in _item_types(env_cls):
        if dataclasses.is_dataclass(kind) and not _fits(kind, stored):
            continue
        with contextlib.suppress(ValueError, TypeError):
            return adapter.validate_python(stored)
    return stored


def _fits(kind: Any, stored: Any) -> bool:
    """Whether a dataclass has all the fields of an item; a subclass may have those that are missing."""
    return isinstance(stored, Mapping) and stored.keys() <= {
        each.name for each in dataclasses.fields(kind)
    }


class _ItemType(NamedTuple):
    kind: Any
    adapter: TypeAdapter[Any]


@functools.cache
def _item_types(env_cls: type[BaseEnv]) -> list[_ItemType]:
    """Return the types that methods declare for an item, those of the most derived class first."""
    found = []
    for declared in dict.fromkeys(_declared(env_cls)):
        for kind in (declared, *getattr(declared, "__subclasses__", list)()):
            with contextlib.suppress(PydanticUserError):
                found.append(_ItemType(kind, TypeAdapter(kind)))
    return found


def _declared(env_cls: type[BaseEnv]) -> Iterator[Any]:
    for cls in env_cls.__mro__:
        for method in filter(inspect.isfunction, vars(cls).values()):
            parameters = [*inspect.signature(method).parameters][:2]
            if not {"row", "item"}.intersection(parameters):
                continue
            try:
                declared = typing.get_type_hints(method).get(parameters[-1])
            except (NameError, TypeError):
                continue  # names that are imported for type checkers alone
            is_class = inspect.isclass(declared) and (
                dataclasses.is_dataclass(declared)
                or issubclass(declared, BaseModel)
                or (issubclass(declared, tuple) and hasattr(declared, "_fields"))
            )
            if is_class or typing.get_origin(declared) in (list, tuple, abc.Sequence):
                yield declared


# The recorded server.


class Recording:
    """The requests and answers of one row."""

    def __init__(self, row: Row) -> None:
        self.fault: str | None = None
        """The first request that could not be answered: the author's code may have caught its exception."""
        self._answers: defaultdict[bytes, deque[Row]] = defaultdict(deque)
        for prompt, call in zip(_prompts(row["calls"]), row["calls"], strict=True):
            self._answers[_key(prompt)].extend(call["answers"])
        nothing = [None] * len(row["tokens"])
        logprobs = row.get("inference_logprobs") or nothing
        self._sequences = list(zip(row["tokens"], row["masks"], logprobs, strict=True))
        self._used: set[tuple[int, int]] = set()
        """(sequence, position) of each turn that was given as an answer."""

    def fail(self, reason: str) -> EngineRejected:
        """Note why the group cannot be replayed; return the exception for the author's code."""
        self.fault = self.fault or reason
        return EngineRejected(reason)

    def take(self, prompt: Any, n: int) -> list[Row]:
        """Return the next `n` answers to a prompt: messages or a text."""
        stored = self._answers.get(_key(prompt), deque())
        if len(stored) < n:
            what = f"{_excerpt(prompt)!r} has {len(stored)} more stored answers, and {n} are asked"
            raise self.fail(f"its requests changed: {what}")
        return [stored.popleft() for _ in range(n)]

    def sampled(
        self, prompt_tokens: list[int] | None, text: str, decode: Callable[[list[int]], str]
    ) -> StoredTurn | None:
        """Return the turn in the row's sequences that follows `prompt_tokens` (None: any) and reads as `text`.

        Turns that were not given before come first: several answers may have the same text.
        """
        for is_used in (False, True):
            for index, (tokens, masks, logprobs) in enumerate(self._sequences):
                starts = _turn_starts(masks) if prompt_tokens is None else [len(prompt_tokens)]
                for start in starts:
                    if ((index, start) in self._used) != is_used or (
                        prompt_tokens is not None and tokens[:start] != prompt_tokens
                    ):
                        continue
                    stop = start
                    while stop < len(masks) and masks[stop] != IGNORE_INDEX:
                        stop += 1
                    said = decode(tokens[start:stop])
                    # The text of an answer that a stop string ended does not contain it.
                    if start < stop and (said == text or (text and said.startswith(text))):
                        self._used.add((index, start))
                        known = [0.0] * len(tokens) if logprobs is None else logprobs
                        return StoredTurn(tokens[:start], tokens[start:stop], known[start:stop])
        return None


class StoredTurn(NamedTuple):
    """One turn of the policy."""

    prompt_tokens: list[int]
    """[P]"""
    tokens: list[int]
    """[T]"""
    logprobs: list[float]
    """[T]"""


class _RecordedPolicy(InProcessPolicy):
    """Answers from the row that is replayed."""

    def __init__(self, env: BaseEnv) -> None:
        super().__init__("replay")
        self._env = env

    async def answer(self, request: PolicyRequest) -> list[PolicyAnswer]:
        recording = request.answerer or _recording()
        prompt, prompt_tokens = request.messages or request.prompt, request.prompt_ids
        if prompt is None:
            raise recording.fail("it asks with token ids alone, and the file has texts")
        answers = recording.take(prompt, request.n)
        if request.wants_tokens and prompt_tokens is None and request.messages is None:
            prompt_tokens = encode_prompt(self._env.tokenizer, str(prompt))
        made = []
        for answer in answers:
            turn = StoredTurn([], [], [])
            if request.wants_tokens:
                turn = self._turn(recording, prompt_tokens, prompt, answer)
            calls = answer.get("tool_calls")
            made.append(PolicyAnswer(answer["text"], answer["finish_reason"], *turn, calls))
        return made

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise _recording().fail("it asks for the logprobs of prompts, which the file does not hold")

    def _turn(
        self, recording: Recording, prompt_tokens: list[int] | None, prompt: Any, answer: Row
    ) -> StoredTurn:
        """Return an answer's tokens: the row's own, else those of its text, with logprobs of 0."""
        text, tokenizer = answer["text"] or "", self._env.tokenizer
        turn = recording.sampled(
            prompt_tokens,
            text,
            lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
        )
        if turn is not None:
            return turn
        tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        if answer["finish_reason"] != "length" or not tokens:
            tokens.append(tokenizer.eos_token_id)
        if prompt_tokens is None:  # images, whose tokens only the engine knew
            prompt_tokens = [int(token) for token in tokenizer.encode(_excerpt(prompt))]
        return StoredTurn(prompt_tokens, tokens, [0.0] * len(tokens))


class _NoPeer:
    """Stands in for a reward model, whose answers no file holds."""

    async def post(self, *args: Any, **options: Any) -> Any:
        raise _recording().fail("a reward model scores it, whose answers the file does not hold")

    async def close(self) -> None:
        """Close nothing."""


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


def _replace_servers(env: BaseEnv) -> None:
    for name, server in [*vars(env).items()]:  # a judge or a teacher has its own
        if isinstance(server, ServerManager):
            _RecordedPolicy(env).serve(server)
        elif isinstance(server, HttpPeer):
            setattr(env, name, _NoPeer())


def _recording() -> Recording:
    recording: Recording | None = answerer.get()
    if recording is None:
        raise ConfigError("a completion was asked for outside of an item, for example in setup")
    return recording


def _prompts(calls: Sequence[Row]) -> list[Any]:
    """Return the whole prompt of each call: one that continues another holds its added messages alone."""
    prompts: list[Any] = []
    for call in calls:
        earlier = call.get("continues")
        added = call["prompt"]
        prompts.append(added if earlier is None else [*prompts[earlier], *added])
    return prompts


def _key(prompt: Any) -> bytes:
    return msgspec.json.encode(prompt, enc_hook=plain, order="deterministic")


def _excerpt(prompt: Any) -> str:
    """Return the text of a prompt, of a chat that of its last message."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    text = str(prompt)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _turn_starts(masks: Sequence[int]) -> list[int]:
    return [
        i
        for i, label in enumerate(masks)
        if label != IGNORE_INDEX and (i == 0 or masks[i - 1] == IGNORE_INDEX)
    ]


# Today's sequences and the stored ones.


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
    return _key(row["messages"][i]) if row.get("messages") else None


def _completion(row: Row, i: int) -> Hashable:
    completions: Sequence[str | None] = row.get("completions") or ()
    return completions[i] if i < len(completions) else None


def is_same(old: float, new: float | None) -> bool:
    """Whether two scores differ by rounding at most; None is no score."""
    return new is not None and math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-12)
