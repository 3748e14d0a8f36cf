"""The restart bridge: stop the engine, start it again on the new checkpoint (the original's behaviour).

Guarantee: when `publish` returns, an engine started from that checkpoint is healthy. At most one engine
of this bridge runs at any time. Works with every engine that loads a model directory and answers
`/health`; costs one engine start per publish, and requests in flight are lost (environments retry).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import httpx

from atroposlib.errors import EngineError
from example_trainer.vllm_process import EngineProcess

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0


class RestartBridge:
    """`CheckpointEngines`: one engine, owned.

    `start_engine(model, version)` returns the engine for that model directory, started or not; the bridge
    starts it if need be, waits until it is healthy and stops it.
    """

    name = "restart"

    def __init__(self, *, start_engine: Callable[[Path, int], EngineProcess]) -> None:
        self._start_engine = start_engine
        self._engine: EngineProcess | None = None

    @property
    def engine(self) -> EngineProcess | None:
        """The running engine; None before `start` and after `close`."""
        return self._engine

    def start(self, checkpoint_dir: Path, version: int) -> None:
        """Start the engine on the initial weights."""
        self._replace_engine(checkpoint_dir, version)

    def publish(self, checkpoint_dir: Path, version: int) -> None:
        """Replace the engine by one on `checkpoint_dir`; raise `EngineError` if that does not come up.

        The checkpoint is looked at before the old engine is stopped.
        """
        if not (checkpoint_dir / "config.json").is_file():
            raise EngineError(
                f"checkpoint {checkpoint_dir} for version {version} holds no config.json; "
                "the engine keeps the version it has"
            )
        self._replace_engine(checkpoint_dir, version)

    def close(self) -> None:
        """Stop the engine, if one runs."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def _replace_engine(self, model: Path, version: int) -> None:
        self.close()
        # Kept before it is healthy: close() must reach an engine that is still starting.
        self._engine = self._start_engine(model, version)
        if self._engine.pid is None:
            self._engine.start()
        self._engine.wait_healthy()
        announce_version(self._engine.url, version)


def announce_version(url: str, version: int) -> bool:
    """Tell an engine which policy version its weights are; return whether it keeps versions.

    vLLM has the route with development mode on; an engine without it (404) is used all the same, and its
    samples carry no version of their own.
    """
    # vLLM 0.32 reads `new_version`; the finish_weight_update route beside it says `weight_version`.
    body = {"new_version": str(version), "weight_version": str(version)}
    try:
        answer = httpx.post(
            f"{url}/update_weight_version", json=body, timeout=CONTROL_TIMEOUT_S, trust_env=False
        )
    except httpx.TransportError as e:
        raise EngineError(f"engine at {url}: /update_weight_version failed: {e!r}") from e
    if answer.status_code == httpx.codes.NOT_FOUND:
        logger.info("engine at %s keeps no weight version (404)", url)
        return False
    if answer.is_error:
        raise EngineError(
            f"engine at {url}: /update_weight_version answered {answer.status_code}: "
            f"{answer.text[:300]}"
        )
    return True
