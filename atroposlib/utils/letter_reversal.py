"""The demo's task: reverse five letters. Rows are generated, split by a hash, and scored exactly.

The answer to `abcde>` is `edcba` and the end-of-sequence token. The CRC-32 of a prompt determines its split, so no
held-out prompt is ever trained on, for any seed. Used by `environments/letter_reversal_server.py` and by the demo's
warm-up and evaluation. Standard library only.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from enum import Enum

LETTERS = "abcdefghij"
NUM_LETTERS = 5
END_OF_QUESTION = ">"
MAX_ANSWER_TOKENS = NUM_LETTERS + 2
"""Generation limit in tokens: the answer, its end-of-sequence token, and one more."""


class Split(Enum):
    """The disjoint parts of the 100,000 prompts."""

    TRAIN = "train"
    """80 %: supervised warm-up and reinforcement learning."""
    VALIDATION = "validation"
    """10 %: decides when the warm-up stops."""
    HELDOUT = "heldout"
    """10 %: measured before and after training, used for nothing else."""


def split_of(prompt: str) -> Split:
    """Return a prompt's split, the same in every process and for every seed."""
    not_trained = {0: Split.HELDOUT, 1: Split.VALIDATION}
    return not_trained.get(zlib.crc32(prompt.encode()) % 10, Split.TRAIN)


def prompts(split: Split, *, seed: int) -> Iterator[str]:
    """Yield random prompts of one split endlessly; the same seed gives the same prompts."""
    generator = random.Random(f"{split.value}-{seed}")
    while True:
        prompt = "".join(generator.choices(LETTERS, k=NUM_LETTERS)) + END_OF_QUESTION
        if split_of(prompt) is split:
            yield prompt


def distinct_prompts(split: Split, *, count: int, seed: int) -> list[str]:
    """Return `count` different prompts of one split."""
    found: dict[str, None] = {}
    for prompt in prompts(split, seed=seed):
        found.setdefault(prompt)
        if len(found) == count:
            break
    return list(found)


def answer_to(prompt: str) -> str:
    """Return the reversed letters.

    >>> answer_to("abcde>")
    'edcba'
    """
    return prompt.removesuffix(END_OF_QUESTION)[::-1]


def is_correct(prompt: str, completion: str, *, finished: bool) -> bool:
    """Whether a completion is exactly the answer and `finished` by the end-of-sequence token.

    >>> is_correct("abcde>", "edcba", finished=False)
    False
    """
    return finished and completion == answer_to(prompt)
