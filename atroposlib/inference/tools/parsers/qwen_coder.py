"""The style of Qwen3-Coder: one tag per argument, values as plain text, typed by the tool's JSON schema.

Nothing is escaped: a value may contain anything but its closing tag followed by another tag of the call.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.inference.tools.parsers.json_text import nests_too_deeply
from atroposlib.inference.tools.parsers.style import Call, FoundCalls, Style, Tools, by_places

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]+)>")
_FUNCTION_END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")


def _find(text: str, tools: Tools) -> list[FoundCalls]:
    found = []
    ends = [match.start() for match in _PARAMETER_END.finditer(text)]
    dead_ends: set[int] = set()
    """Positions after which the arguments are known not to end in `</function>`; several heads may reach one."""
    at = 0
    while (head := _FUNCTION.search(text, at)) is not None:
        at = head.end()
        values: list[tuple[str, int, int]] = []
        passed: list[int] = []
        while at not in dead_ends and (parameter := _PARAMETER.match(text, at)) is not None:
            index = bisect.bisect_left(ends, parameter.end())
            if index == len(ends):
                break
            values.append((parameter[1], parameter.end(), ends[index]))
            at = ends[index] + len("</parameter>")
            passed.append(at)
        tail = None if at in dead_ends else _FUNCTION_END.match(text, at)
        if tail is None:
            dead_ends.update(passed)
            at = head.end()
            continue
        at = tail.end()
        schemas = _schemas(tools, head[1])
        arguments = {
            name: _typed(text[start:end].removeprefix("\n").removesuffix("\n"), schemas.get(name))
            for name, start, end in values
        }
        call = Call(head[1], json.dumps(arguments, ensure_ascii=False))
        found.append(FoundCalls(head.start(), at, (call,)))
    return found


def _schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schemas of a tool's arguments by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return schemas if isinstance(schemas, Mapping) else {}
    return {}


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else set(own) if isinstance(own, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            types |= _types(part)
    return types


def _typed(value: str, schema: Any) -> Any:
    """Read a value as one of the types that its schema allows; text if none fits or there is no schema."""
    types = _types(schema)
    if "null" in types and value.strip().lower() in ("null", "none"):
        return None
    if "boolean" in types and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    wanted = tuple(python for name, python in _PYTHON.items() if name in types)
    if not wanted:
        return value
    try:
        read = json.loads(value)
        json.dumps(read, allow_nan=False)
    except (ValueError, RecursionError):
        return value
    fits = isinstance(read, wanted) and not isinstance(read, bool)
    return read if fits and not nests_too_deeply(read) else value


_PYTHON: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def _render(calls: Sequence[Call]) -> str:
    return "\n".join(map(_render_call, calls))


def _render_call(call: Call) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):  # written by an agent; the format cannot express it
        arguments = {"arguments": call.arguments}
    lines = [_OPEN, f"<function={call.name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", _CLOSE])


QWEN3_CODER = Style(
    name="qwen3_coder",
    split=by_places(_find),
    render=_render,
    markers=(_OPEN, _CLOSE, "<function="),
)
