"""Mask secrets in configurations before they are printed, written to evaluate_config.yaml or sent to wandb."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from atroposlib.utils.wording import without_users

MASK = "***"
"""Replaces a secret. A key with this value in a configuration file is ignored."""

_SECRET_NAME = re.compile(
    r"(^|_)(api|access|secret|private|auth)_?key$|passw(or)?d|secret|credential"
    r"|(^|_)(api|auth|access|bearer|refresh|hf|hub|github)_token$",
    re.IGNORECASE,
)


def without_secrets(value: Any) -> Any:
    """Return plain data with secrets replaced by `MASK`: values with secret-like names, and user parts of URLs.

    >>> without_secrets({"api_key": "sk-1", "max_token_length": 9, "base_url": "http://me:pw@host/v1"})
    {'api_key': '***', 'max_token_length': 9, 'base_url': 'http://***@host/v1'}
    """
    if isinstance(value, Mapping):
        return {
            key: MASK
            if inner and _SECRET_NAME.search(str(key)) and not isinstance(inner, bool | int)
            else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    if isinstance(value, str):
        return without_users(value)
    return value


def without_masked(value: Any) -> Any:
    """Return a configuration without the keys whose value is `MASK`."""
    if isinstance(value, Mapping):
        return {key: without_masked(inner) for key, inner in value.items() if inner != MASK}
    if isinstance(value, list):
        return [without_masked(inner) for inner in value]
    return value
