"""Where a client sends its next call: to the configured URL, or to the replica that owns its run. Does no I/O.

A replica that forwards a request names the owner in its answer (`REPLICA_HEADER`). The client then goes there, which
saves the forwarding, under these rules, so that its token reaches only hubs that have it already:

- The scheme is that of the configured URL, and the host is a loopback one exactly if that one's is.
- Before anything else, `GET /healthz` there, without a token, must give the same id: the address may be that of
  another machine in the client's network. It has `CHECK_S`; after a failure no owner is checked for a while.
- An owner that has not answered for `TRUST_S` is checked again: its address may be another machine's by now.
- An owner that cannot be reached, is silent for `SILENCE_S`, or answers 502 or 503, is left for the configured URL.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

from atroposlib.http_guard import is_loopback_url
from atroposlib.patience import Backoff

CHECK_S = 1.0
SILENCE_S = 4.5
"""As long as the hubs themselves wait for a sign of life (`owners.LAPSE_S`), beside the time that a call may take."""
TRUST_S = 30.0
_HOST = r"(?:[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*|\[[0-9A-Fa-f:.]+\])"
_NAMED = re.compile(
    rf"([\w-]+) (https?://{_HOST}(?::\d{{1,5}})?(?:/[\w.-]+)*/runs/[\w.-]+)", re.ASCII
)
"""A URL without user, query and fragment."""


class Owner(NamedTuple):
    """The replica that serves a run, as `REPLICA_HEADER` names it."""

    id: str
    url: str
    """Of the run."""


class HubAddress:
    """Any thread may use it: two that race check one owner twice."""

    def __init__(self, configured: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.configured = configured
        self._url = configured
        self._heard_at = -math.inf
        """When the owner at `_url` last answered."""
        self._clock = clock
        self._pause = Backoff(first_s=5.0, cap_s=300.0)
        self._retry_at = -math.inf

    @property
    def url(self) -> str:
        """URL of the next call."""
        is_trusted = self._clock() - self._heard_at <= TRUST_S
        return self._url if is_trusted else self.configured

    def failed(self, url: str) -> None:
        """Note that a call to `url` got no answer."""
        if url == self._url != self.configured:
            self._url = self.configured
            self._retry_at = self._clock() + self._pause.next()

    def answered(self, url: str, *, status: int, named: str | None) -> Owner | None:
        """Note an answer from `url`; return the owner that its `REPLICA_HEADER` names if it should be checked now."""
        if url != self.configured:
            if status in (502, 503):
                self.failed(url)
                return None
            self._pause.reset()
            if url == self._url:
                self._heard_at = self._clock()
        owner = self._permitted(named or "")
        if owner is None or owner.url == self.url or self._clock() < self._retry_at:
            return None
        self._retry_at = self._clock() + CHECK_S + self._pause.next()  # unless it is followed
        return owner

    def follow(self, owner: Owner, *, found: str | None) -> None:
        """Go to an owner if it is there: `found` is the id that its `/healthz` gave."""
        if found == owner.id:
            self._url = owner.url
            self._heard_at = self._clock()
            self._retry_at = -math.inf

    def _permitted(self, named: str) -> Owner | None:
        found = _NAMED.fullmatch(named)
        if found is None:
            return None
        owner = Owner(*found.groups())
        has_same_scheme = owner.url.partition(":")[0] == urlsplit(self.configured).scheme
        is_as_near = is_loopback_url(owner.url) == is_loopback_url(self.configured)
        return owner if has_same_scheme and is_as_near else None
