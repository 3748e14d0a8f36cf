"""The request path that all inference servers share.

    health gate -> limiter -> one attempt -> (retry) -> statistics

`retries.py` says what is retried, and by whom. Concrete servers implement the `_..._wrapper` methods; each call of one
is one attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from atroposlib.errors import EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.concurrency import ConcurrencyController
from atroposlib.inference.servers.limiter import AsyncSemWithAdaptiveWeight
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.recent_answers import RecentAnswers
from atroposlib.inference.servers.retries import (
    MAX_ATTEMPTS,
    MAX_BACKOFF_S,
    MIN_PAUSE_S,
    EngineDown,
    Retries,
    is_transient,
    moving,
    says_later,
    timed_out,
)
from atroposlib.inference.servers.sampling_notes import (
    AnsweredRequest,
    ItemRecord,
    note_sampling,
    position,
    recorded,
)
from atroposlib.inference.servers.stops import with_stop_ids
from atroposlib.patience import MAX_RETRY_AFTER_S, Backoff
from atroposlib.utils.tracing import note_request
from atroposlib.utils.wording import without_users

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_TIMEOUT_S = 4.0
HEALTH_REMINDER_S = 5.0
"""Pause between two probes of a server that is down and has no waiting requests."""
BOUND_WAIT_S = 60.0
"""How long a session waits for its server while others are healthy: long enough for a restart."""
AVOID_S, MAX_AVOID_S = 1.0, 30.0
"""How long other servers are preferred after a failure; doubled by each consecutive failure."""


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


def longest_completion(answer: Any) -> int | None:
    """Return the number of tokens of an answer's longest completion (or the mean, from `usage`); None if unknown."""
    if isinstance(answer, tuple):
        return max(map(len, answer[1]), default=None)
    total = getattr(getattr(answer, "usage", None), "completion_tokens", None)
    return total // max(1, len(answer.choices)) if isinstance(total, int) else None


class TokenCounts(NamedTuple):
    prompt: int
    sampled: int


def token_counts(answer: Any) -> TokenCounts:
    """Return the tokens of an answer in any of the four forms; 0 where it does not say."""
    if isinstance(answer, tuple):
        return TokenCounts(len(answer[0]), sum(map(len, answer[1])))
    if isinstance(answer, dict):
        return TokenCounts(len(answer.get("prompt_tokens") or ()), 0)
    usage = getattr(answer, "usage", None)
    prompt, sampled = (getattr(usage, f"{kind}_tokens", 0) for kind in ("prompt", "completion"))
    return TokenCounts(prompt or 0, sampled or 0)


