"""External measurements of the hub's process: CPU time, memory, and how long it delays other requests.

Linux only: CPU comes from the process's CPU clock (exact, including ended threads), the rest from /proc. Starts the
processes that are measured; `hub.py` also attaches to a running hub by its process id.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_TIMEOUT_S = 60.0
CPUCLOCK_SCHED = 2
"""Linux, include/linux/posix-timers.h: a process's CPU clock is `~pid << 3 | CPUCLOCK_SCHED`."""


def family(pid: int) -> list[int]:
    """Return the process and its running descendants."""
    found = [pid]
    for each in found:
        for file in glob.glob(f"/proc/{each}/task/*/children"):
            try:
                found += map(int, Path(file).read_text().split())
            except OSError:  # the thread has just ended
                continue
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of the process, its threads and its children, running or ended."""
    total = 0.0
    for each in family(pid):
        try:
            total += time.clock_gettime(~each << 3 | CPUCLOCK_SCHED)
            waited_for = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[13:15]
        except OSError:
            if each == pid:
                raise
            continue
        total += sum(int(ticks) for ticks in waited_for) / os.sysconf("SC_CLK_TCK")
    return total


def memory_bytes(pid: int, key: str = "VmRSS") -> int:
    """Return the resident bytes of the process and its children; `VmHWM` is the peak since `forget_peak`."""
    total = 0
    for each in family(pid):
        found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{each}/status").read_text(), re.M)
        total += 1024 * int(found.group(1)) if found else 0
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A hub to measure."""

    base_url: str
    pid: int | None
    """None: unknown; only what a client sees is measured."""
    store: str
    """"disk", "memory", "postgres", or "given" for `--base-url`."""
    more_pids: tuple[int, ...] = ()
    """Of its database, and of other replicas."""

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes; NaN without a pid."""
        return float("nan") if self.pid is None else sum(map(cpu_s, (self.pid, *self.more_pids)))

    def memory_bytes(self, key: str = "VmRSS") -> float:
        return float("nan") if self.pid is None else float(memory_bytes(self.pid, key))

    def forget_peak(self) -> None:
        """Reset `VmHWM` (proc(5), clear_refs)."""
        for each in [] if self.pid is None else family(self.pid):
            Path(f"/proc/{each}/clear_refs").write_text("5")


async def settled_cpu_s(hub: Hub) -> float:
    """Return the CPU seconds once work that continues after an answer has ended."""
    seen = hub.cpu_s()
    for _ in range(20):
        await asyncio.sleep(0.03)
        now = hub.cpu_s()
        if not now - seen > 0.003:
            return now
        seen = now
    return seen


class Cost:
    """CPU time of a block, the server's and this process's, and its wall time."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.server_s = self.client_s = self.wall_s = float("nan")

    async def __aenter__(self) -> Cost:
        self.server_s = await settled_cpu_s(self._hub)
        self._began = time.perf_counter()
        self.client_s = time.process_time()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._began
        self.client_s = time.process_time() - self.client_s
        self.server_s = await settled_cpu_s(self._hub) - self.server_s


@contextmanager
def running(
    argv: Sequence[str], *, log_path: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python command during the block, with more environment variables.

    SIGTERM ends it. A SIGTERM to this process raises KeyboardInterrupt in the block, so that it ends the command, too.
    """
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *argv],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        signal.signal(signal.SIGTERM, earlier)


def listening(process: subprocess.Popen[bytes], log_path: Path) -> str:
    """Wait for the address that the process prints."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (found := re.search(r"listening on (http://\S+)", log_path.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} did not start:\n{log_path.read_text()[-2000:]}")
        time.sleep(0.02)
    return found.group(1)


@contextmanager
def running_hub(
    store: str, *, directory: Path, extra: Sequence[str] = (), more_pids: Sequence[int] = ()
) -> Iterator[Hub]:
    """Run `run-api` on a free port during the block; its data is removed afterwards, but for a database's.

    For PostgreSQL `extra` has the URL.
    """
    with ExitStack() as stack:
        data = stack.enter_context(tempfile.TemporaryDirectory(dir=directory, prefix="hub-"))
        argv = ["-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", "0", *extra]
        if store != "postgres":
            argv += ["--memory"] if store == "memory" else ["--data-dir", str(Path(data) / "runs")]
        log_path = Path(data) / "hub.log"
        process = stack.enter_context(running(argv, log_path=log_path))
        url = listening(process, log_path)
        yield Hub(base_url=url, pid=process.pid, store=store, more_pids=tuple(more_pids))


@dataclass(slots=True)
class Waits:
    """Durations of `GET /healthz`, sent 200 times a second during other work, in milliseconds."""

    wall_ms: list[float] = field(default_factory=list)
    net_ms: list[float] = field(default_factory=list)
    """`wall_ms` minus the time that the probe, and the hub's most delayed thread, were runnable without a core: an
    estimate for an idle machine, too low if several threads wait."""
    loop_cpu_ms: list[float] = field(default_factory=list)
    """CPU time of the hub's main thread within `wall_ms`."""


@contextmanager
def probing(hub: Hub, *, token: str | None = None) -> Iterator[Waits]:
    """Probe the hub from a separate process during the block; the yielded `Waits` is filled after it."""
    waits = Waits()
    script = str(Path(__file__).with_name("_hub_probe.py"))
    with subprocess.Popen(
        [sys.executable, script, hub.base_url, str(hub.pid or 0)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PROBE_TOKEN": token or ""},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # the first answers came
            yield waits
        finally:
            process.stdin.close()
            asked = json.loads(process.stdout.read())
    for name, values in asked.items():
        setattr(waits, name, values)
