"""What ends a completion: the strings and token ids of `stop` and `stop_token_ids`.

Engines read ids only in `stop_token_ids`; environments written for the original pass `stop=[tokenizer.eos_token_id]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_NAMES = ("stop", "stop_token_ids")


class Stops(NamedTuple):
    """The tokens of a completion include what ended it, its text does not."""

    strings: tuple[str, ...]
    token_ids: tuple[int, ...]


def with_stop_ids(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with the token ids of `stop` in `stop_token_ids`.

    Raises ValueError for an entry that is neither text nor a token id.

    >>> with_stop_ids({"stop": ["User:", 2], "stop_token_ids": [7]})
    {'stop': ['User:'], 'stop_token_ids': [7, 2]}
    """
    given = _given(kwargs)
    stop = given.get("stop")
    entries = [stop] if isinstance(stop, str | float | int | np.integer) else list(stop or ())
    ids = [_token_id(entry) for entry in entries if not isinstance(entry, str)]
    if not ids:
        return kwargs
    found = {key: value for key, value in kwargs.items() if key not in _NAMES}
    if extra := kwargs.get("extra_body"):
        found["extra_body"] = {key: value for key, value in extra.items() if key not in _NAMES}
    if strings := [entry for entry in entries if isinstance(entry, str)]:
        found["stop"] = strings
    all_ids = dict.fromkeys([*(given.get("stop_token_ids") or ()), *ids])
    return {**found, "stop_token_ids": list(all_ids)}


def read_stops(kwargs: dict[str, Any]) -> Stops:
    """Return what ends the completions of a call."""
    given = _given(with_stop_ids(kwargs))
    stop = given.get("stop") or ()
    strings = (stop,) if isinstance(stop, str) else stop
    return Stops(tuple(filter(None, strings)), tuple(given.get("stop_token_ids") or ()))


def _given(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**kwargs, **(kwargs.get("extra_body") or {})}


def _token_id(entry: Any) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int | np.integer) or entry < 0:
        raise ValueError(f"stop has {entry!r}, expected text or a token id")
    return int(entry)
