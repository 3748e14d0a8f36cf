"""A client that asks a hub for one thing over and over while a test attacks the hub."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from tests.faults.drivers import HubProcess

MEDIAN_S, P95_S = 0.25, 1.0
"""What `assert_prompt` allows: the machine may be busy with other work."""


@contextmanager
def asking(
    hub: HubProcess,
    path: str,
    *,
    method: str = "GET",
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Iterator[list[float]]:
    """Send a request every 5 ms during the block, on one connection; every answer must be 200.

    Yields the seconds that each answer took, sorted once the block has ended.
    """
    waits_s: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", hub.port, timeout=30)) as connection:
            while not is_over.wait(0.005):
                began = time.perf_counter()
                connection.request(method, path, body, dict(headers or {}))
                response = connection.getresponse()
                response.read()
                waits_s.append(time.perf_counter() - began)
                assert response.status == 200

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield waits_s
        finally:
            is_over.set()
        asked.result()
    waits_s.sort()


def quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[int(q * (len(ordered) - 1))]


def describe(waits_s: Sequence[float]) -> str:
    figures = [f"{1e3 * quantile(waits_s, q):.1f}" for q in (0.5, 0.95, 0.99, 1.0)]
    return f"{len(waits_s)} asked, p50 / p95 / p99 / longest {' / '.join(figures)} ms"


def assert_prompt(waits_s: Sequence[float]) -> None:
    assert quantile(waits_s, 0.5) <= MEDIAN_S, describe(waits_s)
    assert quantile(waits_s, 0.95) <= P95_S, describe(waits_s)
