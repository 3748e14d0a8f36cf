"""What every inference server shares: one path for every request.

    health gate -> limiter -> one attempt -> (retry) -> statistics

`APIServer._call` is the ONE owner of retries: connection errors, timeouts and 5xx are retried, everything else is
raised at once. Concrete servers implement the `_..._wrapper` methods; each call of a wrapper is one attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import aiohttp
import numpy as np
from tenacity import (
    AsyncRetrying,
    AttemptManager,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from atroposlib.envs.server_handling.limits import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import EngineUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 3
MAX_BACKOFF_S = 10.0
HEALTH_POLL_S = 1.0
"""Pause between two questions to a server that is down; a server that is up is not asked."""
HEALTH_TIMEOUT_S = 5.0


class EngineDown(EngineUnavailable):
    """The server stayed down for as long as a request may wait; retrying would wait as long again."""


class WeightSpan(NamedTuple):
    """`num_tokens` consecutive sampled tokens that came from one policy version."""

    weight_version: str
    num_tokens: int


class TokenCompletions(tuple[Any, ...]):
    """The answer of `tokens_and_logprobs_completion`; unpacks as the original's four values.

    (prompt_tokens [P], output_tokens [n][T_i], output_logprobs [n][T_i], finish_reasons [n])

    `weight_versions` has, per completion, the spans of policy versions in sampling order, or None where the
    server does not tell.
    """

    weight_versions: list[list[WeightSpan] | None]

    def __new__(
        cls,
        prompt_tokens: list[int],
        output_tokens: list[list[int]],
        output_logprobs: list[list[float]],
        finish_reasons: list[Any],
        *,
        weight_versions: list[list[WeightSpan] | None] | None = None,
    ) -> TokenCompletions:
        self = super().__new__(cls, (prompt_tokens, output_tokens, output_logprobs, finish_reasons))
        self.weight_versions = weight_versions or [None] * len(output_tokens)
        return self

    @classmethod
    def of(cls, answer: tuple[Any, ...]) -> TokenCompletions:
        """Wrap the plain tuple that a third party's server returns."""
        return answer if isinstance(answer, cls) else cls(*answer)

    @property
    def prompt_tokens(self) -> list[int]:
        return self[0]  # type: ignore[no-any-return]

    @property
    def output_tokens(self) -> list[list[int]]:
        return self[1]  # type: ignore[no-any-return]

    @property
    def output_logprobs(self) -> list[list[float]]:
        return self[2]  # type: ignore[no-any-return]

    @property
    def finish_reasons(self) -> list[Any]:
        return self[3]  # type: ignore[no-any-return]


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, EngineDown):
        return False
    return isinstance(
        error, EngineUnavailable | aiohttp.ClientConnectionError | ConnectionError | TimeoutError
    )


