"""A finished chat as tokens and labels, for environments whose inference server returns only text.

Labels are the token where it is trained and -100 elsewhere. Environments that use the managed server have the exact
tokens and should not tokenise text again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.tokenizers.backends import encode, is_of_transformers

logger = logging.getLogger(__name__)

UNMASKED_ROLES = ["assistant", "agent"]
"""Roles whose messages are trained in the all-turns mode."""


class TokenizedChat(TypedDict):
    """Parallel lists of one sequence."""

    tokens: list[int]
    masks: list[int]
    messages: NotRequired[Sequence[Mapping[str, Any]]]


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> TokenizedChat:
    """Render `chat` with the tokenizer's template and label the trained tokens.

    By default the last message is trained; with `train_on_all_assistant_turns`, every message of `UNMASKED_ROLES`. With
    `finish_reason` "length" a final EOS token is removed: the template added it, not the model. The order of parameters
    is part of the interface.
    """
    tokens = chat_token_ids(tokenizer, chat)
    masks = [IGNORE_INDEX] * len(tokens)
    if train_on_all_assistant_turns:
        trained = [i for i, message in enumerate(chat) if message["role"] in UNMASKED_ROLES]
    else:
        trained = [len(chat) - 1]
    for index in trained:
        prompt = chat_token_ids(tokenizer, chat[:index], add_generation_prompt=True)
        is_last = index == len(chat) - 1
        until_here = tokens if is_last else chat_token_ids(tokenizer, chat[: index + 1])
        if tokens[: len(prompt)] != prompt or tokens[: len(until_here)] != until_here:
            logger.warning(
                "message %d: the chat template renders earlier messages differently when later ones follow; "
                "its labels may be shifted",
                index,
            )
        masks[len(prompt) : len(until_here)] = tokens[len(prompt) : len(until_here)]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    result = TokenizedChat(tokens=tokens, masks=masks)
    if include_messages:
        result["messages"] = chat
    return result


def chat_token_ids(
    tokenizer: Any, chat: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
) -> list[int]:
    """Return the template's token ids; [] without messages and generation prompt."""
    if not chat and not add_generation_prompt:
        return []
    options = {"add_generation_prompt": add_generation_prompt}
    if is_of_transformers(tokenizer, "apply_chat_template", "encode"):
        return encode(
            tokenizer, tokenizer.apply_chat_template(list(chat), tokenize=False, **options)
        )
    # transformers 5 returns a mapping by default; other tokenizers may ignore `return_dict`.
    rendered = tokenizer.apply_chat_template(
        list(chat), tokenize=True, return_dict=False, **options
    )
    return list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)
