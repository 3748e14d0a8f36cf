"""OpenAI's Responses API: `POST .../v1/responses`.

Items become messages: a function call joins the assistant message before it, so that the items of one sampled turn
become that turn again. `previous_response_id` works within a session, whose `History` stores conversations.
Reasoning items are dropped; built-in tools, images and files are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from pydantic import Field

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

History = MutableMapping[str, list[dict[str, Any]]]
"""Response id -> the messages up to and including that response, without its instructions."""


class ResponsesBody(EngineSampling):
    """A request for a response."""

    input: str | list[dict[str, Any]] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None


def read(body: ResponsesBody, history: History) -> tuple[AgentRequest, list[dict[str, Any]]]:
    """Translate a request; the second value is the conversation to store, without instructions."""
    if body.background:
        raise ProxyError("background responses are not supported", param="background")
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        if body.previous_response_id not in history:
            raise ProxyError(
                f"this session has no response {body.previous_response_id!r}",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        earlier = history[body.previous_response_id]
    items = body.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    conversation = join_items([*earlier, *messages_of(items)])
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    sampling = body.sampling()
    if body.max_output_tokens is not None:
        sampling["max_tokens"] = body.max_output_tokens
    text_format = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(text_format, Mapping):
        raise ProxyError("text.format must be an object", param="text.format")
    if text_format.get("type") != "text":
        # Converted to the form of chat completions.
        inner = {key: value for key, value in text_format.items() if key != "type"}
        sampling["response_format"] = {
            "type": text_field(text_format, "type", "text.format"),
            **({"json_schema": inner} if inner else {}),
        }
    ask = AgentRequest(
        messages=read_messages([*system, *conversation], param="input"),
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=_tool_choice(body.tool_choice),
        sampling=sampling,
    )
    return ask, conversation


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one message per item, without reasoning."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = text_content(item.get("content"), where=f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            call_id, name, arguments = (
                text_field(item, key, where) for key in ("call_id", "name", "arguments")
            )
            call = tool_call(call_id, name, arguments)
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = text_content(item.get("output"), where=f"{where}.output")
            call_id = text_field(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind != "reasoning":
            raise ProxyError(f"{where} is an item of unsupported type {kind!r}", param=where)
    return messages


def join_items(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join calls to the assistant message they follow.

    >>> call = {"role": "assistant", "content": "", "tool_calls": ["c"]}
    >>> join_items([{"role": "assistant", "content": "Let me see."}, call])
    [{'role': 'assistant', 'content': 'Let me see.', 'tool_calls': ['c']}]
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message.get("tool_calls") and last.get("role") == "assistant":
            calls = [*last.get("tool_calls", []), *message["tool_calls"]]
            joined[-1] = {**last, "tool_calls": calls}
        else:
            joined.append(message)
    return joined


def _tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ProxyError(
            f"tools[{index}] is of type {tool.get('type')!r}; only functions can be offered",
            param=f"tools[{index}]",
        )
    kept = ("name", "description", "parameters")
    function = {key: tool[key] for key in kept if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def remember(
    history: History, answer: AgentAnswer, conversation: list[dict[str, Any]], *, at_most: int
) -> None:
    """Store a conversation under its response's id, and drop the oldest beyond `at_most`."""
    message = {**answer.choices[0].message(), "content": answer.choices[0].content or ""}
    history[f"resp_{answer.id}"] = [*conversation, message]
    while len(history) > at_most:
        del history[next(iter(history))]


def write(answer: AgentAnswer, body: ResponsesBody) -> dict[str, Any]:
    """Return the response body."""
    cut_off = answer.choices[0].finish_reason == "length"
    status = "incomplete" if cut_off else "completed"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": answer.model,
        "output": _items(answer, status),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _items(answer: AgentAnswer, status: str) -> list[dict[str, Any]]:
    choice = answer.choices[0]
    items: list[dict[str, Any]] = []
    if choice.content or not choice.tool_calls:
        part = {"type": "output_text", "text": choice.content or "", "annotations": []}
        items.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for i, call in enumerate(choice.tool_calls):
        items.append(
            {
                "id": f"fc_{answer.id}_{i}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": status,
            }
        )
    return items


def stream(answer: AgentAnswer, body: ResponsesBody) -> Iterator[bytes]:
    """Return the response as events."""
    for number, fields in enumerate(_events(write(answer, body))):
        yield sse.event({**fields, "sequence_number": number}, name=fields["type"])


def _events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    started = {**whole, "status": "in_progress", "output": [], "usage": None}
    started["incomplete_details"] = None
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        is_call = item["type"] == "function_call"
        empty = {**item, "status": "in_progress", **({"arguments": ""} if is_call else {})}
        if not is_call:
            empty["content"] = []
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        if is_call:
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {
                "type": "response.function_call_arguments.done",
                **at,
                "name": item["name"],
                "arguments": arguments,
            }
        else:
            part = item["content"][0]
            at |= {"content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            text = part["text"]
            yield {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}
