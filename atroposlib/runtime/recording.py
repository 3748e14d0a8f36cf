"""The requests and answers of a row of `process` or `serve`, and the policy that gives the same answers again.

A request that the row does not have fails the group's replay, also if the author's code catches its exception. Used by
`replay.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec

from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.in_process_policy import InProcessPolicy, current_answerer
from atroposlib.errors import ConfigError, EngineRejected
from atroposlib.inference.answerer import Answers, Ask, Completion
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import HttpPeer
from atroposlib.inference.servers.sampling_notes import Position, position
from atroposlib.runtime.group_rows import plain
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.tokenizers.backends import encode_prompt

Row = Mapping[str, Any]
"""One line of the JSONL file of `process` or `serve`."""


class Recording:
    """The requests and answers of one row.

    An answer goes to the code that is where it was when the row was made (`Position`). Requests that this cannot tell
    apart are answered in the order in which they were asked, or in reverse: scores that differ then cannot be trusted.
    """

    def __init__(self, row: Row, *, is_reversed: bool = False) -> None:
        self._step = -1 if is_reversed else 1
        self._path_after: dict[Position, tuple[Position, ...]] = {}
        """By the number of a request: the positions that led to it, the first one first, and itself."""
        self.fault: str | None = None
        """The first request that could not be answered: the author's code may have caught its exception."""
        self._answers: defaultdict[bytes, list[_Stored]] = defaultdict(list)
        for number, prompt in enumerate(_prompts(row["calls"])):
            call = row["calls"][number]
            path = self._path(call.get("after"))
            self._path_after[number] = (*path, number)
            self._answers[key_of(prompt)] += [
                _Stored(number, path, answer) for answer in call["answers"]
            ]
        nothing = [None] * len(row["tokens"])
        logprobs = row.get("inference_logprobs") or nothing
        self._sequences = list(zip(row["tokens"], row["masks"], logprobs, strict=True))
        self._used: set[tuple[int, int]] = set()
        """(sequence, position) of each turn that was given as an answer."""

    def fail(self, reason: str) -> EngineRejected:
        """Note why the group cannot be replayed; return the exception for the author's code."""
        self.fault = self.fault or reason
        return EngineRejected(reason)

    def take(self, prompt: Any, n: int, *, after: Position) -> list[_Stored]:
        """Return the next `n` answers to a prompt (messages or a text), nearest to `after` first."""
        stored = self._answers.get(key_of(prompt), [])
        if len(stored) < n:
            what = f"{_excerpt(prompt)!r} has {len(stored)} more stored answers, and {n} are asked"
            raise self.fail(f"its requests changed: {what}")
        path = self._path(after)
        stored.sort(key=lambda each: (*_distance(each.path, path), each.number * self._step))
        taken, stored[:n] = stored[:n], []
        return taken

    def _path(self, after: Position) -> tuple[Position, ...]:
        return self._path_after.get(after, (after,))

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


class _Stored(NamedTuple):
    """An answer of the row."""

    number: int
    """Of its request, in the row."""
    path: tuple[Position, ...]
    """Positions that led to its request."""
    answer: Row


def _distance(one: Sequence[Position], other: Sequence[Position]) -> tuple[int, int]:
    """Return how far two paths are apart: they share little, then they differ in length."""
    num_shared = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return -num_shared, abs(len(one) - len(other))


class StoredTurn(NamedTuple):
    """One turn of the policy."""

    prompt_tokens: list[int]
    """[P]"""
    tokens: list[int]
    """[T]"""
    logprobs: list[float]
    """[T]"""


_answered_by: ContextVar[set[int]] = ContextVar("_answered_by")
"""Numbers of the row's requests whose answers the current request gets."""


class _RecordedPolicy(InProcessPolicy):
    """Answers from the row that is replayed."""

    def __init__(self, env: EnvHooks) -> None:
        super().__init__("replay")
        self._env = env

    async def _call(self, method: str, kwargs: dict[str, Any]) -> Any:
        before, numbers = position.get(), set[int]()
        token = _answered_by.set(numbers)
        try:
            answer = await super()._call(method, kwargs)
        finally:
            _answered_by.reset(token)
        # The position as it was in the run: several servers that shared a request did not change it.
        position.set(numbers.pop() if len(numbers) == 1 else before)
        return answer

    async def answer(self, ask: Ask) -> Answers:
        recording = _recording()
        prompt, prompt_tokens = ask.messages or ask.prompt, ask.prompt_tokens
        if prompt is None:
            raise recording.fail("it asks with token ids alone, and the file has texts")
        stored = recording.take(prompt, ask.n, after=position.get())
        _answered_by.get().update(each.number for each in stored)
        if ask.wants_tokens and prompt_tokens is None and ask.messages is None:
            prompt_tokens = encode_prompt(self._env.tokenizer, str(prompt))
        turn, completions = StoredTurn([], [], []), []
        for _, _, answer in stored:
            if ask.wants_tokens:
                turn = self._turn(recording, prompt_tokens, prompt, answer)
            completions.append(
                Completion(
                    tokens=turn.tokens,
                    logprobs=turn.logprobs,
                    finish_reason=answer["finish_reason"],
                    text=answer["text"],
                    tool_calls=answer.get("tool_calls"),
                )
            )
        return Answers(turn.prompt_tokens, completions)

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


def replace_servers(env: EnvHooks) -> None:
    """Let the row that is replayed answer in place of all servers of an environment."""
    for name, server in [*vars(env).items()]:  # a judge or a teacher has its own
        if isinstance(server, ServerManager):
            _RecordedPolicy(env).serve(server)
        elif isinstance(server, HttpPeer):
            setattr(env, name, _NoPeer())


def _recording() -> Recording:
    recording: Recording | None = current_answerer()
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


def key_of(prompt: Any) -> bytes:
    """Return what equal prompts, and equal conversations, share."""
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
