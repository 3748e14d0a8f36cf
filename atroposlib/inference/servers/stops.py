"""What ends a completion. Engines read token ids in `stop_token_ids` only; environments give them in `stop` as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Stops(NamedTuple):
    """The tokens of a completion include what ended it, its text does not."""

    strings: list[str]
    token_ids: list[int]


def read_stops(kwargs: Mapping[str, Any]) -> Stops:
    """Return the stops of a call. Raises ValueError for an entry of `stop` that is neither text nor a token id."""
    given = {**kwargs, **(kwargs.get("extra_body") or {})}
    stop = given.get("stop")
    found = Stops([], list(given.get("stop_token_ids") or ()))
    for entry in [stop] if isinstance(stop, str | float | int | np.integer) else stop or ():
        if isinstance(entry, str):
            found.strings.extend([entry] if entry else [])
        elif isinstance(entry, bool) or not isinstance(entry, int | np.integer) or entry < 0:
            raise ValueError(f"stop has {entry!r}, expected text or a token id")
        elif entry not in found.token_ids:
            found.token_ids.append(int(entry))
    return found


def with_stop_ids(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's keywords with the token ids of `stop` in `stop_token_ids`, if there are any.

    >>> with_stop_ids({"stop": ["User:", 2], "stop_token_ids": [7]})
    {'stop': ['User:'], 'stop_token_ids': [7, 2]}
    """
    stops, extra = read_stops(kwargs), kwargs.get("extra_body") or {}
    if not stops.token_ids:
        return kwargs
    moved = {"stop": stops.strings or None, "stop_token_ids": stops.token_ids}
    rest = {key: value for key, value in extra.items() if key not in moved}
    return {**kwargs, **({"extra_body": rest} if extra else {}), **moved}
