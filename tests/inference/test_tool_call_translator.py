"""Tool calls go out in the OpenAI form and come back as the text that the model wrote."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
from tokenizers import AddedToken

from atroposlib.errors import ConfigError
from atroposlib.inference.tools import translator as tool_call_translator
from atroposlib.inference.tools.translator import ToolCallTranslator
from tests.inference.tool_samples import SAMPLED
from tests.inference.tool_samples import TOOLS as WEATHER

RAW = '<tool_call>{"name": "search", "arguments": {"query":  "cats"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search"}}]


class Tokenizer:
    """Characters are tokens; 1 and 2 are the special tokens <s> and <|im_end|>."""

    eos_token = "<|im_end|>"
    all_special_tokens = ("<s>", "<|im_end|>")

    def __init__(self, vocabulary: dict[str, int] | None = None) -> None:
        self.vocabulary = vocabulary or {}
        self.added_tokens_decoder: dict[int, AddedToken] = {}

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        special = {1: "<s>", 2: "<|im_end|>"}
        texts = [special.get(token, chr(token)) for token in tokens]
        return "".join(t for t in texts if not (skip_special_tokens and t in special.values()))


@pytest.fixture
def translator() -> ToolCallTranslator:
    return ToolCallTranslator(Tokenizer())


def dicts(tool_calls: Any) -> list[dict[str, Any]]:
    return [call.model_dump() for call in tool_calls]


# Outwards.


def test_tools_need_no_vllm() -> None:
    assert tool_call_translator.VLLM_AVAILABLE is True


def test_a_call_is_in_the_openai_form(translator: ToolCallTranslator) -> None:
    content, tool_calls, reason = translator.parse_model_output(
        RAW, tool_choice="auto", tools=TOOLS
    )
    assert (content, reason) == (None, "tool_calls")
    assert tool_calls is not None
    (call,) = dicts(tool_calls)
    assert call == {
        "id": tool_calls[0].id,
        "type": "function",
        "function": {"name": "search", "arguments": '{"query":  "cats"}'},
    }
    assert (
        len({call["id"]} | {dicts(translator.parse_model_output(RAW, None, TOOLS)[1])[0]["id"]})
        == 2
    )


@pytest.mark.parametrize(
    ("tool_choice", "tools"), [("none", TOOLS), ("auto", None), ("auto", []), (None, None)]
)
def test_without_tools_nothing_is_a_call(
    translator: ToolCallTranslator, tool_choice: str | None, tools: Any
) -> None:
    assert translator.parse_model_output(RAW, tool_choice, tools) == (RAW, None, "stop")


@pytest.mark.parametrize("text", ["It is 72 F.<|im_end|>", "<tool_call>not json</tool_call>", ""])
def test_text_without_a_call_is_returned_as_it_is(
    translator: ToolCallTranslator, text: str
) -> None:
    assert translator.parse_model_output(text, "auto", TOOLS) == (text, None, "stop")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n<s>", " "])
def test_the_end_of_turn_is_no_content(translator: ToolCallTranslator, end: str) -> None:
    content, tool_calls, _ = translator.parse_model_output(RAW + end, tools=TOOLS)
    assert content is None
    assert tool_calls is not None
    assert translator.call_id_to_raw_text[tool_calls[0].id].rstrip() == RAW


def test_special_tokens_that_only_the_added_tokens_list_are_ends_of_turn() -> None:
    tokenizer = Tokenizer()
    tokenizer.added_tokens_decoder = {
        7: AddedToken("<|eom_id|>", special=True),
        8: AddedToken("}", special=False),
    }
    text = '<|python_tag|>{"name": "search", "parameters": {}}<|eom_id|>'
    parsed = ToolCallTranslator(tokenizer, "llama3_json").parse_model_output(text, tools=TOOLS)
    assert parsed.content is None
    assert parsed.finish_reason == "tool_calls"


def test_values_are_typed_by_the_tools() -> None:
    properties = {"n": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    ]
    text = "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    parsed = ToolCallTranslator(Tokenizer(), "qwen3_coder").parse_model_output(text, tools=tools)
    assert dicts(parsed.tool_calls)[0]["function"] == {"name": "f", "arguments": '{"n": 3}'}


def test_tokens_are_decoded_with_special_ones_where_there_are_tools(
    translator: ToolCallTranslator,
) -> None:
    tokens = [1, 72, 105, 2]
    assert translator.decode_with_tool_awareness(tokens, has_tools=True) == "<s>Hi<|im_end|>"
    assert translator.decode_with_tool_awareness(tokens) == "Hi"


# Inwards.


def test_parsed_calls_are_rendered_as_the_answer_that_contained_them(
    translator: ToolCallTranslator,
) -> None:
    text = f"<think>hm</think> I look. {RAW}\n\n{RAW}"
    content, tool_calls, _ = translator.parse_model_output(text, tools=TOOLS)
    calls = dicts(tool_calls)
    assert translator.reconstruct_raw_text_from_tool_calls(calls) == text
    for call in calls:  # clients parse and write the arguments again
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    for said in [content, None, "", [{"type": "text", "text": content}]]:
        message = {"role": "assistant", "content": said, "tool_calls": calls, "name": "bot"}
        assert translator.convert_messages_for_template([message]) == [
            {"role": "assistant", "content": text, "name": "bot"}
        ]


@pytest.mark.parametrize("name", SAMPLED)
def test_answers_of_every_style_come_back_character_by_character(name: str) -> None:
    translator = ToolCallTranslator(Tokenizer(), name)
    said = "<think>\nhm </think>  I look."
    begin = f"<|channel|>final<|message|>{said}<|end|>" if name == "gpt_oss" else said
    text = f"{begin}\n\n{SAMPLED[name]}\n\n{SAMPLED[name]}  and so on "
    content, tool_calls, _ = translator.parse_model_output(f"{text}<|im_end|>", tools=WEATHER)
    assert content == f"{said}\nand so on"
    assert [call["function"]["name"] for call in dicts(tool_calls)] == ["weather", "weather"]
    message = {"role": "assistant", "content": content, "tool_calls": dicts(tool_calls)}
    (converted,) = translator.convert_messages_for_template([message])
    assert converted["content"] == text


def test_calls_that_an_agent_changed_are_not_the_sampled_ones(
    translator: ToolCallTranslator,
) -> None:
    _, tool_calls, _ = translator.parse_model_output(f"{RAW}{RAW}", tools=TOOLS)
    calls = dicts(tool_calls)
    rebuilt = '<tool_call>\n{"name": "search", "arguments": {"query":  "cats"}}\n</tool_call>'
    assert translator.reconstruct_raw_text_from_tool_calls(calls[:1]) == rebuilt
    calls[1]["function"]["arguments"] = '{"query": "dogs"}'
    assert "dogs" in translator.reconstruct_raw_text_from_tool_calls(calls)
    message = {"role": "assistant", "content": "other", "tool_calls": dicts(tool_calls)}
    (converted,) = translator.convert_messages_for_template([message])
    assert converted["content"] == f"other\n{rebuilt}\n{rebuilt}"


def test_unknown_calls_are_written_in_the_style_of_the_model() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00e9"}}}
    llama = ToolCallTranslator(Tokenizer(), "llama3_json")
    assert llama.reconstruct_raw_text_from_tool_calls([call, call]) == (
        '{"name": "f", "parameters": {"a": "\u00e9"}}; {"name": "f", "parameters": {"a": "\u00e9"}}'
    )


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_empty_arguments_are_an_empty_object(
    translator: ToolCallTranslator, arguments: Any
) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
    assert translator.reconstruct_raw_text_from_tool_calls([call]) == (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )


def test_arguments_that_are_no_json_become_a_string(translator: ToolCallTranslator) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": "a=1"}}
    assert '"arguments": "a=1"' in translator.reconstruct_raw_text_from_tool_calls([call])


def test_messages_without_calls_stay_as_they_are(translator: ToolCallTranslator) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!", "tool_calls": []},
        {"role": "tool", "tool_call_id": "a", "content": "5 cats"},
    ]
    assert translator.convert_messages_for_template(messages) == messages


# Memory.


def test_memory_of_calls_is_bounded_and_keeps_those_in_use(
    translator: ToolCallTranslator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_call_translator, "MAX_REMEMBERED_CALLS", 3)

    def say(text: str) -> list[dict[str, Any]]:
        return dicts(translator.parse_model_output(f"{text}{RAW}", tools=TOOLS)[1])

    first = say("first")
    for i in range(5):
        say(f"{i}")
        assert translator.reconstruct_raw_text_from_tool_calls(first) == f"first{RAW}"
        assert len(translator.call_id_to_raw_text) == min(3, i + 2)
    for i in range(3):
        say(f"{i}")
    assert translator.reconstruct_raw_text_from_tool_calls(first).startswith("<tool_call>\n")
    assert len(translator._parsed) == 3


# Which parser.


def test_mistral_writes_in_the_generation_of_its_tokenizer() -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    old, new = Tokenizer(), Tokenizer({"[ARGS]": 9})
    written = [
        ToolCallTranslator(t, "mistral").reconstruct_raw_text_from_tool_calls([call])
        for t in (old, new)
    ]
    assert written == ['[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]f[ARGS]{}"]


def test_an_id_that_the_model_wrote_is_the_calls_id_unless_it_is_taken() -> None:
    translator = ToolCallTranslator(Tokenizer(), "mistral")
    text = "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}"
    first, second = (
        dicts(translator.parse_model_output(text, tools=TOOLS)[1])[0] for _ in range(2)
    )
    assert first["id"] == "abc123def"
    assert second["id"] != "abc123def"
    assert len(second["id"]) == 9


class BorrowedParser:
    """A parser as vLLM has them: "CALL name" is a call."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        if tokenizer.get_vocab().get("refuse"):
            raise RuntimeError("no such token")
        self.tools = tools
        self.reads_tokens = tokenizer.get_vocab().get("reads_tokens")

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        if self.reads_tokens:
            raise NotImplementedError("requires token IDs")
        if text == "boom":
            raise KeyError("boom")
        content, _, name = text.partition("CALL ")
        function = types.SimpleNamespace(
            name=name, arguments=json.dumps({"tools": len(self.tools or ())})
        )
        calls = [types.SimpleNamespace(function=function)] if name else []
        return types.SimpleNamespace(tools_called=bool(name), tool_calls=calls, content=content)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        list_registered = staticmethod(lambda: ["odd", "hermes"])
        get_tool_parser = staticmethod({"odd": BorrowedParser}.__getitem__)

    manager, protocol = types.ModuleType("manager"), types.ModuleType("protocol")
    manager.ToolParserManager = Manager  # type: ignore[attr-defined]
    protocol.ChatCompletionRequest = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers.abstract_tool_parser", manager)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.chat_completion.protocol", protocol)


