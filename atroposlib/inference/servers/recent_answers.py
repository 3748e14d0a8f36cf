"""How long each server of a fleet takes per token, from its recent answers.

The weight of an answer falls with every later answer of any server of the fleet. Time plays no part: answers may take a
tenth of a second or ten minutes, and a pause changes nothing. While only other servers answer, a server's estimate
returns to the fleet's mean, so that it is tried again. Failures do not count: a server that fails at once is not fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_ANSWERS = 32
"""After this many more answers per server, an answer weighs 1/e. `benchmarks/README.md` has the figures of 8 to 128."""


@dataclass(slots=True)
class RecentAnswers:
    """Weighted sums of one server's answers."""

    num: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0
    """Of the longest completion of each answer, which determines its duration."""

    def add(self, seconds: float, num_tokens: int) -> None:
        """Add an answer."""
        self.num += 1
        self.seconds += seconds
        self.tokens += num_tokens

    def fade(self, num_servers: int) -> None:
        """Reduce the weights, because a server of the fleet gave another answer."""
        kept = 1 - 1 / (NUM_ANSWERS * num_servers)
        self.num *= kept
        self.seconds *= kept
        self.tokens *= kept

    def seconds_per_token(self, mean: RecentAnswers) -> float:
        """Return the mean time per token, with the fleet's `mean` answer as one more."""
        return (self.seconds + mean.seconds) / (self.tokens + mean.tokens)


def mean_answer(fleet: Sequence[RecentAnswers]) -> RecentAnswers:
    """Return the mean answer of a fleet; if it has none, one token in one second.

    >>> fast, unknown = RecentAnswers(num=2, seconds=4, tokens=40), RecentAnswers()
    >>> mean = mean_answer([fast, unknown])
    >>> fast.seconds_per_token(mean), unknown.seconds_per_token(mean)
    (0.1, 0.1)
    """
    num = sum(answers.num for answers in fleet)
    if not num:
        return RecentAnswers(num=1, seconds=1, tokens=1)
    return RecentAnswers(
        num=1,
        seconds=sum(answers.seconds for answers in fleet) / num,
        tokens=sum(answers.tokens for answers in fleet) / num,
    )
