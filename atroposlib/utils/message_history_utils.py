"""Shorten thinking blocks and trajectories to a token limit. Called by environments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.scored_data import DISTILL_FIELDS, PER_TOKEN_FIELDS
from atroposlib.utils.tokenize_for_trainer import UNMASKED_ROLES, tokenize_for_trainer

logger = logging.getLogger(__name__)

_OPEN, _CLOSE = "<think>", "</think>"
_NEEDED_KEYS = ("messages", "tokens", "masks", "seed", "parsed_actions")
_ALIGNED_KEYS = (*PER_TOKEN_FIELDS, *DISTILL_FIELDS)
"""Per-token fields of a step, invalid after the text is tokenised again."""

Step = dict[str, Any]
"""One step of a trajectory: parallel lists with one entry per alternative."""


def strip_thinking(response_text: str) -> str:
    """Remove the first `<think>...</think>` with its tags; text without both tags is unchanged.

    >>> strip_thinking("<think>hm</think>yes")
    'yes'
    """
    parts = _split(response_text)
    return response_text if parts is None else parts[0] + parts[2]


def truncate_thinking(response_text: str, tokenizer: Any, max_think_tokens: int) -> str:
    """Shorten the first thinking block to at most `max_think_tokens` tokens of its content.

    A longer block keeps its last paragraph if that fits, else its last tokens, after "... ". The content is put on its
    own lines; if none is left, as with a limit of 0, the tags are empty. Text without a block, or that the tokenizer
    cannot encode, is returned unchanged.
    """
    parts = _split(response_text)
    if parts is None:
        return response_text
    before, content, after = parts
    try:
        content = _shorten(content.strip(), tokenizer, max_think_tokens)
    except Exception:
        logger.warning(
            "a thinking block could not be tokenised and is not shortened", exc_info=True
        )
        return response_text
    block = f"{_OPEN}\n{content}\n{_CLOSE}" if content else f"{_OPEN}{_CLOSE}"
    return f"{before}{block}{after}"


def _shorten(content: str, tokenizer: Any, max_tokens: int) -> str:
    if not content or max_tokens <= 0:
        return ""
    tokens = tokenizer.encode(content, add_special_tokens=False)
    if len(tokens) <= max_tokens:
        return content
    last = content.rpartition("\n\n")[2].strip()
    if last and len(tokenizer.encode(last, add_special_tokens=False)) <= max_tokens:
        return f"... {last}"
    kept = tokenizer.decode(tokens[-max_tokens:]).strip()
    return f"... {kept}" if kept else ""


def _split(text: str) -> tuple[str, str, str] | None:
    before, opened, rest = text.partition(_OPEN)
    content, closed, after = rest.partition(_CLOSE)
    return (before, content, after) if opened and closed else None


def ensure_trajectory_token_limit(
    trajectory: Sequence[Mapping[str, Any]], tokenizer: Any, max_trajectory_tokens: int
) -> list[Step]:
    """Return the steps of a trajectory, each shortened until its longest alternative fits the limit.

    A step that is too long loses its oldest messages after the first one, an observation together with its reply, the
    same number in every alternative; the first message, the last observation and the last reply stay. The rest is
    tokenised again (only the last reply is trained), and the step's other per-token fields become None. Steps that lack
    a required key, or still do not fit, are dropped with a warning.
    """
    kept = []
    for index, step in enumerate(trajectory):
        missing = [key for key in _NEEDED_KEYS if key not in step]
        if missing:
            logger.warning("step %d dropped: it has no %s", index, ", ".join(missing))
            continue
        fitting = _fit(dict(step), tokenizer, max_trajectory_tokens)
        if fitting is None:
            logger.warning(
                "step %d dropped: it exceeds %d tokens even without its history",
                index,
                max_trajectory_tokens,
            )
            continue
        kept.append(fitting)
    return kept


def _fit(step: Step, tokenizer: Any, limit: int) -> Step | None:
    if _longest(step["tokens"]) <= limit:
        return step
    chats = [list(messages) for messages in step["messages"]]
    while True:
        count = 2 if all(_is_exchange(chat) for chat in chats) else 1
        if not chats or any(len(chat) - count < 3 for chat in chats):
            return None
        for chat in chats:
            del chat[1 : 1 + count]
        rendered = [tokenize_for_trainer(tokenizer, chat) for chat in chats]
        if _longest([each["tokens"] for each in rendered]) <= limit:
            break
    step["messages"] = chats
    step["tokens"] = [each["tokens"] for each in rendered]
    step["masks"] = [each["masks"] for each in rendered]
    for key in _ALIGNED_KEYS:
        if step.get(key) is not None:
            step[key] = None
    return step


def _is_exchange(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the oldest removable messages are an observation and its reply."""
    return (
        len(chat) > 4
        and chat[1]["role"] not in UNMASKED_ROLES
        and chat[2]["role"] in UNMASKED_ROLES
    )


def _longest(sequences: Sequence[Sequence[int]]) -> int:
    return max((len(tokens) for tokens in sequences), default=0)
