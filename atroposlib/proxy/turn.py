"""The common form of all dialects: `AgentRequest` (messages, tools, sampling), `AgentAnswer` (choices, usage)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from atroposlib.proxy.errors import ProxyError

MAX_CHOICES = 128
"""`n` of one request, as at OpenAI."""

_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class AgentBody(BaseModel):
    """A request body; unknown fields are ignored, as at OpenAI."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One request for the next message, or for the continuation of a text."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | None = None
    """The text to continue, in place of messages."""
    tools: list[dict[str, Any]] | None = None
    """In the form of chat completions."""
    tool_choice: Any = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Only what the client set: max_tokens, temperature, stop, ..."""
    template: dict[str, Any] = field(default_factory=dict)
    """`chat_template_kwargs`, if the client set them."""
    n: int = 1
    split: str = "train"
    max_context_tokens: int | None = None
    """Limit of the prompt and its answer together; None: the session's."""
    wants_logprobs: bool = False
    left_out: tuple[str, ...] = ()
    """What of the request cannot be offered and was left out, such as the tools that OpenAI itself would run."""


class TokenLogprob(NamedTuple):
    """One sampled token."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled message."""

    content: str | None
    """Without the thought."""
    thought: str = ""
    """Without its tags or marks."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """`{"id", "type", "function": {"name", "arguments"}}`, arguments as a string."""
    finish_reason: str
    """stop, length or tool_calls."""
    stop: str | None = None
    """The stop string that ended it."""
    logprobs: list[TokenLogprob] | None = None

    def message(self) -> dict[str, Any]:
        """Return the message in the form of chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """All choices of one request; none before they are sampled."""

    id: str
    """Hexadecimal, unique; dialects add a prefix."""
    created: int
    """Unix seconds."""
    model: str
    choices: list[Choice]
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_messages(raw: Sequence[Mapping[str, Any]], *, param: str = "messages") -> list[Any]:
    """Return chat messages with contents of text and images, and only the fields that chat templates use.

    Fields that clients add to their history (refusal, annotations, nulls, names of assistants) are dropped, so that a
    turn that was sampled here is recognised in a later request.
    """
    if not raw:
        raise ProxyError(f"{param} must hold at least one message", param=param)
    return [_read_message(message, f"{param}[{i}]") for i, message in enumerate(raw)]


def _read_message(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(sorted(_ROLES))
        raise ProxyError(f"{where}.role is {role!r}; known roles: {known}", param=f"{where}.role")
    message = {key: raw[key] for key in _KEPT if raw.get(key) is not None}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in message:
            message[key] = text_field(message, key, where)
    if role == "developer":
        message["role"] = "system"
    if role == "assistant":
        message.pop("name", None)
    message["content"] = read_content(raw.get("content"), where=f"{where}.content")
    if "tool_calls" in message:
        message["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


def read_content(content: Any, *, where: str) -> str | list[dict[str, Any]]:
    """Return a content: its text, or with images a list of parts as in chat completions.

    It is a string, null, or a list of parts of any dialect.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ProxyError(f"{where} must be a string, null or a list of parts", param=where)
    parts = [_read_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    url: Any = None
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
    elif kind == "image" and isinstance(source := part.get("source"), Mapping):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if isinstance(url, str):
        return {"type": "image_url", "image_url": {"url": url}}
    raise ProxyError(
        f"{where} is a part of type {kind!r}; this endpoint takes text and images with a URL or data",
        param=where,
    )


def text_field(values: Any, key: str, where: str) -> str:
    """Return a field that must be a string."""
    value = values.get(key) if isinstance(values, Mapping) else None
    if not isinstance(value, str):
        raise ProxyError(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return value


def _read_calls(raw: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not all(isinstance(call, Mapping) for call in raw):
        raise ProxyError(
            f"{where} must be a list of {{id, type, function: {{name, arguments}}}}", param=where
        )
    calls = []
    for i, call in enumerate(raw):
        at, function = f"{where}[{i}]", call.get("function")
        name = text_field(function, "name", f"{at}.function")
        arguments = text_field(function, "arguments", f"{at}.function")
        calls.append(tool_call(text_field(call, "id", at), name, arguments))
    return calls


def read_tools(raw: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Check and return the tools of a chat completion; None if there are none."""
    for i, tool in enumerate(raw or ()):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise ProxyError(
                f"{where} is of type {tool.get('type')!r}; only functions can be offered",
                param=where,
            )
        text_field(tool.get("function"), "name", f"{where}.function")
    return [dict(tool) for tool in raw] if raw else None


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in the form of chat completions; arguments become a JSON string."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
