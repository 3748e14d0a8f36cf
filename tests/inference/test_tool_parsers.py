"""Every style reads what it writes, and takes nothing for a call that is not one."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.parsers import STYLES, Call, Style, style_named
from atroposlib.inference.tools.parsers.style import Parsed
from tests.inference.tool_samples import DS, SAMPLED, TOOLS

DISTINCT = sorted({id(style): style for style in STYLES.values()}.values(), key=lambda s: s.name)
TAGGED = {"qwen3_coder", "glm45", "minimax_m2", "deepseek_v32"}
JSON_STYLES = [style for style in DISTINCT if style.name not in TAGGED]
HARMONY = STYLES["gpt_oss"]

WEATHER = {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}
ONE = (Call(**WEATHER),)


def read(style: Style, text: str, tools: Any = ()) -> Parsed:
    """Parse without the ids of Kimi K2, which has the name and the number of every call in them."""
    content, calls = style.parse(text, tools)
    is_kimi = style.name == "kimi_k2"
    return Parsed(content, tuple(call._replace(id=None) if is_kimi else call for call in calls))


every_style = pytest.mark.parametrize("style", DISTINCT, ids=lambda style: style.name)
every_style_with_think_tags = pytest.mark.parametrize(
    "style", [style for style in DISTINCT if style is not HARMONY], ids=lambda style: style.name
)
every_json_style = pytest.mark.parametrize("style", JSON_STYLES, ids=lambda style: style.name)


def test_every_style_has_a_sample() -> None:
    assert {style.name for style in DISTINCT} == set(SAMPLED)


@every_style
def test_what_models_of_a_style_write_is_a_call(style: Style) -> None:
    assert read(style, SAMPLED[style.name], TOOLS) == ("", ONE)


@every_style
def test_a_call_is_written_as_the_model_writes_it(style: Style) -> None:
    assert style.render(ONE) == SAMPLED[style.name]


@every_style
def test_no_calls_are_no_text(style: Style) -> None:
    assert style.render(()) == ""


@every_style_with_think_tags
def test_text_before_and_after_a_call_is_the_content(style: Style) -> None:
    text = f"Let me look.\n{SAMPLED[style.name]}\nDone."
    assert read(style, text, TOOLS) == ("Let me look.\nDone.", ONE)


@every_style_with_think_tags
def test_calls_inside_closed_thinking_are_not_calls(style: Style) -> None:
    thinking = f"<think>{SAMPLED[style.name]}</think>"
    assert read(style, f"{thinking} No.", TOOLS) == (f"{thinking} No.", ())
    assert read(style, f"{thinking}\n{SAMPLED[style.name]}", TOOLS) == (thinking, ONE)


@every_style
def test_text_without_a_call_is_returned_as_it_is(style: Style) -> None:
    for text in ["", " plain \n", "{", "<tool_call>", "[TOOL_CALLS]", '{"name": "Bob"}', "```json"]:
        assert style.parse(text, TOOLS) == (text, ())


@every_style
def test_a_call_that_was_cut_off_is_text(style: Style) -> None:
    sample = SAMPLED[style.name]
    cut = sample[: sample.index("2")]
    assert style.parse(cut, TOOLS) == (cut, ())


@every_json_style
def test_strings_may_hold_the_marks_of_a_call(style: Style) -> None:
    nasty = {"text": SAMPLED[style.name] + '</think> } ] ``` " \\ ;', "list": [{"a": {}}, []]}
    calls = (Call("f", json.dumps(nasty)), Call("g", json.dumps(nasty, ensure_ascii=False)))
    assert read(style, style.render(calls), ()) == ("", calls)


@every_json_style
def test_arguments_are_the_text_that_was_written(style: Style) -> None:
    calls = (Call("f", '{"b":1.50,\n  "a":"\\u00e9 \u00e9",  "c": [ ]}'),)
    assert read(style, style.render(calls), ()) == ("", calls)


@every_json_style
def test_raw_line_breaks_in_strings_become_json(style: Style) -> None:
    text = SAMPLED[style.name].replace("Paris", "Par\nis")
    (call,) = style.parse(text, ()).calls
    assert json.loads(call.arguments) == {"city": "Par\nis", "days": 2}


BAD_ARGUMENTS = ['{"city": Paris}', "{city}", "{'city': 1}", '{"a": 1,}', '{"a": NaN}', '{"a" 1}']


@every_json_style
@pytest.mark.parametrize("bad", BAD_ARGUMENTS)
def test_malformed_json_is_text(style: Style, bad: str) -> None:
    text = SAMPLED[style.name].replace('{"city": "Paris", "days": 2}', bad)
    assert style.parse(text, ()) == (text, ())


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("arguments", ["[1]", "3", "null", '"text"', '"[1]"', '"{\\"a\\": 1} 2"'])
def test_arguments_that_are_no_object_make_no_call(name: str, arguments: str) -> None:
    text = SAMPLED[name].replace('{"city": "Paris", "days": 2}', arguments)
    assert style_named(name).parse(text, ()) == (text, ())


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_arguments_may_be_an_object_in_a_string(name: str) -> None:
    text = SAMPLED[name].replace('{"city": "Paris", "days": 2}', '"{\\"a\\": 1}"')
    assert style_named(name).parse(text, ()).calls == (Call("weather", '{"a": 1}'),)


def test_a_malformed_call_does_not_affect_the_others() -> None:
    good, bad = SAMPLED["hermes"], "<tool_call>{nope}</tool_call>"
    assert style_named("hermes").parse(f"{bad}{good}", ()) == (bad, ONE)
    assert style_named("hermes").parse(f"{good}\n{bad}", ()) == (bad, ONE)


@pytest.mark.parametrize("end", ["", "\n", "</tool", "\n</tool_call"])
def test_hermes_needs_no_closing_tag_at_the_end(end: str) -> None:
    text = SAMPLED["hermes"].removesuffix("\n</tool_call>") + end
    assert style_named("hermes").parse(text, ()) == ("", ONE)
    other = text + " and so on"
    assert style_named("hermes").parse(other, ()) == (other, ())


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "llama3_json",
            'Well.<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": 1}}',
            "Well.",
            (Call("f", "{}"), Call("g", '{"a": 1}')),
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", (Call("f", "{}"),)),
        ("mistral", '[TOOL_CALLS]{"name": "f"}', "", (Call("f", "{}"),)),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123def"}]',
            "",
            (Call("f", "{}", "abc123def"),),
        ),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', "", (Call("f", '{"a": 1}'),)),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
            "",
            (Call("f", '{"a": 1}', "abc123def"), Call("g", "{}")),
        ),
        ("deepseek_v3", SAMPLED["deepseek_v31"], "", ONE),
        ("deepseek_v31", SAMPLED["deepseek_v3"], "", ONE),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>",
            "",
            (Call("f", '{"x": "1"}'),),
        ),
    ],
)
def test_every_generation_of_a_style_is_read(
    name: str, text: str, content: str, calls: tuple[Call, ...]
) -> None:
    assert style_named(name).parse(text, ()) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # Taking `parameters` for nothing would call the tool without its arguments.
        ("hermes", '<tool_call>{"name": "f", "parameters": {"city": "Paris"}}</tool_call>'),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}'),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "Bob", "parameters": {}, "age": 3}'),
        ("llama3_json", '{"name": 3, "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 3]'),
    ],
)
def test_other_json_is_no_call(name: str, text: str) -> None:
    assert style_named(name).parse(text, ()) == (text, ())


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({}, "7", "7"),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "7.5", "7.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "7.5", 7.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "array"}, '[1, "a"]', [1, "a"]),
        ({"type": "object"}, '{"a": {"b": []}}', {"a": {"b": []}}),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, "{broken", "{broken"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"type": "string"}, "two\nlines </parameter> and <b>", "two\nlines </parameter> and <b>"),
    ],
)
def test_qwen_coder_types_values_by_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    sample = (
        f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = style_named("qwen3_coder").parse(sample, tools).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("name", ["mistral", "mistral_v11"])
def test_mistral_ids_are_what_its_templates_accept(name: str) -> None:
    made = style_named(name).new_id()
    assert len(made) == 9
    assert made.isalnum()


# Names.


def test_names_are_found_in_any_spelling() -> None:
    assert style_named("Qwen2.5") is style_named("hermes")
    assert style_named("deepseek-v3.1") is style_named("deepseek_v31")


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no tool parser 'hermse'; did you mean hermes\? Known:"):
        style_named("hermse")


# Properties.

names = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def json_calls(draw: st.DrawFn) -> Call:
    arguments = draw(st.dictionaries(st.text(), values, max_size=4))
    text = json.dumps(
        arguments, ensure_ascii=draw(st.booleans()), indent=draw(st.none() | st.just(1))
    )
    return Call(draw(names), text)


@every_json_style
@settings(max_examples=25, derandomize=True, deadline=None)
@given(calls=st.lists(json_calls(), min_size=1, max_size=3))
def test_what_is_written_is_read_back(style: Style, calls: list[Call]) -> None:
    assert read(style, style.render(calls), ()) == ("", tuple(calls))


TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
typed_values = (
    st.text().filter(lambda text: "</parameter>" not in text)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.booleans()
    | st.lists(values, max_size=3)
    | st.dictionaries(st.text(), values, max_size=3)
)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(name=names, arguments=st.dictionaries(names, typed_values, max_size=4))
def test_what_qwen_coder_writes_is_read_back_with_the_schema(name: str, arguments: Any) -> None:
    properties = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
    tools = [{"function": {"name": name, "parameters": {"properties": properties}}}]
    style = style_named("qwen3_coder")
    call = Call(name, json.dumps(arguments, ensure_ascii=False))
    assert style.parse(style.render([call, call]), tools) == ("", (call, call))


fragments = st.sampled_from(
    [
        *DS.values(),
        *SAMPLED.values(),
        *[sample[: len(sample) // 2] for sample in SAMPLED.values()],
        *[sample[len(sample) // 2 :] for sample in SAMPLED.values()],
        *["<tool_call>", "</tool_call>", "<function=f>", "<parameter=x>", "</parameter>"],
        *["</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>"],
        *["</think>", "[/THINK]", "{", "}", "[", "]", '"', "\\", ";", ",", "\n", "name", "```json"],
    ]
)


@every_style
@settings(max_examples=60, derandomize=True, deadline=None)
@given(parts=st.lists(fragments | st.text(max_size=8), max_size=12))
def test_no_text_raises_and_every_call_is_whole(style: Style, parts: list[str]) -> None:
    text = "".join(parts)
    content, calls = style.parse(text, TOOLS)
    if not calls:
        assert content == text
    for call in calls:
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)


# What a model writes to keep its reader busy


def _floods(size: int) -> dict[str, str]:
    """Texts of about `size` characters in which many calls begin and none ends."""
    begin, separator = DS["tool call begin"], DS["tool sep"]
    nested = '{"a":' * 900 + "NaN" + "}" * 900
    parts = {
        "braces": "{",
        "open objects": '{"a":',
        "nested NaN": nested,
        "digits": '{"a":' + "9" * 5000 + "}",
        "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
        "hermes lists": '<tool_call>{"a": [',
        "mistral": '[TOOL_CALLS][{"name": "f"},',
        "mistral lists": "[TOOL_CALLS][{",
        "parameters": "<function=f><parameter=x></parameter>",
        "ends of thinking": "</think>",
        "deepseek": begin,
        "heads": "<function=a>",
        "ends of turn": "<eos>",
        "spaces": " \n\t",
        **{mark: mark for mark in HARMONY.markers},
        "messages": "<|channel|>commentary to=functions.f<|message|>",
        "roles": "<|start|>assistant to=f ",
        "bodies": "<|start|>assistant<|channel|>analysis x y<|message|>",
    }
    floods = {name: part * (size // len(part)) for name, part in parts.items()}
    half = size // 2
    floods["deepseek late"] = begin * (half // len(begin)) + "x" * half + separator
    head, parameter = "<function=a><parameter=b>", "</parameter><parameter=c>"
    floods["heads of one chain"] = head * (half // len(head)) + parameter * (half // len(parameter))
    floods["one long value"] = head * (half // len(head)) + "x" * half + "</parameter></function>"
    floods["unclosed strings"] = '<tool_call>{"' * (size // 13)
    floods["commas"] = '<tool_call>{",":"' * (size // 17)
    return floods


@every_style
def test_reading_takes_time_in_proportion_to_the_text(style: Style) -> None:
    budget_s = 1.5  # of a busy machine; it was 2 s for 80,000 characters and grew with their square
    for name, text in _floods(160_000).items():
        began = time.thread_time()
        parsed = style.parse(text, TOOLS)
        assert time.thread_time() - began < budget_s, name
        # Qwen3-Coder's arguments may contain its tags.
        assert parsed == (text, ()) or name == "one long value", name


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def below(num_frames: int, work: Callable[[], Any]) -> Any:
    """Run `work` with that many frames of the stack in use, as in an application."""
    return work() if num_frames == 0 else below(num_frames - 1, work)


@every_json_style
def test_arguments_that_nest_deeper_than_any_tools_do_are_text(style: Style) -> None:
    for depth in (101, 200, 300, 400, 940):
        text = style.render((Call("f", nested(depth)),))
        for num_frames in (0, 300, 600):
            assert below(num_frames, lambda text=text: style.parse(text, ())) == (text, ())
    assert style.parse(style.render((Call("f", nested(100)),)), ()).calls


def test_qwen_coder_leaves_values_that_nest_too_deeply_as_text() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "object"}}}}}]
    for depth in (101, 300, 940):
        text = f"<function=f>\n<parameter=x>\n{nested(depth)}\n</parameter>\n</function>"
        (call,) = below(600, lambda text=text: style_named("qwen3_coder").parse(text, tools)).calls
        assert json.loads(call.arguments) == {"x": nested(depth)}


@every_style
def test_half_characters_in_a_call_are_replaced(style: Style) -> None:
    for written in ('"\\ud800"', '"a\\uDFFFb"', '"\\ud83d\\ude00 \\ude00"'):
        text = style.render((Call("weather", '{"city": ' + written + "}"),))
        for call in style.parse(text, TOOLS).calls:
            call.name.encode()
            call.arguments.encode()
            assert json.loads(call.arguments)["city"].encode()


@every_json_style
def test_whole_characters_in_a_call_stay_as_they_were_written(style: Style) -> None:
    arguments = '{"city": "\\ud83d\\ude00", "days":  2}'
    text = style.render((Call("weather", arguments),))
    assert read(style, text, TOOLS).calls == (Call("weather", arguments),)


@every_json_style
def test_an_object_with_nan_is_no_call_and_what_follows_is(style: Style) -> None:
    bad = style.render((Call("weather", '{"days": NaN}'),))
    (call,) = read(style, f"{bad}\n{SAMPLED[style.name]}", TOOLS).calls
    assert call == ONE[0]


def test_kimi_has_the_name_and_the_number_in_the_id() -> None:
    style = style_named("kimi_k2")
    (call,) = style.parse(SAMPLED["kimi_k2"]).calls
    assert call == ONE[0]._replace(id="functions.weather:0")
    assert style.render([call, *ONE]).count("functions.weather:") == 2
    for head in ("weather", "functions.weather", "weather:x"):
        text = SAMPLED["kimi_k2"].replace("functions.weather:0", head)
        assert style.parse(text) == (text, ())


def test_a_parser_of_vllm_needs_vllm() -> None:
    with pytest.raises(ConfigError, match="'vllm:hermes' needs vLLM with a tool parser 'hermes'"):
        style_named("vllm:hermes")
