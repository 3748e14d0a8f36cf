"""Reward for the use of given tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction


@registry.register
class FormatReward(RewardFunction):
    """1.0 if any of `preferred_tags` (all, with `require_all_tags`) occurs opened and closed; else 0.0."""

    def __init__(
        self,
        preferred_tags: Sequence[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.preferred_tags = list(preferred_tags or ("think", "answer"))
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        enough = all if self.require_all_tags else any
        texts = [self.get_content(completion) for completion in completions]
        return [
            float(enough(self._has(text, tag) for tag in self.preferred_tags)) for text in texts
        ]

    def _has(self, text: str, tag: str) -> bool:
        if not self.case_sensitive:
            text, tag = text.lower(), tag.lower()
        _, opened, rest = text.partition(f"<{tag}>")
        return bool(opened) and f"</{tag}>" in rest


def format_reward(
    completions: Sequence[Any],
    preferred_tags: Sequence[str] | None = None,
    require_all_tags: bool = False,
    case_sensitive: bool = False,
    **kwargs: Any,
) -> list[float]:
    """Judge with `FormatReward`."""
    return FormatReward(preferred_tags, require_all_tags, case_sensitive)(completions, **kwargs)