@pytest.mark.usefixtures("vllm")
def test_parsers_that_only_vllm_has_are_borrowed(caplog: pytest.LogCaptureFixture) -> None:
    translator = ToolCallTranslator(Tokenizer(), "odd")
    content, tool_calls, reason = translator.parse_model_output("So CALL f", tools=TOOLS)
    assert (content, reason) == ("So", "tool_calls")
    assert dicts(tool_calls)[0]["function"] == {"name": "f", "arguments": '{"tools": 1}'}
    assert translator.parse_model_output("no", tools=TOOLS) == ("no", None, "stop")
    assert translator.reconstruct_raw_text_from_tool_calls(dicts(tool_calls)) == "So CALL f"
    assert translator.parse_model_output("boom", tools=TOOLS) == ("boom", None, "stop")
    assert "vLLM's tool parser odd failed" in caplog.text


@pytest.mark.usefixtures("vllm")
def test_unknown_names_are_refused_with_the_names_of_both_sources() -> None:
    with pytest.raises(ConfigError, match=r"did you mean odd\? Known: .*hermes, .*odd, "):
        ToolCallTranslator(Tokenizer(), "oddd")
    with pytest.raises(ConfigError, match="'odd' refuses the tokenizer: no such token"):
        ToolCallTranslator(Tokenizer({"refuse": 1}), "odd")
    with pytest.raises(ConfigError, match="'odd' cannot read the text of an answer: .*token IDs"):
        ToolCallTranslator(Tokenizer({"reads_tokens": 1}), "odd")
