"""Managed sessions beyond one conversation: trees, several choices, concurrent turns, prompts without sampling."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import random
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, ServerHarness, create_chat_completion
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import WeightSpan
from atroposlib.inference.sessions.managed_server import (
    ManagedServer,
    SequenceNode,
)
from atroposlib.inference.sessions.openai_client import ManagedServerAdapter
from atroposlib.inference.sessions.recognition import SaidTurn
from atroposlib.inference.sessions.sequences import (
    ChatPlace,
    PendingTurn,
    SampledTurn,
    SequenceStore,
    VisibleText,
    ledger_of,
    train_once,
)
from atroposlib.inference.sessions.text_sessions import DummyManagedServer
from atroposlib.utils.number_list import array_of
from tests.inference.helpers_templates import CHATML, ToldEngine, make_tokenizer, told_session, user

TOKENIZER = make_tokenizer(CHATML, eos="<|im_end|>")


def session(*answers: str, **options: Any) -> tuple[ToldEngine, ManagedServer]:
    engine, managed = told_session(TOKENIZER, **options)
    engine.tell(*answers)
    return engine, managed


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


async def test_a_repeated_question_adds_nodes_after_the_others() -> None:
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


async def test_a_tokenizer_that_cannot_be_hashed_is_accepted() -> None:
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


async def test_the_adapter_is_an_openai_client_that_leaves_out_what_is_not_given() -> None:
    from openai import NOT_GIVEN, omit

    engine, managed = session("one", "two")
    client = ManagedServerAdapter(managed, "http://h/v1").with_options(timeout=3)
    reply = await client.chat.completions.create(
        model="any", messages=[user("a")], tools=NOT_GIVEN, stop=omit, max_tokens=5
    )
    assert reply.choices[0].message.content == "one"
    assert set(engine.requests[0]) == {"input_ids", "prompt", "max_tokens", "model"}
    assert engine.requests[0]["model"] == engine.config.model_name
    text = await client.completions.create(prompt="b")
    assert text.choices[0].text == "two"
    assert len(managed.nodes) == 2
    for method in (client.post, client.copy):
        with pytest.raises(NotImplementedError):
            method()


async def test_a_dummy_session_has_its_text_by_node_or_tree_and_says_that_tokens_are_made_up() -> (
    None
):
    harness = ServerHarness()
    harness.set_desired_response([user("a")], create_chat_completion("yes", n=2))
    managed = DummyManagedServer(harness)
    reply = await managed.chat_completion(messages=[user("a")], n=2)
    assert len(reply.choices) == len(managed.get_state()["nodes"]) == 2
    managed.track_tree = True
    ((text, node),) = managed.get_state()["sequences"].items()
    assert text == node.full_text == "user:a\n\nassistant:yes"
    assert node.metadata["dummy_tokens"] is True
    assert (len(node.tokens), node.masked_tokens[0], node.logprobs[5]) == (128, -100, -0.5)
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


# Stop strings


async def test_text_after_a_stop_string_does_not_repeat_the_stop_string() -> None:
    engine, managed = session()
    engine.tell("Act\nObservation:", end="", reason="stop")
    reply = await managed.completion(prompt="Q", stop="\nObservation:")
    assert reply.choices[0].text == "Act"
    engine.tell("done")
    await managed.completion(prompt="QAct\nObservation: 42")
    assert TOKENIZER.decode(engine.sent[-1]) == "QAct\nObservation: 42"
    assert len(managed.nodes) == 1


async def test_an_answer_in_a_react_turn_is_continued_after_its_stop_string() -> None:
    engine, managed = session()
    engine.tell("Act\nObservation:", end="", reason="stop")
    await managed.chat_completion(messages=[user("a")], stop="\nObservation:")
    engine.tell("done")
    opened = {"role": "assistant", "content": "Act\nObservation: 42"}
    await managed.chat_completion(messages=[user("a"), opened])
    assert TOKENIZER.decode(engine.sent[-1]).endswith("Act\nObservation: 42")
    assert len(managed.nodes) == 1


@pytest.mark.parametrize(
    ("answer", "finish_reason", "options", "text"),
    [
        ("a STOP b", "length", {"stop": "STOP"}, "a STOP b"),
        ("a STOP", "stop", {"stop": "STOP", "include_stop_str_in_output": True}, "a STOP"),
        ("a STOP", "stop", {"extra_body": {"stop": ["STOP"]}}, "a "),
        ("STOP a STOP", "stop", {"stop": "STOP", "min_tokens": 3}, "STOP a "),
        ("no", "stop", {"stop": []}, "no"),
    ],
)
async def test_only_the_stop_string_that_ended_an_answer_is_cut(
    answer: str, finish_reason: str, options: dict[str, Any], text: str
) -> None:
    engine, managed = session()
    engine.tell(answer, end="", reason=finish_reason)
    reply = await managed.chat_completion(messages=[user("a")], **options)
    assert reply.choices[0].message.content == text


# What is kept


async def test_an_answer_that_its_reader_refuses_is_not_kept() -> None:
    engine, managed = session("unseen", "seen")
    with pytest.raises(ValueError, match="unreadable"):
        async with managed.chat_turn(messages=[user("a")]):
            raise ValueError("unreadable")
    async with managed.chat_turn(messages=[user("a")]) as (completion, *_):
        assert completion.choices[0].message.content == "seen"
    assert [trained_text(node) for node in managed.nodes] == ["seen<|im_end|>"]


async def test_a_template_that_writes_the_date_keeps_it_for_the_session() -> None:
    dated = "{{ strftime_now('%H:%M:%S.%f') + '\\n' }}" + CHATML
    tokenizer = make_tokenizer(dated, eos="<|im_end|>")
    engine = ToldEngine(tokenizer)
    engine.tell("one", "two")
    managed = ManagedServer(engine)
    first = await managed.chat_completion(messages=[user("a")])
    await managed.chat_completion(messages=[user("a"), first.choices[0].message, user("b")])
    assert (len(managed.nodes), managed.num_broken_prefixes) == (1, 0)


async def test_samples_with_the_same_text_are_nodes_of_their_own_also_in_a_tree() -> None:
    _, managed = session("same", "same", track_tree=True)
    await managed.chat_completion(messages=[user("a")], n=2)
    assert (len(managed.nodes), len(managed.get_state()["tree"])) == (2, 1)


async def test_branches_repeat_the_labels_of_what_they_share_until_they_are_trained_once() -> None:
    _, managed = session("shared", "left", "right")
    first = await managed.chat_completion(messages=[user("a")])
    history = [user("a"), first.choices[0].message]
    await managed.chat_completion(messages=[*history, user("b")])
    await managed.chat_completion(messages=[*history, user("c")])
    texts = [trained_text(node) for node in managed.nodes]
    assert texts == ["shared<|im_end|>left<|im_end|>", "shared<|im_end|>right<|im_end|>"]
    once = [trained_text(node) for node in train_once(managed.nodes)]
    assert once == ["shared<|im_end|>left<|im_end|>", "right<|im_end|>"]


# Many nodes


class _Tree:
    """Sequences that leave earlier ones at random places, also in the middle of a turn; many have equal tokens."""

    def __init__(self, seed: int, *, num: int) -> None:
        rng = random.Random(seed)
        self.nodes: list[SequenceNode] = []
        self.sources: list[list[tuple[int, int] | None]] = []
        """[num][T] the turn that sampled each position, and its place in the turn; None where it was given."""
        turns = itertools.count()
        for _ in range(num):
            tokens: list[int] = []
            sources: list[tuple[int, int] | None] = []
            if self.nodes and rng.random() < 0.9:
                parent = rng.randrange(len(self.nodes))
                kept = rng.randrange(len(self.sources[parent]) + 1)
                tokens = self.nodes[parent].tokens[:kept]
                sources = self.sources[parent][:kept]
            for _ in range(rng.randrange(3)):
                turn = next(turns)
                sources += [None] * rng.randrange(3)
                sources += [(turn, i) for i in range(rng.randrange(1, 4))]
            tokens = [*tokens, *(rng.randrange(2) for _ in sources[len(tokens) :])]
            self.sources.append(sources)
            self.nodes.append(_node(tokens, sources))

    def trained_once(self) -> list[list[int]]:
        """Return the labels of the sequences that train something, position by position."""
        seen: set[tuple[int, int] | None] = {None}
        found = []
        for node, sources in zip(self.nodes, self.sources, strict=True):
            found.append(
                [-100 if s in seen else t for t, s in zip(node.tokens, sources, strict=True)]
            )
            seen.update(sources)
        return [labels for labels in found if any(label != -100 for label in labels)]


def _node(tokens: list[int], sources: Sequence[tuple[int, int] | None]) -> SequenceNode:
    """Return a sequence whose sampled tokens all have the same logprob."""
    turns: dict[int, dict[str, Any]] = {}
    for position, source in enumerate(sources):
        if source is not None:
            turn = turns.setdefault(
                source[0], {"start": position, "num_tokens": 0, "turn": str(source[0])}
            )
            turn["num_tokens"] += 1
    return SequenceNode.model_construct(
        full_text="",
        tokens=tokens,
        masked_tokens=[t if source else -100 for t, source in zip(tokens, sources, strict=True)],
        logprobs=[-1.0 if source else 1.0 for source in sources],
        metadata={"turns": list(turns.values())},
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_sampled_token_is_trained_once_also_beside_equal_ones(seed: int) -> None:
    tree = _Tree(seed, num=12)
    labels = [list(node.masked_tokens) for node in tree.nodes]
    kept = train_once(tree.nodes)
    assert [node.masked_tokens for node in kept] == tree.trained_once()
    for node in kept:
        assert [p == 1.0 for p in node.logprobs] == [x == -100 for x in node.masked_tokens]
    assert [node.masked_tokens for node in tree.nodes] == labels  # the session's are unchanged
    ledger = ledger_of(tree.nodes, kept)
    assert ledger is not None
    num_sampled = len({each for sources in tree.sources for each in sources} - {None})
    assert (ledger.sampled, ledger.trained, ledger.left_out) == (num_sampled, num_sampled, 0)


def test_a_ledger_names_what_was_left_out_and_does_not_close_on_what_is_trained_twice() -> None:
    first, second = _node([1, 2, 3], [None, (0, 0), (0, 1)]), _node([1, 4], [None, (1, 0)])
    left_out = ledger_of([first, second], [first])
    assert left_out == (3, 2, 1)
    assert left_out is not None
    assert left_out.closes
    twice = ledger_of([first, second], [first, first, second])
    assert twice == (3, 5, 0)
    assert twice is not None
    assert not twice.closes
    first.metadata = None
    assert ledger_of([first], [first]) is None


def test_training_once_takes_time_in_proportion_to_the_tokens() -> None:
    def cost_s(num: int) -> float:
        shared = [(0, i) for i in range(300)]
        nodes = [_node(list(range(302)), [*shared, (i, 0), (i, 1)]) for i in range(1, num + 1)]
        costs = []
        for _ in range(9):
            began = time.thread_time()
            assert len(train_once(nodes)) == num
            costs.append(time.thread_time() - began)
        return min(costs)

    assert cost_s(800) < 25 * cost_s(100)  # comparing all pairs costs 64 times as much


def store_turn(
    store: SequenceStore,
    tokens: list[int],
    sampled: list[int],
    *,
    spans: list[WeightSpan] | None = None,
    text: str = "",
    said: SaidTurn | None = None,
    **turn: Any,
) -> None:
    pending = PendingTurn(
        order=next(store.orders),
        tokens=tokens,
        full_text=turn.pop("prompt", ""),
        visible_text=VisibleText(""),
        **turn,
    )
    answer = SampledTurn(
        tokens=sampled,
        logprobs=[-1.0] * len(sampled),
        full_text=text,
        visible_text=text,
        said=said,
        finish_reason="stop",
        weight_versions=spans,
    )
    store.commit(pending, [answer])


def test_spans_end_where_a_branch_leaves_its_node() -> None:
    store = SequenceStore()
    store_turn(store, [1, 2], [3, 4, 5], spans=[WeightSpan("6", 1), WeightSpan("7", 2)])
    found = store.find_text("")
    assert found is not None
    store_turn(store, [1, 2, 3, 4], [9], spans=[WeightSpan("8", 1)], parent=found[0], num_kept=4)
    metadata = store.nodes[1].metadata
    assert metadata is not None
    spans = metadata["weight_versions"]
    assert [(s["start"], s["num_tokens"], s["weight_version"]) for s in spans] == [
        (2, 1, "6"),
        (3, 1, "7"),
        (4, 1, "8"),
    ]
    assert metadata["policy_version"] == 6


async def test_finding_the_continued_turn_does_not_depend_on_other_conversations() -> None:
    def build(num: int) -> SequenceStore:
        store = SequenceStore()
        for i in range(num):
            said = SaidTurn(f"answer {i}", identity=f"answer {i}")
            chat = {"messages": ("system", "question"), "place": ChatPlace(index=2, lead="q")}
            store_turn(store, [1], [2], prompt="q", text=f"a{i}", said=said, **chat)
        return store

    def cost_s(store: SequenceStore) -> float:
        began = time.thread_time()
        for i in range(1000):
            match, _ = store.find_messages(["system", "question", f"answer {i % 50}", "next"])
            assert match is not None
            assert match.full_text == f"qa{i % 50}"
        return time.thread_time() - began

    small, large = build(50), build(1500)
    cost_s(small)
    assert cost_s(large) < 5 * cost_s(small)  # it was 30 times as much


async def test_the_memory_of_a_session_is_in_proportion_to_its_tokens() -> None:
    async def bytes_of(num_turns: int) -> int:
        engine, managed = session()
        gc.collect()
        tracemalloc.start()
        messages = [user("question " * 30)]
        for i in range(num_turns):
            engine.tell(f"answer {i} " * 20)
            reply = await managed.chat_completion(messages=messages)
            answer = {"role": "assistant", "content": reply.choices[0].message.content.strip()}
            messages = [*messages, answer, user(f"question {i} " * 20)]
            engine.requests.clear()
        del messages
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        [node] = managed.nodes
        assert held < 250 * len(node.tokens)
        return held

    assert await bytes_of(40) < 2.5 * await bytes_of(20)


async def test_a_turn_copies_the_tokens_before_it_once() -> None:
    class Terse(ToldEngine):
        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
            return kwargs["input_ids"], [[5, 6]], [[-1.0, -2.0]], ["length"]

    managed = ManagedServer(Terse(TOKENIZER))
    messages = [user("12" * 20_000)]
    allocated: list[int] = []
    for i in range(5):
        tracemalloc.start()
        reply = await managed.chat_completion(messages=messages)
        allocated.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        messages += [dict(reply.choices[0].message), user(str(i))]
    [node] = managed.nodes
    # The prompt's list takes 8 bytes per token, and the text is held several times. Lists grow in leaps.
    assert min(allocated[1:]) < 8 * len(node.tokens) + 6 * len(node.full_text)


async def test_nodes_that_the_caller_has_stay_as_they_are() -> None:
    _, managed = session("one", "two", "three")
    first = await managed.chat_completion(messages=[user("a")])
    history = [user("a"), first.choices[0].message, user("b")]
    [node] = managed.nodes
    held = node.model_copy(deep=True)
    node.masked_tokens[-1] = -100  # changes by the caller are kept in later turns
    second = await managed.chat_completion(messages=history)
    assert node.tokens == held.tokens
    assert node.metadata == held.metadata
    await managed.chat_completion(messages=[*history, second.choices[0].message, user("c")])
    [longer] = managed.nodes
    assert longer.tokens[: len(node.tokens)] == node.tokens
    assert longer.masked_tokens[: len(node.tokens)] == node.masked_tokens
    assert trained_text(longer) == "onetwo<|im_end|>three<|im_end|>"
    for name in ("tokens", "masked_tokens", "logprobs"):
        values = getattr(longer, name)
        assert array_of(values).tolist() == list(values)
