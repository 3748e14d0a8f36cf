"""`view-run` and `view-run-multimodal`: what they show, and that looking takes nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.cli import view_run, view_run_multimodal
from atroposlib.cli.view_run import (
    MAX_GROUPS,
    NOTHING_YET,
    SeenGroups,
    StoredPage,
    ViewConfig,
    stored_app,
)
from atroposlib.client import TrainerClient
from atroposlib.errors import install_command
from tests.api.helpers_api import serving
from tests.cli.helpers_cli import TOKENIZER, HubServer, text_group
from tests.frontend.helpers_pages import Page, read_page

URI = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="


@contextmanager
def seen_at(hub: HubServer, **changes: Any) -> Iterator[SeenGroups]:
    config = ViewConfig(api_url=hub.url, **changes)
    with TrainerClient(hub.url, retry_for_s=0.0) as client:
        yield SeenGroups(client, config, TOKENIZER.decode)


def newest(seen: SeenGroups, after: str | None = None) -> dict[str, Any]:
    """What the page gets when it asks, however soon after it asked before."""
    seen._read_at = float("-inf")
    found: dict[str, Any] = json.loads(seen.newest(after=after))
    return found


def answers(shown: dict[str, Any]) -> list[str]:
    """The text of the first sequence of each group."""
    return [group["sequences"][0]["text"] for group in shown["groups"]]


# A live run.


def test_looking_registers_no_trainer_and_takes_nothing_from_one(hub: HubServer) -> None:
    with seen_at(hub) as seen:
        assert newest(seen)["head"]["about"] == NOTHING_YET
        assert hub.get("/info") == {"batch_size": -1, "max_token_len": -1}
        hub.register(batch_size=2)
        assert newest(seen)["groups"] == []
        hub.send(text_group("Q", ["first", "x"], [1, 2]), text_group("Q", ["last", "x"], [1, 2]))
        before = hub.get("/ledger"), hub.get("/status")
        assert answers(newest(seen)) == ["Qlast"]
        assert answers(newest(seen)) == ["Qlast"]
        assert (hub.get("/ledger"), hub.get("/status")) == before
        assert before[0]["queued"] == 2


def test_a_group_is_shown_with_its_advantages_and_the_text_of_its_tokens(hub: HubServer) -> None:
    hub.send(text_group("Q", ["4", "5"], [1, 0]))
    with seen_at(hub) as seen:
        shown = newest(seen)
    [group] = shown["groups"]
    assert [each["advantage"] for each in group["sequences"]] == [0.9998, -0.9998]
    assert sorted(shown["vocabulary"].values()) == ["4", "5", "Q"]


def test_groups_that_were_seen_stay_and_only_newer_ones_are_sent_again(hub: HubServer) -> None:
    with seen_at(hub) as seen:
        for answer in ("a", "b", "c"):
            hub.send(text_group("Q", [answer, "x"], [1, 2]))
            shown = newest(seen)
        assert answers(shown) == ["Qa", "Qb", "Qc"]
        second = shown["groups"][1]["id"]
        assert shown["index"]["id"] == [group["id"] for group in shown["groups"]]
        assert shown["index"]["preview"] == ["Qa", "Qb", "Qc"]
        about = "A sample of the groups: the newest one every 2 s: 3 shown, at most 200"
        assert shown["head"]["about"] == about
        assert newest(seen, after=shown["index"]["id"][-1])["index"] is None
        assert answers(newest(seen, after=second)) == ["Qc"]
        assert answers(newest(seen, after="of another run")) == ["Qa", "Qb", "Qc"]


def test_a_bounded_number_of_groups_is_kept(hub: HubServer) -> None:
    hub.register(batch_size=2 * MAX_GROUPS + 20)
    hub.send(*[text_group("Q", [str(i), "x"], [1, 2]) for i in range(MAX_GROUPS + 10)])
    with seen_at(hub, consume=True) as seen:
        seen.take_batch()
        shown = answers(newest(seen))
    assert (len(shown), shown[0], shown[-1]) == (MAX_GROUPS, "Q10", f"Q{MAX_GROUPS + 9}")


def test_a_bounded_amount_of_text_is_kept_but_always_the_newest_group(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_run, "MAX_BYTES", 10)
    with seen_at(hub) as seen:
        for answer in ("a", "b"):
            hub.send(text_group("Q", [answer, "x"], [1, 2]))
            assert answers(newest(seen)) == [f"Q{answer}"]


def test_several_pages_make_one_request_to_the_hub(hub: HubServer) -> None:
    hub.send(text_group("Q", ["a", "x"], [1, 2]))
    with seen_at(hub) as seen:
        first = newest(seen)
        hub.send(text_group("Q", ["b", "x"], [1, 2]))
        assert json.loads(seen.newest(after=None)) == first


def test_the_state_of_the_hub_and_its_history_are_on_the_page(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_run, "MAX_POINTS", 4)
    hub.register(batch_size=4)
    with seen_at(hub) as seen:
        first = newest(seen)["head"]
        assert first["hub"]["blocker"] == "too_few"
        assert first["points"][0].items() >= {"queued": 0, "step": 0, "score": None}.items()
        hub.send(text_group("Q", ["a", "x"], [1, 2]), text_group("Q", ["b", "x"], [1, 0]))
        second = newest(seen)["head"]
        assert second["hub"]["batch"] == "ready"
        assert [point["queued"] for point in second["points"]] == [0, 2]
        assert second["points"][1]["score"] == 0.5
        for _ in range(3):
            last = newest(seen)["head"]["points"]
        assert [point["queued"] for point in last] == [0, 2, 2]  # every second one


def test_consuming_takes_batches_as_a_trainer_does(hub: HubServer) -> None:
    with seen_at(hub, consume=True, group_size=1) as seen:
        assert seen.take_batch() == "There is no batch yet; the hub has too few groups"
    assert hub.get("/info")["batch_size"] == 8
    hub.send(*[text_group("Q", [f"a{i}", f"b{i}"], [1, 2]) for i in range(5)])
    with seen_at(hub, consume=True) as seen:
        assert newest(seen)["groups"] == []
        assert seen.take_batch() == "Batches taken from the trainer: 4 shown, at most 200"
        assert answers(newest(seen)) == [f"Qa{i}" for i in range(4)]
    ledger = hub.get("/ledger")
    assert (ledger["trained"], ledger["queued"], ledger["leased"]) == (4, 1, 0)


def test_consuming_does_not_reset_a_live_run(hub: HubServer) -> None:
    hub.register(batch_size=2, wandb_project="theirs")
    hub.send(text_group("Q", ["a", "b"], [1, 2]))
    with seen_at(hub, consume=True) as seen:
        seen.take_batch()
        assert answers(newest(seen)) == ["Qa"]
    assert hub.get("/wandb_info")["project"] == "theirs"


def test_a_hub_that_does_not_answer_is_said_on_the_page() -> None:
    with seen_at(HubServer("http://127.0.0.1:1")) as seen:
        head = newest(seen)["head"]
        about = head["about"]
    assert (head["hub"], head["points"]) == (None, [])
    assert "Cannot read from the hub: GET http://127.0.0.1:1/latest_example" in about


# Stored files.


def row(answer: str) -> str:
    return json.dumps({"scores": [1.0], "messages": [answer], "images": [URI]}) + "\n"


def test_a_stored_run_is_served_and_read_again_when_its_files_grow(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    (source / "groups.jsonl").write_text(row("first"))
    (tmp_path / "served").mkdir()
    page = StoredPage([source], tmp_path / "served" / "page.html", None)
    with serving(stored_app(page)) as url:

        def shown() -> Page:
            (tmp_path / "copy.html").write_bytes(httpx.get(url).raise_for_status().content)
            found = read_page(tmp_path / "copy.html")
            chunk = httpx.get(f"{url}/{found.head['chunks']}0").raise_for_status().json()
            return found._replace(chunks=[chunk])

        first = shown()
        [group] = first.groups
        assert (group["sequences"][0]["text"], group["images"]) == ("first", [URI])
        assert shown().head == first.head
        with (source / "groups.jsonl").open("a") as file:
            file.write(row("second"))
        assert [each["sequences"][0]["text"] for each in shown().groups] == ["first", "second"]
        gone = httpx.get(f"{url}/{first.head['chunks']}0")
        assert (gone.status_code, "load the page again" in gone.text) == (409, True)
        refused = httpx.get(url, headers={"Host": "evil.example"})
        assert (refused.status_code, "evil.example" in refused.text) == (403, True)
        (source / "groups.jsonl").write_text("{}\n[]\n")
        broken = httpx.get(url)
        assert broken.status_code == 500
        assert "hold no groups" in broken.text


def test_the_page_of_two_runs_is_written_again_when_one_of_them_grows(tmp_path: Path) -> None:
    sources = [tmp_path / name for name in "ab"]
    for source in sources:
        source.mkdir()
        (source / "groups.jsonl").write_text(row("first"))
    target = tmp_path / "page.html"
    page = StoredPage(sources, target, None)
    page.html()
    assert read_page(target).columns["environments"] == ["a", "b"]
    with (sources[1] / "groups.jsonl").open("a") as file:
        file.write(row("second"))
    target.write_bytes(page.html())
    found = read_page(target)
    assert found.columns["environment"] == [0, 1, 1]
    _, version, _ = found.head["chunks"].split("/")
    groups = json.loads(page.chunk(version, 0) or b"{}")["groups"]
    assert [each["environment"] for each in groups] == ["a", "b", "b"]


def test_texts_are_rendered_on_demand_for_the_page_alone(tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").write_text(row("first"))
    page = StoredPage([tmp_path], tmp_path / "page.html", None)
    with serving(stored_app(page)) as url:
        assert '"render":"render"' in httpx.get(url).text
        [plain, form] = httpx.post(f"{url}/render", json=["plain", "**a**"]).json()
        assert plain == ["plain", None]
        assert form == ["**a**", ["div", {}, ["p", {}, ["strong", {}, "a"]]]]

        def status(**request: Any) -> int:
            return httpx.post(f"{url}/render", **request).status_code

        assert status(content="[]") == 415  # what a form of another site can send
        assert status(json=["x" * 2_100_000]) == 413
        assert status(json={"a": 1}) == 400
        assert status(json=[], headers={"Host": "evil.example"}) == 403


def test_wrong_files_and_flags_of_a_stored_run_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view_run.main([str(tmp_path)]) == 2
    assert "hold no groups" in capsys.readouterr().err
    (tmp_path / "g.jsonl").write_text(row("first"))
    assert view_run.main([str(tmp_path), "--share"]) == 2
    assert "--share and --consume are for a live run" in capsys.readouterr().err


# The command.


class Widget:
    def __init__(self, gradio: Gradio, *args: Any, **options: Any) -> None:
        self.gradio = gradio

    def __enter__(self) -> Widget:
        return self

    def __exit__(self, *_: object) -> None: ...

    def click(self, read: Any, outputs: Any) -> None:
        self.gradio.calls.append(("click", read))

    def launch(self, **options: Any) -> tuple[None, str, None]:
        self.gradio.calls.append(("launch", options))
        return None, "http://127.0.0.1:9009/", None

    def block_thread(self) -> None:
        self.gradio.calls.append(("block", None))


class Gradio:
    """The widgets of the page; tests/e2e has the real ones."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        assert name in ("Blocks", "Markdown", "Button", "HTML")
        return lambda *args, **options: Widget(self, *args, **options)


