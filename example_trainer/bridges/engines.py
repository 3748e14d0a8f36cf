"""The control routes of vLLM and SGLang: freeze, load a checkpoint, swap an adapter, set the weight version.

Every method returns when the engine has finished, or raises EngineError naming engine, route and answer. This project's
engine has vLLM's routes. Called by the bridges; nothing here starts an engine or retries.
"""

from __future__ import annotations

import functools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from atroposlib.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from example_trainer.bridges.control import DETAIL_CHARS, Control, NoSuchRoute
from example_trainer.contract import EngineCheck

logger = logging.getLogger(__name__)


class RunningEngine(ABC):
    """A running engine; the base of `VllmEngine` and `SglangEngine`."""

    kind = ""
    version_route = ""

    def __init__(self, control: Control, *, check: EngineCheck | None = None) -> None:
        self.control = control
        self._check = check or EngineCheck(control.url)

    @contextmanager
    def frozen(self, mode: str = "", *, resume_after_error: bool = True) -> Iterator[None]:
        """Pause sampling inside the block; requests in flight wait and continue after it.

        `resume_after_error` is false if an error may leave parts of two versions in the engine.
        """
        self.pause(mode)
        try:
            yield
        except BaseException:
            if resume_after_error:
                try:
                    self.resume()
                except EngineError as error:
                    logger.warning("%s", error)
            raise
        self.resume()

    @abstractmethod
    def pause(self, mode: str = "") -> None: ...

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def load_checkpoint(self, directory: Path, version: int) -> None:
        """Load the weights in `directory`, which the engine must be able to read; call it while frozen."""

    @abstractmethod
    def forget_cache(self) -> None:
        """Drop cached keys and values of older weights."""

    @abstractmethod
    def load_adapter(self, name: str, directory: Path) -> None:
        """Serve the adapter in `directory` as `name`; requests in flight finish with their earlier adapter.

        Do not freeze the engine around this call.
        """

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Set the version that the engine reports for its weights."""

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each loaded tensor by its name in the engine; {} without any that can be compared."""
        return {}

    def check_weights(self, published: Callable[[], Mapping[str, Tensor]]) -> None:
        """Raise EngineProtocolError if the engine's checksums are not those of the tensors published."""
        if self._check.is_due:
            self._check.check(found := self.checksums(), published() if found else {})

    def check_version(self, version: int) -> None:
        """Raise EngineProtocolError if the engine reports another version; it may report none."""
        reported = self._reported_version()
        if reported not in (None, str(version)):
            raise EngineProtocolError(
                f"engine {self.control.url}: {self.version_route} reports weights of version {reported!r} "
                f"after version {version} was loaded"
            )

    def is_behind(self, version: int) -> bool:
        """Whether the engine reports an older version, or, as vLLM and SGLang do after their start, no number."""
        reported = self._reported_version()
        return reported is not None and not (reported.isdecimal() and int(reported) >= version)

    def _reported_version(self) -> str | None:
        found = self.control.look(self.version_route)
        reported = found.get("weight_version") if isinstance(found, dict) else None
        return None if reported is None else str(reported)

    def _do(self, route: str, body: Any = None, *, hint: str = "", **request: Any) -> None:
        """Post; raise EngineProtocolError for a 2xx answer with `success` false."""
        answer = self.control.post(route, body, **request)
        if b'"success":false' in answer.content.replace(b" ", b""):
            raise EngineProtocolError(
                f"engine {self.control.url}: {route} failed{hint}: {answer.text[:DETAIL_CHARS]}"
            )

    def _unload(self, route: str, name: str) -> None:
        with suppress(EngineRejected):  # no such adapter yet; or no such route, as loading reports
            self.control.post(route, {"lora_name": name})


def identify(control: Control) -> RunningEngine:
    """Determine an engine's kind by its list of routes or, if that is hidden, by a route that only SGLang has."""
    schema = control.look("/openapi.json")
    if isinstance(schema, dict) and isinstance(schema.get("paths"), dict):
        is_sglang = "/update_weights_from_disk" in schema["paths"]
    else:
        is_sglang = any(control.look(route) for route in ("/model_info", "/get_model_info"))
    engine = SglangEngine(control) if is_sglang else VllmEngine(control)
    logger.info("engine %s has the routes of %s", control.url, engine.kind)
    return engine


