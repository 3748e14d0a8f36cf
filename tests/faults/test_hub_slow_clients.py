"""Clients that read and send slowly: the memory they cost is bounded, and the system has it back when they are gone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from atroposlib.client import HubClient
from tests.faults.drivers import (
    GroupKey,
    children,
    eventually,
    forget_peak,
    hub_process,
    make_group,
    peak_rss_bytes,
)
from tests.faults.test_hub_memory import NUM_SEQUENCES, NUM_TOKENS, stamped

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MIB = 2**20
NUM_READERS, NUM_POSTERS = 20, 55
BATCH_SEQUENCES = 64
POSTED_BYTES = 24 * MIB
"""Sent of a body that never ends."""


def rss_bytes(pid: int) -> int:
    pages = 0
    for each in (pid, *children(pid)):
        pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * 4096


def connect(stack: ExitStack, port: int) -> socket.socket:
    peer = stack.enter_context(socket.socket())
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", port))
    return peer


async def test_slow_clients_cost_bounded_memory_that_is_given_back(tmp_path: Path) -> None:
    template = make_group(GroupKey(0, 0), num_sequences=NUM_SEQUENCES, num_tokens=NUM_TOKENS)
    with hub_process(tmp_path) as hub, ExitStack() as stack:
        hub.register(batch_size=BATCH_SEQUENCES, max_token_len=NUM_TOKENS)
        async with HubClient(hub.url) as client:
            for number in range(NUM_READERS * BATCH_SEQUENCES // NUM_SEQUENCES):
                await client.send([stamped(template, number)])
        before = rss_bytes(hub.pid)
        forget_peak(hub.pid)
        ended = threading.Event()

        def read_slowly(peer: socket.socket) -> None:
            head = f"GET /batch?lease=1 HTTP/1.1\r\nHost: 127.0.0.1:{hub.port}\r\n\r\n"
            peer.sendall(head.encode())
            while not ended.wait(0.5) and peer.recv(4096):
                pass

        def post_slowly(peer: socket.socket) -> None:
            head = (
                f"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1:{hub.port}\r\n"
                "Content-Type: application/json\r\nContent-Length: 60000000\r\n\r\n"
            )
            piece, num_left = b"[" * MIB, POSTED_BYTES
            try:
                peer.sendall(head.encode())
                while not ended.is_set():
                    peer.sendall(piece[: max(20_000, min(MIB, num_left))])
                    num_left -= MIB
                    if num_left <= 0:
                        ended.wait(0.05)
            except OSError:
                return  # refused, or closed at the end

        slow = [(read_slowly, NUM_READERS), (post_slowly, NUM_POSTERS)]
        threads = [
            threading.Thread(target=work, args=(connect(stack, hub.port),), daemon=True)
            for work, count in slow
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        await asyncio.sleep(12)
        grown = peak_rss_bytes(hub.pid, *children(hub.pid)) - before
        assert hub.get("/healthz") == {"status": "ok"}
        ended.set()
        stack.close()
        gone_at = time.monotonic()
        await eventually(
            lambda: rss_bytes(hub.pid) - before < 64 * MIB or time.monotonic() > gone_at + 30,
            timeout_s=40,
            what="the memory is given back",
        )
        kept = rss_bytes(hub.pid) - before
    print(f"before {before / MIB:.0f} MiB, at most +{grown / MIB:.0f}, kept +{kept / MIB:.0f}")
    assert grown <= 1024 * MIB
    assert kept <= 64 * MIB