class APIServer(ABC):
    """One inference server. Opens nothing before its first request; `close()` releases everything."""

    max_attempts = MAX_ATTEMPTS
    max_backoff_s = MAX_BACKOFF_S
    health_poll_s = 1.0
    """Pause between two probes of a server that is down; a healthy server is not probed."""
    reminder_s = 30.0
    """Between two log lines about a server that is down."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        window = config.rolling_buffer_length
        self.request_timings: deque[float] = deque(maxlen=window)
        self.attempts_list: deque[int] = deque(maxlen=window)
        self.eval_request_timings: deque[float] = deque(maxlen=window)
        self.eval_attempts_list: deque[int] = deque(maxlen=window)
        self.check_task: asyncio.Task[None] | None = None
        self.initialized = False
        """Whether the health check has ever been started."""
        self.context_len: int | None = None
        """Tokens of a prompt and its answer together; None: unknown."""
        self.num_assigned = {"train": 0, "eval": 0}
        """Unfinished requests and sessions at this server, per budget."""
        self.concurrency: ConcurrencyController | None = None
        """Adapts the number of requests in flight; None: only the two configured limits apply."""
        if config.adaptive_concurrency:
            self.concurrency = ConcurrencyController(
                config.num_max_requests_at_once + config.num_requests_for_eval
            )
            self._apply_limit(self.concurrency)
        self.fleet: Sequence[APIServer] = ()
        """All servers of the manager; set by `ServerManager`."""
        self.recent = RecentAnswers()
        self._num_calls = 0
        """Unfinished requests."""
        self._num_blamed = 0
        """Failures since the last answer; concurrent ones count once."""
        self._blamed_at = self._avoided_until = 0.0
        self._num_waiting = 0
        """Requests waiting for the server to become healthy."""
        self._health_asked_at = -HEALTH_REMINDER_S
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._asked = asyncio.Event()
        self.health_reason = ""
        """Why the server is not ready; empty if it is, or has no probe result yet."""
        self._fault_logged_at = 0.0
        self.num_tokens_in = 0
        """Prompt tokens of answered requests."""
        self.num_tokens_out = 0
        """Sampled tokens."""

    # For callers.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.chat.ChatCompletion` with `n` choices."""
        return await self._call(self._chat_completion_wrapper, kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.Completion` with `n` choices."""
        return await self._call(self._completion_wrapper, kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokenCompletions:
        """Sample from `input_ids` (or `prompt`) and return token ids with the logprob of each sampled token."""
        asked = dict(kwargs)  # `_call` takes `split` out
        raw = await self._call(self._tokens_and_logprobs_completion_wrapper, kwargs)
        return self._noted(asked, raw)

    def _noted(self, asked: dict[str, Any], raw: tuple[Any, ...]) -> TokenCompletions:
        """Record how an answer was sampled, for the current item."""
        answer = TokenCompletions.of(raw)
        prompt, outputs = answer[:2]
        note_sampling(asked, answer.weight_versions, prompt=prompt, outputs=outputs)
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the top logprobs at every position of a prompt; the first position may be empty.

        Keys: prompt_tokens [P], prompt_topk_token_ids [P][k], prompt_topk_logprobs [P][k].
        """
        return await self._call(self._get_logprobs_wrapper, kwargs)

    async def update_weight(self, weight: float) -> None:
        """Set this environment's share (0..1) of the server."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)
        if self.concurrency is not None:
            self.concurrency.share = max(self.sem.weight, 1.0 / self.sem.max_val)

    def is_another_healthy(self) -> bool:
        """Whether another server of the fleet is healthy."""
        return any(other.server_healthy for other in self.fleet if other is not self)

    def load(self, split: str = "train") -> float:
        """Return the used share of a budget's slots after one more request; above 1, that request waits for a slot.

        For training, requests and slots of evaluation count as well.
        """
        num_eval = self.num_assigned["eval"]
        if split != "train":
            return (num_eval + 1) / self.eval_sem.capacity
        slots = self.sem.capacity + self.eval_sem.in_use
        return (self.num_assigned["train"] + num_eval + 1) / slots

    @property
    def is_avoided(self) -> bool:
        """Whether other servers are preferred after a recent failure; later this one gets one request at a time."""
        if not self._num_blamed:
            return False
        since_s = time.monotonic() - self._avoided_until
        return since_s < 0 or (since_s < MAX_AVOID_S and any(self.num_assigned.values()))

    def blame(self, *, began: float) -> None:
        """Record that a request, sent at `began`, failed here, or was refused here and accepted elsewhere."""
        if self._num_blamed and began < self._blamed_at:
            return  # sent before the failure was known
        self._blamed_at = time.monotonic()
        avoid_s = min(AVOID_S * 2.0 ** min(self._num_blamed, 10), MAX_AVOID_S)
        self._avoided_until = self._blamed_at + avoid_s
        self._num_blamed += 1

    async def wandb_metrics(
        self, metrics_dict: dict[str, Any] | None, server_name: str | None
    ) -> dict[str, Any]:
        """Add this server's metrics over its last `rolling_buffer_length` requests; times in seconds."""
        shown: dict[str, Any] = {
            "healthy": self.server_healthy,
            "tokens_in": self.num_tokens_in,
            "tokens_out": self.num_tokens_out,
            "requests_waiting": max(0, self._num_calls - self.sem.in_use - self.eval_sem.in_use),
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

    async def close(self) -> None:
        """Stop watching the server. Subclasses close their sessions as well."""
        task, self.check_task = self.check_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if not self.server_healthy:
            self._healthy = asyncio.Event()  # a later request may run in another event loop

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

    async def _find_fault(self) -> str | None:
        """Return None if the server is healthy, else the reason it is not; must not make a paid request."""
        return None

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Probe until the server is healthy, then set `server_healthy`; stop early if no request waits for it."""
        while (fault := await self._find_fault()) is not None:
            self._asked.set()
            now = time.monotonic()
            if fault != self.health_reason or now - self._fault_logged_at >= self.reminder_s:
                logger.warning("Inference server %s is not ready: %s", self._label, fault)
                self.health_reason, self._fault_logged_at = fault, now
            await asyncio.sleep(self.health_poll_s)
            if not self._num_waiting:
                return
        if self.health_reason:
            logger.info("Inference server %s is ready", self._label)
            self.health_reason = ""
        self.server_healthy = True

    # Health.

    @property
    def server_healthy(self) -> bool:
        """Whether requests may be sent."""
        return self._healthy.is_set()

    @server_healthy.setter
    def server_healthy(self, value: bool) -> None:
        if value:
            self._healthy.set()
            self._asked.set()
        elif self._healthy.is_set():
            self._healthy = asyncio.Event()  # a fresh one, not bound to an earlier event loop

    @property
    def _label(self) -> str:
        return without_users(getattr(self.config, "base_url", None) or type(self).__name__)

    @property
    def _checks_health(self) -> bool:
        return self.config.health_check and self.config.base_url is not None

    def _watch(self) -> None:
        """Mark the server unhealthy, which holds requests back, and probe it until it is healthy."""
        self.server_healthy = False
        self._health_asked_at = time.monotonic()
        if self.check_task is None or self.check_task.done():
            self.check_task = asyncio.create_task(self.check_server_status_task())

    @property
    def is_known(self) -> bool:
        """Whether a first probe has a result, or the server is never probed."""
        return self._asked.is_set() or not self._checks_health

    async def first_answer(self) -> None:
        """Probe a server that was never used and wait for the first result, good or bad."""
        if not self.is_known:
            if not self.initialized:
                self.initialized = True
                self._watch()
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self._asked.wait()
            except TimeoutError:
                self._asked.set()  # no answer counts as a result: not healthy

    def look_again(self) -> None:
        """Probe a server that is down, at most every HEALTH_REMINDER_S; for servers without waiting requests."""
        if time.monotonic() - self._health_asked_at >= HEALTH_REMINDER_S:
            self._watch()

    async def healthy_again(self) -> None:
        """Wait without limit until requests may be sent."""
        if not self.server_healthy:
            self._watch()
        with self._waiting():
            await self._healthy.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def _wait_until_healthy(self) -> None:
        if not self.initialized:
            self.initialized = True
        elif self.server_healthy:
            return
        self._watch()
        began = time.monotonic()
        with self._waiting():
            # There is no event for another server's recovery, so `_patience_s` is read again between waits.
            while (left_s := began + self._patience_s - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(left_s, HEALTH_REMINDER_S)):
                        await self._healthy.wait()
                        return
                except TimeoutError:
                    self._watch()
        raise EngineDown(
            f"inference server {self._label} is not ready after {self._patience_s:g} s:"
            f" {self.health_reason or 'no answer'}. Start it, correct base_url, or raise health_wait_s"
        )

    @property
    def _patience_s(self) -> float:
        """How long the current request may wait for the server to become healthy."""
        wait_s = self.config.health_wait_s
        if not self._asked.is_set() or not self.is_another_healthy():
            return wait_s
        return min(wait_s, BOUND_WAIT_S) if moving.get() is None else 0.0

    # The one path.

    async def _call(self, send: Callable[..., Awaitable[T]], kwargs: dict[str, Any]) -> T:
        split = "train" if kwargs.pop("split", "train") == "train" else "eval"
        kwargs = with_stop_ids(kwargs)
        kwargs["model"] = self.config.model_name
        shared = moving.get()
        retries = shared or Retries([self])
        if (record := recorded()) is not None:
            record.num_asked += 1
            number = record.num_asked
        self.num_assigned[split] += 1
        self._num_calls += 1
        try:
            while True:
                retries.num_sent += 1
                began = time.monotonic()
                try:
                    answer, seconds = await self._attempt(
                        send, kwargs, split, again=retries.num_sent > 1
                    )
                except Exception as e:
                    if not is_transient(e):
                        raise
                    if getattr(e, "status", None) != 429:  # the limiter handles 429
                        self.blame(began=began)
                    if shared is not None:
                        raise
                    retries.note(e)
                    pause_s = self.pause_s(e, retries.num_sent)
                else:
                    self._num_blamed = 0
                    self._count(split, seconds, retries.num_sent)
                    num_in, num_out = token_counts(answer)
                    self.num_tokens_in += num_in
                    self.num_tokens_out += num_out
                    self._note_speed(answer, seconds)
                    if record is not None:
                        self._record(record, number, kwargs, answer, seconds)
                    note_request(
                        duration_s=seconds,
                        attributes=lambda: {
                            "server.address": self._label,
                            "gen_ai.request.model": self.config.model_name,
                            "gen_ai.usage.input_tokens": num_in,  # noqa: B023 - called at once
                            "gen_ai.usage.output_tokens": num_out,  # noqa: B023
                        },
                    )
                    return answer
                await asyncio.sleep(pause_s)
        finally:
            self.num_assigned[split] -= 1
            self._num_calls -= 1

    def _note_speed(self, answer: Any, seconds: float) -> None:
        num_tokens = longest_completion(answer)
        if num_tokens and not getattr(answer, "is_cached", False):
            for server in self.fleet:
                server.recent.fade(len(self.fleet))
            self.recent.add(seconds, num_tokens)

    def _record(
        self, record: ItemRecord, number: int, kwargs: dict[str, Any], answer: Any, seconds: float
    ) -> None:
        if kwargs.get("messages") is not None:  # the author may append to the list
            kwargs = {**kwargs, "messages": list(kwargs["messages"])}
        record.calls.append(
            AnsweredRequest(
                config=self.config,
                asked=kwargs,
                answer=answer,
                began_at=time.time() - seconds,
                duration_s=seconds,
                number=number,
                after=position.get(),
            )
        )
        position.set(number)

    def pause_s(self, error: BaseException, num_sent: int) -> float:
        """Return the pause before the next attempt: the server's Retry-After, else exponential backoff."""
        if isinstance(error, EngineUnavailable) and error.retry_after_s is not None:
            return min(error.retry_after_s, MAX_RETRY_AFTER_S) + random.uniform(0.0, MIN_PAUSE_S)
        pause_s = Backoff(1.0, self.max_backoff_s, num_failed=num_sent - 1).next()
        return max(MIN_PAUSE_S, pause_s) if says_later(error) else pause_s

    async def _attempt(
        self,
        send: Callable[..., Awaitable[T]],
        kwargs: dict[str, Any],
        split: str,
        *,
        again: bool,
    ) -> tuple[T, float]:
        """Send once the server is healthy and a slot is free; return the answer and its seconds."""
        limiter = self.sem if split == "train" else self.eval_sem
        gated = self._checks_health
        while True:
            if gated and not (self.initialized and self.server_healthy):
                await self._wait_until_healthy()
            await limiter.acquire(first=again)
            if not gated or self.server_healthy:
                break
            limiter.release()  # the server went down while this request was queued
            again = True
        try:
            if self.concurrency is not None:
                return await self._send_adaptively(self.concurrency, send, kwargs)
            began = time.monotonic()
            return await send(**kwargs), time.monotonic() - began
        except Exception as e:
            # The error may mean that the server is down.
            status = getattr(e, "status", None)
            if gated and is_transient(e) and (status is None or status >= 500):
                self._watch()
            raise
        finally:
            limiter.release()

    async def _send_adaptively(
        self,
        controller: ConcurrencyController,
        send: Callable[..., Awaitable[T]],
        kwargs: dict[str, Any],
    ) -> tuple[T, float]:
        if (pause_s := controller.paused_until - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)
        began = time.monotonic()
        controller.start(began)
        self._apply_limit(controller)
        try:
            answer = await send(**kwargs)
            now = time.monotonic()
            controller.finish(now, started_at=began, num_tokens=longest_completion(answer))
            return answer, now - began
        except BaseException as e:
            if says_later(e) or timed_out(e):
                controller.refuse(time.monotonic(), started_at=began)
            else:
                controller.drop(time.monotonic())
            raise
        finally:
            self._apply_limit(controller)

    def _apply_limit(self, controller: ConcurrencyController) -> None:
        """Apply the limit to both budgets; training gets what evaluation does not use."""
        self.eval_sem.update_limit(controller.limit)
        self.sem.update_limit(max(1, controller.limit - self.eval_sem.in_use))

    def _count(self, split: str, seconds: float, num_sent: int) -> None:
        is_training = split == "train"
        (self.request_timings if is_training else self.eval_request_timings).append(seconds)
        (self.attempts_list if is_training else self.eval_attempts_list).append(num_sent)
