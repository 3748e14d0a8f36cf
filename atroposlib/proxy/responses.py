"""OpenAI's Responses API: `POST .../v1/responses`.

Items become messages: a function call joins the assistant message before it, so that the items of one sampled turn
become that turn again. `previous_response_id` works within a session, whose `History` stores conversations.
Tools of a namespace become functions, custom tools functions of one text; tools that only OpenAI can run are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

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


class ReadResponses(NamedTuple):
    """A translated request."""

    ask: AgentRequest
    conversation: list[dict[str, Any]]
    """What to store, without instructions."""
    tools: dict[str, OfferedTool]


def read(body: ResponsesBody, history: History) -> ReadResponses:
    """Translate a request. Raises ProxyError for what is not supported."""
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
    functions, offered, left_out = read_tools(body.tools or [])
    ask = AgentRequest(
        messages=read_messages([*system, *conversation], param="input"),
        tools=functions or None,
        tool_choice=_tool_choice(body.tool_choice),
        sampling=sampling,
        left_out=tuple(left_out),
    )
    return ReadResponses(ask, conversation, offered)


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one message per item; reasoning that has no text is left out."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = read_content(item.get("content"), where=f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind in ("function_call", "custom_tool_call"):
            name = function_name(text_field(item, "name", where), item.get("namespace"))
            if kind == "function_call":
                arguments: Any = text_field(item, "arguments", where)
            else:
                arguments = {"input": text_field(item, "input", where)}
            call = tool_call(text_field(item, "call_id", where), name, arguments)
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = read_content(item.get("output"), where=f"{where}.output")
            if item.get("call_id") is None and item.get("name") is not None:
                messages.append(_told(item, output, where))
                continue
            call_id = text_field(item, "call_id", where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            listed = [
                item[key] for key in ("content", "summary") if isinstance(item.get(key), list)
            ]
            parts = [part for parts in listed for part in parts if isinstance(part, Mapping)]
            thought = "".join(str(part.get("text") or "") for part in parts)
            if thought:
                message = {"role": "assistant", "content": "", "reasoning_content": thought}
                messages.append(message)
        else:
            raise ProxyError(f"{where} is an item of unsupported type {kind!r}", param=where)
    return messages


def _told(
    item: Mapping[str, Any], output: str | list[dict[str, Any]], where: str
) -> dict[str, Any]:
    """Return what a tool says without being called, as tools of Codex do, as a message of the user."""
    name = function_name(text_field(item, "name", where), item.get("namespace"))
    if isinstance(output, str):
        return {"role": "user", "content": f"{name}: {output}"}
    return {"role": "user", "content": [{"type": "text", "text": f"{name}:"}, *output]}


def join_items(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join thoughts to the assistant message that follows, and calls to the one before.

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
        elif message["role"] == "assistant" and _is_thought(last):
            joined[-1] = {**last, **message}
        else:
            joined.append(message)
    return joined


def _is_thought(message: Mapping[str, Any]) -> bool:
    """Whether a message is a thought alone."""
    rest = message.get("content") or message.get("tool_calls")
    return bool(message.get("reasoning_content")) and not rest


class OfferedTool(NamedTuple):
    """How the client knows a tool that the model knows as a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether it takes a text instead of JSON."""


Tools = Mapping[str, OfferedTool]
"""By the name of the function; functions that have the same name at the client are left out."""


def function_name(name: str, namespace: Any) -> str:
    """Return the name by which the model calls a tool of a namespace.

    >>> function_name("read", "mcp__files"), function_name("read", "mcp__files__")
    ('mcp__files__read', 'mcp__files__read')
    """
    return (
        f"{namespace.removesuffix('__')}__{name}"
        if namespace and isinstance(namespace, str)
        else name
    )


def read_tools(
    raw: Sequence[Mapping[str, Any]], where: str = "tools", namespace: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, OfferedTool], list[str]]:
    """Return the tools as functions, how the client knows them, and the types that only OpenAI can run."""
    functions: list[dict[str, Any]] = []
    offered: dict[str, OfferedTool] = {}
    left_out: list[str] = []
    for i, tool in enumerate(raw):
        at, kind = f"{where}[{i}]", tool.get("type") if isinstance(tool, Mapping) else None
        if kind == "namespace" and namespace is None and isinstance(tool.get("tools"), list):
            found = read_tools(tool["tools"], f"{at}.tools", text_field(tool, "name", at))
            functions += found[0]
            offered |= found[1]
            left_out += found[2]
        elif kind in ("function", "custom"):
            own_name = text_field(tool, "name", at)
            known = OfferedTool(own_name, namespace, kind == "custom")
            name = function_name(own_name, namespace)
            kept = ("description", "parameters")
            function = {key: tool[key] for key in kept if tool.get(key) is not None}
            if known.is_custom:
                function["parameters"] = _ONE_TEXT
            if known != OfferedTool(name):
                offered[name] = known
            functions.append({"type": "function", "function": {"name": name, **function}})
        elif isinstance(kind, str):
            left_out.append(kind)
        else:
            raise ProxyError(f"{at} has no type", param=at)
    return functions, offered, left_out


_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool."""


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool; arguments of another form as the model wrote them."""
    read = parsed_json(arguments)
    given = read.get("input") if isinstance(read, dict) else None
    return given if isinstance(given, str) else arguments


def _tool_choice(choice: Any) -> Any:
    if (
        isinstance(choice, Mapping)
        and choice.get("type") in ("function", "custom")
        and "name" in choice
    ):
        name = function_name(str(choice["name"]), choice.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    return choice


def remember(
    history: History, answer: AgentAnswer, conversation: list[dict[str, Any]], *, at_most: int
) -> None:
    """Store a conversation under its response's id, and drop the oldest beyond `at_most`."""
    message = {**answer.choices[0].message(), "content": answer.choices[0].content or ""}
    history[f"resp_{answer.id}"] = [*conversation, message]
    while len(history) > at_most:
        del history[next(iter(history))]


