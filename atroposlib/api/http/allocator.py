"""How the hub's processes keep memory. Called once at the start of a process; changes nothing but glibc's settings."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of mallopt(3)."""


def keep_freed_memory() -> None:
    """Let glibc keep memory that bodies were in for the next ones: fresh pages cost a fifth of an ingested token.

    Without glibc nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_TRIM_THRESHOLD, 128 * 2**20)
    mallopt(_TOP_PAD, 16 * 2**20)
