"""The reload bridge: running engines load new weights in place, from a directory that they can read.

Guarantee: when `publish` returns, every engine samples from the new checkpoint and says so where it can; requests in
flight were frozen, not lost, and go on under the new weights. Each engine is consistent by itself: they are frozen and
resumed at their own pace, so that for moments two of them serve different versions, which their samples name. The
engines belong to somebody else: this bridge never starts or stops one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from example_trainer.bridges.control import Control, for_each, require_healthy
from example_trainer.bridges.engines import RunningEngine, identify
from example_trainer.weights import require_checkpoint


class ReloadBridge:
    """`CheckpointEngines` that run already; `urls` are their addresses without `/v1`. Kinds may be mixed."""

    name = "reload"

    def __init__(
        self,
        *,
        urls: Sequence[str],
        timeout_s: float = 600.0,
        retry_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        self._controls = [Control(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._engines: dict[str, RunningEngine] = {}
        """By address; asked once what they are."""

    def start(self, checkpoint_dir: Path, version: int) -> None:
        """Wait until every engine is healthy and load the initial weights.

        Loading it also repairs an engine that still holds the weights of an earlier run.
        """
        for_each(self._controls, lambda c: c.get("/health"), retry_s=self._timeout_s)
        self.publish(checkpoint_dir, version)

    def publish(self, checkpoint_dir: Path, version: int) -> int:
        """Load `checkpoint_dir` into every engine at once.

        Raises EngineError before any engine is touched when the checkpoint is not complete, later naming the engine,
        the route and its answer.
        """
        directory = checkpoint_dir.resolve()
        require_checkpoint(directory)
        for_each(
            self._controls,
            lambda control: self._update(control, directory, version),
            retry_s=self._retry_s,
        )
        return version

    def check(self) -> None:
        require_healthy(self._controls)

    def close(self) -> None:
        """Close the connections; the engines keep running."""
        for control in self._controls:
            control.close()

    def _update(self, control: Control, directory: Path, version: int) -> None:
        if control.url not in self._engines:
            self._engines[control.url] = identify(control)
        engine = self._engines[control.url]
        with engine.frozen():
            engine.load_checkpoint(directory, version)
            engine.forget_cache()
            engine.set_version(version)
        engine.check_version(version)
