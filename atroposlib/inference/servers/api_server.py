"""What all inference servers share: the public calls, their stops, what is recorded of an answer, and the metrics.

`admission.py` says when a request is sent, to which server, and what is retried. Concrete servers implement the
`_..._wrapper` methods; each call of one is one attempt.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from atroposlib.errors import EngineError, EngineRejected
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.admission import Door, Slot, StreamBroken, ask
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.sampling_notes import (
    AnsweredRequest,
    item_notes,
    note_sampling,
    position,
    recorded,
)
from atroposlib.utils.tracing import note_request


class WeightSpan(NamedTuple):
    """`num_tokens` consecutive sampled tokens that came from one policy version."""

    weight_version: str
    num_tokens: int


class _FourValues(NamedTuple):
    prompt_tokens: list[int]
    """[P]"""
    output_tokens: list[list[int]]
    """[n][T_i]"""
    output_logprobs: list[list[float]]
    """[n][T_i]"""
    finish_reasons: list[Any]
    """[n]"""


class TokenCompletions(_FourValues):
    """The answer of `tokens_and_logprobs_completion`; unpacks as the original's four values."""

    weight_versions: list[list[WeightSpan] | None]
    """Per completion, the spans of policy versions in sampling order; None if the server does not report them."""
    stand_in: APIServer | None = None
    """The server that answered in place of the one that was asked."""

    def __new__(
        cls,
        prompt_tokens: list[int],
        output_tokens: list[list[int]],
        output_logprobs: list[list[float]],
        finish_reasons: list[Any],
        *,
        weight_versions: list[list[WeightSpan] | None] | None = None,
    ) -> TokenCompletions:
        self = super().__new__(cls, prompt_tokens, output_tokens, output_logprobs, finish_reasons)
        self.weight_versions = weight_versions or [None] * len(output_tokens)
        return self

    @classmethod
    def of(cls, answer: tuple[Any, ...] | None) -> TokenCompletions:
        """Wrap the plain tuple of a third-party server; raise EngineRejected for None, which is no answer."""
        if answer is None:
            raise EngineRejected("the server has no answer for this prompt")
        return answer if isinstance(answer, cls) else cls(*answer)


def in_process_config(name: str) -> APIServerConfig:
    """Return the configuration of a server that answers in this process: no address, no health check, no limits."""
    unlimited = 2**20
    return APIServerConfig(
        model_name=name,
        base_url=f"http://{name}.invalid",
        health_check=False,
        adaptive_concurrency=False,
        num_max_requests_at_once=unlimited,
        num_requests_for_eval=unlimited,
        server_type="vllm",
    )


class Stops(NamedTuple):
    """What ends a completion. Its tokens include what ended it, its text does not."""

    strings: list[str]
    token_ids: list[int]


def read_stops(kwargs: Mapping[str, Any]) -> Stops:
    """Return the stops of a call. Raises ValueError for an entry of `stop` that is neither text nor a token id."""
    given = {**kwargs, **(kwargs.get("extra_body") or {})}
    stop = given.get("stop")
    found = Stops([], list(given.get("stop_token_ids") or ()))
    for entry in [stop] if isinstance(stop, str | float | int | np.integer) else stop or ():
        if isinstance(entry, str):
            found.strings.extend([entry] if entry else [])
        elif isinstance(entry, bool) or not isinstance(entry, int | np.integer) or entry < 0:
            raise ValueError(f"stop has {entry!r}, expected text or a token id")
        elif entry not in found.token_ids:
            found.token_ids.append(int(entry))
    return found


