"""vLLM's tool parsers as styles, for names that `STYLES` lacks; only if vLLM is installed.

They are foreign code that runs on a model's text: any exception is logged, and the text stays text.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.parsers.json_styles import HERMES
from atroposlib.inference.tools.parsers.style import Call, Style, Tools, sendable

logger = logging.getLogger(__name__)


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

    Raises ConfigError if the parser refuses the tokenizer, for example because a delimiter is not one of its tokens.
    """
    protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    parser_cls = _manager().get_tool_parser(name)
    try:
        parser_cls(tokenizer)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"vLLM's tool parser {name!r} refuses the tokenizer: {error}") from error

    def split(text: str, tools: Tools) -> list[str | Call]:
        try:
            request = protocol.ChatCompletionRequest(
                model="", messages=[{"role": "user", "content": ""}], tools=list(tools) or None
            )
            # A parser per answer: parsers keep its state, and some type arguments by the tools they are created with.
            read = parser_cls(tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # boundary: foreign code on a model's text
            logger.exception("vLLM's tool parser %s failed; its text is left unparsed", name)
            return [text]
        if not read.tools_called or not read.tool_calls:
            return [text]
        calls = [Call(call.function.name, call.function.arguments) for call in read.tool_calls]
        return [read.content or "", *map(sendable, calls)]

    return Style(name=name, split=split, render=HERMES.render, markers=())
