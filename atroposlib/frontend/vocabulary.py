"""The text of single tokens, as the viewer shows them: special tokens and parts of a character are visible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from atroposlib.utils.tokenizers.backends import BYTE_OF_CHARACTER, decode

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""


def decoder(tokenizer: Any) -> Decode:
    """Return a function for `write_page` that decodes with a tokenizer.

    Of a single token it keeps the leading space and shows bytes that are no complete character as `\\xe2`.
    """

    def text_of(tokens: Sequence[int]) -> str:
        try:
            text = decode(tokenizer, list(map(int, tokens)))
        except (LookupError, OverflowError, ValueError):  # another model's tokenizer
            return " ".join(f"[{token}]" for token in tokens)
        return text if len(tokens) != 1 else _piece(tokenizer, int(tokens[0]), text)

    return text_of


def _piece(tokenizer: Any, token: int, text: str) -> str:
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)  # not in a tokenizer of an author
    raw = convert(token) if convert is not None else None
    if not isinstance(raw, str):
        return text
    if raw.startswith("\u2581") and not text.startswith(" "):  # SentencePiece drops it at the start
        return f" {text}"
    if "\ufffd" not in text:
        return text
    if all(character in BYTE_OF_CHARACTER for character in raw):
        return bytes(BYTE_OF_CHARACTER[character] for character in raw).decode(
            errors="backslashreplace"
        )
    return raw


class Vocabulary:
    """Decodes each token id once."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def of(self, groups: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return the pieces of all tokens in view groups, by id; {} without a tokenizer."""
        if self._decode is None:
            return {}
        used = {
            token
            for group in groups
            for sequence in group["sequences"]
            for token in sequence.get("tokens") or ()
        }
        for token in used - self._pieces.keys():
            self._pieces[token] = self._decode([token])
        return {str(token): self._pieces[token] for token in sorted(used)}
