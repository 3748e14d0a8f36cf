"""The restart bridge: stop the engine, start it again on the new checkpoint (the original's behaviour).

Guarantee: when `publish` returns a version, an engine started from that version's checkpoint is healthy. At most one
engine of this bridge runs at any time; one that dies between two publishes is started again. Works with every engine
that loads a model directory and answers `/health`; costs one engine start per publish, and requests in flight are lost
(environments retry). Nothing is stopped before the new checkpoint is complete on disk.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from atroposlib.errors import AtroposError, EngineError
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.vllm_process import EngineProcess
from example_trainer.weights import require_checkpoint

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
WATCH_INTERVAL_S = 1.0


class Served(NamedTuple):
    model: Path
    version: int


class RestartBridge:
    """`CheckpointEngines`: one engine, owned.

    `start_engine(model, version)` returns the engine for that model directory, started or not; the bridge
    starts it if need be, waits until it is ready and stops it.
    """

    name = "restart"

    def __init__(
        self,
        *,
        start_engine: Callable[[Path, int], EngineProcess],
        watch_interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self._start_engine = start_engine
        self._watch_interval_s = watch_interval_s
        self._engine: EngineProcess | None = None
        self._served: Served | None = None
        """What the running engine was started from; None while there is no healthy one."""
        self._rolled_back = False
        self._failure: EngineError | None = None
        """Why an engine that died could not be started again."""
        self._closing = threading.Event()
        self._replacing = threading.Lock()
        """Held by whoever starts or stops engines: the trainer's thread, or the watcher."""
        self._watcher = threading.Thread(target=self._watch, name="engine watcher", daemon=True)

    @property
    def engine(self) -> EngineProcess | None:
        """The running engine; None before `start` and after `close`."""
        return self._engine

    def start(self, checkpoint_dir: Path, version: int) -> None:
        """Start the engine on the initial weights."""
        with self._replacing:
            self._replace_engine(Served(checkpoint_dir, version))
        self._watcher.start()

    def publish(self, checkpoint_dir: Path, version: int) -> int:
        """Replace the engine by one on `checkpoint_dir`; return the version that is served afterwards.

        When the new engine does not come up, the old checkpoint is served again, the reason logged and its version
        returned. EngineError when that fails too, or the second time in a row, or when the checkpoint is not complete.
        """
        require_checkpoint(checkpoint_dir)
        with self._replacing:
            self._raise_failure()
            before = self._served
            try:
                self._replace_engine(Served(checkpoint_dir, version))
            except EngineError as error:
                return self._roll_back(before, version, error)
            self._rolled_back = False
            return version

    def check(self) -> None:
        """Nothing to ask: the watcher starts an engine that died again, and ends the run if it does not come up."""

    def close(self) -> None:
        """Stop the engine, if one runs; EngineError if it died during the run and could not be started again."""
        self._closing.set()
        if self._engine is not None:  # one that the watcher is starting just now: its wait ends
            self._engine.stop()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._replacing:
            self._stop_engine()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _replace_engine(self, served: Served) -> None:
        self._stop_engine()
        self._served = None
        # Kept before it is ready: close() must reach an engine that is still starting.
        self._engine = self._start_engine(*served)
        if self._engine.pid is None:
            self._engine.start()
        if (
            self._closing.is_set()
        ):  # close() has looked for an engine to stop before this one was there
            raise EngineError("the engine is not waited for: the bridge is being closed")
        self._engine.wait_ready()
        announce_version(self._engine.url, served.version)
        self._served = served

    def _stop_engine(self) -> None:
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def _roll_back(self, before: Served | None, version: int, error: EngineError) -> int:
        if before is None or self._rolled_back or not before.model.exists():
            raise error
        logger.error(
            "the engine did not come up on version %d, version %d is served again: %s",
            version,
            before.version,
            error,
        )
        self._replace_engine(before)
        self._rolled_back = True
        return before.version

    def _watch(self) -> None:
        """Start an engine that died again, from what it served; end the run when it does not come up."""
        while not self._closing.wait(self._watch_interval_s):
            with self._replacing:
                died = self._engine is not None and self._engine.poll() is not None
                if not died or self._served is None or self._closing.is_set():
                    continue
                assert self._engine is not None
                logger.error(
                    "the engine died and is started again on version %d\n%s",
                    self._served.version,
                    self._engine.log_tail(),
                )
                try:
                    self._replace_engine(self._served)
                except AtroposError as error:
                    if self._closing.is_set():
                        return
                    self._failure = EngineError(f"the engine died and did not come back: {error}")
            if self._failure is not None:
                logger.error("%s", self._failure)
                os.kill(
                    os.getpid(), signal.SIGTERM
                )  # the trainer may wait for data that cannot come
                return

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def announce_version(url: str, version: int) -> None:
    """Tell an engine which policy version its weights are; one that keeps none is used all the same."""
    control = Control(url, timeout_s=CONTROL_TIMEOUT_S)
    try:
        VllmEngine(control).set_version(version)
    finally:
        control.close()
