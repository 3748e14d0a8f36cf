"""Anthropic's Messages API: `POST .../v1/messages` and `.../count_tokens`.

Blocks become messages: tool results become messages before the user's text. A tool that is deferred is shown to the
model where a block refers to it, so that the beginning of the prompt stays as it was. Tools that only Anthropic can run
are left out, documents are refused. Unlike Anthropic's API, answers are never constrained, so `tool_choice` "any" means
"auto".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from atroposlib.inference.tools.messages import parsed_json
from atroposlib.proxy.chat import EngineSampling
from atroposlib.proxy.errors import ProxyError
from atroposlib.proxy.stream import Part, event
from atroposlib.proxy.turn import (
    AgentAnswer,
    AgentRequest,
    read_content,
    read_messages,
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
        system = read_content(body.system, where="system")
        messages.append({"role": "system", "content": system})
    known: dict[str, dict[str, Any]] = {}
    tools, left_out = [], []
    for i, tool in enumerate(body.tools or []):
        if (kind := tool.get("type") or "custom") == "custom":
            function = _function(tool, f"tools[{i}]")
            known[function["name"]] = function
            if not tool.get("defer_loading"):
                tools.append({"type": "function", "function": function})
        else:
            left_out.append(str(kind))
    for i, message in enumerate(body.messages):
        messages += _messages_of(message, known, f"messages[{i}]")
    sampling = body.sampling()
    if body.stop_sequences:
        sampling["stop"] = body.stop_sequences
    choice = (body.tool_choice or {}).get("type")
    return AgentRequest(
        messages=read_messages(messages),
        tools=tools or None,
        left_out=tuple(left_out),
        tool_choice="none" if choice == "none" else None,
        sampling=sampling,
    )


def _messages_of(
    message: Mapping[str, Any], known: Mapping[str, dict[str, Any]], where: str
) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    parts: list[Any] = []
    thoughts: list[str] = []
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
            result = _read(block.get("content"), known, f"{at}.content")
            call_id = text_field(block, "tool_use_id", at)
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind == "thinking":
            thoughts.append(text_field(block, "thinking", at))
        elif kind != "redacted_thinking":
            parts.append(block)
    said = {"role": role, "content": _read(parts, known, f"{where}.content")}
    if role == "assistant":
        given = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
        return [{**said, **{key: value for key, value in given.items() if value}}]
    return results + ([said] if parts else [])


def _read(
    content: Any, known: Mapping[str, dict[str, Any]], where: str
) -> str | list[dict[str, Any]]:
    """Return a content, with blocks about tools and sources as text."""
    if isinstance(content, list):
        content = [_as_text(block, known, f"{where}[{i}]") for i, block in enumerate(content)]
    return read_content(content, where=where)


def _as_text(block: Any, known: Mapping[str, dict[str, Any]], where: str) -> Any:
    """Return a block about a tool or a source as a text; others as they are."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "search_result":
        said = read_content(block.get("content"), where=f"{where}.content")
        text = f"{block.get('title')} ({block.get('source')})\n{said}"
    elif kind == "tool_reference":
        text = _shown(text_field(block, "tool_name", where), known)
    elif kind in ("tool_addition", "tool_removal"):
        tool = block.get("tool")
        if isinstance(tool, Mapping) and tool.get("type") == "tool_definition":
            function = _function(tool.get("definition"), f"{where}.tool.definition")
            text = _shown(function["name"], {function["name"]: function})
        else:
            name = text_field(tool, "name", f"{where}.tool")
            text = _shown(name, known)
            if kind == "tool_removal":
                text = f"The tool {name} was removed."
    else:
        return block
    return {"type": "text", "text": text}


def _shown(name: str, known: Mapping[str, dict[str, Any]]) -> str:
    """Return a tool as the model reads it within a message."""
    return f"<function>{json.dumps(known.get(name, {'name': name}), ensure_ascii=False)}</function>"


def _function(tool: Any, where: str) -> dict[str, Any]:
    function = {
        "name": text_field(tool, "name", where),
        "parameters": tool.get("input_schema") or {},
    }
    if tool.get("description"):
        function["description"] = tool["description"]
    return function


def write(answer: AgentAnswer) -> dict[str, Any]:
    """Return the response body."""
    choice = answer.choices[0]
    blocks = [_block("thought", choice.thought)] if choice.thought else []
    if choice.content or not choice.tool_calls:
        blocks.append(_block("text", choice.content or ""))
    blocks += [_block("call", call=call) for call in choice.tool_calls]
    reason = _STOP_REASONS[choice.finish_reason] if choice.stop is None else "stop_sequence"
    return {
        **_message(answer),
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": choice.stop,
    }


def _message(answer: AgentAnswer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.completion_tokens,
        },
    }


def _block(kind: str, text: str = "", call: dict[str, Any] | None = None) -> dict[str, Any]:
    if call is not None:
        function = call["function"]
        return {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": _input_of(function["arguments"]),
        }
    if kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _input_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, which Anthropic's SDK requires."""
    read = parsed_json(arguments or "{}")
    return read if isinstance(read, dict) else {"arguments": arguments}


class Writer:
    """The events of a streamed message: one block per part."""

    def begin(self, head: AgentAnswer) -> Iterator[bytes]:
        started = {**_message(head), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=started)

    def open(self, part: Part) -> Iterator[bytes]:
        block = _block(part.kind, "", part.call)
        if part.call is not None:
            block["input"] = {}
        yield _event("content_block_start", index=part.index, content_block=block)

    def piece(self, part: Part, text: str) -> Iterator[bytes]:
        delta = {"type": "text_delta", "text": text}
        if part.kind == "thought":
            delta = {"type": "thinking_delta", "thinking": text}
        elif part.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(_input_of(text))}
        yield _event("content_block_delta", index=part.index, delta=delta)

    def close(self, part: Part) -> Iterator[bytes]:
        if part.kind == "thought":
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=part.index, delta=delta)
        yield _event("content_block_stop", index=part.index)

    def end(self, answer: AgentAnswer) -> Iterator[bytes]:
        whole = write(answer)
        ending = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ending, usage=whole["usage"])
        yield _event("message_stop")

    def fail(self, error: ProxyError) -> Iterator[bytes]:
        yield event(error.anthropic_body(), name="error")


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, name=kind)
