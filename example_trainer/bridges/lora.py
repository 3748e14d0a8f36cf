"""The LoRA bridge: running engines swap the adapter and keep the base model.

Guarantee: when `publish` returns, every engine answers requests for `lora_name` with the new adapter. Requests in
flight end under the one that they began with.
Environments ask for the adapter by its name: their `model_name` is `lora_name`, not the base model's. The engines
belong to somebody else: this bridge never starts or stops one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from example_trainer.bridges.control import Control, for_each, require_healthy
from example_trainer.bridges.engines import RunningEngine, identify
from example_trainer.model import Policy
from example_trainer.weights import WeightsDirectory


class LoraBridge:
    """A `WeightBridge` to engines that run already and serve the base model; `urls` are without `/v1`."""

    name = "lora"

    def __init__(
        self,
        weights: WeightsDirectory,
        *,
        urls: Sequence[str],
        lora_name: str,
        timeout_s: float = 600.0,
        retry_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        self._weights = weights
        self._controls = [Control(url, timeout_s=timeout_s, api_key=api_key) for url in urls]
        self._lora_name = lora_name
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._engines: dict[str, RunningEngine] = {}

    def start(self, policy: Policy, version: int) -> None:
        """Wait until every engine is healthy and load the initial adapter."""
        if policy.world.is_main:
            for_each(self._controls, lambda c: c.get("/health"), retry_s=self._timeout_s)
        self.publish(policy, version)

    def publish(self, policy: Policy, version: int) -> int:
        """Save the adapter and load it into every engine at once; raise EngineError naming engine, route and answer."""
        directory = self._weights.save_adapter(version)
        if policy.world.is_main:
            for_each(
                self._controls,
                lambda control: self._update(control, directory.resolve(), version),
                retry_s=self._retry_s,
            )
        return version

    def check(self) -> None:
        require_healthy(self._controls)

    def close(self) -> None:
        """Close the connections; the engines keep running, and keep the adapter."""
        for control in self._controls:
            control.close()

    def _update(self, control: Control, directory: Path, version: int) -> None:
        if control.url not in self._engines:
            self._engines[control.url] = identify(control)
        engine = self._engines[control.url]
        engine.load_adapter(self._lora_name, directory)
        engine.set_version(version)
        engine.check_version(version)
