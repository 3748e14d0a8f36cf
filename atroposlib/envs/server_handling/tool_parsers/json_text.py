"""JSON objects inside a longer text, with the text of their members as it was written.

Lenient in one thing: models write raw line breaks into strings. Everything else that JSON forbids is no object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.tool_parsers.style import Call

_SPACE = re.compile(r"[ \t\r\n]*")
_BESIDE = {"id", "type"}
"""Members that a call may have beside its name and arguments."""


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


class Member(NamedTuple):
    value: Any
    text: str
    """As written."""


class Object(NamedTuple):
    members: dict[str, Member]
    end: int
    """Where the text goes on."""


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def read_object(text: str, start: int) -> Object | None:
    """Read the JSON object that begins at `start`; None if there is none."""
    read = read_or_pass(text, start)
    return read if isinstance(read, Object) else None


def read_or_pass(text: str, start: int) -> Object | int:
    """Read the JSON object that begins at `start`, or return where to go on: what it holds up to there is no object."""
    try:
        return _read_object(text, start)
    except json.JSONDecodeError as error:
        return max(error.pos, start + 1)
    except ValueError:  # a constant such as NaN, or a number of thousands of digits
        return start + 1
    except RecursionError:
        return len(text)


def _read_object(text: str, start: int) -> Object:
    _expect("{", text, start)
    members: dict[str, Member] = {}
    at = skip_space(text, start + 1)
    if text[at : at + 1] == "}":
        return Object(members, at + 1)
    while True:
        _expect('"', text, at)
        key, at = _DECODER.raw_decode(text, at)
        at = skip_space(text, at)
        _expect(":", text, at)
        begin = skip_space(text, at + 1)
        value, at = _DECODER.raw_decode(text, begin)
        members[key] = Member(value, text[begin:at])
        at = skip_space(text, at)
        if text[at : at + 1] == "}":
            return Object(members, at + 1)
        _expect(",", text, at)
        at = skip_space(text, at + 1)


def _expect(mark: str, text: str, at: int) -> None:
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"no {mark}", text, at)


def call_of(
    members: dict[str, Member], *, keys: Sequence[str] = ("arguments",), needs_arguments: bool
) -> Call | None:
    """Return the call that an object describes, under the first of `keys` that it has; None if it is not a call."""
    name = members.get("name")
    key = next((key for key in keys if key in members), None)
    if name is None or not isinstance(name.value, str) or not name.value.strip():
        return None
    if (key is None and needs_arguments) or members.keys() - {"name", key, *_BESIDE}:
        return None
    arguments = "{}" if key is None else arguments_of(members[key])
    if arguments is None:
        return None
    own_id = members["id"].value if "id" in members else None
    return Call(name.value, arguments, own_id if isinstance(own_id, str) and own_id else None)


def arguments_of(member: Member) -> str | None:
    """Return arguments as the text of a JSON object; None if they are something else.

    A string that holds an object is taken as one: the OpenAI API writes arguments so.
    """
    value, text = member
    if isinstance(value, str):
        text = value.strip()
        inner = read_object(text, 0)
        if inner is None or inner.end != len(text):
            return None
        value = {key: one.value for key, one in inner.members.items()}
    if not isinstance(value, dict):
        return None
    try:
        json.loads(text)
    except ValueError:  # raw line breaks inside strings
        return json.dumps(value, ensure_ascii=False)
    return text


def is_object(text: str) -> bool:
    """Whether a text is a JSON object and nothing else."""
    start = skip_space(text, 0)
    read = read_object(text, start)
    return read is not None and skip_space(text, read.end) == len(text)


def write_call(call: Call, *, key: str = "arguments") -> str:
    """Write a call as JSON, the arguments exactly as they are; text that is no object is written as a string."""
    arguments = call.arguments if is_object(call.arguments) else json.dumps(call.arguments)
    own_id = f', "id": {json.dumps(call.id)}' if call.id else ""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "{key}": {arguments}{own_id}}}'
