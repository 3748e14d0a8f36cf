"""What clients do to the turns in their history, and what of it continues the sampled tokens."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from atroposlib.inference.sessions.managed_server import ManagedServer
from atroposlib.inference.sessions.recognition import Difference, SaidTurn, called, given_after
from atroposlib.inference.sessions.sequences import train_once
from atroposlib.inference.tools.thoughts import THINK_TAGS, ThinkTags, tags_known_to
from tests.inference.helpers_templates import (
    CHATML,
    CUTS_THOUGHTS,
    MOVES_THOUGHTS,
    ToldEngine,
    make_tokenizer,
    told_session,
    user,
)

THOUGHT = "<think>\nI ponder {i}.\n</think>\n\n"
ANSWER = " Step {i}:\n```\nls\n```\n"

Message = dict[str, Any]


def as_answered(message: Message) -> Message:
    return message


def stripped(message: Message) -> Message:
    return {**message, "content": message["content"].strip()}


def without_thoughts(message: Message) -> Message:
    return {**message, "content": message["content"].rpartition("</think>")[2]}


def with_moved_thoughts(key: str) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        thoughts, _, answer = message["content"].partition("</think>")
        return {
            **message,
            "content": answer.lstrip("\n"),
            key: thoughts.replace("<think>", "").strip(),
        }

    return change


def reopened(message: Message) -> Message:
    return {**message, "content": "<think>\n" + message["content"].strip()}


def with_stop(message: Message) -> Message:
    return {**message, "content": message["content"].strip() + "</code>"}


async def converse(
    template: str,
    answer: str,
    change: Callable[[Message], Message],
    *,
    num_turns: int,
    end: str = "<|im_end|>",
    **sampling: Any,
) -> tuple[ToldEngine, ManagedServer]:
    """Let a client that changes each answer before it returns it talk for some turns."""
    tokenizer = make_tokenizer(template, eos="<|im_end|>")
    engine, managed = told_session(tokenizer)
    messages: list[Any] = [user("Do it.")]
    for i in range(num_turns):
        engine.tell(answer.format(i=i), end=end, reason="stop")
        reply = await managed.chat_completion(messages=messages, **sampling)
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        messages += [change(said), user(f"result {i}")]
    return engine, managed


@pytest.mark.parametrize(
    ("template", "answer", "change", "num_turns", "options"),
    [
        (CHATML, ANSWER, stripped, 10, {}),
        (CHATML, THOUGHT + ANSWER, stripped, 4, {}),
        (CHATML, THOUGHT + ANSWER, without_thoughts, 10, {}),
        (MOVES_THOUGHTS, THOUGHT + ANSWER, without_thoughts, 4, {}),
        (CHATML, THOUGHT + ANSWER, with_moved_thoughts("reasoning_content"), 4, {}),
        (CHATML, THOUGHT + ANSWER, with_moved_thoughts("reasoning"), 4, {}),
        (CUTS_THOUGHTS, "I ponder.\n</think>\n\n" + ANSWER, without_thoughts, 4, {}),
        (CUTS_THOUGHTS, "I ponder.\n</think>\n\n" + ANSWER, reopened, 4, {}),
        (CHATML, ANSWER + "</code>", with_stop, 10, {"end": "", "stop": "</code>"}),
    ],
)
async def test_a_client_that_changes_its_turns_gets_the_sequence_of_one_that_does_not(
    template: str,
    answer: str,
    change: Callable[[Message], Message],
    num_turns: int,
    options: dict[str, Any],
) -> None:
    plain, changed = [
        await converse(template, answer, each, num_turns=num_turns, **options)
        for each in (as_answered, change)
    ]
    [node] = changed[1].nodes
    assert node == plain[1].nodes[0].model_copy(update={"metadata": node.metadata})
    assert changed[0].sent == plain[0].sent
    assert changed[1].num_broken_prefixes == 0


@pytest.mark.parametrize(
    ("sampled", "given", "is_recognised"),
    [
        # What Claude Code makes of its model's calls: defaults, types, white space, a needless `cd`.
        ({"old": "a"}, {"replace_all": False, "old": "a"}, True),
        ({"timeout": "5000", "all": "false"}, {"timeout": 5000, "all": False}, True),
        ({"content": "x = 1  \ny\n\n"}, {"content": "x = 1\ny"}, True),
        ({"command": "cd /a && ls -l"}, {"command": "ls -l"}, True),
        ({"edits": [{"old": "a "}, {"old": "b"}]}, {"edits": [{"old": "a"}, {"old": "b"}]}, True),
        ({"b": 12}, {"b": 2}, False),
        ({"command": "ls -l"}, {"command": "ls"}, False),
        ({"command": "ls -l"}, {"command": ""}, False),
        ({"content": "x = 1\n"}, {"content": "[left out]"}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({"edits": ["a", "b"]}, {"edits": ["b"]}, False),
        ("not JSON", {"a": 1}, False),
    ],
)
def test_calls_whose_arguments_a_client_only_tidied_are_the_sampled_ones(
    sampled: Any, given: Any, is_recognised: bool
) -> None:
    function = {"name": "f", "arguments": given}
    message = {"content": "", "tool_calls": [{"id": "c", "function": function}]}
    found = given_after(SaidTurn("", calls=(("f", sampled),)), message)
    assert found == "" if is_recognised else found.reason == "calls"  # type: ignore[union-attr]


async def test_text_that_the_client_appends_follows_the_sampled_tokens_and_is_no_target() -> None:
    def appended(message: Message) -> Message:
        return {**message, "content": message["content"] + "\nCalling tools: ls"}

    engine, managed = await converse(CHATML, "Step {i}.", appended, num_turns=10)
    [node] = managed.nodes
    text = engine.tokenizer.decode(node.tokens)
    assert text.startswith(
        "<|im_start|>user\nDo it.<|im_end|>\n<|im_start|>assistant\nStep 0.<|im_end|>"
        "\nCalling tools: ls<|im_end|>\n<|im_start|>user\nresult 0<|im_end|>\n"
    )
    targets = [label for label in node.masked_tokens if label != -100]
    assert engine.tokenizer.decode(targets) == "".join(f"Step {i}.<|im_end|>" for i in range(10))
    assert managed.num_broken_prefixes == 0


async def test_equal_answers_go_on_in_the_sequence_of_the_thoughts_that_came_back() -> None:
    engine, managed = told_session(make_tokenizer(CHATML, eos="<|im_end|>"))
    engine.tell("<think>One.</think>Yes.", "<think>Two.</think>Yes.", "three", "four")
    for _ in range(2):
        await managed.chat_completion(messages=[user("a")])
    for thought in ("One.", "Two."):
        said = {"role": "assistant", "content": "Yes.", "reasoning_content": thought}
        await managed.chat_completion(messages=[user("a"), said, user("b")])
    texts = [engine.tokenizer.decode(node.tokens) for node in managed.nodes]
    assert [re.findall(r"One|Two|three|four", text) for text in texts] == [
        ["One", "three"],
        ["Two", "four"],
    ]


async def test_two_clients_that_append_different_texts_go_on_in_sequences_of_their_own() -> None:
    engine, managed = told_session(make_tokenizer(CHATML, eos="<|im_end|>"))
    engine.tell("one", "two", "three", "four", "five")
    await managed.chat_completion(messages=[user("a")])
    for added in (" and x", " and y"):
        history = [user("a"), {"role": "assistant", "content": "one" + added}, user("b")]
        reply = await managed.chat_completion(messages=history)
        history += [reply.choices[0].message, user("c")]
        await managed.chat_completion(messages=history)
    texts = [engine.tokenizer.decode(node.tokens) for node in managed.nodes]
    assert [re.findall(r" and .|two|three|four|five", text) for text in texts] == [
        [" and x", "two", "three"],
        [" and y", "four", "five"],
    ]


@pytest.mark.parametrize(
    ("sampled", "returned", "reason", "shown"),
    [
        ("Step one.", "Step two.", "changed", "character 5: 'Step one.' became 'Step two.'"),
        ("Step one. Or two.", "Step one.", "cut", "character 9"),
        ("It is 1", "It is 10", "changed", "character 7"),
        ("<think>a</think>b", "<think>c</think>b", "thoughts", "character 0: 'a' became 'c'"),
        ("<think>a</think>", "b", "changed", "character 0: '' became 'b'"),
    ],
)
async def test_a_turn_that_differs_begins_a_sequence_is_counted_and_named_once(
    sampled: str, returned: str, reason: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    def replaced(message: Message) -> Message:
        return {**message, "content": returned}

    with caplog.at_level(logging.WARNING):
        _, managed = await converse(CHATML, sampled, replaced, num_turns=3)
    assert len(managed.nodes) == 3
    assert dict(managed.broken_prefixes) == {reason: 2}
    assert managed.num_broken_prefixes == 2
    [warning] = caplog.messages
    assert f"({reason}; " in warning
    assert shown in warning


async def test_equal_answers_of_a_deterministic_engine_are_all_trained() -> None:
    engine, managed = told_session(make_tokenizer(CHATML, eos="<|im_end|>"))
    engine.tell(*["same"] * 8)
    await managed.chat_completion(messages=[user("a")], n=4)
    for _ in range(4):
        await managed.chat_completion(messages=[user("a")])
    labels = [node.masked_tokens for node in managed.nodes]
    assert [node.masked_tokens for node in train_once(managed.nodes)] == labels
    assert len({tuple(each) for each in labels}) == 1


# The rules, for any text.

texts = st.text(st.sampled_from(["a", "b", "1", " ", "\n", ".", "<"]), max_size=12)
words = texts.filter(lambda text: text.strip() != "")
space = st.text(st.sampled_from(" \n"), max_size=3)


@given(texts, texts, space, space, st.sampled_from(["</code>", "\nObservation:", ""]))
def test_space_thoughts_and_stops_are_no_difference(
    thoughts: str, answer: str, before: str, after: str, stop: str
) -> None:
    said = SaidTurn(f"<think>{thoughts}</think>{answer}", stop)
    opened = SaidTurn(f"{thoughts}</think>{answer}", stop)
    for returned in (answer, answer + stop if answer.strip() else answer, said.content):
        changed = {"content": before + returned + after}
        assert given_after(said, changed) == given_after(opened, changed) == ""
    moved = {"content": answer, "reasoning_content": thoughts}
    assert given_after(said, moved) == ""


@given(words, texts, st.sampled_from(["</code>", "\nObservation:", ""]))
def test_appended_text_is_given_whole(answer: str, added: str, stop: str) -> None:
    said = SaidTurn(answer, stop)
    assert given_after(said, {"content": answer.rstrip() + stop + "-" + added}) == "-" + added


@example("1 ", "1 1")
@given(words, words)
def test_what_neither_begins_with_the_answer_nor_equals_it_differs_at_its_first_other_character(
    answer: str, other: str
) -> None:
    sampled, returned = answer.strip(), other.strip()
    found = given_after(SaidTurn(answer), {"content": other})
    if returned.startswith(sampled):
        glued = sampled[-1].isalnum() and returned[len(sampled) :][:1].isalnum()
        assert isinstance(found, Difference) == glued
        return
    assert isinstance(found, Difference)
    same = found.position
    assert sampled[:same] == returned[:same]
    assert sampled[same : same + 1] != returned[same : same + 1]
    assert (found.reason == "cut") == sampled.startswith(returned)


@given(st.dictionaries(words, st.integers() | texts, max_size=3), st.randoms())
def test_calls_are_equal_by_name_and_parsed_arguments(
    arguments: dict[str, Any], rng: random.Random
) -> None:
    def message(name: str, arguments: dict[str, Any]) -> Message:
        function = {"name": name, "arguments": json.dumps(arguments, indent=rng.choice([None, 2]))}
        return {"content": "", "tool_calls": [{"id": str(rng.random()), "function": function}]}

    shuffled = list(arguments.items())
    rng.shuffle(shuffled)
    said = SaidTurn("", calls=called(message("f", arguments)))
    assert given_after(said, message("f", dict(shuffled))) == ""
    more = SaidTurn("", calls=called(message("f", {**arguments, "more": 0})))
    for sampled, other in (
        (said, message("g", arguments)),
        (more, message("f", arguments)),
        (more, message("f", {**arguments, "more": 1})),
        (said, {"content": ""}),
    ):
        found = given_after(sampled, other)
        assert isinstance(found, Difference)
        assert found.reason == "calls"


@pytest.mark.parametrize("answer", ["Let me look.", "I ask weather.", ""])
def test_calls_that_the_client_writes_as_text_are_appended_text(answer: str) -> None:
    said = SaidTurn(f"<think>So.</think>{answer}", calls=(("weather", {"city": "Oslo"}),))
    written = "Calling tools: [{'name': 'weather', 'arguments': {'city': 'Oslo'}}]"
    assert given_after(said, {"content": f"{answer}{written}"}) == written
    for content in (answer, f"{answer}Calling tools: [{{'name': 'time'}}]"):
        found = given_after(said, {"content": content})
        assert isinstance(found, Difference)
        assert found.reason == "calls"


# Tags.


@given(
    tags=st.sampled_from(THINK_TAGS),
    pieces=st.lists(st.sampled_from(["OPENING", "CLOSING", "a", "b", " ", "\n\n"]), max_size=9),
    is_opened=st.booleans(),
    returns_thought=st.booleans(),
)
def test_a_turn_continues_as_the_proxy_shows_it_with_and_without_its_thought(
    tags: ThinkTags, pieces: list[str], is_opened: bool, returns_thought: bool
) -> None:
    text = "".join(pieces).replace("OPENING", tags.opening).replace("CLOSING", tags.closing)
    # Of a thought that the prompt began and that has no end, nothing may come back.
    assume(not is_opened or tags.closing in text)
    shown = tags.divide(text, is_opened=is_opened)
    moved = {"reasoning_content": shown.thought} if returns_thought and shown.thought else {}
    said = SaidTurn(text, tags=tags)
    assert given_after(said, {"role": "assistant", "content": shown.content, **moved}) == ""


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("The tag </think> ends it.", "The tag </think> ends it."),
        ("Use <think> here.", "Use <think> here."),
        ("Write <think>foo</think> now.", "Write <think>foo</think> now.</code>"),
    ],
)
def test_an_answer_that_mentions_the_tags_continues_without_its_thought(
    answer: str, given: str
) -> None:
    said = SaidTurn(f"<think>So.</think>{answer}", cut="</code>")
    assert given_after(said, {"role": "assistant", "content": given}) == ""


def test_another_answer_behind_a_tag_is_not_what_was_added_to_the_answer() -> None:
    said = SaidTurn("4</think>4")
    found = given_after(said, {"role": "assistant", "content": "4</think>5"})
    assert isinstance(found, Difference)
    assert found.reason == "changed"


@pytest.mark.parametrize(
    ("template", "tokens", "opening"),
    [
        ("{{ content.split('</think>') }}", ["[/THINK]"], "<think>"),
        ("{{ '</seed:think>' }}", ["<think>"], "<seed:think>"),
        ("{{ content }}", ["[INST]", "[THINK]", "[/THINK]"], "[THINK]"),
        ("{{ content }}", ["<think>"], None),
        ("<|channel|>analysis<|message|>", ["<|channel|>"], None),
    ],
)
def test_tags_are_those_of_the_template_or_else_of_the_tokens(
    template: str, tokens: list[str], opening: str | None
) -> None:
    tags = tags_known_to(template, tokens)
    assert (tags and tags.opening) == opening


@pytest.mark.parametrize("change", [as_answered, stripped, "divided", "moved"])
async def test_tags_that_are_special_tokens_are_seen_and_stay_one_sequence(change: Any) -> None:
    """Magistral's tags are control tokens, which decoding leaves out."""
    tokenizer = make_tokenizer(CHATML + "{# [/THINK] #}", eos="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    engine, managed = told_session(tokenizer)
    tags = managed.think_tags
    assert tags is not None
    messages: list[Any] = [user("Do it.")]
    texts = ["[THINK]Hm.[/THINK]Yes.", "[THINK]So.[/THINK]No.", "[THINK]Hm"]
    for text in texts:
        engine.tell(text, end="<|im_end|>" if "/" in text else "")
        answer = await managed.chat_completion(messages=messages)
        content = answer.choices[0].message.content
        assert content == text
        message = {"role": "assistant", "content": content}
        if change == "moved":
            thought, message["content"] = tags.divide(content, is_opened=False)
            message["reasoning_content"] = thought
        elif change == "divided":
            message["content"] = tags.divide(content, is_opened=False).content
        else:
            message = change(message)
        messages += [message, user("Go on.")]
    assert managed.num_broken_prefixes == 0
    (node,) = managed.get_state()["nodes"]
    trained = [token for token in node.masked_tokens if token != -100]
    assert tokenizer.decode(trained) == "<|im_end|>".join(texts)