@pytest.fixture
def gradio(monkeypatch: pytest.MonkeyPatch) -> Gradio:
    fake = Gradio()
    monkeypatch.setattr(view_run, "require", lambda module, *, extra: fake)
    return fake


@pytest.mark.parametrize("command", [view_run, view_run_multimodal])
def test_the_page_is_private_unless_asked_for(
    command: Any,
    hub: HubServer,
    tokenizer_path: str,
    gradio: Gradio,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--api-url", hub.url, "--tokenizer", tokenizer_path, "--port=9009"]
    assert command.main(flags) == 0
    [(name, options), (last, _)] = gradio.calls
    assert (name, last) == ("launch", "block")
    assert (options["server_name"], options["server_port"]) == ("127.0.0.1", 9009)
    assert (options["share"], options["quiet"]) == (False, True)
    assert capsys.readouterr().out == f"{hub.url}: http://127.0.0.1:9009/ (Ctrl-C ends)\n"


def test_only_a_button_takes_batches(hub: HubServer, tokenizer_path: str, gradio: Gradio) -> None:
    flags = ["--api-url", hub.url, "--tokenizer", tokenizer_path, "--port=0", "--consume"]
    assert view_run.main(flags) == 0
    assert [name for name, _ in gradio.calls] == ["click", "launch", "block"]
    assert hub.get("/info")["batch_size"] == -1


def test_a_port_in_use_names_another(
    hub: HubServer,
    tokenizer_path: str,
    tmp_path: Path,
    gradio: Gradio,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "g.jsonl").write_text(row("first"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in (["--api-url", hub.url, "--tokenizer", tokenizer_path], [str(tmp_path)]):
            assert view_run.main([*flags, f"--port={port}"]) == 2
            error = capsys.readouterr().err
            assert f"--port {port}: already in use" in error
            assert f"for example --port {port + 1}" in error
    assert gradio.calls == []


def test_a_missing_gradio_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    assert view_run.main([]) == 1
    assert install_command("view") in capsys.readouterr().err


def test_tokenizers_default_to_the_originals() -> None:
    assert ViewConfig().tokenizer == "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    multimodal = view_run_multimodal.ViewMultimodalConfig()
    assert (multimodal.tokenizer, multimodal.port) == ("Qwen/Qwen2-VL-2B-Instruct", 9001)
