"""Encode, decode and write chats as tokenizers of transformers do: the same ids and texts in less time.

Other tokenizers, and classes that replace transformers' methods, are called themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_of_character()


class _TokenBytes(dict[int, bytes]):
    """The bytes of the tokens of a byte-level tokenizer, read on first use."""

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        super().__init__()
        self._id_to_token = id_to_token

    def __missing__(self, token: int) -> bytes:
        token = int(token)  # of numpy or torch
        text = self._id_to_token(token)
        if text is None:  # left out of the text; it may be added to the vocabulary later
            return b""
        try:
            piece = bytes(map(BYTE_OF_CHARACTER.__getitem__, text))
        except KeyError:  # an added token
            piece = text.encode()
        self[token] = piece
        return piece


_TOKEN_BYTES: WeakKeyDictionary[Any, _TokenBytes | None] = WeakKeyDictionary()
"""By tokenizer; None if `decode` of transformers does more than to join the bytes of tokens."""


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of a text, as `tokenizer.encode` does.

    transformers also requests the offsets of every token, which takes a third of the time.
    """
    is_known = is_of_transformers(tokenizer, "encode", "__call__", "_encode_plus")
    backend = tokenizer.backend_tokenizer if is_known else None
    if (
        backend is None
        or (backend.truncation, backend.padding) != (None, None)
        or tokenizer.split_special_tokens
        or backend.encode_special_tokens
    ):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a prompt; a BOS that the text already contains is not doubled."""
    tokens = encode(tokenizer, text, add_special_tokens=add_special_tokens) if text else []
    bos = getattr(tokenizer, "bos_token_id", None)
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def decode(
    tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool | None = None
) -> str:
    """Return the text of tokens, as `tokenizer.decode` does; with byte-level BPE in a fifth of the time.

    `skip_special_tokens` None is the tokenizer's default, which is False for those of transformers.
    """
    try:
        known = _TOKEN_BYTES[tokenizer]
    except KeyError:
        known = _TOKEN_BYTES[tokenizer] = _token_bytes(tokenizer)
    except TypeError:  # an author's class that is not hashable or has no weak references
        known = None
    if known is not None and not skip_special_tokens:
        return b"".join(map(known.__getitem__, tokens)).decode(errors="replace")
    method = getattr(type(tokenizer), "decode", None)
    # transformers checks each element of a list in Python (0.2 s per million tokens), but not of an array.
    takes_arrays = getattr(method, "__module__", "").startswith("transformers.")
    given = np.asarray(tokens, np.int64) if takes_arrays else list(tokens)
    options = {} if skip_special_tokens is None else {"skip_special_tokens": skip_special_tokens}
    return str(tokenizer.decode(given, **options))


def _token_bytes(tokenizer: Any) -> _TokenBytes | None:
    if (
        not is_of_transformers(tokenizer, "decode", "_decode")
        or tokenizer.clean_up_tokenization_spaces
        or type(tokenizer.backend_tokenizer.decoder).__name__ != "ByteLevel"
    ):
        return None
    return _TokenBytes(tokenizer.backend_tokenizer.id_to_token)


_IS_RUN_ALIKE: dict[Any, bool] = {}
"""By compiled chat template: whether its first chat came out as from `apply_chat_template`."""


def write_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of a chat, as `tokenizer.apply_chat_template` does with `variables` as further keywords.

    transformers copies each message several times, which takes longer than running most templates. A copy of plain
    texts is equal to them, so the template is run on the messages themselves; its first text is compared.
    """
    template = _template_to_run(tokenizer, messages, variables)

    def run() -> str:
        seen = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **variables}
        seen |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        seen.pop("chat_template", None)
        return str(template.render(seen))

    if _IS_RUN_ALIKE.get(template):
        return run()
    text = str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
    )
    if template is not None and template not in _IS_RUN_ALIKE:
        _IS_RUN_ALIKE[template] = run() == text
    return text


def _template_to_run(
    tokenizer: Any, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> Any:
    """Return the compiled chat template; None if transformers does more than to run it on equal messages."""
    if not is_of_transformers(tokenizer, "apply_chat_template", "get_chat_template"):
        return None
    own = _parameters_of(type(tokenizer).apply_chat_template) - {"tools", "chat_template"}
    if (
        # Of a long conversation only these three lines visit every message.
        set(map(type, messages)) != {dict}
        or not set(chain.from_iterable(messages)) <= {"role", "content", "name", "tool_call_id"}
        or set(map(type, chain.from_iterable(map(dict.values, messages)))) != {str}
        or not own.isdisjoint(variables)
        or "messages" in variables
        or (variables and not _is_plain(dict(variables)))
    ):
        return None
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:  # it is private
        return None
    tools, template = variables.get("tools"), variables.get("chat_template")
    return _compile_jinja_template(tokenizer.get_chat_template(template, tools))


@functools.cache
def _parameters_of(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)


def _is_plain(value: Any) -> bool:
    """Whether a value is JSON of Python's own types, which transformers copies unchanged."""
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and all(map(_is_plain, value.values()))
    if kind is list:
        return all(map(_is_plain, value))
    return value is None or kind in (str, int, float, bool)


def is_of_transformers(tokenizer: Any, *methods: str) -> bool:
    """Whether a tokenizer has a Rust backend, and its methods of these names are those of transformers."""
    return not any(
        name in vars(tokenizer)
        or not getattr(getattr(type(tokenizer), name, None), "__module__", "").startswith(
            "transformers.tokenization_utils"
        )
        for name in methods
    ) and hasattr(tokenizer, "backend_tokenizer")
