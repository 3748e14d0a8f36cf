"""Chat completions whose tool calls can be read as dicts and as objects.

`call["function"]["name"]` and `call.function.name` both work, as do `json.dumps(call)` and `completion.model_dump()`:
authors of environments use the former, agents written for the `openai` package the latter. Called by `ManagedServer`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


class OpenAIToolCall(dict[str, Any]):
    """A tool call or its function: a dict whose items are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a tool call has no {name!r}; it has {', '.join(self)}") from None

    @classmethod
    def of(cls, call: Any) -> OpenAIToolCall:
        """Wrap a call given as a mapping or as an object of the `openai` package."""
        values = dict(call) if isinstance(call, Mapping) else call.model_dump(exclude_none=True)
        return cls({**values, "function": cls(values["function"])})

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return plain dicts, as the objects of the `openai` package do."""
        return {
            key: value.model_dump() if isinstance(value, OpenAIToolCall) else value
            for key, value in self.items()
        }

    def to_dict(self, **options: Any) -> dict[str, Any]:
        return self.model_dump()


def completion_with_tool_calls(body: dict[str, Any]) -> Any:
    """Build a `ChatCompletion` from a body whose messages may have `tool_calls` of type `OpenAIToolCall`."""
    completion_type, choice_type, message_type = _types()
    choices = [
        choice_type.construct(**{**choice, "message": message_type.construct(**choice["message"])})
        for choice in body["choices"]
    ]
    completion = completion_type.construct(**{**body, "choices": []})
    completion.choices = choices
    return completion


@functools.cache
def _types() -> tuple[Any, Any, Any]:
    # `openai` takes about a second to import. Its own types warn when they serialise calls that are dicts.
    from openai.types.chat import ChatCompletion, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice

    class CalledMessage(ChatCompletionMessage):
        tool_calls: list[Any] | None = None

    class CalledChoice(Choice):
        message: CalledMessage

    class CalledCompletion(ChatCompletion):
        choices: list[CalledChoice]  # type: ignore[assignment]

    return CalledCompletion, CalledChoice, CalledMessage
