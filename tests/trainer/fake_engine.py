"""A stand-in engine for `test_engine_process.py`: answers /health, and misbehaves on demand.

Run as a script: `fake_engine.py PORT [--die MESSAGE] [--never-healthy] [--deaf] [--child PIDFILE]
[--model DIR] [--versions FILE]`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(503 if options.never_healthy else 200, {"model": options.model})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/update_weight_version" or options.versions is None:
            self._answer(404, {"detail": "Not Found"})
        elif options.versions == "refuse":
            self._answer(400, {"detail": "new_version is missing"})
        else:
            with Path(options.versions).open("a") as file:
                file.write(f"{options.model} {body['new_version']}\n")
            self._answer(200, {"success": True})

    def _answer(self, status: int, body: dict[str, object]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--die")
parser.add_argument("--never-healthy", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--child")
parser.add_argument("--model", default="")
parser.add_argument("--versions")
options = parser.parse_args()

if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.child:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(options.child).write_text(str(child.pid))
if options.die:
    print(f"ValueError: {options.die}", flush=True)
    for _ in range(40):
        print("noise of the shutdown", flush=True)
    sys.exit(3)
HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
