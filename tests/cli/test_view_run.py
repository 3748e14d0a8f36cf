"""`view-run` and `view-run-multimodal`: what they show, and that looking takes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.cli import view_run, view_run_multimodal
from atroposlib.cli._group_page import images_in, page_of
from atroposlib.cli.view_run import ViewConfig, build_page, read_page
from atroposlib.client import TrainerClient
from atroposlib.errors import install_command
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from tests.cli.helpers_cli import TOKENIZER, HubServer, text_group

PNG = "iVBORw0KGgoAAAANSUhEUg=="
URI = f"data:image/png;base64,{PNG}"


def scored(*args: Any, **more: Any) -> ScoredGroup:
    return check_group(text_group(*args, **more), strictness=Strictness.MEANING)


def shown(hub: HubServer, **changes: Any) -> str:
    config = ViewConfig(api_url=hub.url, **changes)
    with TrainerClient(hub.url, retry_for_s=0.0) as client:
        return read_page(client, config, TOKENIZER.decode, images=False)


# The page.


def test_a_group_is_shown_as_prompt_completions_and_scores() -> None:
    page = page_of([scored("Q: 2+2? ", ["4", "5"], [1.0, -0.25], env_id=3)], TOKENIZER.decode)
    assert "environment 3, 2 sequences, 18 tokens, 2 of them trained, mean score 0.375" in page
    assert "<pre>Q: 2+2? </pre>" in page
    assert '<div class="score high">1</div><div><pre>4</pre></div>' in page
    assert '<div class="score low">-0.25</div><div><pre>5</pre></div>' in page
    assert "<details" not in page


def test_equal_scores_are_neither_high_nor_low() -> None:
    page = page_of([scored("Q", ["a", "b"], [1, 1])], TOKENIZER.decode)
    assert page.count('<div class="score ">1</div>') == 2


def test_several_groups_fold_and_the_first_is_open() -> None:
    page = page_of([scored("Q", ["a"], [i]) for i in range(3)], TOKENIZER.decode)
    assert page.count("<details>") == 2
    assert "<details open><summary>Group 1 of 3</summary>" in page


@pytest.mark.parametrize("images", [False, True])
def test_text_of_a_group_cannot_be_markup(images: bool) -> None:
    evil = '<script>alert(1)</script><img src=x onerror="alert(1)">'
    group = scored(evil, [evil], [1], images=[f'{URI}" onerror="alert(1)', "javascript:alert(1)"])
    page = page_of([group], TOKENIZER.decode, images=images)
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_images_are_shown_where_they_stand_and_from_their_field() -> None:
    group = scored(f"Look: {URI} ", ["a cat", "a dog"], [1, 0], images=[[URI], {"image": PNG}])
    page = page_of([group], TOKENIZER.decode, images=True)
    assert page.count(f'<img src="{URI}"') == 2
    assert "<pre>Look: [image] </pre>" in page
    plain = page_of([group], TOKENIZER.decode, images=False)
    assert "<img" not in plain


def test_images_are_found_in_any_shape_once_and_in_order() -> None:
    jpeg = "/9j/4AAQSkZJRg=="
    value = [[URI, None], {"a": {"b": jpeg}}, PNG, "text", 3, f"{URI} and more"]
    assert images_in(value) == [URI, f"data:image/jpeg;base64,{jpeg}"]
    assert images_in(None) == []


# The hub.


def test_looking_registers_no_trainer_and_takes_nothing_from_one(hub: HubServer) -> None:
    assert "There is no group yet" in shown(hub)
    assert hub.get("/info") == {"batch_size": -1, "max_token_len": -1}
    hub.register(batch_size=2)
    assert "There is no group yet" in shown(hub)
    hub.send(text_group("Q", ["first", "x"], [1, 2]), text_group("Q", ["last", "x"], [1, 2]))
    before = hub.get("/ledger"), hub.get("/status")
    assert "<pre>last</pre>" in shown(hub)
    assert "<pre>last</pre>" in shown(hub)
    assert (hub.get("/ledger"), hub.get("/status")) == before
    assert before[0]["queued"] == 2


def test_consuming_takes_batches_as_a_trainer_does(hub: HubServer) -> None:
    assert "There is no group yet" in shown(hub, consume=True, group_size=1)
    assert hub.get("/info")["batch_size"] == 8
    hub.send(*[text_group("Q", [f"a{i}", f"b{i}"], [1, 2]) for i in range(5)])
    page = shown(hub, consume=True)
    assert "Group 1 of 4" in page
    assert "<pre>a0</pre>" in page
    ledger = hub.get("/ledger")
    assert (ledger["trained"], ledger["queued"], ledger["leased"]) == (4, 1, 0)


def test_consuming_does_not_reset_a_live_run(hub: HubServer) -> None:
    hub.register(batch_size=2, wandb_project="theirs")
    hub.send(text_group("Q", ["a", "b"], [1, 2]))
    assert "<pre>a</pre>" in shown(hub, consume=True)
    assert hub.get("/wandb_info")["project"] == "theirs"


def test_a_hub_that_does_not_answer_is_said_on_the_page() -> None:
    assert "Cannot read from the hub: GET http://127.0.0.1:1/latest_example" in shown(
        HubServer("http://127.0.0.1:1")
    )


# The command.


class Widget:
    def __init__(self, gradio: Gradio, *args: Any, **options: Any) -> None:
        self.gradio, self.args, self.options = gradio, args, options

    def __enter__(self) -> Widget:
        return self

    def __exit__(self, *_: object) -> None: ...

    def click(self, read: Any, outputs: Any) -> None:
        self.gradio.calls.append(("click", read()))

    def load(self, read: Any, outputs: Any) -> None:
        self.gradio.calls.append(("load", read()))

    def launch(self, **options: Any) -> None:
        self.gradio.calls.append(("launch", options))


class Gradio:
    """The four widgets of the page; what is wired to an event is called at once."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        assert name in ("Blocks", "Markdown", "Button", "HTML")
        return lambda *args, **options: Widget(self, *args, **options)


