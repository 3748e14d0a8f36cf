"""Does the text repeat itself? From 0 (no) to -1 (nothing else)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

_WORD = re.compile(r"\w+(?:'\w+)?")
_SENTENCE_END = re.compile(r"[.!?\n]+")
_PHRASE_WORDS = 3
_BEGINNING_WORDS = 2
_MIN_WORD_LENGTH = 4
"""Shorter words (the, and, of) recur in any text."""
_REST_OF_SCALE = 0.4
"""What repeated sentences can cost beyond `paragraph_penalty_base`."""


@registry.register(name="repetition_penalty")
class RepetitionPenaltyReward(RewardFunction):
    """Minus what a text repeats.

    Fewer than `min_words` words or `min_sentences` sentences: `short_text_penalty`. A sentence that occurs again:
    `paragraph_penalty_base` - 0.4 * the share of such sentences. Otherwise minus the weighted sum, at most 1, of four
    shares, each counted only above `threshold`: long words that repeat the most frequent one, repeated phrases of
    three words, words that follow themselves, and sentences that begin like another.
    """

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_penalty_base: float = -0.6,
        word_weight: float = 0.3,
        phrase_weight: float = 0.4,
        consecutive_weight: float = 0.6,
        beginning_weight: float = 0.5,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_penalty_base = paragraph_penalty_base
        self.word_weight = word_weight
        self.phrase_weight = phrase_weight
        self.consecutive_weight = consecutive_weight
        self.beginning_weight = beginning_weight

    def compute(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return [self._value(self.get_content(completion)) for completion in completions]

    def _value(self, text: str) -> float:
        sentences = [
            tuple(words)
            for part in _SENTENCE_END.split(text.lower())
            if (words := _WORD.findall(part))
        ]
        words = [word for sentence in sentences for word in sentence]
        if len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        if repeated := _repeated_share(sentences):
            return max(-1.0, self.paragraph_penalty_base - _REST_OF_SCALE * repeated)
        long_words = Counter(word for word in words if len(word) >= _MIN_WORD_LENGTH)
        most_frequent = max(long_words.values(), default=1)
        shares = (
            (self.word_weight, (most_frequent - 1) / len(words)),
            (
                self.phrase_weight,
                _repeated_share(
                    list(zip(*(words[i:] for i in range(_PHRASE_WORDS)), strict=False))
                ),
            ),
            (
                self.consecutive_weight,
                sum(left == right for left, right in pairwise(words)) / max(1, len(words) - 1),
            ),
            (
                self.beginning_weight,
                _repeated_share([sentence[:_BEGINNING_WORDS] for sentence in sentences]),
            ),
        )
        total = sum(weight * share for weight, share in shares if share > self.threshold)
        return -min(1.0, total) if total else 0.0


def _repeated_share(entries: Sequence[Hashable]) -> float:
    """Return the share of entries that have occurred before.

    >>> _repeated_share(["a", "b", "a", "a"])
    0.5
    """
    return 1.0 - len(set(entries)) / len(entries) if entries else 0.0


def repetition_penalty_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Judge with the default settings of `RepetitionPenaltyReward`."""
    return RepetitionPenaltyReward()(completions, **kwargs)
