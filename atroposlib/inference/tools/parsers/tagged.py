"""The styles that write one tag per argument: Qwen3-Coder, GLM, MiniMax M2 and DeepSeek V3.2.

Values are plain text, typed by the tool's JSON schema. Nothing is escaped: a value may contain anything but its closing
tag followed by another tag of the call. Formats as in the models' chat templates and in vLLM's parsers.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.inference.tools.parsers.json_text import nests_too_deeply
from atroposlib.inference.tools.parsers.style import Call, FoundCalls, Style, Tools, by_places

_PLACES = {
    "{name}": r"(?P<name>[^<>\s]+)",
    "{key}": r"(?P<key>[^<>\n]+?)",
    "{is_text}": r"(?P<is_text>true|false)",
}


def _pattern(template: str) -> str:
    """Return the expression that reads what a template writes, with any white space between its tags."""
    parts = re.split(r"(\{\w+\}|\n)", template)
    return "".join(_PLACES.get(part, r"\s*" if part == "\n" else re.escape(part)) for part in parts)


@dataclass(frozen=True)
class _Tags:
    """The texts of one format. Line feeds are what the model writes; any white space is read."""

    section: str
    """Before the call, or before the first of all calls if `shares_section`. May be missing; "" if there is none."""
    head: str
    parameter: str
    """Before a value."""
    parameter_end: str
    end: str
    section_end: str
    shares_section: bool = False
    """Whether one section contains all calls."""
    has_lines: bool = False
    """Whether a value has lines of its own."""

    @functools.cached_property
    def head_read(self) -> re.Pattern[str]:
        section = f"(?:{_pattern(self.section)})?" if self.section else ""
        return re.compile(section + _pattern(self.head))

    @functools.cached_property
    def parameter_read(self) -> re.Pattern[str]:
        return re.compile(r"\s*" + _pattern(self.parameter))

    @functools.cached_property
    def parameter_end_read(self) -> re.Pattern[str]:
        opening = re.escape(self.parameter.partition("{")[0])
        return re.compile(
            rf"{re.escape(self.parameter_end)}(?=\s*(?:{opening}|{re.escape(self.end)}))"
        )

    @functools.cached_property
    def end_read(self) -> re.Pattern[str]:
        section_end = f"(?:{_pattern(self.section_end)})?" if self.section_end else ""
        return re.compile(rf"\s*{re.escape(self.end)}" + section_end)

    def find(self, text: str, tools: Tools) -> list[FoundCalls]:
        found = []
        ends = [match.start() for match in self.parameter_end_read.finditer(text)]
        dead_ends: set[int] = set()
        """Positions after which the arguments are known not to end in `end`; several heads may reach one."""
        at = 0
        while (head := self.head_read.search(text, at)) is not None:
            at = head.end()
            values: list[tuple[re.Match[str], str]] = []
            passed: list[int] = []
            while (
                at not in dead_ends
                and (parameter := self.parameter_read.match(text, at)) is not None
            ):
                index = bisect.bisect_left(ends, parameter.end())
                if index == len(ends):
                    break
                values.append((parameter, text[parameter.end() : ends[index]]))
                at = ends[index] + len(self.parameter_end)
                passed.append(at)
            tail = None if at in dead_ends else self.end_read.match(text, at)
            if tail is None:
                dead_ends.update(passed)
                at = head.end()
                continue
            at = tail.end()
            schemas = _schemas(tools, head["name"])
            arguments = {
                parameter["key"].strip(): self._value(parameter, value, schemas)
                for parameter, value in values
            }
            call = Call(head["name"], json.dumps(arguments, ensure_ascii=False))
            found.append(FoundCalls(head.start(), at, (call,)))
        return found

    def _value(self, parameter: re.Match[str], value: str, schemas: Mapping[str, Any]) -> Any:
        if self.has_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        schema = schemas.get(parameter["key"].strip())
        if not _types(schema) and parameter.groupdict().get("is_text") == "false":
            schema = _ANY
        return _typed(value, schema)

    def render(self, calls: Sequence[Call]) -> str:
        if not calls:
            return ""
        if self.shares_section:
            body = "\n".join(map(self._render_call, calls))
            return f"{self.section}{body}{self.section_end}"
        return "\n".join(
            f"{self.section}{self._render_call(call)}{self.section_end}" for call in calls
        )

    def _render_call(self, call: Call) -> str:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):  # written by an agent; the format cannot express it
            arguments = {"arguments": call.arguments}
        line = "\n" if self.has_lines else ""
        parts = [self.head.replace("{name}", call.name)]
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            opening = self.parameter.replace("{key}", key)
            opening = opening.replace("{is_text}", "true" if is_text else "false")
            parts.append(f"{opening}{line}{text}{line}{self.parameter_end}")
        return "\n".join([*parts, self.end])

    def style(self, name: str, *markers: str) -> Style:
        return Style(name=name, split=by_places(self.find), render=self.render, markers=markers)


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
_ANY = {"type": ["null", "boolean", *_PYTHON]}


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

QWEN3_CODER = _Tags(
    section=f"{_OPEN}\n",
    head="<function={name}>",
    parameter="<parameter={key}>",
    parameter_end="</parameter>",
    end="</function>",
    section_end=f"\n{_CLOSE}",
    has_lines=True,
).style("qwen3_coder", _OPEN, _CLOSE, "<function=")

GLM = _Tags(
    section="",
    head=f"{_OPEN}{{name}}",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>",
    parameter_end="</arg_value>",
    end=_CLOSE,
    section_end="",
).style("glm45", _OPEN, _CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

MINIMAX_M2 = _Tags(
    section="<minimax:tool_call>\n",
    head='<invoke name="{name}">',
    parameter='<parameter name="{key}">',
    parameter_end="</parameter>",
    end="</invoke>",
    section_end="\n</minimax:tool_call>",
    shares_section=True,
).style("minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=")

_DSML = "\uff5cDSML\uff5c"

DEEPSEEK_V32 = _Tags(
    section=f"<{_DSML}function_calls>\n",
    head=f'<{_DSML}invoke name="{{name}}">',
    parameter=f'<{_DSML}parameter name="{{key}}" string="{{is_text}}">',
    parameter_end=f"</{_DSML}parameter>",
    end=f"</{_DSML}invoke>",
    section_end=f"\n</{_DSML}function_calls>",
    shares_section=True,
).style("deepseek_v32", f"<{_DSML}", f"</{_DSML}")
