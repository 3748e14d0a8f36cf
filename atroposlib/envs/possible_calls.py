"""Judge tool calls by the values that are possible for each argument: the rules of the Berkeley Function Calling
Leaderboard (BFCL, its `ast_checker`). Pure functions; values are JSON. No call is run.

An expected call is `{name: {parameter: [possible values]}}`; "" among the values means that the parameter may be left
out. A value has the type of the function's description, or that of the possible values, which then name a variable.
Texts are compared without case, spaces and `,./-_*^`, and with either kind of quotes.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from atroposlib.envs.tool_env import ToolCall

Possible: TypeAlias = Mapping[str, Mapping[str, Sequence[Any]]]
"""One expected call: its name and the possible values of its parameters."""
Described: TypeAlias = Mapping[str, Any]
"""A function with `name` and `parameters`, a JSON schema with the type names of BFCL."""

_TYPES: dict[str, type] = {
    **{"string": str, "integer": int, "float": float, "boolean": bool, "array": list},
    **{"tuple": list, "dict": dict, "any": str},
    **dict.fromkeys(("byte", "short", "long", "Bigint"), int),  # of Java and JavaScript
    **{"double": float, "Boolean": bool, "String": str, "char": str},
    **{"Array": list, "ArrayList": list, "HashMap": dict},
}
_IGNORED = str.maketrans({**dict.fromkeys(" ,./-_*^"), "'": '"'})
MAX_CALLS_CHARS = 20_000
"""Longer texts of calls are not read."""


class _Typed(NamedTuple):
    """What the types say of a value."""

    is_valid: bool
    is_variable: bool = False
    """Whether the possible values have another type than the description: they name a variable."""


def calls_are_possible(
    calls: Sequence[ToolCall],
    expected: Sequence[Possible],
    functions: Sequence[Described],
) -> bool:
    """Whether there are as many calls as expected, and each expected one, in order, finds another call.

    >>> functions = [{"name": "f", "parameters": {"properties": {"x": {"type": "float"}}, "required": ["x"]}}]
    >>> expected = [{"f": {"x": [2.0]}}, {"f": {"x": [3.5, 4.0]}}]
    >>> calls = [ToolCall(name="f", arguments={"x": x}) for x in (4, 2)]
    >>> calls_are_possible(calls, expected, functions), calls_are_possible(calls[:1], expected, functions)
    (True, False)
    """
    left = list(calls)
    if len(left) != len(expected):
        return False
    by_name = {function["name"]: function for function in functions}
    for each in expected:
        [(name, possible)] = each.items()
        matching = (i for i, call in enumerate(left) if _is_possible(call, possible, by_name[name]))
        if (found := next(matching, None)) is None:
            return False
        del left[found]
    return True


def _is_possible(
    call: ToolCall, possible: Mapping[str, Sequence[Any]], described: Described
) -> bool:
    schema = described["parameters"]
    properties, given = schema["properties"], call.arguments
    return (
        call.name == described["name"]
        and given.keys() <= properties.keys() & possible.keys()
        and all(name in given for name in schema.get("required", ()))
        and all(name in given or "" in values for name, values in possible.items())
        and all(_fits(value, possible[name], properties[name]) for name, value in given.items())
    )


def _fits(value: Any, possible: Sequence[Any], described: Mapping[str, Any]) -> bool:
    """Whether a value has a type and a value that are possible."""
    kind = _TYPES.get(described["type"], str)
    inner = None
    if kind is list:
        inner = _TYPES.get(described.get("items", {}).get("type", "any"), str)
    if described["type"] == "float" and type(value) is int:
        if abs(value) > sys.float_info.max:
            return False
        value = float(value)
    typed = _typed(value, possible, kind, inner)
    if not typed.is_valid:
        return False
    if typed.is_variable:
        return value in possible
    if kind is dict:
        return any(_is_same_dict(value, each) for each in possible)
    if kind is list and inner is dict:
        return any(_are_same_dicts(value, each) for each in possible)
    if kind is list:  # a list that may be left out may be empty
        return _plain(value) in [_plain(each or []) for each in possible]
    return _plain(value) in map(_plain, possible)


def _typed(value: Any, possible: Sequence[Any], kind: type, inner: type | None) -> _Typed:
    items: Any = value
    given = next((type(each) for each in possible if each != ""), None)
    is_variable = given is not None and given is not kind
    if type(value) is not kind:
        return _Typed(type(value) is given, True)
    if inner is None:
        return _Typed(True, is_variable)
    fitting = any(
        not isinstance(each, list) or all(_typed(one, each, inner, None).is_valid for one in items)
        for each in possible
    )
    return _Typed(fitting, is_variable)


def _is_same_dict(value: Any, possible: Any) -> bool:
    """Whether a dictionary has possible values for its keys, and all keys that may not be left out."""
    if not isinstance(value, dict) or not isinstance(possible, dict):
        return False
    return all(
        key in possible and _plain(each) in [_plain(one) for one in possible[key]]
        for key, each in value.items()
    ) and all(key in value or "" in values for key, values in possible.items())


def _are_same_dicts(value: Sequence[Any], possible: Sequence[Any]) -> bool:
    return len(value) == len(possible) and all(map(_is_same_dict, value, possible))


def _plain(value: Any) -> Any:
    """Return a text, or the texts of a list, in the form that is compared.

    >>> _plain("New-York, NY's"), _plain(["A b", 1])
    ('newyorkny"s', ['ab', 1])
    """
    if isinstance(value, list):
        return [_plain(each) if isinstance(each, str) else each for each in value]
    return value.translate(_IGNORED).lower() if isinstance(value, str) else value


def python_calls(text: str) -> list[ToolCall]:
    """Read `[f(x=1), module.g(y="a")]`, or one call alone; [] for any other text. Only named arguments are read.

    >>> python_calls("[f(x=-1, y={'a': [north]}), m.g()]")
    [ToolCall(name='f', arguments={'x': -1, 'y': {'a': ['north']}}), ToolCall(name='m.g', arguments={})]
    >>> python_calls("I cannot call f(x=1).")
    []
    """
    text = re.sub(r"^```\w*|```$", "", text.strip()).strip().strip("'")
    if len(text) > MAX_CALLS_CHARS:
        return []
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in the model's text
            body = ast.parse(text, mode="eval").body
        listed = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        return [
            ToolCall(
                name=ast.unparse(call.func),
                arguments={k.arg: _value(k.value) for k in call.keywords if k.arg},
            )
            for call in map(_as_call, listed)
        ]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def _as_call(node: ast.expr) -> ast.Call:
    if not isinstance(node, ast.Call):
        raise TypeError("not a call")
    return node


def _value(node: ast.expr) -> Any:
    """Return a literal; any other expression as its text."""
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(int() | float() as value)):
            return -value
        case ast.List(elts) | ast.Tuple(elts):
            return [_value(each) for each in elts]
        case ast.Dict(keys, values):
            if None in keys:
                raise ValueError("a dictionary is unpacked")
            return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k}
    return ast.unparse(node)
