"""`ToolCallTranslator`: convert tool calls between the OpenAI form and the text that a model writes.

Parsing turns the raw text of an answer into `tool_calls`. Rendering turns an assistant message with `tool_calls` into
text: the model's own, verbatim, if this translator parsed it. Called by `ManagedServer`, which trains on the raw text.
The formats are in `parsers`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.inference.tools.messages import as_dict, parsed_json
from atroposlib.inference.tools.parsers import STYLES, Call, Parsed, Style, style_named
from atroposlib.inference.tools.parsers.borrowed import given_style
from atroposlib.inference.tools.parsers.style import Read, ToolCallParser, call_from
from atroposlib.inference.tools.thoughts import THINK_TAGS

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageToolCall

VLLM_AVAILABLE = True
"""The original's flag that tool parsing is available. Always true: the parsers here need no vLLM."""

MAX_REMEMBERED_CALLS = 4096


class ModelOutput(NamedTuple):
    """An answer in the OpenAI form."""

    content: str | None
    """The text outside the calls; the whole text if there are none."""
    tool_calls: list[ChatCompletionMessageToolCall] | None
    finish_reason: str
    """ "tool_calls" or "stop"; truncation is not detected here."""


class ToolCallTranslator:
    """Translates any number of conversations: call ids are unique. Raises ConfigError for an unknown `parser_name`."""

    def __init__(self, tokenizer: Any, parser_name: str | ToolCallParser = "hermes") -> None:
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.style: Style = (
            style_named(parser_name, tokenizer=tokenizer)
            if isinstance(parser_name, str)
            else given_style(parser_name)
        )
        if self.style is STYLES["mistral"] and "[ARGS]" in getattr(tokenizer, "get_vocab", dict)():
            self.style = STYLES["mistral_v11"]
        self.call_id_to_raw_text: OrderedDict[str, str] = OrderedDict()
        """Call id -> the whole answer that contained it, without the end of turn; the last `MAX_REMEMBERED_CALLS`."""
        self._parsed: dict[str, Parsed] = {}

    # Parsing.

    def parse_model_output(
        self,
        raw_text: str,
        tool_choice: Any = None,
        tools: Sequence[Any] | None = None,
    ) -> ModelOutput:
        """Return (content, tool_calls, finish_reason) of an answer, decoded with or without special tokens.

        Without `tools`, or with `tool_choice="none"`, the answer is all content.
        """
        if tool_choice == "none" or not tools:
            return ModelOutput(raw_text, None, "stop")
        read = self.read(raw_text, tools)
        return self.remember(read) if read.parsed.calls else ModelOutput(raw_text, None, "stop")

    def read(self, raw_text: str, tools: Sequence[Any]) -> Read:
        """Find the calls in an answer. Changes no state, so it may run in a thread."""
        text = self._without_end_of_turn(raw_text)
        return self.style.read(text, [as_dict(tool) for tool in tools])

    def remember(self, read: Read) -> ModelOutput:
        """Return an answer with calls in the OpenAI form, and store the text that they were parsed from."""
        calls = [self._remember(call, read) for call in read.parsed.calls]
        return ModelOutput(read.parsed.content or None, calls, "tool_calls")

    def decode_with_tool_awareness(self, token_ids: Sequence[int], has_tools: bool = False) -> str:
        """Decode an answer; with tools, special tokens are kept, because they may delimit calls."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=not has_tools)
        return str(text)

    # Rendering.

    def convert_messages_for_template(self, messages: Sequence[Any]) -> list[dict[str, Any]]:
        """Return messages for a chat template: the assistant's calls become text, the rest is unchanged."""
        return [self._as_text(as_dict(message)) for message in messages]

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Any]) -> str:
        """Return the text of calls: the whole answer they were parsed from, else as the model would write them."""
        calls = [call_from(call) for call in tool_calls]
        raw = self._exact(tool_calls, calls, content=None)
        return self.style.render(calls) if raw is None else raw

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        tool_calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not tool_calls:
            return message
        calls = [call_from(call) for call in tool_calls]
        content = _text_of(message.get("content"))
        text = self._exact(tool_calls, calls, content=content)
        if text is None:
            text = "\n".join(part for part in (content, self.style.render(calls)) if part)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**rest, "content": text}

    def _exact(
        self, tool_calls: Sequence[Any], calls: Sequence[Call], *, content: str | None
    ) -> str | None:
        """Return the stored answer with exactly these calls and, if given, this content; None if there is none."""
        if not tool_calls:
            return None
        first_id = str(as_dict(tool_calls[0]).get("id", ""))
        parsed, raw = self._parsed.get(first_id), self.call_id_to_raw_text.get(first_id)
        if parsed is None or raw is None or len(parsed.calls) != len(calls):
            return None
        if content and content.strip() != parsed.content.strip():
            return None
        if not all(map(_is_same, parsed.calls, calls)):
            return None
        self.call_id_to_raw_text.move_to_end(first_id)
        return raw

    # Memory.

    def _remember(self, call: Call, read: Read) -> ChatCompletionMessageToolCall:
        # Light imports: openai takes half a second.
        from openai.types.chat.chat_completion_message_function_tool_call import (
            ChatCompletionMessageFunctionToolCall,
            Function,
        )

        call_id = call.id
        if call_id is None or call_id in self.call_id_to_raw_text:
            call_id = self.style.new_id()
        self.call_id_to_raw_text[call_id] = read.text
        self._parsed[call_id] = read.parsed
        while len(self.call_id_to_raw_text) > MAX_REMEMBERED_CALLS:
            forgotten, _ = self.call_id_to_raw_text.popitem(last=False)
            self._parsed.pop(forgotten, None)
        return ChatCompletionMessageFunctionToolCall(
            id=call_id,
            type="function",
            function=Function(name=call.name, arguments=call.arguments),
        )

    def _without_end_of_turn(self, text: str) -> str:
        """Cut the special tokens after an answer: templates write them, and they are not part of a call."""
        kept = len(text)
        while True:
            stop = kept
            while stop and text[stop - 1].isspace():
                stop -= 1
            end = next((end for end in self._ends_of_turn if text.endswith(end, 0, stop)), None)
            if end is None:
                return text[:kept]
            kept = stop - len(end)

    @functools.cached_property
    def _ends_of_turn(self) -> tuple[str, ...]:
        tokenizer = self.tokenizer
        eos_token = str(getattr(tokenizer, "eos_token", None) or "")
        if not self.style.markers:  # a parser of vLLM's: any special token may delimit a call
            return (eos_token,) if eos_token else ()
        # Llama 3 ends calls with <|eom_id|>, which is special only in the list of added tokens.
        added = (getattr(tokenizer, "added_tokens_decoder", None) or {}).values()
        special = {str(token) for token in added if getattr(token, "special", False)}
        special.update(map(str, getattr(tokenizer, "all_special_tokens", None) or ()))
        special.add(eos_token)
        return tuple(sorted(special - {"", *self.style.markers, *chain(*THINK_TAGS)}))


def _text_of(content: Any) -> str:
    """Return the text of a message's content, a string or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in map(as_dict, content))
    return content or ""


def _is_same(read: Call, given: Call) -> bool:
    """Whether two calls are equal; agents may format the same JSON differently."""
    return read.name == given.name and (
        read.arguments == given.arguments
        or parsed_json(read.arguments) == parsed_json(given.arguments)
    )
