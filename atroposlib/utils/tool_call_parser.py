"""Find and parse a tool call that a model wrote as JSON between tags. Called by environments.

Never raises for a completion: a call that cannot be parsed is an error in the result.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

ERROR_NAME = "-ERROR-"
DEFAULT_TAGS = ("tool_call",)


class ParsedToolCall(NamedTuple):
    """One call; `name` is `ERROR_NAME` when `is_error`."""

    name: str
    arguments: dict[str, Any]
    is_error: bool


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return the content of the first non-empty tag, in the order of `preferred_tags`; None without one.

    >>> extract_tool_call('so: <tool_call>{"name": "look"}</tool_call>')
    '{"name": "look"}'
    """
    for tag in preferred_tags or DEFAULT_TAGS:
        name = re.escape(tag)
        for match in re.finditer(rf"<{name}>(.*?)</{name}>", text, re.DOTALL | re.IGNORECASE):
            if content := match.group(1).strip():
                return content
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[str | Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> ParsedToolCall:
    """Return (name, arguments, is_error) of the first tool call in `response`.

    `available_tools` are names or OpenAI tool descriptions; without them every name is accepted. Returns ("-ERROR-",
    arguments, True) for an unknown name, ("-ERROR-", {}, True) for a missing or unparsable call.
    """
    content = extract_tool_call(response, preferred_tags)
    call = None if content is None else _load(content)
    if not isinstance(call, dict):
        logger.debug("no readable tool call in %.200r", response)
        return ParsedToolCall(ERROR_NAME, {}, True)
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form: JSON inside JSON
        arguments = _load(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        logger.debug("the tool call has no name or no arguments object: %.200r", content)
        return ParsedToolCall(ERROR_NAME, {}, True)
    if available_tools and name not in {_name_of(tool) for tool in available_tools}:
        logger.debug("unknown tool %r", name)
        return ParsedToolCall(ERROR_NAME, arguments, True)
    return ParsedToolCall(name, arguments, False)


def _name_of(tool: str | Mapping[str, Any]) -> str:
    if isinstance(tool, str):
        return tool
    return str(tool.get("function", tool).get("name", ""))


def _load(text: str) -> Any:
    """Parse JSON; if that fails, parse it with apostrophes as quotes (like a Python dict)."""
    for candidate in (text, text.replace("'", '"')):
        try:
            return json.loads(candidate, strict=False)  # models write raw line breaks into strings
        except ValueError:
            continue
        except RecursionError:
            return None
    return None
