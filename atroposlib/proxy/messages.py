"""Anthropic's Messages API: `POST .../v1/messages` and `.../count_tokens`.

Blocks become messages: tool results become messages before the user's text, thinking is dropped, images and documents
are refused. Unlike Anthropic's API, answers are never constrained, so `tool_choice` "any" means "auto".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atroposlib.inference.tools.tool_messages import parsed_json
from atroposlib.proxy import sse
from atroposlib.proxy.chat import EngineSampling
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.turn import (
    AgentAnswer,
    AgentRequest,
    read_messages,
    text_content,
    text_field,
    tool_call,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesBody(EngineSampling):
    """A request for a message."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def read(body: MessagesBody) -> AgentRequest:
    """Translate a request. Raises ProxyError for unsupported content."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_content(body.system, where="system")})
    for i, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages[{i}]")
    sampling = body.sampling()
    if body.stop_sequences:
        sampling["stop"] = body.stop_sequences
    choice = (body.tool_choice or {}).get("type")
    return AgentRequest(
        messages=read_messages(messages),
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice="none" if choice == "none" else None,
        sampling=sampling,
    )


def _messages_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            call_id, name = text_field(block, "id", at), text_field(block, "name", at)
            if not isinstance(block.get("input"), Mapping):
                raise ProxyError(f"{at}.input must be an object", param=f"{at}.input")
            calls.append(tool_call(call_id, name, block["input"]))
        elif kind == "tool_result":
            text = text_content(block.get("content"), where=f"{at}.content")
            call_id = text_field(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_content([block], where=at))
    if role == "assistant":
        answer: dict[str, Any] = {"role": role, "content": "".join(texts)}
        return [{**answer, "tool_calls": calls} if calls else answer]
    return results + ([{"role": role, "content": "".join(texts)}] if texts else [])


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise ProxyError(
            f"tools[{index}]: only custom tools can be offered", param=f"tools[{index}]"
        )
    function: dict[str, Any] = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def write(answer: AgentAnswer) -> dict[str, Any]:
    """Return the response body."""
    choice = answer.choices[0]
    blocks: list[dict[str, Any]] = []
    if choice.content or not choice.tool_calls:
        blocks.append({"type": "text", "text": choice.content or ""})
    for call in choice.tool_calls:
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": _input_of(function["arguments"]),
            }
        )
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": blocks,
        "stop_reason": _STOP_REASONS[choice.finish_reason]
        if choice.stop is None
        else "stop_sequence",
        "stop_sequence": choice.stop,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
        },
    }


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, which Anthropic's SDK requires."""
    read = parsed_json(arguments or "{}")
    return read if isinstance(read, dict) else {"arguments": arguments}


def stream(answer: AgentAnswer) -> Iterator[bytes]:
    """Return the response as events."""
    for fields in _events(write(answer)):
        yield sse.event(fields, name=fields["type"])


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    counts = whole["usage"]
    started = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    started["usage"] = {**counts, "output_tokens": 0}
    yield {"type": "message_start", "message": started}
    blocks: Sequence[dict[str, Any]] = whole["content"]
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": ending, "usage": counts}
    yield {"type": "message_stop"}
