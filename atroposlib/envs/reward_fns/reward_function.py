"""The base class of reward functions: compute raw values, weight them, log them.

An exception while scoring is logged, counted in `failures` and scored 0. Setup errors (`AtroposError`: a missing extra,
a wrong argument) are raised, because they would make every reward 0.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from atroposlib.errors import AtroposError, EnvError

logger = logging.getLogger(__name__)

parts_of_rewards: ContextVar[dict[str, list[float]] | None] = ContextVar(
    "parts_of_rewards", default=None
)
"""Where a caller wants the raw values of every reward that a call computes, by the reward's name."""


class RewardFunction(ABC):
    """One reward. Subclasses define `compute`; `weight` multiplies its values, `config` holds unknown arguments."""

    def __init__(self, weight: float = 1.0, name: str | None = None, **config: Any) -> None:
        self.weight = weight
        self.config = config
        self.failures: Counter[str] = Counter()
        """Completions that could not be scored, by reason."""
        self._name = name
        self.wandb_logger: Any = None

    @property
    def name(self) -> str:
        """The given name, else the class name in lower case."""
        return self._name or type(self).__name__.lower()

    @abstractmethod
    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return the raw value of every completion."""

    def __call__(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return the weighted value of every completion; all 0.0 when `compute` raises."""
        try:
            raw = self.compute(completions, **kwargs)
        except AtroposError:
            raise
        except Exception:
            self.failures["exception"] += len(completions)
            logger.exception("reward %s failed; its %d values are 0", self.name, len(completions))
            return [0.0] * len(completions)
        if len(raw) != len(completions):
            raise EnvError(
                f"reward {self.name} returned {len(raw)} values for {len(completions)} completions"
            )
        weighted = [self.weight * value for value in raw]
        self.log_metrics(raw, weighted)
        return weighted

    def set_wandb_logger(self, logger: Any) -> None:
        """Send statistics of every call to `logger.log`."""
        self.wandb_logger = logger

    def log_metrics(self, raw_rewards: Sequence[float], weighted_rewards: Sequence[float]) -> None:
        """Log the statistics of one call's values, if there is a logger; NaN (not scored) is excluded."""
        if (parts := parts_of_rewards.get()) is not None:
            parts[self.name] = [float(value) for value in raw_rewards]
        values = np.asarray(raw_rewards, dtype=np.float64)
        is_scored = ~np.isnan(values)
        values = values[is_scored]
        if self.wandb_logger is None or values.size == 0:
            return
        weighted = np.asarray(weighted_rewards, dtype=np.float64)[is_scored]
        self.wandb_logger.log(
            {
                f"reward/{self.name}/mean_raw": float(values.mean()),
                f"reward/{self.name}/mean_weighted": float(weighted.mean()),
                f"reward/{self.name}/min": float(values.min()),
                f"reward/{self.name}/max": float(values.max()),
            }
        )

    @staticmethod
    def get_content(completion: Any) -> str:
        """Return a completion's text: a string, a message, `{"message": message}`, or a list of messages.

        Of a list, the text of the first assistant message. "" for anything else.

        >>> RewardFunction.get_content([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
        'a'
        """
        if isinstance(completion, str):
            return completion
        if isinstance(completion, Mapping):
            if isinstance(completion.get("message"), Mapping):
                completion = completion["message"]
            content = completion.get("content")
            return content if isinstance(content, str) else ""
        if isinstance(completion, list | tuple):
            for message in completion:
                if isinstance(message, Mapping) and message.get("role") == "assistant":
                    return RewardFunction.get_content(message)
        return ""


def spread(value: Any, count: int, *, name: str) -> list[Any]:
    """Return one value per completion: a list (or tuple) of length `count` unchanged, a single value repeated.

    A list of one is repeated as well; raises `EnvError` for other lengths.

    >>> spread("4", 2, name="solution")
    ['4', '4']
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) == 1:
        return list(value) * count
    if len(value) != count:
        raise EnvError(f"{len(value)} values of {name} for {count} completions")
    return list(value)


def merge_weights(
    defaults: Mapping[str, float], given: Mapping[str, float] | None, *, name: str
) -> dict[str, float]:
    """Return `defaults` overridden by `given`; unknown names are logged and ignored.

    >>> merge_weights({"a": 1.0, "b": 2.0}, {"b": 3.0}, name="weights")
    {'a': 1.0, 'b': 3.0}
    """
    given = given or {}
    if unknown := given.keys() - defaults.keys():
        logger.warning(
            "%s: %s have no effect; the names are %s",
            name,
            ", ".join(map(repr, sorted(unknown))),
            ", ".join(defaults),
        )
    return {key: given.get(key, value) for key, value in defaults.items()}
