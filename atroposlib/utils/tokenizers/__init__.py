"""Load tokenizers of transformers, which is imported on first use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 3.0
"""For one request to the hub of models before anything is downloaded: its own client retries for a minute."""


def load_tokenizer(source: str, *, flag: str = "--env.tokenizer_name") -> Any:
    """Load a tokenizer by name or path; slow, so call it off the event loop.

    If the hub of models cannot be reached, only the local cache is read. Raises ConfigError, naming `flag`, if the
    tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    unreachable = _hub_fault(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=unreachable is not None)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or repr(error)
        if unreachable is not None:
            reason = f"it is not in the local cache, and {unreachable}"
        raise ConfigError(
            f"cannot load the tokenizer {source!r}: {reason}; "
            f"give a Hugging Face name or a local directory with {flag}"
        ) from error
    if unreachable is not None:
        logger.warning("using the cached tokenizer %r: %s", source, unreachable)
    return tokenizer


def is_at_hand(source: str) -> bool:
    """Whether a tokenizer is a local directory or in the local cache; asks no host and does not import transformers."""
    from huggingface_hub import errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(source, "tokenizer_config.json")
    except errors.HFValidationError:  # a path
        cached = None
    return isinstance(cached, str) or Path(source).exists()


def _hub_fault(source: str) -> str | None:
    """Return why the hub of models cannot be reached; None if it can, or `source` is no name at the hub."""
    import httpx
    from huggingface_hub import constants

    if Path(source).exists() or source.startswith(("/", ".", "~")) or source.count("/") > 1:
        return None
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return None


__all__ = ["is_at_hand", "load_tokenizer"]
