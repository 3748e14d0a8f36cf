"""`atropos-dpo-gen FILE` saves pairs of a good and a bad answer to the same prompt, for preference training.

Reads a hub as its trainer (groups read count as trained), or files. See `_write_rows` for its guarantees.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from atroposlib.cli._rows import Chat, Source, chats_of, decoder, messages_of, texts_of
from atroposlib.cli._write_rows import LeftOut, Row, RowsConfig, RowsOf, write_rows
from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary

GROUPS_PER_STEP = 8


class DpoConfig(RowsConfig):
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
        positional=["filepath"],
    )
    write_rows(config, rows_for(config), groups_per_step=GROUPS_PER_STEP)
    return 0


def rows_for(config: DpoConfig) -> RowsOf:
    """Return a function from a group to its pairs.

    `{prefix, pos, score, neg}`, `{pos, score, neg}` of messages, or in format `chat` `{prompt, chosen, rejected,
    score_chosen, score_rejected}`.
    """
    is_chat = config.format == "chat"
    decode = None if is_chat or config.save_messages else decoder(config.tokenizer)
    chance = random.Random(config.seed)

    def rows_of(source: Source, left_out: LeftOut) -> list[Row]:
        scores = source.group.scores.tolist()
        pairs = pairs_of(scores, config, chance)
        left_out["group without a pair"] += not pairs
        if is_chat:
            rows = _chat_rows(chats_of(source), scores, pairs)
            left_out["pair with different prompts"] += len(pairs) - len(rows)
            return rows
        shared: Row = {}
        if decode is None:
            contents: Sequence[object] = messages_of(source)
        else:
            prefix, contents = texts_of(source.with_tokens(), decode)
            shared = {"prefix": prefix}
        return [
            {**shared, "pos": contents[good], "score": scores[good], "neg": contents[bad]}
            for good, bad in pairs
        ]

    return rows_of


def _chat_rows(chats: Sequence[Chat], scores: Sequence[float], pairs: Sequence[Pair]) -> list[Row]:
    """Return the rows of pairs; two answers to different prompts are no pair."""
    return [
        {
            "prompt": chats[good].prompt,
            "chosen": chats[good].answer,
            "rejected": chats[bad].answer,
            "score_chosen": scores[good],
            "score_rejected": scores[bad],
        }
        for good, bad in pairs
        if chats[good].prompt == chats[bad].prompt
    ]


def pairs_of(scores: Sequence[float], config: DpoConfig, chance: random.Random) -> list[Pair]:
    """Pair each of the best sequences with an unused one of the worst whose score is low enough."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    limit = config.save_n_pairs_per_group
    good = [i for i in order if config.takes(scores[i])][:limit]
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
