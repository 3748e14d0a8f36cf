"""Reward for Sanskrit verse in a given metre. Needs the package `chandas`, which no extra installs."""

from __future__ import annotations

import functools
import importlib
import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

logger = logging.getLogger(__name__)

_VALUES = {"exact": 1.0, "partial": 0.5, "accidental": 0.25}
"""Value by the kind of match that chandas reports."""


@registry.register(name="chandas_meter")
class ChandasMeterReward(RewardFunction):
    """1.0 for an exact match of `meter`, 0.5 for partial, 0.25 for accidental; 0 for none or without chandas."""

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **config: Any) -> None:
        super().__init__(weight=weight, **config)
        self.meter = meter

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        identify = _chandas()
        if identify is None:
            return [0.0] * len(completions)
        return [self._value(identify, self.get_content(each)) for each in completions]

    def _value(self, identify: Any, text: str) -> float:
        if not text.strip():
            return 0.0
        lines = identify.to_pattern_lines(text.splitlines())
        found = identify.identifier.IdentifyFromPatternLines(lines)
        wanted = _plain(self.meter)
        return max(
            (value for kind, value in _VALUES.items() if wanted in _names(found.get(kind))),
            default=0.0,
        )


@functools.cache
def _chandas() -> Any:
    try:
        return importlib.import_module("chandas.identify")
    except ImportError as error:
        logger.warning("every metre reward is 0: %s; run: pip install chandas", error)
        return None


def _names(found: Any) -> Iterator[str]:
    """Yield the metres in a result: a name, or names in lists or as keys."""
    if isinstance(found, str):
        yield _plain(found)
    elif isinstance(found, Mapping | list | tuple | set):
        for each in found:
            yield from _names(each)


def _plain(name: str) -> str:
    """Return a name without its diacritics, in lower case.

    >>> _plain("Tri\\u1e63\\u1e6dubh")
    'tristubh'
    """
    decomposed = unicodedata.normalize("NFKD", name)
    return "".join(c for c in decomposed if not unicodedata.combining(c)).casefold()


def chandas_meter_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Judge with the default settings of `ChandasMeterReward`."""
    return ChandasMeterReward()(completions, **kwargs)
