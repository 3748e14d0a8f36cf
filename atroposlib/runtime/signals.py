"""Handle signals in the running event loop during a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from signal import Signals

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def on_signals(handle: Callable[[], None], *signals: Signals) -> Iterator[None]:
    """Call `handle` at each of these signals; outside the main thread, and on Windows, change nothing."""
    loop = asyncio.get_running_loop()
    try:
        for number in signals:
            loop.add_signal_handler(number, handle)
    except (NotImplementedError, RuntimeError, ValueError):
        logger.debug("signals are not handled here")
        signals = ()
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