class VllmEngine(RunningEngine):
    """vLLM with its development routes (VLLM_SERVER_DEV_MODE=1), or this project's engine."""

    kind = "vLLM"
    version_route = "/weight_info"
    _keeps_versions = True

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """The answer of `/server_info`; empty without that route."""
        found = self.control.look("/server_info", params={"config_format": "json"})
        return found if isinstance(found, dict) else {}

    def config(self, name: str) -> dict[str, Any]:
        """Return one section of vLLM's configuration; empty if it is not reported."""
        config = self.info.get("vllm_config")
        found = config.get(name) if isinstance(config, dict) else None
        return found if isinstance(found, dict) else {}

    def pause(self, mode: str = "") -> None:
        try:
            self.control.post("/pause", params={"mode": mode or "keep"})
        except NoSuchRoute as error:
            raise EngineRejected(f"{error} (vLLM has it with VLLM_SERVER_DEV_MODE=1)") from error

    def resume(self) -> None:
        self.control.post("/resume")

    def load_checkpoint(self, directory: Path, version: int) -> None:
        """Refuse a reload that is known to give wrong results before sending it."""
        if _ties_embeddings(directory):
            found = self.control.look("/server_info", params={"config_format": "text"})
            if isinstance(found, dict) and "device_config=cpu" in str(found.get("vllm_config")):
                raise EngineRejected(
                    f"engine {self.control.url}: vLLM (0.32) on the CPU keeps the old output layer when a model with "
                    "tied embeddings is reloaded; use --bridge restart, or a model with tie_word_embeddings false"
                )
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self.control.post("/collective_rpc", body)

    def checksums(self) -> dict[str, str]:
        try:
            answer = self.control.post("/weight_checker", {"action": "checksum"}).json()
            return dict(answer["checksums"])
        except NoSuchRoute:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise EngineProtocolError(
                f"engine {self.control.url}: /weight_checker answered no checksums"
            ) from error

    def forget_cache(self) -> None:
        # Recompute requests in flight with the new weights: vLLM keeps the old prefix cache while any of them exists.
        params = {"reset_running_requests": "true"}
        if self.config("kv_transfer_config"):  # an external cache; without one, vLLM fails
            params["reset_external"] = "true"
        hint = ", cached keys and values are of older weights"
        self._do("/reset_prefix_cache", hint=hint, params=params)

    def load_adapter(self, name: str, directory: Path) -> None:
        """Unload and load; in between, for some milliseconds, the engine answers 404 for `name`.

        Not `load_inplace`: vLLM (0.32, vllm#33791) then reads the adapter from disk in every scheduler step, and an
        older request that is rescheduled restores the older adapter for all. vLLM keys its prefix cache by the
        adapter's path, so each version needs its own directory. It identifies adapters in a batch by name only and
        crashes on two versions, so an engine that serves several adapters at once is drained first.
        """
        at_once = self.config("lora_config").get("max_loras", 1)
        with self.frozen("wait") if at_once > 1 else nullcontext():
            self._unload("/v1/unload_lora_adapter", name)
            try:
                body = {"lora_name": name, "lora_path": str(directory)}
                self.control.post("/v1/load_lora_adapter", body)
            except NoSuchRoute as refusal:
                try:  # the original's server
                    body = {"adapter_name": name, "adapter_path": str(directory)}
                    self.control.post("/lora/load", body)
                except NoSuchRoute:
                    raise EngineRejected(
                        f"{refusal} (vLLM has it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)"
                    ) from refusal

    def set_version(self, version: int) -> None:
        if not self._keeps_versions:
            return
        # vLLM 0.32 reads `new_version` here; its other weight routes call it `weight_version`.
        body = {"new_version": str(version), "weight_version": str(version)}
        try:
            self.control.post("/update_weight_version", body)
        except NoSuchRoute:
            self._keeps_versions = False
            logger.info(
                "engine %s keeps no weight version; its samples carry none", self.control.url
            )

    def _reported_version(self) -> str | None:
        return super()._reported_version() if self._keeps_versions else None


class SglangEngine(RunningEngine):
    """SGLang. Its checksums (0.5.23, /weights_checker) are of a hash function of its own on a GPU, and not compared.

    Requests in flight return to the queue (`retract`) and are recomputed. Weights are loaded with `flush_cache` false,
    because a refused flush ends SGLang's scheduler. The separate flush is refused (up to 0.5.23) while requests wait;
    cached prefixes of older weights then remain.
    """

    kind = "SGLang"
    version_route = "/model_info"
    _warned = False

    def pause(self, mode: str = "") -> None:
        self.control.post("/pause_generation", {"mode": mode or "retract"})

    def resume(self) -> None:
        self.control.post("/continue_generation", {})

    def load_checkpoint(self, directory: Path, version: int) -> None:
        body = {"model_path": str(directory), "weight_version": str(version)}
        options = {"flush_cache": False, "abort_all_requests": False}
        self._do("/update_weights_from_disk", body | options)

    def forget_cache(self) -> None:
        try:
            self.control.post("/flush_cache")
        except EngineRejected as error:
            if not self._warned:
                logger.warning("%s; cached prompts keep keys and values of older weights", error)
            self._warned = True

    def load_adapter(self, name: str, directory: Path) -> None:
        """Unload and load. SGLang unloads only after all requests in flight, and refuses new ones until then."""
        self._unload("/unload_lora_adapter", name)
        self._do("/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    def set_version(self, version: int) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        self._do("/update_weight_version", body)


def _ties_embeddings(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"checkpoint {directory}: config.json: {error}") from error
    return bool(config.get("tie_word_embeddings"))
