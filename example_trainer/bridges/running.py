"""The base of the bridges to running engines, and the two bridges whose engines load checkpoints or adapters from disk.

Guarantee: when `publish` returns, every engine samples from the new weights and, if it can, reports their version.
Engines change one by one, so two may briefly serve different versions; their samples carry the version. These bridges
never start or stop an engine. An engine that its supervisor restarted serves older weights until the next `publish` or
`check`, which loads the published ones again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from example_trainer.bridges.control import Control, for_each
from example_trainer.bridges.engines import RunningEngine, identify
from example_trainer.contract import check_files, tensors_in
from example_trainer.weights import Published

logger = logging.getLogger(__name__)


class RunningEngines:
    """The base of the bridges to running engines; `urls` are addresses without `/v1`, of any mix of kinds."""

    def __init__(
        self,
        *,
        urls: Sequence[str],
        timeout_s: float = 600.0,
        retry_s: float = 600.0,
        api_key: str | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._controls = [Control(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._is_stopping = is_stopping
        self._engines: dict[str, RunningEngine] = {}

    def wait_healthy(self) -> None:
        for_each(self._controls, Control.require_healthy, retry_s=self._timeout_s)

    def engine_at(self, control: Control) -> RunningEngine:
        """Return the engine at this address; its kind is determined once."""
        if control.url not in self._engines:
            self._engines[control.url] = identify(control)
        return self._engines[control.url]

    def check(self) -> None:
        for_each(self._controls, self.check_engine, retry_s=0.0)

    def check_engine(self, control: Control) -> None:
        control.require_healthy()

    def close(self) -> None:
        """Close the connections; the engines keep running."""
        for control in self._controls:
            control.close()


class DirectoryReaders(RunningEngines):
    """Engines that read new weights from a directory."""

    _published: Published | None = None

    def start(self, directory: Path, version: int) -> None:
        """Wait until every engine is healthy, then load the initial weights: an earlier run may have left others."""
        self.wait_healthy()
        self.publish(directory, version)

    def publish(self, directory: Path, version: int) -> int:
        """Load `directory` into all engines concurrently; raise EngineError naming engine, route and answer."""
        check_files(directory)
        published = self._published = Published(directory.resolve(), version)
        for_each(
            self._controls,
            lambda control: self._update(control, published),
            retry_s=self._retry_s,
            is_stopping=self._is_stopping,
        )
        return version

    def check_engine(self, control: Control) -> None:
        """Also load the published weights into an engine that reports older ones: it was restarted."""
        super().check_engine(control)
        published = self._published
        if published and self.engine_at(control).is_behind(published.version):
            logger.warning(
                "engine %s was restarted; loading version %d again", control.url, published.version
            )
            del self._engines[control.url]  # its flags may have changed
            self._update(control, published)

    def _update(self, control: Control, published: Published) -> None:
        engine = self.engine_at(control)
        self.load(engine, *published)
        engine.check_version(published.version)

    def load(self, engine: RunningEngine, directory: Path, version: int) -> None:
        raise NotImplementedError


class ReloadBridge(DirectoryReaders):
    """Engines load whole checkpoints in place; requests in flight pause meanwhile and are not lost."""

    def load(self, engine: RunningEngine, directory: Path, version: int) -> None:
        with engine.frozen():
            engine.load_checkpoint(directory, version)
            engine.forget_cache()
            engine.set_version(version)
            engine.check_weights(lambda: dict(tensors_in(directory)))


class LoraBridge(DirectoryReaders):
    """Engines swap the adapter called `lora_name` and keep the base model.

    Requests in flight finish with their earlier adapter. Environments must use `lora_name` as `model_name`.
    """

    def __init__(self, *, lora_name: str, **engines: Any) -> None:
        super().__init__(**engines)
        self._lora_name = lora_name

    def load(self, engine: RunningEngine, directory: Path, version: int) -> None:
        engine.load_adapter(self._lora_name, directory)
        engine.set_version(version)
