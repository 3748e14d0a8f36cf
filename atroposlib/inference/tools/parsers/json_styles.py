"""The styles that write arguments as JSON: Hermes, Llama 3, Mistral, DeepSeek V3 and Kimi K2.

Formats as in the models' chat templates and in vLLM's parsers.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from atroposlib.inference.tools.parsers.json_text import (
    Object,
    Reader,
    arguments_at,
    call_of,
    skip_space,
    write_call,
)
from atroposlib.inference.tools.parsers.style import Call, FoundCalls, Style, Tools, by_places

_NAME = re.compile(r"[^\s`<>{}\[\]\"]+")
"""A name outside JSON."""


# Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}</tool_call>.

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _find_hermes(text: str, tools: Tools) -> list[FoundCalls]:
    found = []
    reader = Reader(text)
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        at = start + len(_OPEN)
        read = reader.read_object(skip_space(text, at))
        if read is None:
            continue
        at = read.end
        end = skip_space(text, at)
        if text.startswith(_CLOSE, end):
            end += len(_CLOSE)
        elif not _CLOSE.startswith(text[end:]):  # the closing tag may have been truncated
            continue
        else:
            end = len(text)
        call = call_of(read.members, needs_arguments=False)
        if call is not None:
            found.append(FoundCalls(start, end, (call,)))
            at = end
    return found


def _render_hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"{_OPEN}\n{write_call(call)}\n{_CLOSE}" for call in calls)


HERMES = Style(
    name="hermes", split=by_places(_find_hermes), render=_render_hermes, markers=(_OPEN, _CLOSE)
)


# Llama 3: {"name": ..., "parameters": ...}, separated by semicolons.

_PYTHON_TAG = "<|python_tag|>"
_OBJECT = re.compile(r'\{[ \t\r\n]*["}]')


def _find_llama(text: str, tools: Tools) -> list[FoundCalls]:
    found: list[FoundCalls] = []
    reader = Reader(text)
    at = 0
    while (opening := _OBJECT.search(text, at)) is not None:
        brace = opening.start()
        read = reader.read(brace)
        if not isinstance(read, Object):
            at = read
            continue
        call = call_of(read.members, keys=("parameters", "arguments"), needs_arguments=True)
        if call is not None:
            before = text[at:brace].rstrip()
            is_tagged = before.endswith(_PYTHON_TAG)
            start = at + len(before) - len(_PYTHON_TAG) if is_tagged else brace
            separator = skip_space(text, read.end)
            at = separator + 1 if text.startswith(";", separator) else read.end
            found.append(FoundCalls(start, at, (call,)))
        else:
            at = read.end
    return found


def _render_llama(calls: Sequence[Call]) -> str:
    return "; ".join(write_call(call, key="parameters") for call in calls)


LLAMA = Style(
    name="llama3_json",
    split=by_places(_find_llama),
    render=_render_llama,
    markers=(_PYTHON_TAG,),
    opens=(_PYTHON_TAG, "{"),
)


# Mistral: [TOOL_CALLS] and a list; from tokenizer version 11 on [TOOL_CALLS]name[ARGS]{...}.

_TOOL_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _find_mistral(text: str, tools: Tools) -> list[FoundCalls]:
    found = []
    reader = Reader(text)
    at = 0
    while (start := text.find(_TOOL_CALLS, at)) >= 0:
        at = start + len(_TOOL_CALLS)
        begin = skip_space(text, at)
        read = _mistral_list(text, begin, reader) or _mistral_named(text, begin, reader)
        if read is not None:
            calls, at = read
            found.append(FoundCalls(start, at, calls))
    return found


def _mistral_list(text: str, at: int, reader: Reader) -> tuple[tuple[Call, ...], int] | None:
    is_list = text.startswith("[", at)
    at = skip_space(text, at + 1) if is_list else at
    calls: list[Call] = []
    while True:
        read = reader.read_object(at)
        call = read and call_of(read.members, needs_arguments=False)
        if read is None or call is None:
            return None
        calls.append(call)
        if not is_list:
            return tuple(calls), read.end
        at = skip_space(text, read.end)
        if text.startswith("]", at):
            return tuple(calls), at + 1
        if not text.startswith(",", at):
            return None
        at = skip_space(text, at + 1)


def _mistral_named(text: str, at: int, reader: Reader) -> tuple[tuple[Call, ...], int] | None:
    name = _NAME.match(text, at)
    if name is None:
        return None
    at = name.end()
    own_id = None
    if text.startswith(_CALL_ID, at):
        own_id = _NAME.match(text, at + len(_CALL_ID))
        if own_id is None:
            return None
        at = own_id.end()
    if text.startswith(_ARGS, at):
        at += len(_ARGS)
    read = arguments_at(text, at, reader)
    if read is None:
        return None
    arguments, end = read
    return (Call(name[0], arguments, own_id[0] if own_id else None),), end


def _render_mistral(calls: Sequence[Call]) -> str:
    return f"{_TOOL_CALLS}[{', '.join(map(write_call, calls))}]" if calls else ""


def _render_mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(
        f"{_TOOL_CALLS}{call.name}{_CALL_ID + call.id if call.id else ''}{_ARGS}{call.arguments}"
        for call in calls
    )


def _mistral_id() -> str:
    # Mistral's chat templates refuse ids that are not nine letters or digits.
    return uuid.uuid4().hex[:9]


MISTRAL = Style(
    name="mistral",
    split=by_places(_find_mistral),
    render=_render_mistral,
    markers=(_TOOL_CALLS,),
    new_id=_mistral_id,
)
MISTRAL_V11 = Style(
    name="mistral_v11",
    split=by_places(_find_mistral),
    render=_render_mistral_v11,
    markers=(_TOOL_CALLS, _ARGS, _CALL_ID),
    new_id=_mistral_id,
)


# DeepSeek: special tokens with full-width bars (U+FF5C) and low blocks (U+2581) for spaces.


def _token(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS_BEGIN, _CALLS_END = _token("tool calls begin"), _token("tool calls end")
_CALL_BEGIN, _CALL_END = _token("tool call begin"), _token("tool call end")
_SEPARATOR = _token("tool sep")
_FENCED = re.compile(r"([^\s`<>{}\[\]\"]+)[ \t]*\n```json[ \t]*\n?")
_FENCE = "```"


class _Marks(NamedTuple):
    """The tokens around the name and the arguments of a call, and around all calls."""

    calls_begin: str
    calls_end: str
    begin: str
    separator: str
    end: str

    def find(
        self, text: str, head: Callable[[str], tuple[str, str | None] | None]
    ) -> list[FoundCalls]:
        """Return the calls of which `head` reads the name and the id between `begin` and `separator`.

        The arguments may be fenced as a code block with the name before it, as DeepSeek V3 and R1 write them.
        """
        found = []
        reader = Reader(text)
        at = 0
        while (start := text.find(self.begin, at)) >= 0:
            separator = text.find(self.separator, start)
            if separator < 0:
                break
            # A separator belongs to the last beginning before it.
            start = text.rfind(self.begin, start, separator)
            at = start + len(self.begin)
            fenced = _FENCED.match(text, separator + len(self.separator))
            named = head(fenced[1] if fenced else text[at:separator].strip())
            begin = fenced.end() if fenced else separator + len(self.separator)
            read = arguments_at(text, begin, reader)
            if read is None or named is None:
                continue
            arguments, end = read
            end = skip_space(text, end)
            if fenced and text.startswith(_FENCE, end):
                end = skip_space(text, end + len(_FENCE))
            if text.startswith(self.end, end):
                end += len(self.end)
            elif end != len(text):
                continue
            at = end
            call = Call(named[0], arguments, named[1])
            found.append(self._with_brackets(text, FoundCalls(start, end, (call,))))
        return found

    def _with_brackets(self, text: str, found: FoundCalls) -> FoundCalls:
        """Extend the first and last call by the tokens that bracket all calls."""
        before = found.start
        while before and text[before - 1].isspace():
            before -= 1
        is_first = text.endswith(self.calls_begin, 0, before)
        start = before - len(self.calls_begin) if is_first else found.start
        after = skip_space(text, found.end)
        is_last = text.startswith(self.calls_end, after)
        return found._replace(
            start=start, end=after + len(self.calls_end) if is_last else found.end
        )


_DEEPSEEK = _Marks(_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _SEPARATOR, _CALL_END)


def _find_deepseek(text: str, tools: Tools) -> list[FoundCalls]:
    """Read both forms: V3 and R1 fence the arguments as a code block, V3.1 does not."""
    return _DEEPSEEK.find(text, lambda head: (head, None) if _NAME.fullmatch(head) else None)


def _render_deepseek_v3(calls: Sequence[Call]) -> str:
    parts = (
        f"{_CALL_BEGIN}function{_SEPARATOR}{call.name}\n```json\n{call.arguments}\n```{_CALL_END}"
        for call in calls
    )
    return _CALLS_BEGIN + "\n".join(parts) + _CALLS_END if calls else ""


def _render_deepseek_v31(calls: Sequence[Call]) -> str:
    parts = (f"{_CALL_BEGIN}{call.name}{_SEPARATOR}{call.arguments}{_CALL_END}" for call in calls)
    return _CALLS_BEGIN + "".join(parts) + _CALLS_END if calls else ""


DEEPSEEK_V3 = Style(
    name="deepseek_v3",
    split=by_places(_find_deepseek),
    render=_render_deepseek_v3,
    markers=_DEEPSEEK,
)
DEEPSEEK_V31 = Style(
    name="deepseek_v31",
    split=by_places(_find_deepseek),
    render=_render_deepseek_v31,
    markers=_DEEPSEEK,
)


# Kimi K2: the id of a call is its name and its number in the conversation, functions.weather:0.

_KIMI = _Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s`<>{}\[\]\":]+):\d+")


def _kimi_head(head: str) -> tuple[str, str | None] | None:
    match = _KIMI_ID.fullmatch(head)
    return (match[1], head) if match else None


def _render_kimi(calls: Sequence[Call]) -> str:
    parts = (
        f"{_KIMI.begin}{call.id or f'functions.{call.name}:{index}'}{_KIMI.separator}{call.arguments}{_KIMI.end}"
        for index, call in enumerate(calls)
    )
    return _KIMI.calls_begin + "".join(parts) + _KIMI.calls_end if calls else ""


KIMI_K2 = Style(
    name="kimi_k2",
    split=by_places(lambda text, tools: _KIMI.find(text, _kimi_head)),
    render=_render_kimi,
    markers=_KIMI,
)
