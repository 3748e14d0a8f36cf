"""Messages -> prompt text through a tokenizer's chat template, so that turns already sampled keep their exact tokens.

A tracked assistant turn is rendered as a short mark instead of its text. What the template puts after the mark is all
that a later turn adds to the prompt: nothing sampled is ever tokenised again, and templates that trim or strip
assistant text (`<think>` blocks, white space) cannot touch it. Pure apart from calling the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from pydantic import BaseModel

from atroposlib.errors import ConfigError

Message = Mapping[str, Any]

_COMPARED_KEYS = ("role", "name", "tool_calls", "tool_call_id")


def _mark(index: int) -> str:
    return f"ATROPOSTURN{index}END"


def as_dict(message: Any) -> dict[str, Any]:
    """Return a message as a dict; `completion.choices[0].message` is a pydantic object."""
    if isinstance(message, BaseModel):
        return message.model_dump(exclude_none=True)
    return dict(message)


def text_of(content: Any) -> str | None:
    """Return the text of a message's content (a string or a list of parts); None when it is not only text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(part["text"] for part in content)
    return None


def identity(message: Message) -> str:
    """Return what two messages must share to be the same turn: role, content, name and tool calls."""
    content = message.get("content")
    text = text_of(content)
    rest = {key: message[key] for key in _COMPARED_KEYS if message.get(key)}
    return repr((rest, text if text is not None else content))


class RenderedChat(NamedTuple):
    """A conversation as text, in two renderings that a later turn is compared with."""

    prompt: str
    """Everything up to where the model starts writing."""
    history: str
    """The messages without the generation prompt; tracked turns are marks."""


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        tracked: Set[int] = frozenset(),
        tools: list[Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation. `tracked` are the indexes of assistant turns to render as marks.

        If the last message is the assistant's, the model continues it: nothing is put behind it.
        """
        marked: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        continues = bool(messages) and messages[-1].get("role") == "assistant"
        for i, message in enumerate(messages):
            text = text_of(message.get("content"))
            is_assistant = message.get("role") == "assistant" and text is not None
            is_continued = continues and i == len(messages) - 1
            if is_assistant and (i in tracked or is_continued or "<think>" in (text or "")):
                marked.append({**message, "content": _mark(i)})
                if i not in tracked:
                    texts[_mark(i)] = text or ""
            else:
                marked.append(dict(message))
        if continues:
            last = _mark(len(messages) - 1)
            prompt = self._apply(marked, tools=tools, add_generation_prompt=False)
            prompt = prompt[: prompt.rindex(last) + len(last)] if last in prompt else prompt
            history = self._apply(marked[:-1], tools=tools, add_generation_prompt=False)
        else:
            prompt = self._apply(marked, tools=tools, add_generation_prompt=True)
            history = self._apply(marked, tools=tools, add_generation_prompt=False)
        for mark, text in texts.items():
            prompt, history = prompt.replace(mark, text), history.replace(mark, text)
        return RenderedChat(prompt, history)

    def text_after(self, rendered: RenderedChat, *, earlier_history: str, turn: int) -> str | None:
        """Return what follows the tracked turn at index `turn`; None if the template rewrote what came before it."""
        mark = _mark(turn)
        prompt = rendered.prompt
        if not prompt.startswith(earlier_history) or prompt.count(mark) != 1:
            return None
        position = prompt.index(mark)
        if position < len(earlier_history):
            return None
        return prompt[position + len(mark) :]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise text. With special tokens, a BOS that the text already spells out is not doubled."""
        if not text:
            return []
        tokens = [
            int(t) for t in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ]
        bos = getattr(self._tokenizer, "bos_token_id", None)
        if bos is not None and tokens[:2] == [bos, bos]:
            tokens = tokens[1:]
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return str(text)

    def is_special(self, token: int) -> bool:
        """Whether a token ends or begins a turn rather than being text."""
        if token == getattr(self._tokenizer, "eos_token_id", None):
            return True
        return token in (getattr(self._tokenizer, "all_special_ids", None) or ())

    def _apply(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        if not messages:
            return ""
        options: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **options,
                )
            )
        except ValueError as e:
            if getattr(self._tokenizer, "chat_template", "") is None:
                raise ConfigError(
                    "the tokenizer has no chat template; use an instruction-tuned model,"
                    " set tokenizer.chat_template, or call completion() with a text prompt"
                ) from e
            raise
