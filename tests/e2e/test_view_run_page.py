"""`view-run` with the real Gradio: it serves the viewer and its groups beside its own page."""

import importlib.util
from pathlib import Path

import httpx
import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.cli.helpers_cli import TOKENIZER, HubServer, text_group
from tests.processes import answers, free_port, running, wait_for

pytestmark = [
    pytest.mark.drill,
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra view"),
]


@pytest.mark.parametrize("consume", [False, True])
def test_a_real_gradio_serves_the_viewer_of_a_live_run(tmp_path: Path, consume: bool) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    port = free_port()
    with serving(create_app()) as url:
        hub = HubServer(url)
        hub.register(batch_size=2)
        hub.send(text_group("Q: ", ["good", "bad"], [1, 0]))
        before = hub.get("/ledger")
        flags = ["--api-url", url, "--tokenizer", str(tmp_path / "tokenizer"), f"--port={port}"]
        flags += ["--consume"] if consume else []
        command = ["-m", "atroposlib.cli.view_run", *flags]
        with running("viewer", command, log_path=tmp_path / "log") as viewer:
            root = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(root), timeout_s=50, process=viewer)
            with httpx.Client(base_url=root, timeout=20, trust_env=False) as page:
                assert "Atropos run" in page.get("/").raise_for_status().text
                assert page.post("/render", json=["*a*"]).json()[0][1][2][2] == ["em", {}, "a"]
                assert '"poll":"newest-groups"' in page.get("/viewer").raise_for_status().text
                if consume:
                    assert page.get("/newest-groups").json()["groups"] == []
                    call = page.post("/gradio_api/call/take_batch", json={"data": []})
                    name = call.raise_for_status().json()["event_id"]
                    events = page.get(f"/gradio_api/call/take_batch/{name}").text
                    assert "Batches taken from the trainer: 1 shown" in events
                shown = page.get("/newest-groups").raise_for_status().json()
                [group] = shown["groups"]
                assert shown["head"]["hub"]["batch_size"] == 2
                refused = page.get("/newest-groups", headers={"Host": "evil.example"})
                assert refused.status_code == 403
        said = (tmp_path / "log").read_text()
        assert "public link" not in said
        assert f"{url}: {root}/ (Ctrl-C ends)" in said
        assert [each["text"] for each in group["sequences"]] == ["Q: good", "Q: bad"]
        assert (hub.get("/ledger") == before) == (not consume)
