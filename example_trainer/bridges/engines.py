"""What vLLM and SGLang call the same things: freeze, load a checkpoint, swap an adapter, name the weights' version.

`identify` asks an engine what it is. Every method returns when the engine has done it and raises EngineError naming
engine, route and answer otherwise. The engine of this project speaks vLLM's routes. Called by the bridges to engines
that run already, through `RunningEngine`; nothing here starts or stops an engine or tries again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from atroposlib.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from example_trainer.bridges.control import Control, NoSuchRoute

logger = logging.getLogger(__name__)


class RunningEngine(Protocol):
    """An engine that serves already."""

    control: Control
    kind: str

    def frozen(self, *, resume_after_error: bool = True) -> AbstractContextManager[None]:
        """Sample nothing inside the block; requests in flight wait and go on after it.

        After an error they go on as well, unless the weights may be in pieces (`resume_after_error` false).
        """

    def load_checkpoint(self, directory: Path, version: int) -> None:
        """Replace the weights by those in `directory`, which the engine must be able to read. Freeze it around this."""

    def forget_cache(self) -> None:
        """Drop keys and values that older weights computed."""

    def load_adapter(self, name: str, directory: Path) -> None:
        """Serve the adapter in `directory` as `name`, instead of an earlier one; requests in flight end under theirs.

        Do not freeze the engine around it.
        """

    def set_version(self, version: int) -> None:
        """Label the weights."""

    def check_version(self, version: int) -> None:
        """Raise EngineProtocolError if the engine names another version than `version`; engines without pass."""


def identify(control: Control) -> RunningEngine:
    """Ask the engine what it is: its list of routes, and where that is hidden a route that only SGLang has."""
    schema = control.look("/openapi.json")
    if isinstance(schema, dict) and isinstance(schema.get("paths"), dict):
        is_sglang = "/update_weights_from_disk" in schema["paths"]
    else:
        is_sglang = any(control.look(route) for route in ("/model_info", "/get_model_info"))
    engine = SglangEngine(control) if is_sglang else VllmEngine(control)
    logger.info("engine %s speaks as %s does", control.url, engine.kind)
    return engine


class VllmEngine:
    """vLLM with its development routes (VLLM_SERVER_DEV_MODE=1), or this project's engine."""

    kind = "vLLM"

    def __init__(self, control: Control) -> None:
        self.control = control
        self._keeps_versions = True
        self._mixes_adapters: bool | None = None
        """May a batch hold requests of several adapters? None until it was asked."""

    @contextmanager
    def frozen(self, *, resume_after_error: bool = True) -> Iterator[None]:
        try:
            self.control.post("/pause", params={"mode": "keep"})
        except NoSuchRoute as error:
            raise EngineRejected(f"{error} (vLLM has it with VLLM_SERVER_DEV_MODE=1)") from error
        with _afterwards(lambda: self.control.post("/resume"), after_error=resume_after_error):
            yield

    def load_checkpoint(self, directory: Path, version: int) -> None:
        """A reload that fails inside vLLM ends its engine: what can be seen to be wrong is refused before."""
        self._refuse_stale_head(directory)
        self.control.post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}},
        )

    def forget_cache(self) -> None:
        # Requests in flight are computed anew under the new weights; without that vLLM keeps the old prefix cache
        # while any of them lives, and answers 200 with success false.
        parameters = {"reset_running_requests": "true"}
        if self._config().get(
            "kv_transfer_config"
        ):  # keys and values outside; without any vLLM answers with a failure
            parameters["reset_external"] = "true"
        reset = self.control.post("/reset_prefix_cache", params=parameters)
        if b'"success":false' in reset.content.replace(b" ", b""):
            raise EngineProtocolError(
                f"engine {self.control.url}: /reset_prefix_cache failed, cached keys and values are of older weights"
            )

    def load_adapter(self, name: str, directory: Path) -> None:
        """Unload and load: requests in flight end under the adapter that they began with.

        Not `load_inplace`: vLLM (0.32, vllm#33791) then reads the adapter from disk in every step of the scheduler,
        and one older request that it takes up again brings the older adapter back for all. Between the two calls, for
        some milliseconds, the engine answers 404 for `name`. vLLM keys its prefix cache by the adapter's path, so each
        version needs a directory of its own.
        """
        with self._drained() if self._may_mix_adapters() else nullcontext():
            try:
                self.control.post("/v1/unload_lora_adapter", {"lora_name": name})
            except EngineRejected:
                pass  # it holds none of that name yet, or has no such route: the next call says which
            try:
                self.control.post(
                    "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)}
                )
            except NoSuchRoute as error:
                self._load_as_the_original_does(name, directory, error)

    def _may_mix_adapters(self) -> bool:
        """Ask once. vLLM (0.32) tells the adapters of a batch apart by their names alone, and dies of two versions."""
        if self._mixes_adapters is None:
            adapters = self._config().get("lora_config")
            at_once = adapters.get("max_loras") if isinstance(adapters, dict) else None
            if at_once is None:
                logger.info(
                    "engine %s does not say how many adapters it serves at once; a vLLM that serves more than one "
                    "(--max-loras) may die when an adapter is swapped under requests in flight",
                    self.control.url,
                )
            self._mixes_adapters = isinstance(at_once, int) and at_once > 1
        return self._mixes_adapters

    def _config(self) -> dict[str, Any]:
        """Return vLLM's configuration; empty where it tells none."""
        found = self.control.look("/server_info", params={"config_format": "json"})
        config = found.get("vllm_config") if isinstance(found, dict) else None
        return config if isinstance(config, dict) else {}

    def require_transfer(self, backend: str) -> None:
        """Raise EngineRejected unless vLLM was started for `backend`: asked without, its engine dies."""
        config = self._config()
        if "weight_transfer_config" not in config:
            raise EngineRejected(
                f"engine {self.control.url}: /server_info names no weight transfer; --bridge transfer needs "
                "vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1"
            )
        found = config["weight_transfer_config"]
        if not isinstance(found, dict) or found.get("backend") != backend:
            raise EngineRejected(
                f"engine {self.control.url}: weight transfer is {found!r}; start vLLM with "
                f'--weight-transfer-config \'{{"backend": "{backend}"}}\''
            )

    @contextmanager
    def _drained(self) -> Iterator[None]:
        """Let requests in flight end first, and others wait until the block is done."""
        self.control.post("/pause", params={"mode": "wait"})
        with _afterwards(lambda: self.control.post("/resume"), after_error=True):
            yield

    def _load_as_the_original_does(self, name: str, directory: Path, refusal: NoSuchRoute) -> None:
        try:
            self.control.post("/lora/load", {"adapter_name": name, "adapter_path": str(directory)})
        except NoSuchRoute:
            raise EngineRejected(
                f"{refusal} (vLLM has it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
            ) from refusal

    def set_version(self, version: int) -> None:
        if not self._keeps_versions:
            return
        # vLLM 0.32 reads `new_version` here; its other weight routes call the same thing `weight_version`.
        body = {"new_version": str(version), "weight_version": str(version)}
        try:
            self.control.post("/update_weight_version", body)
        except NoSuchRoute:
            self._keeps_versions = False
            logger.info(
                "engine %s keeps no weight version; its samples carry none", self.control.url
            )

    def check_version(self, version: int) -> None:
        if self._keeps_versions:
            _check_version(self.control, "/weight_info", version)

    def _refuse_stale_head(self, directory: Path) -> None:
        """Refuse tied embeddings on the CPU: vLLM (0.32) packs the head when it starts and never again."""
        if not _ties_embeddings(directory):
            return
        found = self.control.look("/server_info", params={"config_format": "text"})
        if isinstance(found, dict) and "device_config=cpu" in str(found.get("vllm_config")):
            raise EngineRejected(
                f"engine {self.control.url}: vLLM on the CPU keeps the old output layer when a model with tied "
                "embeddings is reloaded; use --bridge restart, or a model with tie_word_embeddings false"
            )


