"""What counts as a tool call, and what a bad one is reported as."""

import json
from typing import Any

import pytest

from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call


def wrap(content: str) -> str:
    return f"I will look. <tool_call>\n{content}\n</tool_call> done"


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "say", "arguments": {"t": "x"}}', ("say", {"t": "x"}, False)),
        # Python's quotes, as a last resort.
        ("{'name': 'say', 'arguments': {'n': 1}}", ("say", {"n": 1}, False)),
        # A line break inside a string.
        ('{"name": "say", "arguments": {"t": "a\nb"}}', ("say", {"t": "a\nb"}, False)),
        # Arguments as JSON text.
        ('{"name": "say", "arguments": "{\\"a\\": 1}"}', ("say", {"a": 1}, False)),
        # An unknown tool keeps its arguments.
        ('{"name": "rm", "arguments": {"path": "/"}}', ("-ERROR-", {"path": "/"}, True)),
    ],
)
def test_calls_are_read_as_models_write_them(text: str, call: tuple[str, Any, bool]) -> None:
    assert parse_tool_call(wrap(text), ["say"]) == call


def test_apostrophes_in_arguments_survive() -> None:
    text = json.dumps({"name": "say", "arguments": {"text": "it's John's"}})
    assert parse_tool_call(wrap(text)).arguments == {"text": "it's John's"}


@pytest.mark.parametrize("tool", [{"name": "ls"}, {"type": "function", "function": {"name": "ls"}}])
def test_tools_may_be_openai_descriptions(tool: dict[str, object]) -> None:
    assert not parse_tool_call(wrap('{"name": "ls"}'), [tool]).is_error


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        wrap(""),
        wrap("{"),
        wrap("[1]"),
        wrap('"text"'),
        wrap('{"arguments": {}}'),
        wrap('{"name": "f", "arguments": [1]}'),
        wrap('{"name": 3}'),
        wrap("[" * 100_000),
    ],
)
def test_what_cannot_be_read_is_an_error_and_never_an_exception(text: str) -> None:
    assert parse_tool_call(text) == ("-ERROR-", {}, True)


def test_the_first_tag_that_is_not_empty_wins() -> None:
    text = "<tool_call> </tool_call><tool_call>b</tool_call><act>a</act>"
    assert extract_tool_call(text) == "b"
    assert extract_tool_call(text, ["act", "tool_call"]) == "a"
    assert extract_tool_call("<tool_call>open") is None