class APIServer(ABC):
    """One inference server. Opens nothing before its first request; `close()` releases what it opened."""

    max_attempts = MAX_ATTEMPTS
    max_backoff_s = MAX_BACKOFF_S
    health_poll_s = HEALTH_POLL_S

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
        """Whether the server has been asked for its health yet."""
        self.num_assigned = {"train": 0, "eval": 0}
        """Requests and sessions that were given to this server and are not finished, per budget."""
        self._healthy = asyncio.Event()
        self._healthy.set()
        self._asked = asyncio.Event()
        self._health_reason = ""

    # For callers.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.chat.ChatCompletion` with `n` choices."""
        return await self._call(self._chat_completion_wrapper, kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Return an `openai.types.Completion` with `n` choices."""
        return await self._call(self._completion_wrapper, kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokenCompletions:
        """Sample from `input_ids` (or `prompt`) and return token ids with the logprob of each sampled token."""
        answer = await self._call(self._tokens_and_logprobs_completion_wrapper, kwargs)
        return TokenCompletions.of(answer)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the top logprobs at every position of a prompt.

        Keys: prompt_tokens [P], prompt_topk_token_ids [P][k], prompt_topk_logprobs [P][k]; the first
        position may be empty.
        """
        return await self._call(self._get_logprobs_wrapper, kwargs)

    async def update_weight(self, weight: float) -> None:
        """Set this environment's share (0..1) of the server."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    def num_free(self, split: str = "train") -> int:
        """Slots of a budget that are not spoken for; negative when requests are waiting."""
        budget = self.sem if split == "train" else self.eval_sem
        return budget.capacity - self.num_assigned["train" if split == "train" else "eval"]

    async def wandb_metrics(self, metrics: dict[str, Any] | None, name: str) -> dict[str, Any]:
        """Add this server's figures over its last `rolling_buffer_length` requests to `metrics`; times in seconds."""
        metrics = {} if metrics is None else metrics
        for prefix, timings in (("", self.request_timings), ("eval_", self.eval_request_timings)):
            if timings:
                values = np.asarray(timings)
                metrics[f"server/{name}_{prefix}request_time_avg"] = float(values.mean())
                metrics[f"server/{name}_{prefix}request_time_std"] = float(values.std())
                metrics[f"server/{name}_{prefix}request_time_99p"] = float(
                    np.percentile(values, 99)
                )
        if self.attempts_list:
            metrics[f"server/{name}_average_num_attempts"] = float(np.mean(self.attempts_list))
        if self.eval_attempts_list:
            metrics[f"server/{name}_eval_retry_rate"] = float(
                np.mean(np.asarray(self.eval_attempts_list) > 1)
            )
        return metrics

    async def close(self) -> None:
        """Stop watching the server. Subclasses close their sessions as well."""
        task, self.check_task = self.check_task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
        raise NotImplementedError(f"{type(self).__name__} cannot return prompt logprobs")

    async def _find_fault(self) -> str | None:
        """Return None if the server is up, else the reason it is not; makes no paid request."""
        return None

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Ask until the server is up, then set `server_healthy`. Runs only while requests wait for it."""
        while (fault := await self._find_fault()) is not None:
            self._asked.set()
            if fault != self._health_reason:
                logger.warning("Inference server %s is not ready: %s", self._label, fault)
                self._health_reason = fault
            await asyncio.sleep(self.health_poll_s)
        if self._health_reason:
            logger.info("Inference server %s is ready", self._label)
            self._health_reason = ""
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
        return str(getattr(self.config, "base_url", None) or type(self).__name__)

    @property
    def _checks_health(self) -> bool:
        return self.config.health_check and self.config.base_url is not None

    def _watch(self) -> None:
        """Hold requests back until the server has answered a health question."""
        self.server_healthy = False
        if self.check_task is None or self.check_task.done():
            self.check_task = asyncio.create_task(self.check_server_status_task())

    @property
    def is_known(self) -> bool:
        """Whether the server has answered a health question, or will never be asked one."""
        return self._asked.is_set() or not self._checks_health

    async def first_answer(self) -> None:
        """Ask a server that was never used for its health and wait for one answer, good or bad."""
        if not self.is_known:
            if not self.initialized:
                self.initialized = True
                self._watch()
            try:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await self._asked.wait()
            except TimeoutError:
                self._asked.set()  # no answer is an answer, too: the server is not healthy

    async def healthy_again(self) -> None:
        """Return when requests may be sent, however long that takes."""
        if not self.server_healthy:
            self._watch()
        await self._healthy.wait()

    async def _wait_until_healthy(self) -> None:
        if not self._checks_health:
            return
        if not self.initialized:
            self.initialized = True
            self._watch()
        if self.server_healthy:
            return
        self._watch()
        wait_s = self.config.health_wait_s
        try:
            async with asyncio.timeout(wait_s):
                await self._healthy.wait()
        except TimeoutError as e:
            raise EngineDown(
                f"inference server {self._label} is not ready after {wait_s:g} s:"
                f" {self._health_reason or 'no answer'}. Start it, correct base_url, or raise health_wait_s"
            ) from e

    # The one path.

    async def _call(self, send: Callable[..., Awaitable[T]], kwargs: dict[str, Any]) -> T:
        split = "train" if kwargs.pop("split", "train") == "train" else "eval"
        kwargs["model"] = self.config.model_name
        limiter = self.sem if split == "train" else self.eval_sem
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.max_attempts),
            wait=wait_random_exponential(max=self.max_backoff_s),
            retry=retry_if_exception(is_transient),
            reraise=True,
        )
        self.num_assigned[split] += 1
        try:
            async for attempt in retrying:
                with attempt:
                    await self._wait_until_healthy()
                    async with limiter:
                        started_at = time.perf_counter()
                        try:
                            answer = await send(**kwargs)
                        except Exception as e:
                            if is_transient(e) and self._checks_health:
                                self._watch()
                            raise
                    self._count(split, time.perf_counter() - started_at, attempt)
                    return answer
        except EngineDown:
            raise
        except Exception as e:
            if not is_transient(e):
                raise
            raise EngineUnavailable(f"{e} (gave up after {self.max_attempts} attempts)") from e
        finally:
            self.num_assigned[split] -= 1
        raise AssertionError("tenacity ends with an answer or an exception")

    def _count(self, split: str, seconds: float, attempt: AttemptManager) -> None:
        timings, attempts = (
            (self.request_timings, self.attempts_list)
            if split == "train"
            else (self.eval_request_timings, self.eval_attempts_list)
        )
        timings.append(seconds)
        attempts.append(attempt.retry_state.attempt_number)