class SglangEngine:
    """SGLang.

    Requests in flight go back to the queue (`retract`) and are computed anew. The weights are loaded with
    `flush_cache` false, because a flush that is refused ends SGLang's scheduler; the cache is flushed by a call of its
    own, which SGLang (up to 0.5.23) refuses while requests wait. Prefixes that older weights computed then remain.
    """

    kind = "SGLang"

    def __init__(self, control: Control) -> None:
        self.control = control
        self._told = False

    @contextmanager
    def frozen(self, *, resume_after_error: bool = True) -> Iterator[None]:
        self.control.post("/pause_generation", {"mode": "retract"})
        with _afterwards(
            lambda: self.control.post("/continue_generation", {}), after_error=resume_after_error
        ):
            yield

    def load_checkpoint(self, directory: Path, version: int) -> None:
        self._do(
            "/update_weights_from_disk",
            {
                "model_path": str(directory),
                "weight_version": str(version),
                "flush_cache": False,
                "abort_all_requests": False,
            },
        )

    def forget_cache(self) -> None:
        try:
            self.control.post("/flush_cache")
        except EngineRejected as error:
            if not self._told:
                self._told = True
                logger.warning(
                    "%s; prompts that it has cached keep keys and values of older weights", error
                )

    def load_adapter(self, name: str, directory: Path) -> None:
        """Unload and load. SGLang ends the unload when requests in flight have ended, and refuses others until then."""
        try:
            self.control.post("/unload_lora_adapter", {"lora_name": name})
        except EngineRejected:
            pass  # it holds none of that name yet
        self._do("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    def set_version(self, version: int) -> None:
        self._do(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def check_version(self, version: int) -> None:
        _check_version(self.control, "/model_info", version)

    def _do(self, route: str, body: dict[str, Any]) -> None:
        answer = self.control.post(route, body)
        if b'"success":false' in answer.content.replace(b" ", b""):
            raise EngineProtocolError(
                f"engine {self.control.url}: {route} failed: {answer.text[:300]}"
            )


@contextmanager
def _afterwards(resume: Callable[[], Any], *, after_error: bool) -> Iterator[None]:
    """Do `resume` at the end of the block; after an error only if so asked, and its own failure is only logged."""
    try:
        yield
    except BaseException:
        if after_error:
            try:
                resume()
            except EngineError as error:
                logger.warning("%s", error)
        raise
    resume()


def _check_version(control: Control, route: str, version: int) -> None:
    found = control.look(route)
    named = found.get("weight_version") if isinstance(found, dict) else None
    if named is not None and str(named) != str(version):
        raise EngineProtocolError(
            f"engine {control.url}: {route} names weights of version {named!r} after version {version} was loaded"
        )


def _ties_embeddings(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"checkpoint {directory}: config.json: {error}") from error
    return bool(config.get("tie_word_embeddings"))
