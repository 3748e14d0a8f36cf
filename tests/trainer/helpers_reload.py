"""A small HTTP server with the weight routes of vLLM or SGLang, and a hub on a port, both in threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn

from atroposlib.api.server import create_app

ROUTES = {
    "vllm": {
        "/health",
        "/pause",
        "/resume",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/weight_info",
        "/server_info",
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    },
    "sglang": {
        "/health",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/update_weight_version",
        "/model_info",
        "/load_lora_adapter",
        "/unload_lora_adapter",
    },
    "original": {"/health", "/lora/load"},
}


class FakeEngine:
    """Records what it is asked to do; `faults` maps a route to the (status, body) it answers instead.

    Questions (`/openapi.json` and those that change nothing) are not among `calls`.
    """

    def __init__(self, kind: str = "vllm") -> None:
        self.kind = kind
        self.calls: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.weights: list[str] = []
        self.versions: list[str] = []
        self.adapters: dict[str, str] = {}
        self.faults: dict[str, tuple[int, bytes]] = {}
        self.device = "cuda"
        self.keys: set[str | None] = set()
        self.max_loras = 1
        self.num_workers = 1
        self.is_updating = False
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def answer(self) -> None:
                engine.keys.add(self.headers.get("Authorization"))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, reply = engine.handle(self.path, json.loads(body or b"{}") or {})
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        route = path.partition("?")[0]
        answer = self.look(route, is_json="config_format=json" in path)
        if answer is None:
            self.calls.append(path)
            self.bodies.append((route, body))
        if route in self.faults:
            return self.faults[route]
        if answer is not None:
            return 200, json.dumps(answer).encode()
        if route not in ROUTES[self.kind]:
            return 404, b'{"detail": "Not Found"}'
        return self.act(route, body)

    def look(self, route: str, *, is_json: bool) -> Any:
        """Answer a question; None for what is none."""
        config: Any = f"model='m', device_config={self.device}, seed=0"
        if is_json:
            config = {
                "lora_config": {"max_loras": self.max_loras},
                "weight_transfer_config": {"backend": "nccl"},
            }
        version = {"weight_version": self.versions[-1] if self.versions else "default"}
        answers = {
            "/openapi.json": {"paths": dict.fromkeys(ROUTES[self.kind], {})},
            "/weight_info": version,
            "/model_info": version,
            "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": self.num_workers},
        }
        is_known = route in ROUTES[self.kind] or route == "/openapi.json"
        return answers.get(route) if is_known else None

    def act(self, route: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if route == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.weights.append(body["kwargs"]["weights_path"])
        elif route == "/update_weights_from_disk":
            self.weights.append(body["model_path"])
            self.versions.append(body["weight_version"])
        elif route == "/update_weight_version":
            self.versions.append(body["new_version"])
        elif route.endswith("/load_lora_adapter"):
            if body["lora_name"] in self.adapters:
                return 400, b"already loaded"
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif route.endswith("/unload_lora_adapter"):
            if self.adapters.pop(body["lora_name"], None) is None:
                return 404 if self.kind == "vllm" else 400, b"cannot be found"
        elif route in ("/start_weight_update", "/finish_weight_update"):
            if self.is_updating == (route == "/start_weight_update"):
                return 500, b"an update is already, or not, active"
            self.is_updating = not self.is_updating
        elif route == "/lora/load":
            self.adapters[body["adapter_name"]] = body["adapter_path"]
        return 200, b'{"success": true}'


@contextmanager
def fake_engine(kind: str = "vllm") -> Iterator[FakeEngine]:
    engine = FakeEngine(kind)
    thread = threading.Thread(
        target=engine.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield engine
    finally:
        engine.server.shutdown()
        engine.server.server_close()
        thread.join()


@contextmanager
def running_hub() -> Iterator[str]:
    """Serve an empty hub on a free port and yield its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(), port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
