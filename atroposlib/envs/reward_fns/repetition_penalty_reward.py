"""Penalty for repetition, from 0 (none) to -1."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, merge_weights

_WORD = re.compile(r"\w+(?:'\w+)?")
_SENTENCE_END = re.compile(r"[.!?\n]+")
_PHRASE_WORDS = 3
_BEGINNING_WORDS = 2
_MIN_WORD_LENGTH = 4
"""Shorter words (the, and, of) recur in any text."""
_REST_OF_SCALE = 0.4
"""Largest penalty for repeated sentences beyond `paragraph_repetition_base_penalty`."""

DEFAULT_WEIGHTS = {
    "word_repetition": 0.3,
    "phrase_repetition": 0.4,
    "consecutive_repetition": 0.6,
    "beginning_repetition": 0.5,
}


@registry.register(name="repetition_penalty")
class RepetitionPenaltyReward(RewardFunction):
    """The negative share of repeated parts of a text.

    Fewer than `min_words` words or `min_sentences` sentences: `short_text_penalty`. Any repeated sentence:
    `paragraph_repetition_base_penalty` - 0.4 * the share of repeated sentences, at least -1. Otherwise minus the
    weighted sum, at most 1, of four shares, each counted only above `threshold`: repeats of the most frequent long
    word, repeated phrases of three words, words that follow themselves, and sentences that begin like an earlier one.
    `component_weights` overrides entries of `DEFAULT_WEIGHTS`; `stopwords` are long words that may be repeated.
    """

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: Mapping[str, float] | None = None,
        stopwords: Collection[str] | None = None,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        self.component_weights = merge_weights(
            DEFAULT_WEIGHTS, component_weights, name="component_weights"
        )
        self.stopwords = frozenset(stopwords or ())

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
            return max(-1.0, self.paragraph_repetition_base_penalty - _REST_OF_SCALE * repeated)
        long_words = Counter(
            word for word in words if len(word) >= _MIN_WORD_LENGTH and word not in self.stopwords
        )
        most_frequent = max(long_words.values(), default=1)
        phrases = list(zip(*(words[i:] for i in range(_PHRASE_WORDS)), strict=False))
        num_doubled = sum(left == right for left, right in pairwise(words))
        shares = {
            "word_repetition": (most_frequent - 1) / len(words),
            "phrase_repetition": _repeated_share(phrases),
            "consecutive_repetition": num_doubled / max(1, len(words) - 1),
            "beginning_repetition": _repeated_share([s[:_BEGINNING_WORDS] for s in sentences]),
        }
        total = sum(
            self.component_weights[name] * share
            for name, share in shares.items()
            if share > self.threshold
        )
        return -min(1.0, total) if total else 0.0


def _repeated_share(entries: Sequence[Hashable]) -> float:
    """Return the share of entries equal to an earlier one.

    >>> _repeated_share(["a", "b", "a", "a"])
    0.5
    """
    return 1.0 - len(set(entries)) / len(entries) if entries else 0.0


def repetition_penalty_reward(
    completions: Sequence[Any], threshold: float = 0.05, **kwargs: Any
) -> list[float]:
    """Judge with `RepetitionPenaltyReward`, its other settings at their defaults."""
    return RepetitionPenaltyReward(threshold=threshold)(completions, **kwargs)
