"""`view-run` with the real Gradio: the page is served, and its button shows what the hub holds."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import httpx
import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.cli.helpers_cli import TOKENIZER, HubServer, text_group
from tests.processes import answers, free_port, running, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra view"),
]


def test_the_page_of_a_real_gradio_shows_the_group(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    port = free_port()
    with serving(create_app()) as url:
        HubServer(url).send(text_group("Q: ", ["good", "bad"], [1, 0]))
        flags = ["--api-url", url, "--tokenizer", str(tmp_path / "tokenizer"), f"--port={port}"]
        command = ["-m", "atroposlib.cli.view_run", *flags]
        with running("viewer", command, log_path=tmp_path / "log") as viewer:
            root = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(root), timeout_s=50, process=viewer)
            with httpx.Client(base_url=root, timeout=20, trust_env=False) as page:
                assert "Atropos run" in page.get("/").raise_for_status().text
                call = page.post("/gradio_api/call/show", json={"data": []}).raise_for_status()
                events = page.get(f"/gradio_api/call/show/{call.json()['event_id']}").text
    name, data = events.strip().splitlines()
    assert name == "event: complete"
    [shown] = json.loads(data.removeprefix("data: "))
    assert "<pre>good</pre>" in shown
