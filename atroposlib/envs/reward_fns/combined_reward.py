"""The weighted sum of several rewards, optionally normalised."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import AtroposError, ConfigError

logger = logging.getLogger(__name__)

Normalization = Literal["none", "sum", "minmax"]


@registry.register(name="combined")
class CombinedReward(RewardFunction):
    """The sum of `weight * value` over the members.

    `normalization`: "sum" divides by the sum of the members' weights, "minmax" maps a call's values to 0..1 (0 if all
    are equal). A member that raises is excluded from that call, logged and counted in `failures` under its name.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any] | RewardFunction],
        normalization: Normalization = "none",
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        if normalization not in ("none", "sum", "minmax"):
            raise ConfigError(f"normalization {normalization!r}: use 'none', 'sum' or 'minmax'")
        self.normalization = normalization
        self.reward_functions = [
            each if isinstance(each, RewardFunction) else registry.create(each) for each in rewards
        ]

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        total = np.zeros(len(completions))
        sum_of_weights = 0.0
        for member in self.reward_functions:
            try:
                raw = member.compute(completions, **kwargs)
                weighted = member.weight * np.asarray(raw, dtype=np.float64)
                total += weighted
            except AtroposError:
                raise
            except Exception:
                self.failures[member.name] += len(completions)
                logger.exception("reward %s failed and is left out of %s", member.name, self.name)
                continue
            member.log_metrics(raw, weighted.tolist())
            sum_of_weights += member.weight
        if self.normalization == "sum" and sum_of_weights:
            total /= sum_of_weights
        if self.normalization == "minmax" and len(completions):
            low, high = np.nanmin(total), np.nanmax(total)
            total = (total - low) / (high - low) if high > low else total - low
        values: list[float] = total.tolist()
        return values

    def set_wandb_logger(self, logger: Any) -> None:
        """Send statistics of this reward and of its members to `logger.log`."""
        super().set_wandb_logger(logger)
        for member in self.reward_functions:
            member.set_wandb_logger(logger)
