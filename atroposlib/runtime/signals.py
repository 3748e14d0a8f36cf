"""Handle signals in the running event loop during a block."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from signal import SIGTERM, Signals

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


@contextlib.contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """Let SIGTERM cancel the current task and end the process with its usual status; asyncio does so for SIGINT."""
    task = asyncio.current_task()
    is_terminated = False

    def terminate() -> None:
        nonlocal is_terminated
        is_terminated = True
        assert task is not None
        task.cancel()

    try:
        with on_signals(terminate, SIGTERM):
            yield
    except asyncio.CancelledError:
        if is_terminated:
            raise SystemExit(128 + SIGTERM) from None
        raise