def with_stop_ids(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with the token ids of `stop` in `stop_token_ids`: engines read them only there.

    >>> with_stop_ids({"stop": ["User:", 2], "stop_token_ids": [7]})
    {'stop': ['User:'], 'stop_token_ids': [7, 2]}
    """
    stops, extra = read_stops(kwargs), kwargs.get("extra_body") or {}
    if not stops.token_ids:
        return kwargs
    moved = {"stop": stops.strings or None, "stop_token_ids": stops.token_ids}
    rest = {key: value for key, value in extra.items() if key not in moved}
    return {**kwargs, **({"extra_body": rest} if extra else {}), **moved}


Listener = Callable[[list[int]], None]
"""Called with each further token or tokens of one completion while its request runs."""


class Hearing:
    """The listeners of one call and whether they were told anything: what they know cannot be sampled again."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        """One per completion."""
        self.has_heard = False

    def hear(self, number: int, tokens: list[int]) -> None:
        if tokens:
            self.has_heard = True
            self._listeners[number](tokens)


hearing: ContextVar[Hearing | None] = ContextVar("hearing", default=None)
"""Who listens to the current call."""


@contextmanager
def listening(listeners: Sequence[Listener]) -> Iterator[None]:
    """Let each of `listeners` hear the tokens of one completion of the call in the block; empty: no listeners."""
    token = hearing.set(Hearing(listeners) if listeners else None)
    try:
        yield
    finally:
        hearing.reset(token)


class TokenCounts(NamedTuple):
    """The tokens of an answer; 0 where it does not say."""

    prompt: int
    sampled: int
    longest: int
    """Of the longest completion; of an answer that says only the sum, their mean."""


def token_counts(answer: Any) -> TokenCounts:
    """Return the tokens of an answer in any of the four forms."""
    if isinstance(answer, tuple):
        lengths = list(map(len, answer[1]))
        return TokenCounts(len(answer[0]), sum(lengths), max(lengths, default=0))
    if isinstance(answer, dict):
        return TokenCounts(len(answer.get("prompt_tokens") or ()), 0, 0)
    usage = getattr(answer, "usage", None)
    sampled = getattr(usage, "completion_tokens", 0) or 0
    longest = sampled // max(1, len(answer.choices)) if sampled else 0
    return TokenCounts(getattr(usage, "prompt_tokens", 0) or 0, sampled, longest)


class APIServer(Door, ABC):
    """One inference server. Opens nothing before its first request; `close()` releases everything."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config)
        self.reasoning_config = reasoning_config
        window = config.rolling_buffer_length
        self.request_timings: deque[float] = deque(maxlen=window)
        self.attempts_list: deque[int] = deque(maxlen=window)
        self.eval_request_timings: deque[float] = deque(maxlen=window)
        self.eval_attempts_list: deque[int] = deque(maxlen=window)
        self.context_len: int | None = None
        """Tokens of a prompt and its answer together; None: unknown."""
        self.broken_prefixes: Counter[str] = Counter()
        """Turns of sessions that could not reuse the tokens of earlier turns, by reason."""
        self.num_tokens_in = 0
        """Prompt tokens of answered requests."""
        self.num_tokens_out = 0
        """Sampled tokens."""

    # For callers.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.chat.ChatCompletion` with `n` choices."""
        return await self._call("chat_completion", kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.Completion` with `n` choices."""
        return await self._call("completion", kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokenCompletions:
        """Sample from `input_ids` (or `prompt`) and return token ids with the logprob of each sampled token."""
        return TokenCompletions.of(await self._call("tokens_and_logprobs_completion", kwargs))

    async def get_logprobs(self, **kwargs: Any) -> Any:
        """Return the top logprobs at every position of a prompt; the first position may be empty.

        Keys: prompt_tokens [P], prompt_topk_token_ids [P][k], prompt_topk_logprobs [P][k].
        """
        return await self._call("get_logprobs", kwargs)

    async def _call(self, method: str, kwargs: dict[str, Any]) -> Any:
        return await call([self], method, kwargs)

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Add this server's metrics over its last `rolling_buffer_length` requests; times in seconds."""
        shown: dict[str, Any] = {
            "healthy": self.server_healthy,
            "tokens_in": self.num_tokens_in,
            "tokens_out": self.num_tokens_out,
            **{f"broken_by_{reason}": count for reason, count in self.broken_prefixes.items()},
            "requests_waiting": self.num_waiting + self.sem.num_waiting + self.eval_sem.num_waiting,
        }
        if self.concurrency is not None:
            shown["concurrency_limit"] = min(self.concurrency.limit, self.sem.max_val)
        for prefix, timings in (("", self.request_timings), ("eval_", self.eval_request_timings)):
            if timings:
                shown[f"{prefix}request_time_avg"] = np.mean(timings)
                shown[f"{prefix}request_time_std"] = np.std(timings)
                shown[f"{prefix}request_time_99p"] = np.percentile(timings, 99)
        if self.attempts_list:
            shown["average_num_attempts"] = np.mean(self.attempts_list)
        if self.eval_attempts_list:
            shown["eval_retry_rate"] = np.mean(np.asarray(self.eval_attempts_list) > 1)
        metrics = {} if metrics_dict is None else metrics_dict
        name = server_name or "server"
        metrics |= {f"server/{name}_{key}": float(value) for key, value in shown.items()}
        return metrics

    # For concrete servers.

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        """Make one attempt at a chat completion."""

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        """Make one attempt at a text completion."""

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[Any, ...]:
        """Make one attempt at a completion with token ids and logprobs."""

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(
            f"{type(self).__name__} cannot return prompt logprobs: it does not implement get_logprobs"
        )

    # After an answer.

    def _count(self, taken: Slot[APIServer], answer: Any, split: str) -> None:
        is_training = split == "train"
        timings = self.request_timings if is_training else self.eval_request_timings
        timings.append(taken.seconds)
        (self.attempts_list if is_training else self.eval_attempts_list).append(taken.num_sent)
        num_in, num_out, _ = token_counts(answer)
        self.num_tokens_in += num_in
        self.num_tokens_out += num_out
        note_request(
            duration_s=taken.seconds,
            attributes=lambda: {
                "server.address": self._label,
                "gen_ai.request.model": self.config.model_name,
                "gen_ai.usage.input_tokens": num_in,
                "gen_ai.usage.output_tokens": num_out,
            },
        )


async def call(servers: Sequence[APIServer], method: str, kwargs: dict[str, Any]) -> Any:
    """Ask one of the servers for a `chat_completion`, `completion`, `tokens_and_logprobs_completion` or `get_logprobs`.

    Counts the answer at its server and records, for the current item, how it was sampled.
    """
    split = "train" if kwargs.get("split", "train") == "train" else "eval"
    asked = {**with_stop_ids(kwargs)}
    asked.pop("split", None)
    if (record := recorded()) is not None:
        record.num_asked += 1
        number = record.num_asked

    async def send(taken: Slot[APIServer]) -> Any:
        attempt = getattr(taken.server, f"_{method}_wrapper")
        try:
            answer = await attempt(**{**asked, "model": taken.server.config.model_name})
        except EngineError as e:
            if (listener := hearing.get()) is not None and listener.has_heard:
                raise StreamBroken(f"the answer broke off: {e}") from e
            raise
        if method == "tokens_and_logprobs_completion" and answer is not None:
            answer = TokenCompletions.of(answer)
        if not getattr(answer, "is_cached", False):
            taken.num_tokens = token_counts(answer).longest
        return answer

    if (notes := item_notes.get()) is not None:
        notes.num_asking += 1
    try:
        taken, answer = await ask(servers, split, send)
    finally:
        if notes is not None:
            notes.num_asking -= 1
    server = taken.server
    server._count(taken, answer, split)
    if record is not None:
        if asked.get("messages") is not None:  # the author may append to the list
            asked["messages"] = list(asked["messages"])
        record.calls.append(
            AnsweredRequest(
                config=server.config,
                asked={**asked, "model": server.config.model_name},
                answer=answer,
                began_at=time.time() - taken.seconds,
                duration_s=taken.seconds,
                number=number,
                after=position.get(),
            )
        )
        position.set(number)
    if isinstance(answer, TokenCompletions):
        if server not in servers:
            answer.stand_in = server
        prompt, outputs = answer[:2]
        note_sampling(kwargs, answer.weight_versions, prompt=prompt, outputs=outputs)
    return answer
