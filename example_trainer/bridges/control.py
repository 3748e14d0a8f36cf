"""Calls to a running engine's control routes, and the same done to several engines at once.

Owns the retries: an engine that cannot be reached is tried again until `retry_s`; any answer but 2xx is final. Called
by `engines.py` and the bridges to engines that run already; it does not know what a route does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from atroposlib.errors import EngineRejected, EngineUnavailable

logger = logging.getLogger(__name__)

DETAIL_CHARS = 300

T = TypeVar("T")


HEALTH_TIMEOUT_S = 10.0


class Unreachable(EngineUnavailable):
    """No HTTP answer, or not healthy yet: the failures that are tried again."""


class NoSuchRoute(EngineRejected):
    """404: an older engine, another kind of engine, or one without development routes."""


class Control:
    """A connection to one engine; `url` is its address without `/v1`, `api_key` the one it asks for, if any."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # A connection kept for minutes may be closed just as the next call goes out, which then cannot be told
            # from an engine that died of it.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def get(self, route: str, **request: Any) -> httpx.Response:
        return self._call("GET", route, **request)

    def post(self, route: str, body: Any = None, **request: Any) -> httpx.Response:
        return self._call("POST", route, json=body, **request)

    def look(self, route: str, **request: Any) -> Any:
        """Return what a GET answers, as JSON; None when the engine has no such route or answers no JSON."""
        try:
            answer = self.get(route, **request)
            return answer.json()
        except (NoSuchRoute, ValueError):
            return None

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, route: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, route, **request)
        except httpx.TransportError as error:
            raise Unreachable(
                f"engine {self.url}: {route} got no answer ({error!r}); is an engine running there? "
                "--engine_url names the engines that are running already"
            ) from error
        if answer.is_success:
            return answer
        detail = f"engine {self.url}: {route} answered {answer.status_code}: {answer.text[:DETAIL_CHARS]}"
        if answer.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            raise NoSuchRoute(detail)
        if answer.is_client_error:
            raise EngineRejected(detail)
        kind = Unreachable if route == "/health" else EngineUnavailable
        raise kind(detail, status=answer.status_code)


def retrying(action: Callable[[], T], *, retry_s: float) -> T:
    """Return what `action` returns; while it raises `Unreachable`, repeat it until `retry_s` have passed."""
    attempts = Retrying(
        retry=retry_if_exception_type(Unreachable),
        wait=wait_exponential(multiplier=0.2, max=5.0),
        stop=stop_after_delay(retry_s),
        before_sleep=_say_once,
        reraise=True,
    )
    return attempts(action)


def for_each(engines: Sequence[Any], action: Callable[[Any], Any], *, retry_s: float) -> None:
    """Do `action` to every engine at once, with retries; when all have ended, raise the first failure."""
    if len(engines) == 1:  # in this thread, where Ctrl-C can end it
        retrying(lambda: action(engines[0]), retry_s=retry_s)
        return
    with ThreadPoolExecutor(max_workers=max(1, len(engines))) as pool:
        pending = [
            pool.submit(retrying, lambda engine=engine: action(engine), retry_s=retry_s)
            for engine in engines
        ]
    for future in pending:
        future.result()


def require_healthy(engines: Sequence[Control]) -> None:
    """Raise EngineError for the first engine that is not there."""
    for engine in engines:
        engine.get("/health", timeout=HEALTH_TIMEOUT_S)


def _say_once(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        logger.warning("%s; trying again", state.outcome.exception())
