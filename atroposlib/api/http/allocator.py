"""glibc allocator settings of the hub's processes, applied once at start-up."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of earlier bodies: fresh pages cost a fifth of ingesting a token. Needs glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_TRIM_THRESHOLD, 128 * 2**20)
    mallopt(_TOP_PAD, 16 * 2**20)
