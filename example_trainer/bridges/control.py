"""HTTP calls to the control routes of one running engine, and the same call to several engines at once.

Owns the retries: an unreachable engine is retried for `retry_s` or until the run must stop; any other failure is final.
Called by `engines.py` and the bridges; independent of what a route does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from atroposlib.errors import EngineRejected, EngineUnavailable
from atroposlib.patience import Backoff

logger = logging.getLogger(__name__)

DETAIL_CHARS = 300


class Unreachable(EngineUnavailable):
    """No HTTP answer, or `/health` answered 5xx: the failures that are retried."""


class NoSuchRoute(EngineRejected):
    """404 or 405: an older engine, another kind of engine, or one without development routes."""


class Control:
    """An HTTP client for one engine; `url` is its address without `/v1`."""

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # No kept connections: one closed just as a call is sent looks like an engine that died.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def post(self, route: str, body: Any = None, **request: Any) -> httpx.Response:
        return self.call("POST", route, json=body, **request)

    def look(self, route: str, **request: Any) -> Any:
        """Return the JSON answer of a GET; None if the route is missing or the answer is not JSON."""
        try:
            return self.call("GET", route, **request).json()
        except (NoSuchRoute, ValueError):
            return None

    def require_healthy(self) -> None:
        self.call("GET", "/health", timeout=10.0)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, route: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, route, **request)
        except httpx.TransportError as error:
            raise Unreachable(
                f"engine {self.url}: {route} got no answer ({error!r}); is an engine running there? "
                "--engine_url gives the addresses of the engines that are running already"
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


def for_each(
    controls: Sequence[Control],
    action: Callable[[Control], Any],
    *,
    retry_s: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Call `action` for every engine concurrently, with retries; when all have ended, raise the first failure.

    Once `is_stopping()`, skip an unreachable engine with a warning.
    """

    def attempt(control: Control) -> None:
        deadline_s = time.monotonic() + retry_s
        backoff = Backoff(first_s=0.2, cap_s=5.0)
        while True:
            try:
                action(control)
                return
            except Unreachable as error:
                if is_stopping():
                    logger.warning("stopping without waiting for an engine: %s", error)
                    return
                pause_s = backoff.next()
                if time.monotonic() + pause_s > deadline_s:
                    raise
                if backoff.num_failed == 1:
                    logger.warning("%s; retrying", error)
                time.sleep(pause_s)

    if len(controls) == 1:  # in this thread, where Ctrl-C can interrupt it
        attempt(controls[0])
        return
    with ThreadPoolExecutor(max_workers=len(controls)) as pool:
        list(pool.map(attempt, controls))
