"""gpt-oss's messages: thoughts, content and calls, whole and unfinished, and sessions of several turns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.inference.sessions.managed_server import ManagedServer
from atroposlib.inference.sessions.sampled_text import before_any
from atroposlib.inference.tools.parsers import STYLES, Call
from tests.inference.helpers_templates import (
    CHANNELS,
    ToldEngine,
    make_tokenizer,
    told_session,
    user,
)
from tests.inference.tool_samples import SAMPLED, TOOLS

HARMONY = STYLES["gpt_oss"]
CALL = SAMPLED["gpt_oss"]
WEATHER = Call("weather", '{"city": "Paris", "days": 2}')
START = "<|start|>assistant"


def message(channel: str, body: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{body}{end}"


THOUGHT = message("analysis", "Hm. ")
FINAL = message("final", " It is mild.\n", "<|return|>")


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "calls"),
    [
        (THOUGHT + START + FINAL, "Hm. ", "It is mild.\n", ()),
        (THOUGHT + START + THOUGHT + START + CALL, "Hm. \nHm. ", "", (WEATHER,)),
        (
            THOUGHT + START + message("commentary", "I look.") + START + CALL,
            "Hm. ",
            "I look.",
            (WEATHER,),
        ),
        # The recipient in the header of the role, no type, no channel, another channel, another end.
        (
            " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
            "",
            "",
            (Call("f", "{}"),),
        ),
        (
            START + " to=functions.f<|channel|>commentary<|message|> {}\n<|call|>",
            "",
            "",
            (Call("f", "{}"),),
        ),
        (" to=functions.f<|message|>{}<|call|>", "", "", (Call("f", "{}"),)),
        (
            "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
            "",
            "",
            (Call("f", "{}"),),
        ),
        (CALL.replace("<|call|>", "<|return|>"), "", "", (WEATHER,)),
        (CALL + START + CALL, "", "", (WEATHER, WEATHER)),
        # A function that was offered is called without the prefix, too; other tools are none.
        (CALL.replace("functions.", ""), "", "", (WEATHER,)),
        (CALL.replace("functions.weather", "python"), "", None, ()),
        (CALL.replace("functions.weather", "browser.search"), "", None, ()),
        (message("analysis to=python code", "1 + 1", "<|call|>"), "1 + 1", "", ()),
        # Not whole, or no JSON.
        (CALL.removesuffix("<|call|>"), "", None, ()),
        (CALL.replace("<|call|>", "x<|call|>"), "", None, ()),
        (CALL.replace("2}", "2"), "", None, ()),
        # What models write that is no message.
        (message("commentary 2? We ask.", "x"), "", None, ()),
        (
            "<|channel|>commentary... We ask.<|end|>" + START + FINAL,
            "",
            "<|channel|>commentary... We ask.<|end|>\nIt is mild.\n",
            (),
        ),
        ("<|start|>user<|message|>Hi<|end|>", "", None, ()),
        ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>1<|end|>", "", None, ()),
        (THOUGHT + "<|start|>assi", "Hm. ", "<|start|>assi", ()),
        (message("analysis", "Hm", ""), "Hm", "", ()),
        (message("final", "a") + message("final", "b"), "", "a\nb", ()),
        ("Plain.", "", "Plain.", ()),
        # The thoughts end where the final message begins.
        (FINAL + START + THOUGHT, "", "It is mild.\n\n" + START + THOUGHT.strip(), ()),
    ],
)
def test_an_answer_is_thoughts_content_and_calls(
    text: str, thoughts: str, content: str | None, calls: tuple[Call, ...]
) -> None:
    """`content` None: the whole text."""
    read = HARMONY.read(text, TOOLS)
    assert read.parsed == (text if content is None else content, calls)
    assert read.thoughts == thoughts


def test_arguments_may_contain_marks() -> None:
    arguments = json.dumps({"text": CALL + FINAL})
    text = HARMONY.render([Call("f", arguments)] * 2)
    assert HARMONY.parse(text) == ("", (Call("f", arguments),) * 2)


PIECES = [
    *HARMONY.markers,
    "assistant",
    "analysis",
    "commentary",
    "final",
    " to=functions.f",
    " to=f",
    " to=g",
]
PIECES += [" json", '{"a": 1}', '{"a": "', "x", " ", "\n", START, THOUGHT, FINAL, CALL]


@given(text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join), cut=st.integers(0, 300))
def test_what_is_certain_of_an_answer_is_the_beginning_of_the_whole(text: str, cut: int) -> None:
    assert HARMONY.begun is not None
    tools = [{"function": {"name": "f"}}]
    whole = HARMONY.read(text, tools)
    begun = HARMONY.begun(before_any(text[:cut], HARMONY.markers, cuts_whole=False))
    certain = HARMONY.read(begun, tools)
    assert whole.thoughts.startswith(certain.thoughts)
    told = certain.parsed.content.rstrip()
    assert whole.parsed.content.startswith(told)
    if told:
        assert certain.thoughts == whole.thoughts


# Sessions.


def session(tool_parser: str = "gpt_oss") -> tuple[ToldEngine, ManagedServer]:
    tokenizer = make_tokenizer(CHANNELS, eos="<|return|>")
    return told_session(tokenizer, tool_parser=tool_parser)


ANSWER = message("final", "It is mild.", "")


@pytest.mark.parametrize(
    "returned", ["whole", "without_thoughts", "renamed", "in_tags", "stripped"]
)
async def test_a_conversation_with_calls_is_one_sequence(returned: str) -> None:
    def change(said: dict[str, Any]) -> dict[str, Any]:
        thoughts = said.pop("reasoning_content", "")
        if returned == "whole":
            said["reasoning_content"] = thoughts
        elif returned == "renamed":
            said["reasoning"] = thoughts
        elif returned == "in_tags":
            said["content"] = f"<think>\n{thoughts}\n</think>\n\n{said['content'] or ''}"
        elif returned == "stripped":
            said["content"] = (said["content"] or "").strip()
        return said

    engine, managed = session()
    turns = [
        (THOUGHT + START + message("commentary", "I look.") + START + CALL, "<|call|>"),
        (" to=functions.weather<|channel|>commentary json<|message|>{}", "<|call|>"),
        (THOUGHT + START + ANSWER, "<|return|>"),
        (THOUGHT + START + CALL.removesuffix("<|call|>"), "<|return|>"),
        (ANSWER, "<|return|>"),
    ]
    messages: list[Any] = [user("Weather?")]
    finish_reasons = []
    for text, end in turns:
        engine.tell(text.removesuffix(end), end=end)
        reply = await managed.chat_completion(messages=messages, tools=TOOLS)
        choice = reply.choices[0]
        finish_reasons.append(choice.finish_reason)
        said = json.loads(json.dumps(choice.message.model_dump(exclude_none=True)))
        messages.append(change({"content": None, **said}))
        calls = choice.message.tool_calls or []
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "mild"} for call in calls
        ] or [user("And now?")]
    [node] = managed.nodes
    assert managed.num_broken_prefixes == 0
    result = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"mild"<|end|>'
    between = [result, result, "<|start|>user<|message|>And now?<|end|>", result]
    sampled = [text.removesuffix(end) + end for text, end in turns]
    expected = "<|start|>user<|message|>Weather?<|end|>" + START + sampled[0]
    expected += "".join(
        told + START + text for told, text in zip(between, sampled[1:], strict=True)
    )
    assert engine.tokenizer.decode(node.tokens) == node.full_text == expected
    targets = [label for label in node.masked_tokens if label != -100]
    assert engine.tokenizer.decode(targets) == "".join(sampled)
    assert finish_reasons == ["tool_calls", "tool_calls", "stop", "tool_calls", "stop"]


async def test_thoughts_are_apart_with_and_without_tools() -> None:
    for tools in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        engine, managed = session()
        engine.tell(THOUGHT + START + ANSWER, end="<|return|>")
        reply = await managed.chat_completion(messages=[user("Weather?")], **tools)
        said = reply.choices[0].message
        assert (said.content, said.reasoning_content) == ("It is mild.", "Hm. ")


async def test_a_call_that_was_not_offered_is_neither_a_call_nor_content() -> None:
    engine, managed = session()
    engine.tell(THOUGHT + START + CALL.removesuffix("<|call|>"), end="<|call|>")
    reply = await managed.chat_completion(messages=[user("Weather?")])
    choice = reply.choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("", None)
    assert choice.finish_reason == "stop"


async def test_thoughts_that_the_client_changed_are_not_those_sampled() -> None:
    engine, managed = session()
    for _ in range(2):
        engine.tell(THOUGHT + START + ANSWER, end="<|return|>")
    said = {"role": "assistant", "content": "It is mild.", "reasoning_content": "Ha."}
    await managed.chat_completion(messages=[user("Weather?")])
    await managed.chat_completion(messages=[user("Weather?"), said, user("And now?")])
    assert managed.broken_prefixes == {"thoughts": 1}


async def test_equal_answers_are_told_apart_by_their_thoughts() -> None:
    engine, managed = session()
    for thought in ("One.", "Two.", "Three."):
        engine.tell(message("analysis", thought) + START + ANSWER, end="<|return|>")
    asked = [user("Weather?")]
    await managed.chat_completion(messages=asked)
    second = await managed.chat_completion(messages=asked)
    await managed.chat_completion(messages=[*asked, second.choices[0].message, user("And now?")])
    texts = [node.full_text for node in managed.nodes]
    assert [("One." in text, "Two." in text, "Three." in text) for text in texts] == [
        (True, False, False),
        (False, True, True),
    ]


async def test_the_model_continues_its_final_message() -> None:
    engine, managed = session()
    engine.tell(THOUGHT + START + ANSWER, end="<|return|>")
    await managed.chat_completion(messages=[user("Weather?")])
    engine.tell(" And dry.", end="<|return|>")
    said = {"role": "assistant", "content": "It is mild."}
    reply = await managed.chat_completion(messages=[user("Weather?"), said])
    assert reply.choices[0].message.content == " And dry."
    assert managed.nodes[-1].full_text.endswith(THOUGHT + START + ANSWER + " And dry.<|return|>")
