"""Read function calls that are written in Java or JavaScript, for BFCL's categories of these languages.

`typed_calls` reads `[f(x=1L, names=new String[]{"a"})]`: the arguments stay texts of the language. `converted` makes
values of them by the types of a function's description; a text that is no value of its type stays a text, which is how
BFCL's answers name a variable. `described` tells a model so; `in_language` is the way back. Pure functions; no text
raises, and none takes long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from atroposlib.envs.possible_calls import MAX_CALLS_CHARS
from atroposlib.envs.tool_env import ToolCall

Language: TypeAlias = Literal["java", "javascript"]

_TEXT = re.compile(r"""(?s)"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'""")
_TOKEN = re.compile(  # a text, the types of a generic, whose commas separate nothing, or one mark
    rf"""{_TEXT.pattern}|`(?:[^`\\]|\\.)*+`|(?<=\w)<[\w\s,.?<>]{{0,200}}>|[()\[\]{{}},:;"'`]"""
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_DECIMAL = r"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
_NUMBERS: dict[str, dict[str, tuple[str, Callable[[str], Any]]]] = {
    "java": {
        **dict.fromkeys(("byte", "short", "integer"), (r"(-?\d+)", int)),
        "long": (r"(-?\d+)[lL]", int),
        "float": (rf"{_DECIMAL}[fF]", float),
        "double": (_DECIMAL, float),
    },
    "javascript": {
        "integer": (r"(-?\d+)", int),
        "Bigint": (r"(-?\d+)n", int),
        "float": (r"(-?\d+(?:\.\d+)?)", float),
    },
}
_LISTS = {
    "Array": r"new\s+\w+\s*\[\s*\]\s*\{(.*)\}",
    "ArrayList": r"new\s+ArrayList<\w*>\s*\((?:\s*Arrays\.asList\((.*)\)\s*)?\)",
    "array": r"\[(.*)\]|new\s+Array\((.*)\)",
}
_ADDED = r"new\s+{}<[^()]*>\s*\(\)\s*(?:\{{\s*\{{(.*)\}}\s*\}})?"
_BOOLEANS = {"true": True, "false": False}
_MAX_DIGITS = 400
"""Longer numbers stay texts."""
_MAX_DEPTH = 4
"""Lists and objects inside of each other; deeper ones stay texts."""


def typed_calls(text: str) -> list[ToolCall]:
    """Read the calls of an answer, in brackets or not; [] for any other text. Only named arguments are read.

    >>> typed_calls('[a.f(x=5L, y=new Map<K, V>(), z="a, b")]')
    [ToolCall(name='a.f', arguments={'x': '5L', 'y': 'new Map<K, V>()', 'z': 'a, b'})]
    >>> typed_calls("f(x=(a, b) => a, y='it', z={k: [1]});")
    [ToolCall(name='f', arguments={'x': '(a, b) => a', 'y': 'it', 'z': '{k: [1]}'})]
    >>> typed_calls("I cannot call f(x=1).")
    []
    """
    text = re.sub(r"^```\w*|```$", "", text.strip()).strip().removeprefix("[").removesuffix("]")
    if len(text) > MAX_CALLS_CHARS:
        return []
    try:
        calls = _split(text.rstrip("; \n"), ",")
        return [_call(each) for each in calls if each]
    except ValueError:
        return []


def _call(text: str) -> ToolCall:
    if not (found := re.fullmatch(r"(?s)([\w$.]+)\s*\((.*)\)", text)):
        raise ValueError("not a call")
    arguments: dict[str, Any] = {}
    for each in _split(found[2], ","):
        named = re.fullmatch(r"(?s)([\w$]+)\s*=(?![=>])\s*(.+)", each)
        if named is None and not each.isidentifier():
            continue
        name, value = named.groups() if named else ("", each)  # a name alone is no argument
        if name in arguments:
            raise ValueError(f"{name!r} is given twice")
        arguments[name] = _unquoted(value)
    return ToolCall(name=found[1], arguments=arguments)


def _split(text: str, at: str) -> list[str]:
    """Split a text at the separators outside of quotes and brackets; ValueError if one of these is not closed."""
    parts, start, closing = [], 0, list[str]()
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in ('"', "'", "`"):
            raise ValueError("a quote is not closed")
        if mark in _CLOSING:
            closing.append(_CLOSING[mark])
        elif mark in _CLOSING.values():
            if not closing or closing.pop() != mark:
                raise ValueError(f"{mark} closes nothing")
        elif mark == at and not closing:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    if closing:
        raise ValueError(f"{closing[-1]} is missing")
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _unquoted(text: str) -> str:
    return text[1:-1] if _TEXT.fullmatch(text) else text


def converted(call: ToolCall, function: Mapping[str, Any], language: Language) -> ToolCall:
    """Return a call with the values of its texts, by the types of the function's description.

    >>> types = {"n": {"type": "long"}, "a": {"type": "ArrayList", "items": {"type": "any"}}}
    >>> texts = {"n": "5L", "a": 'new ArrayList<>(Arrays.asList("x", 2, limit))'}
    >>> converted(ToolCall(name="f", arguments=texts), {"parameters": {"properties": types}}, "java").arguments
    {'n': 5, 'a': ['x', 2, 'limit']}
    """
    types = function["parameters"]["properties"]
    return ToolCall(
        name=call.name,
        arguments={
            name: _value(value, language, types.get(name, {}))
            for name, value in call.arguments.items()
        },
    )


def _value(text: Any, language: Language, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text of the type of a schema; the text if it has none; None for what is no text."""
    if not isinstance(text, str):
        return None
    kind = schema.get("type") if len(text) <= MAX_CALLS_CHARS else "any"
    if kind in ("boolean", "Boolean"):
        return _BOOLEANS.get(text, text)
    if kind == "String" and language == "javascript":
        return _unquoted(text)
    if kind in _NUMBERS[language]:
        return _number(text, *_NUMBERS[language][kind])
    try:
        if (items := _list(text, language, kind)) is not None:
            return [_element(each, language, schema.get("items", {})) for each in items]
        if kind in ("HashMap", "dict") and (pairs := _pairs(text, language)) is not None:
            return {name: _untyped(each, language, 1) for name, each in pairs.items()}
    except ValueError:
        return text
    return text


def _number(text: str, pattern: str, convert: Callable[[str], Any]) -> Any:
    found = re.fullmatch(pattern, text)
    return convert(found[1]) if found and len(text) < _MAX_DIGITS else text


def _element(text: str, language: Language, schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "any")
    if kind in ("any", "dict", "array") or text.startswith("["):
        return _untyped(text, language, 1)
    return _value(_unquoted(text), language, schema)


def _untyped(text: str, language: Language, depth: int) -> Any:
    """Return the value of a text by its own form."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if (plain := _unquoted(text)) != text:
        return plain
    if language == "javascript" and depth < _MAX_DEPTH:
        if (items := _list(text, language, "array")) is not None:
            return [_untyped(each, language, depth + 1) for each in items]
        if (pairs := _pairs(text, language)) is not None:
            return {name: _untyped(each, language, depth + 1) for name, each in pairs.items()}
    suffixes = ("[lL]?", "[fF]?") if language == "java" else ("", "")
    whole = _number(text, rf"(-?\d+){suffixes[0]}", int)
    return _number(text, _DECIMAL + suffixes[1], float) if whole is text else whole


def _list(text: str, language: Language, kind: Any) -> list[str] | None:
    """Return the texts of the elements of a list of a type, or None for other texts and types."""
    if found := re.fullmatch(_LISTS.get(kind, r"(?!)"), text, re.DOTALL):
        return _split(next((each for each in found.groups() if each), ""), ",")
    if kind == "ArrayList" and (found := re.fullmatch(_ADDED.format("ArrayList"), text, re.DOTALL)):
        return [each for [each] in _statements(found[1] or "", "add")]
    return None


def _pairs(text: str, language: Language) -> dict[str, str] | None:
    """Return the texts of the values of a map or object by its keys, or None for other texts."""
    if language == "java":
        if not (found := re.fullmatch(_ADDED.format("HashMap"), text, re.DOTALL)):
            return None
        pairs = _statements(found[1] or "", "put")
    else:
        if not (found := re.fullmatch(r"\{(.*)\}", text, re.DOTALL)):
            return None
        pairs = [_split(each, ":") for each in _split(found[1], ",")]
    return {_unquoted(name): value for name, value in pairs}


def _statements(text: str, name: str) -> list[list[str]]:
    """Return the arguments of the Java statements `name(...);`; ValueError for other statements."""
    calls = [re.fullmatch(rf"{name}\((.*)\)", each, re.DOTALL) for each in _split(text, ";")]
    if None in calls:
        raise ValueError("another statement")
    return [_split(call[1], ",") for call in calls if call]


def described(function: Mapping[str, Any], language: Language) -> dict[str, Any]:
    """Return a description in which every parameter is a string, and says of which type of the language.

    >>> f = {"name": "f", "parameters": {"properties": {"n": {"type": "long", "description": "Size."}}}}
    >>> described(f, "java")["parameters"]["properties"]
    {'n': {'type': 'string', 'description': 'Size. A Java expression of type long, as a string.'}}
    """
    name = {"java": "Java", "javascript": "JavaScript"}[language]

    def as_text(schema: Mapping[str, Any]) -> dict[str, Any]:
        kind = f"type {schema['type']}" if schema["type"] != "any" else "any type"
        if items := schema.get("items"):
            kind += f" with elements of type {items['type']}"
        if entries := schema.get("properties"):
            kind += f" with the entries {json.dumps(entries)}"
        text = f"{schema.get('description', '')} A {name} expression of {kind}, as a string."
        return {"type": "string", "description": text.strip()}

    parameters = function["parameters"]
    texts = {key: as_text(each) for key, each in parameters["properties"].items()}
    return {**function, "parameters": {**parameters, "properties": texts}}


def in_language(
    call: ToolCall, function: Mapping[str, Any], language: Language, *, quoted: bool
) -> ToolCall:
    """Return a call with its values as texts, which `converted` reads; a string is quoted in code, not in JSON."""
    types = function["parameters"]["properties"]
    texts = {
        name: value
        if isinstance(value, str) and not quoted
        else _written(value, language, types[name])
        for name, value in call.arguments.items()
    }
    return ToolCall(name=call.name, arguments=texts)


def _written(value: Any, language: Language, schema: Mapping[str, Any]) -> str:
    """Return a text that is converted to a value.

    >>> _written({"a": [1, "b"]}, "javascript", {"type": "dict"})
    '{"a": [1, "b"]}'
    >>> _written([5], "java", {"type": "ArrayList", "items": {"type": "long"}})
    'new ArrayList<>(Arrays.asList(5L))'
    """
    kind, inner = schema.get("type"), schema.get("items", {})
    if isinstance(value, str):
        return value if '"' in value else f'"{value}"'
    if isinstance(value, list):
        items = ", ".join(_written(each, language, inner) for each in value)
        if language == "javascript":
            return f"[{items}]"
        array = f"new Object[]{{{items}}}"
        return array if kind == "Array" else f"new ArrayList<>(Arrays.asList({items}))"
    if isinstance(value, dict):
        pairs = [(name, _written(each, language, {})) for name, each in value.items()]
        if language == "javascript":
            return "{" + ", ".join(f'"{name}": {each}' for name, each in pairs) + "}"
        return "new HashMap<>() {{ " + " ".join(f'put("{k}", {v});' for k, v in pairs) + " }}"
    suffix = {"long": "L", "Bigint": "n"}.get(str(kind), "")
    return json.dumps(value) + ("f" if (kind, language) == ("float", "java") else suffix)
