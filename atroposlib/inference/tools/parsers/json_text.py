"""JSON objects inside a longer text, with the verbatim text of their members.

Lenient in one point: strings may contain raw line breaks, as models write them. Anything else that is invalid JSON is
not an object. Finding all calls in a text takes time linear in its length.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.inference.tools.parsers.style import Call

_SPACE = re.compile(r"[ \t\r\n]*")
_BESIDE = {"id", "type"}
"""Members that a call may have beside its name and arguments."""


MAX_DEPTH = 100
"""Of arguments. Python's writer of JSON and chat templates fail at a depth that depends on the stack in use."""
_MAX_DIGITS = 4000
"""Python refuses to read integers of more digits."""


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else math.nan


# NaN, Infinity and overlong integers are read as NaN, which no call may contain: raising would read the text before
# them again from every brace in it.
_DECODER = json.JSONDecoder(
    strict=False, parse_constant=lambda name: math.nan, parse_int=_read_integer
)


class _Text(str):
    """A text without line counts: JSONDecodeError counts all lines before each error."""

    def count(self, *args: Any) -> int:
        return 0

    def rfind(self, *args: Any) -> int:
        return -1


class JsonMember(NamedTuple):
    value: Any
    text: str
    """Verbatim."""


class Reader:
    """Reads objects at any position of one text, with a bound on unsuccessful reading.

    Otherwise a text in which many objects begin and none ends would be read again from each of them.
    """

    def __init__(self, text: str) -> None:
        self._text = _Text(text)
        self._left = 16 * len(text) + 4096
        """Characters that may still be read without finding an object. Ordinary texts need few."""

    def read(self, start: int) -> Object | int:
        """Return the object that begins at `start`; if there is none, the position where reading failed."""
        if self._left <= 0:
            return len(self._text)
        try:
            return _read_object(self._text, start)
        except json.JSONDecodeError as error:
            failed = max(error.pos, start + 1)
        except RecursionError:
            failed = len(self._text)
        self._left -= failed - start
        return failed

    def read_object(self, start: int) -> Object | None:
        """Read the object that begins at `start`; None if there is none."""
        read = self.read(start)
        return read if isinstance(read, Object) else None


class Object(NamedTuple):
    members: dict[str, JsonMember]
    end: int
    """The position after the object."""


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _whole_object(text: str) -> Object | None:
    """Read a text that is a JSON object; None if it is anything else."""
    read = Reader(text).read_object(skip_space(text, 0))
    return read if read is not None and skip_space(text, read.end) == len(text) else None


def _read_object(text: str, start: int) -> Object:
    _expect("{", text, start)
    members: dict[str, JsonMember] = {}
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
        members[key] = JsonMember(value, text[begin:at])
        at = skip_space(text, at)
        if text[at : at + 1] == "}":
            return Object(members, at + 1)
        _expect(",", text, at)
        at = skip_space(text, at + 1)


def _expect(mark: str, text: str, at: int) -> None:
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"no {mark}", text, at)


def call_of(
    members: dict[str, JsonMember], *, keys: Sequence[str] = ("arguments",), needs_arguments: bool
) -> Call | None:
    """Return the call that an object describes; its arguments are under the first of `keys`. None if it is no call."""
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


def nests_too_deeply(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_DEPTH` lists and objects inside one another."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        ]
        if not parts:
            return False
        level = [inner for part in parts for inner in part]
    return True


def arguments_of(member: JsonMember) -> str | None:
    """Return arguments as the text of a JSON object; None if they are something else.

    A string that contains an object counts as one, as in the OpenAI API.
    """
    value, text = member
    if isinstance(value, str):
        text = value.strip()
        inner = _whole_object(text)
        if inner is None:
            return None
        value = {key: one.value for key, one in inner.members.items()}
    if not isinstance(value, dict) or nests_too_deeply(value):
        return None
    try:
        rewritten = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN
        return None
    try:
        json.loads(text)
    except ValueError:  # raw line breaks inside strings
        return rewritten
    return text


def arguments_at(text: str, at: int, reader: Reader) -> tuple[str, int] | None:
    """Return the arguments at `at` and the position after them."""
    start = skip_space(text, at)
    read = reader.read_object(start)
    if read is None:
        return None
    value = {key: member.value for key, member in read.members.items()}
    arguments = arguments_of(JsonMember(value, text[start : read.end]))
    return None if arguments is None else (arguments, read.end)


def write_call(call: Call, *, key: str = "arguments") -> str:
    """Write a call as JSON with its arguments verbatim, or as a string if they are not a JSON object."""
    arguments = call.arguments if _whole_object(call.arguments) else json.dumps(call.arguments)
    own_id = f', "id": {json.dumps(call.id)}' if call.id else ""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "{key}": {arguments}{own_id}}}'
