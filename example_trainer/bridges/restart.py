"""The restart bridge: stop the engine and start it on the new checkpoint (the original's behaviour).

Guarantee: when `publish` returns a version, an engine started from that version's checkpoint is healthy. At most one
engine of this bridge runs at a time; one that dies between two publishes is restarted. Works with any engine that loads
a model directory and answers `/health`. Each publish costs one engine start, and requests in flight are lost
(environments retry). The engine is stopped only after the new checkpoint is complete on disk.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from atroposlib.errors import AtroposError, EngineError, EngineProtocolError
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import VllmEngine
from example_trainer.contract import EngineCheck, check_files, tensors_in
from example_trainer.vllm_process import EngineProcess
from example_trainer.weights import Published

logger = logging.getLogger(__name__)


class RestartBridge:
    """One engine, owned by the trainer; `start_engine(model)` returns it for a model directory, not yet started.

    Once `is_stopping()`, the bridge waits for no engine.
    """

    def __init__(
        self,
        *,
        start_engine: Callable[[Path], EngineProcess],
        is_stopping: Callable[[], bool] = lambda: False,
        watch_interval_s: float = 1.0,
    ) -> None:
        self._start_engine = start_engine
        self._is_stopping = is_stopping
        self._watch_interval_s = watch_interval_s
        self.engine: EngineProcess | None = None
        """The running engine; None before `start` and after `close`."""
        self._served: Published | None = None
        """What the running engine was started from; None while none is healthy."""
        self._check: EngineCheck | None = None
        """Of every engine in turn: what an engine keeps in a form of its own, the next one does too."""
        self._rolled_back = False
        self._failure: EngineError | None = None
        """Why an engine that died could not be restarted."""
        self._closing = threading.Event()
        self._replacing = threading.Lock()
        """Held by the thread that starts or stops engines: the trainer's or the watcher."""
        self._watcher = threading.Thread(target=self._watch, name="engine watcher", daemon=True)

    def start(self, checkpoint_dir: Path, version: int) -> None:
        check_files(checkpoint_dir)
        with self._replacing:
            self._replace_engine(Published(checkpoint_dir, version))
        self._watcher.start()

    def publish(self, checkpoint_dir: Path, version: int) -> int:
        """Replace the engine by one on `checkpoint_dir`; return the version that is served afterwards.

        If the new engine does not become healthy, log the reason, serve the old checkpoint again and return its
        version. Raises EngineError if that fails too, if it happens twice in a row, if the checkpoint is incomplete, or
        if the engine has loaded something else.
        A run that must stop does not wait for the engine.
        """
        check_files(checkpoint_dir)
        with self._replacing:
            self._raise_failure()
            before = self._served
            try:
                self._replace_engine(Published(checkpoint_dir, version))
            except EngineError as error:
                if self._is_stopping():
                    return version if before is None else before.version
                has_failed = self._rolled_back or isinstance(error, EngineProtocolError)
                if before is None or has_failed or not before.directory.exists():
                    raise
                logger.error(
                    "no healthy engine on version %d, version %d is served again: %s",
                    *(version, before.version, error),
                )
                self._replace_engine(before)
                self._rolled_back = True
                return before.version
            self._rolled_back = False
            return version

    def check(self) -> None:
        """Do nothing: the watcher restarts an engine that died, and ends the run if that fails."""

    def close(self) -> None:
        """Stop the engine if one runs; raise EngineError if one died during the run and could not be restarted."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with self._replacing:
            self._stop_engine()
        self._raise_failure()

    def _replace_engine(self, served: Published) -> None:
        self._stop_engine()
        self._served = None
        self.engine = self._start_engine(served.directory)  # set at once: close() must reach it
        try:
            self.engine.start()
        except OSError as error:  # such as a full disk, for its log
            raise EngineError(f"{self.engine.name} could not be started: {error}") from error
        self.engine.wait_ready(is_ending=self._is_ending)
        # vLLM computes SHA-256 at about a second per GB.
        with closing(Control(self.engine.url, timeout_s=600.0)) as control:
            self._check = self._check or EngineCheck(self.engine.url)
            engine = VllmEngine(control, check=self._check)
            engine.set_version(served.version)
            engine.check_weights(lambda: dict(tensors_in(served.directory)))
        self._served = served

    def _is_ending(self) -> bool:
        return self._closing.is_set() or self._is_stopping()

    def _stop_engine(self) -> None:
        if self.engine is not None:
            self.engine.stop()
            self.engine = None

    def _watch(self) -> None:
        """Restart an engine that died, on the weights that it served; end the run if that fails."""
        while not self._closing.wait(self._watch_interval_s):
            with self._replacing:
                died = self.engine is not None and self.engine.poll() is not None
                if not died or self._served is None or self._is_ending():
                    continue
                assert self.engine is not None
                logger.error(
                    "the engine died and is started again on version %d\n%s",
                    *(self._served.version, self.engine.log_tail()),
                )
                try:
                    self._replace_engine(self._served)
                except AtroposError as error:
                    if self._is_ending():
                        return
                    self._failure = EngineError(
                        f"the engine died and could not be restarted: {error}"
                    )
            if self._failure is not None:
                logger.error("%s", self._failure)
                # The trainer may be waiting for a batch that will never come.
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
