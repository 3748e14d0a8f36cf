"""The scripted engine with the weight routes of one kind of server, in a thread, recording what trainers ask of it."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from aiohttp import web

from atroposlib.http_bodies import ApiError
from atroposlib.inference.scripted_engine.server import ScriptedEngine, _Reply

ONE_KIND = {
    "vllm": {
        *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/weight_info"),
        *("/server_info", "/get_world_size", "/init_weight_transfer_engine"),
        *("/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/shutdown_weight_transfer_engine", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    },
    "sglang": {
        *("/pause_generation", "/continue_generation", "/update_weights_from_disk"),
        *(
            "/flush_cache",
            "/model_info",
            "/get_model_info",
            "/load_lora_adapter",
            "/unload_lora_adapter",
        ),
    },
    "original": {"/lora/load"},
}
"""Routes that one kind of server has and the others lack."""
QUESTIONS = {
    *("/openapi.json", "/weight_info", "/server_info", "/get_world_size"),
    *("/model_info", "/get_model_info", "/weight_checker"),
}


class RecordedEngine(ScriptedEngine):
    """`calls` and `bodies` hold the control calls but questions; `faults`: (status, body) of routes that fail."""

    def __init__(self, kind: str = "vllm") -> None:
        lacks = [path for other, paths in ONE_KIND.items() if other != kind for path in paths]
        super().__init__(
            missing_paths=[*lacks, *(["/update_weight_version"] if kind == "original" else [])]
        )
        self.calls: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.adapters: dict[str, str] = {}
        self.faults: dict[str, tuple[int, bytes]] = {}
        self.device = "cuda"
        self.keys: set[str | None] = set()
        self.max_loras = 1
        self.num_workers = 1
        self.is_updating = False
        self.checksums: dict[str, str] | None = None
        """What it says that it has loaded; None without that route."""

    @property
    def weights(self) -> list[Any]:
        """The directories of all reloads."""
        found = [body.get("kwargs", body) for _, body in self.bodies]
        paths = [body.get("weights_path", body.get("model_path")) for body in found]
        return [path for path in paths if path is not None]

    @property
    def versions(self) -> list[Any]:
        """The weight versions that were set."""
        return [body["new_version"] for _, body in self.bodies if "new_version" in body]

    def restart_as(self, version: str) -> None:
        """Forget what was asked, and report `version`, as an engine that was started again."""
        httpx.post(f"{self.url}/update_weight_version", json={"new_version": version})
        self.bodies.clear()

    async def _control(self, request: web.BaseRequest, payload: bytes) -> _Reply:
        self.keys.add(request.headers.get("Authorization"))
        if request.path not in QUESTIONS:
            self.calls.append(request.path_qs)
            self.bodies.append((request.path, json.loads(payload or b"{}") or {}))
        if request.path in self.faults:
            return _Reply(*self.faults[request.path], {})
        return await super()._control(request, payload)

    def _control_routes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        gets, posts = super()._control_routes()
        gets |= {
            "/server_info": self._server_info,
            "/get_world_size": lambda body: {"world_size": self.num_workers},
        }
        posts |= dict.fromkeys(ONE_KIND["vllm"] - gets.keys() - posts.keys(), lambda body: b"")
        posts |= {
            "/start_weight_update": lambda body: self._update(begins=True),
            "/finish_weight_update": lambda body: self._update(begins=False),
            "/lora/load": lambda body: self._load(body["adapter_name"], body["adapter_path"]),
            "/weight_checker": self._weight_checker,
        }
        for prefix in ("", "/v1"):
            posts[f"{prefix}/load_lora_adapter"] = self._load_adapter
            posts[f"{prefix}/unload_lora_adapter"] = self._unload_adapter
        return gets, posts

    def _server_info(self, body: dict[str, Any]) -> Any:
        if body["config_format"] == "text":
            return {"vllm_config": f"model='m', device_config={self.device}, seed=0"}
        lora, transfer = {"max_loras": self.max_loras}, {"backend": "nccl"}
        return {"vllm_config": {"lora_config": lora, "weight_transfer_config": transfer}}

    def _weight_checker(self, body: dict[str, Any]) -> Any:
        assert body == {"action": "checksum"}
        if self.checksums is None:
            raise ApiError("Not Found", status=404)
        return {"checksums": self.checksums}

    def _update(self, *, begins: bool) -> bytes:
        if self.is_updating == begins:
            raise ApiError("an update is already, or not, active", status=500)
        self.is_updating = begins
        return b""

    def _load_adapter(self, body: dict[str, Any]) -> bytes:
        if body["lora_name"] in self.adapters:
            raise ApiError("already loaded")
        return self._load(body["lora_name"], body["lora_path"])

    def _load(self, name: str, path: str) -> bytes:
        self.adapters[name] = path
        return b""

    def _unload_adapter(self, body: dict[str, Any]) -> bytes:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise ApiError("cannot be found")
        return b""


@contextmanager
def recorded_engine(kind: str = "vllm") -> Iterator[RecordedEngine]:
    engine, loop = RecordedEngine(kind), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)

    def do(call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, loop).result()

    thread.start()
    try:
        do(engine.start())
        yield engine
    finally:
        do(engine.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
