"""An environment of the original kind as a process that tests kill: JSON, no group ids, standard library only.

    original_env.py post PORT PATH CONTENT_TYPE FILE   POST the file slowly, once, then stay
    original_env.py serve PORT NAME MIN_SHARE          register, then send small groups and poll the status for ever

It starts in a few hundredths of a second, so that a test can afford to kill many of them.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE_BYTES = 4096
GROUP_SIZE = 2


def post(port: str, path: str, content_type: str, file: str) -> None:
    """Send the body in pieces with pauses, so that most kills find it half sent."""
    body = Path(file).read_bytes()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), PIECE_BYTES):
            yield body[start : start + PIECE_BYTES]
            time.sleep(0.001)

    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
    print("sending", flush=True)
    connection.request("POST", path, body=pieces(), headers=headers)
    print("status", connection.getresponse().status, flush=True)
    time.sleep(600)


def serve(port: str, name: str, min_share: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)

    def call(method: str, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, body=json.dumps(body), headers=headers)
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, (path, response.status, content)
        return json.loads(content)

    registration = {
        "max_token_length": 64,
        "desired_name": name,
        "weight": 1.0,
        "min_batch_allocation": float(min_share),
        "group_size": GROUP_SIZE,
    }
    while (reply := call("POST", "/register-env", registration))["status"] != "success":
        time.sleep(0.1)
    env_id = reply["env_id"]
    rows = [[env_id, 1, 2]] * GROUP_SIZE
    group = {"tokens": rows, "masks": rows, "scores": [0.0, 1.0], "env_id": env_id}
    while True:
        if call("GET", "/status-env", {"env_id": env_id})["self_queue_size"] < 4:
            call("POST", "/scored_data", group)
        time.sleep(0.05)


if __name__ == "__main__":
    {"post": post, "serve": serve}[sys.argv[1]](*sys.argv[2:])
