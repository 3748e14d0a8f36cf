"""Which failed requests are repeated, and how often.

Each call has ONE owner of retries: `APIServer._call` if it is bound to this server (in a session), `ServerManager` if
it may move to another (`moving`). Both count in `Retries`: connection errors, timeouts and 5xx are retried up to
`max_attempts`; 429 and 503 mean "later" and use no attempt; everything else is raised. Only sampling and scoring go
through here, because they can be repeated: a second answer comes from the same distribution. Calls that change the
server must not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import aiohttp

from atroposlib.errors import EngineUnavailable

if TYPE_CHECKING:
    from atroposlib.inference.servers.api_server import APIServer

MAX_ATTEMPTS = 3
MAX_BACKOFF_S = 10.0
MIN_PAUSE_S = 0.01
LATER = frozenset({429, 503})


class EngineDown(EngineUnavailable):
    """The server stayed down for a request's maximum wait, so the request is not retried."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, EngineDown):
        return False
    return isinstance(
        error, EngineUnavailable | aiohttp.ClientConnectionError | ConnectionError | TimeoutError
    )


def says_later(error: BaseException) -> bool:
    """Whether a healthy server asks to retry later: too many requests, or its weights are being changed."""
    return (
        isinstance(error, EngineUnavailable)
        and error.status in LATER
        and "insufficient_quota" not in str(error)
    )


def timed_out(error: BaseException) -> bool:
    """Whether an attempt timed out."""
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


class Retries:
    """Counts the attempts of one call over all servers, and ends its retries."""

    def __init__(self, servers: Sequence[APIServer]) -> None:
        """`servers` are those that may get the call; the largest of their limits applies."""
        self.num_sent = 0
        self.num_failed = 0
        self._servers = servers
        self._began_waiting: float | None = None

    def note(self, error: Exception) -> None:
        """Count a failed attempt; raise after too many failures, or too many seconds of "later" (429, 503)."""
        if says_later(error):
            now = time.monotonic()
            self._began_waiting = self._began_waiting or now
            longest_s = max(server.config.health_wait_s for server in self._servers)
            gives_up = now - self._began_waiting >= longest_s
        else:
            self.num_failed += 1
            gives_up = self.num_failed >= max(server.max_attempts for server in self._servers)
        if not gives_up:
            return
        if not is_transient(error):
            raise error
        raise EngineUnavailable(
            f"{error} (gave up after {self.num_sent} attempts)",
            status=getattr(error, "status", None),
            retry_after_s=getattr(error, "retry_after_s", None),
        ) from error


moving: ContextVar[Retries | None] = ContextVar("moving", default=None)
"""Set by `ServerManager` around a call that it can move to another server: each server then tries once."""
