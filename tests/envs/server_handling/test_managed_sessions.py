"""Managed sessions beyond one conversation: trees, several choices, concurrent turns, prompts without sampling."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.server_handling.api_server import WeightSpan
from atroposlib.envs.server_handling.managed_server import (
    DummyManagedServer,
    ManagedServer,
    ManagedServerAdapter,
    SequenceNode,
)
from atroposlib.envs.server_handling.sequences import PendingTurn, SampledTurn, SequenceStore
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_harness import (
    ByteTokenizer,
    ServerHarness,
    create_chat_completion,
)
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError
from tests.envs.server_handling.helpers_templates import CHATML, ToldEngine, make_tokenizer

TOKENIZER = make_tokenizer(CHATML, eos="<|im_end|>")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def session(*answers: str, **options: Any) -> tuple[ToldEngine, ManagedServer]:
    engine = ToldEngine(TOKENIZER)
    engine.tell(*answers)
    return engine, ManagedServer(engine, **options)


def trained_text(node: SequenceNode) -> str:
    return TOKENIZER.decode([label for label in node.masked_tokens if label != -100])  # type: ignore[no-any-return]


async def test_in_a_tree_every_turn_is_a_node_that_trains_itself_only() -> None:
    engine, managed = session("one", "two", "other", track_tree=True)
    first = await managed.chat_completion(messages=[user("a")])
    history = [user("a"), first.choices[0].message]
    await managed.chat_completion(messages=[*history, user("b")])
    await managed.chat_completion(messages=[*history, user("c")])
    state = managed.get_state()
    assert state["tree"] == state["sequences"]
    nodes = list(state["sequences"].values())
    assert [key == node.full_text for key, node in state["sequences"].items()] == [True] * 3
    assert [trained_text(node) for node in nodes] == [
        "one<|im_end|>",
        "two<|im_end|>",
        "other<|im_end|>",
    ]
    start = nodes[0].tokens
    assert [node.tokens[: len(start)] == start for node in nodes] == [True] * 3
    for node in nodes:
        assert [value == 1.0 for value in node.logprobs] == [x == -100 for x in node.masked_tokens]


async def test_choices_of_a_continued_conversation_line_up_with_nodes() -> None:
    engine, managed = session("one", "p", "q", "r")
    first = await managed.chat_completion(messages=[user("a")])
    reply = await managed.chat_completion(
        messages=[user("a"), first.choices[0].message, user("b")], n=3
    )
    nodes = managed.get_state()["nodes"]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert [trained_text(node) for node in nodes] == [
        f"one<|im_end|>{choice.message.content}<|im_end|>" for choice in reply.choices
    ]


async def test_a_question_asked_again_adds_nodes_behind_the_others() -> None:
    _, managed = session("one", "two", "three", "four")
    first = await managed.chat_completion(messages=[user("a")])
    await managed.chat_completion(messages=[user("a")])
    await managed.chat_completion(messages=[user("a"), first.choices[0].message, user("b")])
    await managed.chat_completion(messages=[user("a")])
    nodes = managed.get_state()["nodes"]
    assert [trained_text(node).split("<|im_end|>")[:-1] for node in nodes] == [
        ["one", "three"],
        ["two"],
        ["four"],
    ]


async def test_equal_answers_are_continued_one_after_the_other() -> None:
    _, managed = session("same", "same", "x", "y")
    reply = await managed.chat_completion(messages=[user("a")], n=2)
    for choice, text in zip(reply.choices, "bc", strict=True):
        await managed.chat_completion(messages=[user("a"), choice.message, user(text)])
    nodes = managed.get_state()["nodes"]
    assert [trained_text(node) for node in nodes] == [
        "same<|im_end|>x<|im_end|>",
        "same<|im_end|>y<|im_end|>",
    ]


@pytest.mark.parametrize("fails", [False, True])
async def test_equal_answers_are_continued_at_the_same_time_each_in_its_node(fails: bool) -> None:
    engine, managed = session("same", "same")
    reply = await managed.chat_completion(messages=[user("a")], n=2)
    histories = [
        [user("a"), choice.message, user(text)]
        for choice, text in zip(reply.choices, "bc", strict=True)
    ]
    if fails:  # a turn that failed is not being continued any more
        with pytest.raises(IndexError):
            await managed.chat_completion(messages=histories[0])
    engine.tell("x", "y")
    await asyncio.gather(*(managed.chat_completion(messages=history) for history in histories))
    nodes = managed.get_state()["nodes"]
    assert [trained_text(node) for node in nodes] == [
        "same<|im_end|>x<|im_end|>",
        "same<|im_end|>y<|im_end|>",
    ]


async def test_turns_sampled_at_the_same_time_from_one_history_become_branches() -> None:
    _, managed = session("one", "p", "q")
    first = await managed.chat_completion(messages=[user("a")])
    history = [user("a"), first.choices[0].message]
    await asyncio.gather(
        *(managed.chat_completion(messages=[*history, user(text)]) for text in "bc")
    )
    nodes = managed.get_state()["nodes"]
    assert [trained_text(node) for node in nodes] == [
        "one<|im_end|>p<|im_end|>",
        "one<|im_end|>q<|im_end|>",
    ]


async def test_a_session_samples_more_choices_than_the_manager_puts_into_one_call() -> None:
    manager = ServerManager([APIServerConfig(model_name="m")], testing=True, max_n_completions=8)
    async with manager.managed_server() as managed:
        reply = await managed.chat_completion(messages=[user("a")], n=20)
        nodes = managed.get_state()["nodes"]
    assert len(reply.choices) == len(nodes) == 20
    for choice, node in zip(reply.choices, nodes, strict=True):
        assert f"{choice.message.content}<eos>" in node.full_text


async def test_a_node_is_a_pydantic_object() -> None:
    _, managed = session("one")
    await managed.chat_completion(messages=[user("a")])
    [node] = managed.get_state()["nodes"]
    copied = SequenceNode.model_validate_json(node.model_dump_json())
    assert copied == node
    assert json.loads(node.model_dump_json())["metadata"]["finish_reason"] == "stop"
    with pytest.raises(ValueError, match="tokens"):
        SequenceNode(full_text="", tokens="x", masked_tokens=[], logprobs=[])  # type: ignore[arg-type]


async def test_a_preview_is_the_prompt_that_is_sent_and_changes_nothing() -> None:
    engine, managed = session("one", "two")
    first = await managed.chat_completion(messages=[user("a")])
    messages = [user("a"), first.choices[0].message, user("b")]
    prompt = managed.preview(messages=messages)
    start = managed.get_state()["nodes"][0].tokens
    assert prompt.tokens[: len(start)] == start
    await managed.chat_completion(messages=messages)
    assert prompt.tokens == engine.sent[1]
    assert TOKENIZER.decode(prompt.tokens) == prompt.text


async def test_logprobs_of_a_sampled_conversation_are_those_of_its_tokens() -> None:
    class Judge(ToldEngine):
        async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
            self.requests.append(kwargs)
            tokens = kwargs["input_ids"]
            return {
                "prompt_tokens": tokens,
                "prompt_topk_token_ids": [[t] for t in tokens],
                "prompt_topk_logprobs": [[-1.0] for _ in tokens],
            }

    engine = Judge(TOKENIZER)
    managed = ManagedServer(engine)
    encode = TOKENIZER.encode
    engine.answers.append(([*encode("an"), *encode("swer"), *encode("<|im_end|>")], "stop"))
    first = await managed.chat_completion(messages=[user("a")])
    conversation = [user("a"), first.choices[0].message]
    answer = await managed.get_logprobs(messages=conversation, top_k=1)
    [node] = managed.get_state()["nodes"]
    assert answer["prompt_tokens"] == node.tokens
    assert set(engine.requests[-1]) == {"input_ids", "top_k"}
    answer = await managed.get_logprobs(messages=[*conversation, user("b")])
    assert answer["prompt_tokens"][: len(node.tokens)] == node.tokens
    assert managed.get_state()["nodes"] == [node]
    with pytest.raises(ValueError, match="input_ids, prompt or messages"):
        await managed.get_logprobs()


async def test_a_server_without_a_tokenizer_uses_the_one_its_configuration_names(
    tmp_path: Path,
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    engine = ToldEngine(None)
    engine.config.tokenizer_name = str(tmp_path)
    engine.answers = [(TOKENIZER.encode("one"), "length")] * 2
    sessions = [ManagedServer(engine), ManagedServer(engine)]
    for managed in sessions:
        reply = await managed.chat_completion(messages=[user("a")])
        assert reply.choices[0].message.content == "one"
    assert sessions[0].tokenizer is sessions[1].tokenizer


async def test_a_session_without_any_tokenizer_is_refused_with_the_cure(tmp_path: Path) -> None:
    engine = ToldEngine(None)
    engine.config.model_name = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="managed_server\\(tokenizer="):
        await ManagedServer(engine).chat_completion(messages=[user("a")])


async def test_a_tokenizer_that_cannot_be_hashed_will_do() -> None:
    class Own(ByteTokenizer):
        __hash__ = None  # type: ignore[assignment]

    managed = ManagedServer(ServerHarness(tokenizer=Own(), respond=lambda request: "yes"))
    reply = await managed.chat_completion(messages=[user("a")])
    assert reply.choices[0].message.content == "yes"


async def test_prompts_are_logged_when_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, managed = session("one", "two")
    with caplog.at_level(logging.INFO):
        await managed.chat_completion(messages=[user("a")])
        assert caplog.text == ""
        monkeypatch.setenv("ATROPOS_DEBUG_REQUESTS", "1")
        await managed.chat_completion(messages=[user("what is it?")])
    assert "what is it?" in caplog.text


async def test_the_adapter_drops_what_the_openai_package_writes_for_not_given() -> None:
    from openai import NOT_GIVEN, omit

    engine, managed = session("one")
    client = ManagedServerAdapter(managed, "http://h/v1").with_options(timeout=3)
    reply = await client.chat.completions.create(
        model="any", messages=[user("a")], tools=NOT_GIVEN, stop=omit, max_tokens=5
    )
    assert reply.choices[0].message.content == "one"
    assert set(engine.requests[0]) == {"input_ids", "prompt", "max_tokens"}
    for method in (client.post, client.copy):
        with pytest.raises(NotImplementedError):
            method()


async def test_a_dummy_session_in_tree_mode_has_its_nodes_by_text() -> None:
    harness = ServerHarness()
    harness.set_desired_response([user("a")], create_chat_completion("yes"))
    managed = DummyManagedServer(harness, track_tree=True)
    await managed.chat_completion(messages=[user("a")])
    assert list(managed.get_state()["sequences"]) == ["user:a\n\nassistant:yes"]
    managed.reset()
    assert managed.get_state()["sequences"] == {}
    with pytest.raises(NotImplementedError):
        await managed.get_logprobs(prompt="a")


@pytest.mark.parametrize("second", [None, "default"])
async def test_a_turn_of_unknown_version_makes_the_sequence_one_of_unknown_version(
    second: str | None,
) -> None:
    engine, managed = session("one", "two")
    engine.weight_version = "4"
    first = await managed.chat_completion(messages=[user("a")])
    assert managed.get_state()["nodes"][0].metadata["policy_version"] == 4
    engine.weight_version = second
    await managed.chat_completion(messages=[user("a"), first.choices[0].message, user("b")])
    [node] = managed.get_state()["nodes"]
    assert node.metadata["policy_version"] is None


def test_spans_end_where_a_branch_leaves_its_node() -> None:
    store = SequenceStore()

    def add(tokens: list[int], sampled: list[int], spans: list[WeightSpan], **turn: Any) -> None:
        store.commit(
            PendingTurn(
                order=store.next_order(), tokens=tokens, full_text="", visible_text="", **turn
            ),
            [
                SampledTurn(
                    tokens=sampled,
                    logprobs=[-1.0] * len(sampled),
                    full_text="",
                    visible_text="",
                    finish_reason="stop",
                    weight_versions=spans,
                )
            ],
        )

    add([1, 2], [3, 4, 5], [WeightSpan("6", 1), WeightSpan("7", 2)])
    found = store.find_text("")
    assert found is not None
    add([1, 2, 3, 4], [9], [WeightSpan("8", 1)], parent=found[0], num_kept=4)
    metadata = store.nodes[1].metadata
    assert metadata is not None
    spans = metadata["weight_versions"]
    assert [(s["start"], s["num_tokens"], s["weight_version"]) for s in spans] == [
        (2, 1, "6"),
        (3, 1, "7"),
        (4, 1, "8"),
    ]
    assert metadata["policy_version"] == 6
