"""Load tokenizers of transformers, which is imported on first use."""

from __future__ import annotations

from typing import Any

from atroposlib.errors import ConfigError


def load_tokenizer(source: str, *, flag: str = "--env.tokenizer_name") -> Any:
    """Load a tokenizer by name or path; slow, so call it off the event loop.

    Raises ConfigError, naming `flag`, if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"cannot load the tokenizer {source!r}: {reason}; "
            f"give a Hugging Face name or a local directory with {flag}"
        ) from error


__all__ = ["load_tokenizer"]
