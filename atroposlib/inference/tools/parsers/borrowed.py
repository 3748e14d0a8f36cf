"""Parsers of others as styles: vLLM's, for names that `STYLES` lacks, if vLLM is installed, and an author's object.

They are foreign code that runs on a model's text: any exception is logged, and the text stays text.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.messages import as_dict
from atroposlib.inference.tools.parsers.json_styles import HERMES
from atroposlib.inference.tools.parsers.style import (
    Call,
    Part,
    Style,
    ToolCallParser,
    Tools,
    call_from,
    sendable,
)

logger = logging.getLogger(__name__)

_PROBE = "Hello."
"""An answer that every parser can read."""


def vllm_names() -> list[str]:
    """Return vLLM's parser names; none without vLLM."""
    manager = _manager()
    return [] if manager is None else list(manager.list_registered())


def _manager() -> Any:
    try:
        return importlib.import_module("vllm.tool_parsers.abstract_tool_parser").ToolParserManager
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "vllm":
            raise
        return None


def vllm_style(name: str, tokenizer: Any) -> Style:
    """Return one of `vllm_names()` as a style. It renders calls as Hermes does: vLLM's parsers only parse.

    Raises ConfigError if the parser refuses the tokenizer, for example because a delimiter is not one of its tokens, or
    cannot read an answer's text, as that of gpt-oss, which reads tokens.
    """
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    parser_cls = _manager().get_tool_parser(name)
    try:
        parser_cls(tokenizer)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"vLLM's tool parser {name!r} refuses the tokenizer: {error}") from error

    def read(text: str, tools: Tools) -> tuple[str | None, list[Call]]:
        request = protocol.ChatCompletionRequest(
            model="", messages=[{"role": "user", "content": ""}], tools=list(tools) or None
        )
        # A parser per answer: parsers keep its state, and some type arguments by the tools they are created with.
        found = parser_cls(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = found.tool_calls if found.tools_called else []
        return found.content, [Call(call.function.name, call.function.arguments) for call in calls]

    try:
        read(_PROBE, ())
    except Exception as error:
        raise ConfigError(
            f"vLLM's tool parser {name!r} cannot read the text of an answer: {type(error).__name__}: {error}"
        ) from error
    return _style(f"vLLM's tool parser {name}", name, read)


def given_style(parser: ToolCallParser) -> Style:
    """Return an author's parser as a style. It renders calls as Hermes does."""

    def read(text: str, tools: Tools) -> tuple[str | None, list[Call]]:
        content, calls = parser.parse(text)
        return content, [
            call_from(call)._replace(id=as_dict(call).get("id")) for call in calls or ()
        ]

    name = type(parser).__name__
    return _style(f"The tool parser {name}", name, read)


def _style(
    what: str, name: str, read: Callable[[str, Tools], tuple[str | None, list[Call]]]
) -> Style:
    def split(text: str, tools: Tools) -> list[Part]:
        try:
            content, calls = read(text, tools)
        except Exception:  # boundary: foreign code on a model's text
            logger.exception("%s failed; its text is left unparsed", what)
            return [text]
        return [content or "", *map(sendable, calls)] if calls else [text]

    return Style(name=name, split=split, render=HERMES.render, markers=())
