"""Harmony, the format of gpt-oss: an answer is messages, each with a channel, some with a recipient.

`<|channel|>analysis<|message|>...<|end|>` is a thought, `commentary` without a recipient and `final` are content, and
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>` is a call on any channel; the
recipient may stand before the channel. Each but the first message begins with `<|start|>assistant`, as the prompt ends.
A message that is none of these stays text as it was written, marks included: a call that is cut off or without a JSON
object, and one to a tool that is no function (`python`), unless it is a thought. Format: OpenAI's guide,
github.com/openai/openai-cookbook, articles/openai-harmony.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from atroposlib.inference.tools.parsers.json_text import Reader, arguments_at, skip_space
from atroposlib.inference.tools.parsers.style import Call, Part, Style, Thought, Tools, sendable

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|return|>", "<|call|>")
"""`<|return|>` and `<|call|>` also end the turn; the template may write another than was sampled."""
_FUNCTIONS = "functions."
_HEAD = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*+to=(?P<to>[^\s<]++))?\s*+"
    r"(?:<\|channel\|>(?P<channel>analysis|commentary|final)(?:\s++to=(?P<then_to>[^\s<]++))?"
    r"\s*+(?:<\|constrain\|>\s*+)?[^\s<]*+)?\s*+"
)
"""Ends with the type of the content, such as `json`."""
_END = re.compile("|".join(map(re.escape, MESSAGE_ENDS)))


class _Message(NamedTuple):
    start: int
    end: int
    channel: str | None
    """Only of thoughts and of messages to the user."""
    to: str
    """The recipient; "" if there is none."""
    body: str
    arguments: str | None
    """Of a whole message with a recipient, the body if it is a JSON object."""


def _messages(text: str) -> Iterator[_Message]:
    """Yield the messages with a well-formed header; the last one may lack its end."""
    reader = Reader(text)
    at = 0
    while (mark := text.find(_MESSAGE, at)) >= 0:
        start = max(at, text.rfind(_START, at, mark))
        head = _HEAD.fullmatch(text, start, mark)
        at = body = mark + len(_MESSAGE)
        if head is None or not any(head.groups()):
            continue
        to, arguments = head["to"] or head["then_to"] or "", None
        if to and (read := arguments_at(text, at, reader)) is not None:
            at = skip_space(text, read[1])
            arguments = read[0] if text.startswith(MESSAGE_ENDS, at) else None
        found = _END.search(text, at)
        stop, at = found.span() if found else (len(text), len(text))
        channel = head["channel"] if not to or head["channel"] == "analysis" else None
        yield _Message(start, at, channel, to, text[body:stop], arguments)


def _is_function(to: str, tools: Tools) -> bool:
    """Whether a recipient is a function; models may leave out the prefix of one that was offered."""
    if to.startswith(_FUNCTIONS):
        return to != _FUNCTIONS
    return any((tool.get("function") or {}).get("name") == to for tool in tools)


def _split(text: str, tools: Tools) -> list[Part]:
    parts: list[Part] = []
    at = 0
    has_final = False
    for message in _messages(text):
        part: Part
        if _is_function(message.to, tools):
            if message.arguments is None:
                continue
            part = sendable(Call(message.to.removeprefix(_FUNCTIONS), message.arguments))
        elif message.channel == "analysis" and not has_final:
            part = Thought(message.body)
        elif message.channel == "final":
            # White space at the end stays: the model may continue here.
            part, has_final = message.body.lstrip(), True
        elif message.channel == "commentary":
            part = message.body.strip()
        else:
            continue
        parts += [text[at : message.start].strip(), part]
        at = message.end
    return [*parts, text[at:].strip()] if parts else [text]


def _begun(text: str) -> str:
    """Return the thoughts; from where the final message begins, the answer up to its end.

    Before it more thoughts may follow a content; after it nothing is a thought.
    """
    thoughts = ""
    for message in _messages(text):
        if message.to and message.arguments is None:
            break  # arguments that are not whole may contain marks
        if message.channel == "final":
            return text[: message.end]
        if message.channel == "analysis":
            thoughts += text[message.start : message.end]
    return thoughts


def _render(calls: Sequence[Call]) -> str:
    return f"{_START}assistant".join(
        f"{_CHANNEL}commentary to={_FUNCTIONS}{call.name} {_CONSTRAIN}json{_MESSAGE}{call.arguments}<|call|>"
        for call in calls
    )


HARMONY = Style(
    name="gpt_oss",
    split=_split,
    render=_render,
    markers=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *MESSAGE_ENDS),
    begun=_begun,
)
