"""The memory of this host that a process may still take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Return this process's share of the memory that is left on the host or in the container (cgroup v2).

    Files that the kernel keeps in memory count as free. Without /proc, all is.
    """
    if not _MEMINFO.is_file():
        return sys.maxsize
    free = _number(_MEMINFO, "MemAvailable:") * 1024
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        used = int((_CGROUP / "memory.current").read_text())
        free = min(free, int(text) - used + _number(_CGROUP / "memory.stat", "inactive_file"))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _number(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))
