"""The format and the accuracy part of a reasoning reward, and their sum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.answers import solution_of
from atroposlib.envs.math_answers import compare, final_answer
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, spread

_NUMBER = re.compile(r"[-+]?\d++(?:[.,/]\d++)*+")
_THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@registry.register
class FormatReasoningReward(RewardFunction):
    """`reward_value` for one non-empty thinking block followed by a response; else 0.0.

    `require_thinking` False also accepts a completion without tags, `require_response` False one that ends with its
    thinking block, `allow_multiple_thinking` True several blocks.
    """

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        texts = [self.get_content(completion) for completion in completions]
        return [self.reward_value if self._is_well_formed(text) else 0.0 for text in texts]

    def _is_well_formed(self, text: str) -> bool:
        num_blocks = text.count("<think>")
        if num_blocks != text.count("</think>"):
            return False
        blocks = _THINKING.findall(text)
        if num_blocks != len(blocks):
            return False
        if self.require_response and not solution_of(text).strip():
            return False
        if not blocks:
            return not self.require_thinking
        if len(blocks) > 1 and not self.allow_multiple_thinking:
            return False
        return all(block.strip() for block in blocks)


@registry.register
class AccuracyXReward(RewardFunction):
    """`reward_value` if the response contains the solution (`exact_match`: equals it); else 0.0.

    The response is the last box, else what follows `####`, else all text after the thinking. If the solution is a
    number, the response or the last number in it must be equal to it.
    """

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(
        self, completions: Sequence[Any], solution: Any = None, **kwargs: Any
    ) -> list[float]:
        """Compare with `solution`: one for all completions, or one each; None or "" matches nothing."""
        golds = spread(solution, len(completions), name="solution")
        return [
            self.reward_value if self._matches(self.get_content(completion), gold) else 0.0
            for completion, gold in zip(completions, golds, strict=True)
        ]

    def _matches(self, text: str, gold: Any) -> bool:
        response, wanted = solution_of(text).strip(), "" if gold is None else str(gold).strip()
        if not self.exact_match:
            response = final_answer(response) or response
            if compare(wanted, wanted):
                is_number = compare(response, response)
                said = response if is_number else "".join(_NUMBER.findall(response)[-1:])
                return bool(compare(wanted, said))
        if not self.case_sensitive:
            response, wanted = response.casefold(), wanted.casefold()
        if not wanted:
            return False
        return response == wanted if self.exact_match else wanted in response


@registry.register
class R1Reward(RewardFunction):
    """`format_weight` times the format reward (0 or 0.5) plus `accuracy_weight` times the accuracy (0 or 1)."""

    def __init__(
        self,
        format_weight: float = 0.5,
        accuracy_weight: float = 1.0,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.format_reward = FormatReasoningReward(weight=format_weight)
        self.accuracy_reward = AccuracyXReward(weight=accuracy_weight)

    def compute(
        self, completions: Sequence[Any], solution: Any = None, **kwargs: Any
    ) -> list[float]:
        formats = self.format_reward(completions)
        accuracies = self.accuracy_reward(completions, solution=solution)
        return [sum(pair) for pair in zip(formats, accuracies, strict=True)]


def r1_reward(
    completions: Sequence[Any],
    solution: Any = None,
    format_weight: float = 0.5,
    accuracy_weight: float = 1.0,
    **kwargs: Any,
) -> list[float]:
    """Judge with `R1Reward`."""
    return R1Reward(format_weight, accuracy_weight)(completions, solution=solution, **kwargs)
