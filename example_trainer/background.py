"""Work that the training loop does not wait for: writing files, and then telling the hub or the engines.

A job must not call collectives of the training's process groups, nor read what a step changes. Called by `training.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

from atroposlib.errors import AtroposError

logger = logging.getLogger(__name__)


class Background:
    """Runs one job at a time in a thread; a context manager that waits for the last one, except after Ctrl-C.

    The error of a job is raised by the next call of `check`, `start` or `wait`, or at the end.
    """

    def __init__(self) -> None:
        self._job: Future[float] | None = None
        self._ended_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return self._job is not None and not self._job.done()

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` once the one before has ended."""
        self.wait()

        def timed() -> float:
            began = time.perf_counter()
            job()
            return time.perf_counter() - began

        self._job = in_background(timed)

    def check(self) -> None:
        """Raise the error of a job that has failed."""
        if not self.is_busy:
            self.wait()

    def wait(self) -> None:
        if self._job is not None:
            job = self._job
            job.exception()  # an interruption of this wait keeps the job
            self._job = None
            self._ended_s = (self._ended_s or 0.0) + job.result()

    def ended_s(self) -> float | None:
        """Return the seconds of the jobs that were found to have ended since the last call; None if none was."""
        seconds, self._ended_s = self._ended_s, None
        return seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *trace: object) -> None:
        if exc is not None and not isinstance(exc, Exception):
            return
        try:
            self.wait()
        except AtroposError as error:
            if exc is None:
                raise
            logger.error("%s", error)  # the other error, which came first, ends the run


def in_background(call: Callable[[], Any]) -> Future[Any]:
    """Run `call` in a daemon thread, which does not keep the process alive; its result or error is the future's."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
