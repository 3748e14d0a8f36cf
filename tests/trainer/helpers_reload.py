"""A small HTTP server with vLLM's weight routes, and a hub on a port, both in threads."""

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


class FakeEngine:
    """Records what it is asked; `faults` maps a route to the (status, body) it answers instead."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: list[str] = []
        self.versions: list[str] = []
        self.faults: dict[str, tuple[int, bytes]] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, reply = engine.handle(self.path, json.loads(body or b"{}"))
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
        self.calls.append(path)
        if route in self.faults:
            return self.faults[route]
        if route == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.weights.append(body["kwargs"]["weights_path"])
        if route == "/update_weight_version":
            self.versions.append(body["new_version"])
        return 200, b'{"success": true}'


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
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
