"""Messages of a chat as dicts: how they are read, and the key by which a sampled turn is recognised in a later request.

Pure; no tokenizer and no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Message = Mapping[str, Any]

_COMPARED_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning")


def as_dict(message: Any) -> dict[str, Any]:
    """Return a message as a dict; `completion.choices[0].message` is a pydantic object."""
    # The check for a model takes longer than copying most messages.
    if not isinstance(message, dict) and isinstance(message, BaseModel):
        return message.model_dump(exclude_none=True)
    return dict(message)


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as dicts with calls as dicts.

    Content becomes a string; only content with images stays a list of parts. Raises ValueError for audio and files.
    """
    if not messages:
        raise ValueError("messages is empty; a chat needs at least one message")
    found = []
    for i, given in enumerate(messages):
        message = as_dict(given)
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}] has no role")
        if not isinstance(content := message.get("content"), str):
            message["content"] = _content_of(content, where=f"messages[{i}].content")
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_plain(call) for call in calls]
        found.append(message)
    return found


def has_images(messages: Sequence[Message]) -> bool:
    """Whether messages from `read_messages` contain images."""
    return any(isinstance(message["content"], list) for message in messages)


def _content_of(content: Any, *, where: str) -> str | list[Any]:
    """Return content that is no text."""
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ValueError(f"{where} is a {type(content).__name__}, expected text")
    kinds = [
        part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content
    ]
    for i, kind in enumerate(kinds):
        if kind not in ("text", "image_url"):
            raise ValueError(
                f"{where}[{i}] is of type {kind!r}, but token prompts carry text and images (image_url) only;"
                " describe it in words, or call server.chat_completion(), which keeps no tokens"
            )
    if "image_url" in kinds:
        return content
    return "".join(str(part.get("text") or "") for part in content)


def identity(message: Message) -> tuple[str, str]:
    """Return the key of a turn: role, name, content, thoughts beside it, and tool calls without their ids.

    Arguments of tool calls are compared as parsed JSON, because clients serialise them again.
    """
    head: str = message["role"]
    content = message.get("content") or ""
    if len(message) > 2:  # a history has hundreds of plain messages
        rest = [message.get(key) or "" for key in _COMPARED_KEYS]
        calls = message.get("tool_calls") or ()
        if calls:
            content = content.strip()
        if any(rest) or calls:
            head = repr((head, rest, [_call_identity(call) for call in calls]))
    # The content itself: a copy of it would have to be hashed again.
    return head, content if isinstance(content, str) else repr(content)


def _call_identity(call: Mapping[str, Any]) -> tuple[str, str]:
    function = with_parsed(call)["function"]
    arguments = json.dumps(function.get("arguments"), sort_keys=True, default=repr)
    return str(function.get("name")), arguments


def call_ids(message: Message) -> tuple[str, ...]:
    """Return the ids of a message's tool calls."""
    return tuple(str(call.get("id")) for call in message.get("tool_calls") or ())


def begun_text(messages: Sequence[Message]) -> str | None:
    """Return the last message's text if the model continues it; None if the model answers it."""
    last = messages[-1]
    is_continued = last["role"] == "assistant" and not last.get("tool_calls")
    return str(last["content"]) if is_continued else None


def _plain(call: Any) -> dict[str, Any]:
    call = as_dict(call)
    return {**call, "function": as_dict(call.get("function") or {})}


def with_parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Parse JSON arguments: templates expect an object."""
    function = call["function"]
    if isinstance(function.get("arguments"), str):
        function = {**function, "arguments": parsed_json(function["arguments"])}
    return {**call, "function": function}


def parsed_json(arguments: str) -> Any:
    """Return the JSON value of a call's arguments; the text if they are not JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
