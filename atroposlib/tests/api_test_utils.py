"""Start a hub for a test, as a process. The caller stops it; nothing is stored on disk."""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import time
import urllib.request

from atroposlib.errors import HubUnavailable

POLL_S = 0.05
"""Pause between two questions to a hub that is starting."""


def launch_api_for_testing(
    max_wait_for_api: float = 10, *, port: int = 8000
) -> subprocess.Popen[bytes]:
    """Run `run-api --memory` on this machine and return its process once it answers.

    `max_wait_for_api` is in seconds. Raises `HubUnavailable` with the end of its output when it ends, or does not
    answer in time; the process is gone then.
    """
    if _answers(port):
        raise HubUnavailable(f"port {port} is taken: a hub already answers there")
    command = [sys.executable, "-m", "atroposlib.cli.run_api", f"--port={port}", "--memory"]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + max_wait_for_api
        while process.poll() is None and time.monotonic() < deadline:
            if _answers(port) and process.poll() is None:
                return process
            time.sleep(POLL_S)
        status = process.poll()
        process.kill()
        process.wait()
        output.seek(0)
        said = output.read()[-2000:].decode(errors="replace").strip()
    what = "did not answer in time" if status is None else f"ended with status {status}"
    raise HubUnavailable(f"the hub on port {port} {what}: {said}")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
