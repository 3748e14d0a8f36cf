"""`atropos status` on a real hub, and what `atropos up` prints."""

import asyncio
import io
import os
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from rich.console import Console
from starlette.routing import Route

from atroposlib.api.schemas import Ledger
from atroposlib.cli.atropos import main
from atroposlib.cli.launch import status as status_module
from atroposlib.cli.launch import view as view_module
from atroposlib.cli.launch.status import is_closed
from atroposlib.cli.launch.supervisor import Program, launched
from atroposlib.cli.launch.view import RunView
from atroposlib.client import HubClient
from atroposlib.utils.json_lines import LineTail
from tests.api.helpers_api import serving
from tests.builders.rows import write_rows
from tests.cli.helpers_cli import HubServer, text_group


def test_the_status_says_why_there_is_no_batch(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.register(batch_size=4)
    hub.send(text_group("Q", ["a", "b"], [0.0, 1.0]))
    assert main(["status", hub.url]) == 0
    said = capsys.readouterr().out
    assert "step 0  policy version 0  queue 1 group, 2 sequences (batch: 4 sequences)" in said
    assert "no batch: 2 of 4 sequences are queued" in said
    assert "ledger: 1 group = 1 queued" in said
    assert "lost:" not in said
    hub.get("/batch")  # environments may register once the trainer asks
    about = {"desired_name": "sums", "max_token_length": 99, "weight": 1.0, "group_size": 2}
    httpx.post(f"{hub.url}/register-env", json=about).raise_for_status()
    hub.get(
        '/status-env?env_id=0&items_in_flight=0&losses={"dropped_equal_scores":3,"suspicious_canary":9}'
    )
    hub.send(text_group("Q", ["a", "b"], [0.0, 1.0]))
    assert main(["status", hub.url]) == 0
    said = capsys.readouterr().out
    assert "sums_0 lost: dropped_equal_scores 3\nsums_0 suspicious: canary 9\n" in said
    assert "a batch is ready" in said
    assert "unknown" not in said
    assert main(["status", "--hub_url", hub.url]) == 0
    assert "a batch is ready" in capsys.readouterr().out
    hub.register(batch_size=4, resume_step=3)
    assert main(["status", hub.url]) == 0
    assert "resumed past 3 unknown steps" in capsys.readouterr().out


def test_the_status_counts_the_fates_that_the_trainer_recorded(
    hub: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub.register()
    fates = [
        {"group": f"g{i}", "env_id": 0, "step": 1, "fate": fate, "loss_share": 0.5}
        for i, fate in enumerate(["trained", "zero_advantage", "trained"])
    ]
    write_rows(tmp_path / "metrics.jsonl", {"step": 1, "reward_mean": 0.5})
    write_rows(tmp_path / "checkpoints" / "group_fates.jsonl", *fates)
    assert main(["status", hub.url, "--run", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "trainer: 3 groups = 2 trained + 1 zero_advantage, up to step 1" in said
    assert main(["status", hub.url]) == 0
    assert "trainer:" not in capsys.readouterr().out


def test_the_status_shows_as_many_environments_as_asked_for_page_by_page(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "MAX_PAGE", 2)
    hub.register()
    hub.get("/batch")
    about = {"desired_name": "sums", "max_token_length": 99, "weight": 1.0, "group_size": 2}
    for _ in range(7):
        httpx.post(f"{hub.url}/register-env", json=about).raise_for_status()
    for asked, shown in ((0, 0), (1, 1), (5, 5), (9, 7)):
        assert main(["status", hub.url, "--environments", str(asked)]) == 0
        said = capsys.readouterr().out
        assert [f"sums_{i} ({i})" in said for i in range(7)] == [i < shown for i in range(7)]
        assert (f"{7 - shown} more; 7 of 7 are active" in said) == (shown < 7)


def test_a_hub_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "http://127.0.0.1:9"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "error: GET http://127.0.0.1:9/explain: Connection refused" in said
    assert said.endswith("; run-api starts a hub")


def test_an_address_that_is_no_hub_is_named(
    hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", f"{hub.url}/elsewhere"]) == 1
    said = capsys.readouterr().err
    assert "/elsewhere/explain: 404" in said


def test_a_server_that_answers_anything_is_no_hub(capsys: pytest.CaptureFixture[str]) -> None:
    app = FastAPI(routes=[Route("/{path:path}", lambda request: PlainTextResponse("Welcome"))])
    with serving(app) as url:
        assert main(["status", url]) == 1
    assert "this is not a hub's Explanation: b'Welcome'" in capsys.readouterr().err


def test_the_page_of_another_server_is_shown_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app = FastAPI(exception_handlers={404: lambda *_: PlainTextResponse("<h1>\nNo", 404)})
    with serving(app) as url:
        assert main(["status", url]) == 1
    assert "/explain: 404 <h1> No; is this a hub?" in " ".join(capsys.readouterr().err.split())


def ledger(**counts: int) -> Ledger:
    names = ("produced", "queued", "buffered", "leased", "trained", "expired", "dead", "discarded")
    values = {**dict.fromkeys(names, 0), **counts}
    return Ledger.model_validate({**values, "duplicates": 0, "rejected": {"bad": 1}})


def test_a_ledger_is_closed_if_every_group_is_in_one_place() -> None:
    assert is_closed(ledger(produced=4, trained=2, queued=1))
    assert not is_closed(ledger(produced=5, trained=2, queued=1))


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_logs_have_the_parts_name_and_a_terminal_has_a_table(
    hub: HubServer, tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "REFRESH_S", 0.01)
    hub.register(batch_size=4)
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=is_terminal, color_system=None)
    metrics = tmp_path / "metrics.jsonl"
    of_another_trainer = '{"step": 1}\n[]\nno JSON\n'
    step = '{"reward_mean": 0.5, "num_trained_tokens": 10, "wall_s": 1.0}\n'
    metrics.write_text(of_another_trainer + step)
    program = Program(name="judge", argv=["sh", "-c", "echo hello; sleep 600"])
    with RunView(console, log_dir=tmp_path, names=["judge", "engine"]) as view:
        async with HubClient(hub.url) as reader, launched(log_dir=tmp_path, env=os.environ) as all_:
            all_.start(program)
            showing = asyncio.gather(
                view.show(all_, metrics=LineTail(metrics)), view.read_hub(reader)
            )
            wanted = ["judge  | hello"]
            if is_terminal:
                wanted += ["judge  running", "no batch: 0 of 4", "last step: reward 0.500"]
            while not all(each in out.getvalue() for each in wanted):  # noqa: ASYNC110 - output sets no event
                await asyncio.sleep(0.01)
            showing.cancel()
            view.say("judge", "was ended by SIGKILL; restart in 1.0 s")
    assert "judge  | was ended by SIGKILL; restart in 1.0 s" in out.getvalue()
    assert ("part" in out.getvalue()) == is_terminal