def write(answer: AgentAnswer, body: ResponsesBody, tools: Tools) -> dict[str, Any]:
    """Return the response body."""
    cut_off = answer.choices[0].finish_reason == "length"
    status = "incomplete" if cut_off else "completed"
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    return {
        **_response(answer, body, status=status, usage=usage),
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": _items(answer, tools, status),
    }


def _response(
    answer: AgentAnswer, body: ResponsesBody, *, status: str, usage: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": answer.model,
        "output": [],
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
        "usage": usage,
    }


def _items(answer: AgentAnswer, tools: Tools, status: str) -> list[dict[str, Any]]:
    choice = answer.choices[0]
    items: list[dict[str, Any]] = []
    if choice.thought:
        items.append(_item(answer.id, "thought", 0, choice.thought, tools, status))
    if choice.content or not choice.tool_calls:
        items.append(_item(answer.id, "text", 0, choice.content or "", tools, status))
    for i, call in enumerate(choice.tool_calls):
        text = call["function"]["arguments"]
        items.append(_item(answer.id, "call", i, text, tools, status, call=call))
    return items


def _item(
    id: str,
    kind: str,
    number: int,
    text: str,
    tools: Tools,
    status: str,
    *,
    call: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if call is not None:
        name = call["function"]["name"]
        tool = tools.get(name, OfferedTool(name))
        known = {"call_id": call["id"], "name": tool.name, "status": status}
        if tool.namespace is not None:
            known["namespace"] = tool.namespace
        if tool.is_custom:
            known |= {"type": "custom_tool_call", "input": _custom_input(text)}
            return {"id": f"ctc_{id}_{number}", **known}
        return {"id": f"fc_{id}_{number}", "type": "function_call", "arguments": text, **known}
    if kind == "thought":
        parts = [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": parts}
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [_text_part(text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


class Writer:
    """The events of a streamed response: one item per part."""

    def __init__(self, body: ResponsesBody, tools: Tools) -> None:
        self._body = body
        self._tools = tools
        self._id = ""
        self._started: dict[str, Any] = {}
        self._num_events = 0

    def begin(self, head: AgentAnswer) -> Iterator[bytes]:
        self._id = head.id
        self._started = _response(head, self._body, status="in_progress", usage=None)
        yield self._event("response.created", response=self._started)
        yield self._event("response.in_progress", response=self._started)

    def open(self, part: Part) -> Iterator[bytes]:
        item = self._item(part, "", "in_progress")
        if "content" in item:
            item["content"] = []
        item |= {key: "" for key in ("arguments", "input") if key in item}
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if part.call is None:
            yield self._of("response.content_part.added", part, content_index=0, part=_part(part))

    def piece(self, part: Part, text: str) -> Iterator[bytes]:
        if part.call is None:
            more = {"content_index": 0, "delta": text, **_logprobs_of(part)}
            yield self._of(f"response.{_TEXTS[part.kind]}.delta", part, **more)
        else:
            item = self._item(part, text, "in_progress")
            key = "input" if "input" in item else "arguments"
            yield self._of(f"response.{_CALL_TEXTS[key]}.delta", part, delta=item[key])

    def close(self, part: Part) -> Iterator[bytes]:
        item = self._item(part, part.text, "completed")
        if part.call is None:
            name = f"response.{_TEXTS[part.kind]}.done"
            yield self._of(name, part, content_index=0, text=part.text, **_logprobs_of(part))
            yield self._of("response.content_part.done", part, content_index=0, part=_part(part))
        elif "input" in item:
            name = f"response.{_CALL_TEXTS['input']}.done"
            yield self._of(name, part, input=item["input"])
        else:
            name = f"response.{_CALL_TEXTS['arguments']}.done"
            yield self._of(name, part, name=item["name"], arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=part.index, item=item)

    def end(self, answer: AgentAnswer) -> Iterator[bytes]:
        whole = write(answer, self._body, self._tools)
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ProxyError) -> Iterator[bytes]:
        fault = {"code": error.code or "server_error", "message": error.message}
        failed = {**self._started, "status": "failed", "error": fault}
        # OpenAI's SDK raises for an event with an error beside its type.
        yield self._event("response.failed", response=failed, **error.body())

    def _item(self, part: Part, text: str, status: str) -> dict[str, Any]:
        number = part.num_call
        return _item(self._id, part.kind, number, text, self._tools, status, call=part.call)

    def _of(self, kind: str, of: Part, **fields: Any) -> bytes:
        item_id = self._item(of, "", "")["id"]
        return self._event(kind, item_id=item_id, output_index=of.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, **fields, "sequence_number": number}, name=kind)


_TEXTS = {"thought": "reasoning_text", "text": "output_text"}
_CALL_TEXTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}


def _part(part: Part) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "reasoning_text", "text": part.text}
    return _text_part(part.text)


def _logprobs_of(part: Part) -> dict[str, Any]:
    return {"logprobs": []} if part.kind == "text" else {}
