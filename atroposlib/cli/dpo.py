"""`atropos-dpo-gen FILE` saves pairs of a good and a bad answer to the same prompt, for preference training.

Acts as the trainer at the hub: groups read count as trained. See `_rows` for its guarantees.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydantic import Field

from atroposlib.cli._rows import Row, RowsConfig, decoder, messages_of, texts_of, write_rows
from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary
from atroposlib.scored_data import ScoredGroup

GROUPS_PER_STEP = 8


class DpoConfig(RowsConfig):
    """Flags of `atropos-dpo-gen`."""

    save_n_pairs_per_group: int = Field(default=3, ge=1)
    """Most pairs per group."""
    minimum_score_diff_max_min: float = Field(default=0.5, ge=0)
    """Score difference that a pair must exceed."""
    seed: int = 0
    """Seed of the choice among bad answers."""


class Pair(NamedTuple):
    """Two sequences of a group, by index."""

    good: int
    bad: int


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and return 0; 2 for a wrong flag or file, 1 when the hub or an environment fails."""
    return cli_boundary(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    config = parse_flags(
        DpoConfig,
        argv,
        prog="atropos-dpo-gen",
        description="Save pairs of good and bad answers for preference training.",
        positional="filepath",
    )
    write_rows(config, rows_for(config), groups_per_step=GROUPS_PER_STEP)
    return 0


def rows_for(config: DpoConfig) -> Callable[[ScoredGroup], list[Row]]:
    """Return a function from a group to its pairs: `{prefix, pos, score, neg}`, or `{pos, score, neg}` of messages."""
    decode = None if config.save_messages else decoder(config.tokenizer)
    chance = random.Random(config.seed)

    def rows_of(group: ScoredGroup) -> list[Row]:
        scores = group.scores.tolist()
        shared: Row = {}
        if decode is None:
            contents: Sequence[object] = messages_of(group)
        else:
            prefix, contents = texts_of(group, decode)
            shared = {"prefix": prefix}
        return [
            {**shared, "pos": contents[good], "score": scores[good], "neg": contents[bad]}
            for good, bad in pairs_of(scores, config, chance)
        ]

    return rows_of


def pairs_of(scores: Sequence[float], config: DpoConfig, chance: random.Random) -> list[Pair]:
    """Pair each of the best sequences with an unused one of the worst whose score is low enough."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    limit = config.save_n_pairs_per_group
    good = [i for i in order if config.allow_negative_scores or scores[i] > 0][:limit]
    left = order[-limit:]
    pairs = []
    for i in good:
        below = [j for j in left if scores[j] < scores[i] - config.minimum_score_diff_max_min]
        if below:
            pairs.append(Pair(i, chance.choice(below)))
            left.remove(pairs[-1].bad)
    return pairs


if __name__ == "__main__":
    sys.exit(main())
