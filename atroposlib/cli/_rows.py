"""What `atropos-sft-gen` and `atropos-dpo-gen` read from a group: text, messages, or prompt and answers as messages.

A group comes from a hub, or from a line of a file of `process` or `serve`, whose other keys then help to find the
conversations. Messages are passed on unchanged, with their tool calls, reasoning and other keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from atroposlib.errors import EnvError
from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup
from atroposlib.utils.tokenizers import load_tokenizer

Decode: TypeAlias = Callable[[Sequence[int]], str]
Messages: TypeAlias = list[Any]


class Source(NamedTuple):
    """A group and where it comes from."""

    group: ScoredGroup
    line: Mapping[str, Any]
    """Its line of a file, as JSON; {} from a hub."""

    def with_tokens(self) -> ScoredGroup:
        """Return the group; EnvError if its tokens are placeholders."""
        if self.line.get("has_token_ids") is False:
            raise EnvError(
                "a group of an API without token ids has no text of its tokens; use"
                " --save-messages or --format chat"
            )
        return self.group


class Texts(NamedTuple):
    """The sequences of a group as text."""

    prefix: str
    """The common text before the first trained token of any sequence."""
    completions: list[str]
    """The rest of each sequence."""


class Chat(NamedTuple):
    """A conversation of which only the answer is trained."""

    prompt: Messages
    """What the model was sent first."""
    answer: Messages
    """Its first message and all later ones."""


def decoder(tokenizer: str) -> Decode:
    """Load a tokenizer; the text keeps its special tokens."""
    loaded = load_tokenizer(tokenizer, flag="--tokenizer")
    return lambda tokens: str(loaded.decode(list(map(int, tokens))))


def texts_of(group: ScoredGroup, decode: Decode) -> Texts:
    """Decode the sequences and split off their common prefix."""
    sequences = [group.sequence(i) for i in range(group.num_sequences)]
    texts = [decode(sequence.tokens.tolist()) for sequence in sequences]
    prompts = []
    for sequence in sequences:
        trained = np.flatnonzero(sequence.masks != IGNORE_INDEX)
        end = int(trained[0]) if len(trained) else len(sequence.tokens)
        prompts.append(decode(sequence.tokens[:end].tolist()))
    prefix = os.path.commonprefix([*texts, *prompts])
    return Texts(prefix, [text[len(prefix) :] for text in texts])


def messages_of(source: Source) -> list[Messages]:
    """Return the conversations of a group; EnvError if it has none."""
    group = source.group
    if group.messages is None or len(group.messages) != group.num_sequences:
        raise EnvError(
            f"a group of environment {group.env_id} has no messages; run it with"
            " --env.include_messages true, or drop --save-messages and --format chat"
        )
    return group.messages


def chats_of(source: Source) -> list[Chat]:
    """Split each conversation of a group; EnvError if one has no message of the assistant.

    The prompt is the line's `prompt` if the conversations start with it (it may contain examples of answers), else all
    messages before the assistant's first.
    """
    found = messages_of(source)
    if not all(map(first_answer, found)):
        found = _sampled_messages(source) or found
    sent = source.line.get("prompt")
    prompt = sent if isinstance(sent, list) else []
    has_prompt = all(
        messages[: len(prompt)] == prompt and len(messages) > len(prompt) for messages in found
    )
    chats = []
    for messages in found:
        end = len(prompt) if prompt and has_prompt else first_answer(messages)
        if not end:
            raise EnvError(
                f"a group of environment {source.group.env_id} has a conversation without a prompt or"
                " without a message of the assistant; --format chat needs `messages` with both"
            )
        chats.append(Chat(messages[:end], messages[end:]))
    return chats


def first_answer(messages: Any) -> int:
    """Return the position of the assistant's first message; 0 without one, or without a prompt before it."""
    roles = [each.get("role") if isinstance(each, Mapping) else None for each in messages]
    return roles.index("assistant") if "assistant" in roles else 0


def _sampled_messages(source: Source) -> list[Messages] | None:
    """Return the conversations that the recorded requests of a line had; None if one cannot be determined.

    Environments that send no messages get a single one with all text of a sequence. A sequence's conversation is then
    the messages of the request that its last answer came from, and this answer.
    """
    prompts: list[Any] = []
    sampled: dict[Any, list[Messages]] = {}
    for call in source.line.get("calls") or ():
        earlier = call.get("continues")
        added = call.get("prompt")
        prompts.append(added if earlier is None else prompts[earlier] + added)
        for answer in call["answers"]:
            conversations = sampled.setdefault(answer["text"], [])
            if isinstance(prompts[-1], list) and prompts[-1] not in conversations:
                conversations.append(prompts[-1])
    found = []
    for text in source.line.get("completions") or ():
        conversations = sampled.get(text, [])
        if len(conversations) != 1:
            return None
        found.append([*conversations[0], {"role": "assistant", "content": text}])
    return found if len(found) == source.group.num_sequences else None