@pytest.mark.parametrize(("consume", "events"), [(False, ["click", "load"]), (True, ["click"])])
def test_opening_the_page_shows_a_group_but_consumes_none(consume: bool, events: list[str]) -> None:
    gradio = Gradio()
    build_page(gradio, lambda: "content", config=ViewConfig(consume=consume))
    assert gradio.calls == [(event, "content") for event in events]


@pytest.mark.parametrize("command", [view_run, view_run_multimodal])
def test_the_page_is_private_unless_asked_for(
    command: Any, hub: HubServer, tokenizer_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradio = Gradio()
    monkeypatch.setattr(view_run, "require", lambda module, *, extra: gradio)
    hub.send(text_group("Q", [URI, "x"], [1, 2]))
    flags = ["--api-url", hub.url, "--tokenizer", tokenizer_path, "--port=9009"]
    assert command.main(flags) == 0
    launched = {"server_name": "127.0.0.1", "server_port": 9009, "share": False}
    assert gradio.calls[-1] == ("launch", launched)
    assert ("<img" in gradio.calls[0][1]) == (command is view_run_multimodal)


def test_a_port_in_use_names_its_flag(
    hub: HubServer,
    tokenizer_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(self: Widget, **options: Any) -> None:
        raise OSError("Cannot find empty port in range: 9009-9009")

    monkeypatch.setattr(Widget, "launch", refuse)
    monkeypatch.setattr(view_run, "require", lambda module, *, extra: Gradio())
    flags = ["--api-url", hub.url, "--tokenizer", tokenizer_path, "--port=9009"]
    assert view_run.main(flags) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: cannot serve the page on 127.0.0.1:9009")
    assert "choose another --port" in told


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
