"""Send `GET /healthz` to a hub 200 times a second until standard input closes; print the durations as JSON.

`_hub_probe.py BASE_URL PID`, started by `_hub_process.probing` as a separate process, so that sending the load does not
delay it. With a PID it also reports how long the scheduler delayed each answer.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

PERIOD_S = 0.005
WARM_UP = 20


class Scheduling(NamedTuple):
    own_delay_s: float
    """Total time that this thread was runnable without a core."""
    delays_s: dict[str, float]
    """The same for each thread of the hub."""
    loop_cpu_s: float
    """Total CPU time of the hub's main thread."""


def scheduling(pid: int | None) -> Scheduling:
    if pid is None:
        return Scheduling(0.0, {}, 0.0)
    own_delay_s = 1e-9 * int(Path("/proc/self/schedstat").read_text().split()[1])
    delays_s = {}
    loop_cpu_s = 0.0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            cpu_ns, delay_ns, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        except OSError:
            continue
        delays_s[thread] = 1e-9 * int(delay_ns)
        if thread == str(pid):
            loop_cpu_s = 1e-9 * int(cpu_ns)
    return Scheduling(own_delay_s, delays_s, loop_cpu_s)


class Wait(NamedTuple):
    wall_ms: float
    net_ms: float
    loop_cpu_ms: float


def ask(connection: socket.socket, request: bytes, pid: int | None) -> Wait:
    """Send one request and wait for its answer; `_hub_process.Waits` documents the values."""
    before = scheduling(pid)
    began = time.perf_counter()
    connection.sendall(request)
    received = b""
    while not is_whole(received):
        piece = connection.recv(65536)
        if not piece:
            raise EOFError("the hub closed the probe's connection")
        received += piece
    wall = time.perf_counter() - began
    after = scheduling(pid)
    loop_cpu = after.loop_cpu_s - before.loop_cpu_s
    delay = after.own_delay_s - before.own_delay_s
    delay += max(
        (now - before.delays_s.get(thread, 0.0) for thread, now in after.delays_s.items()),
        default=0.0,
    )
    net = max(min(loop_cpu, wall), wall - delay)
    return Wait(1e3 * wall, 1e3 * net, 1e3 * loop_cpu)


def is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(end) and len(body) >= (int(found.group(1)) if found else 0)


def main() -> None:
    address = urlsplit(sys.argv[1])
    pid = int(sys.argv[2]) or None
    lines = ["GET /healthz HTTP/1.1", f"Host: {address.netloc}"]
    if token := os.environ.get("PROBE_TOKEN"):
        lines.append(f"Authorization: Bearer {token}")
    request = "\r\n".join([*lines, "", ""]).encode()
    waits = []
    with socket.create_connection((address.hostname or "", address.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(WARM_UP):
            ask(connection, request, pid)
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
            waits.append(ask(connection, request, pid))
    print(json.dumps({name: [getattr(w, name) for w in waits] for name in Wait._fields}))


if __name__ == "__main__":
    main()
