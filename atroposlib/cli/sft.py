"""`atropos-sft-gen FILE` saves the best answers of environments as rows for supervised training.

Acts as the trainer at the hub: groups read count as trained. See `_rows` for its guarantees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pydantic import Field

from atroposlib.cli._rows import Row, RowsConfig, decoder, messages_of, texts_of, write_rows
from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary
from atroposlib.scored_data import ScoredGroup


class SftConfig(RowsConfig):
    """Flags of `atropos-sft-gen`."""

    save_top_n_per_group: int = Field(default=3, ge=1)
    """Most rows per group."""
    minimum_score_diff_max_min: float = Field(default=0.0, ge=0)
    """Difference from the group's lowest score that a score must exceed; 0: none."""
    tasks_per_step: int = Field(default=64, ge=1)
    """Groups in a batch of the hub."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and return 0; 2 for a wrong flag or file, 1 when the hub or an environment fails."""
    return cli_boundary(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    config = parse_flags(
        SftConfig,
        argv,
        prog="atropos-sft-gen",
        description="Save the best answers of environments for supervised training.",
        positional="filepath",
    )
    write_rows(config, rows_for(config), groups_per_step=config.tasks_per_step)
    return 0


def rows_for(config: SftConfig) -> Callable[[ScoredGroup], list[Row]]:
    """Return a function from a group to its rows, best first: `{prefix, completion, score}` or `{messages, score}`."""
    decode = None if config.save_messages else decoder(config.tokenizer)

    def rows_of(group: ScoredGroup) -> list[Row]:
        scores = group.scores.tolist()
        if decode is None:
            contents: list[Row] = [{"messages": messages} for messages in messages_of(group)]
        else:
            prefix, completions = texts_of(group, decode)
            contents = [{"prefix": prefix, "completion": text} for text in completions]
        return [{**contents[i], "score": scores[i]} for i in _best(scores, config)]

    return rows_of


def _best(scores: Sequence[float], config: SftConfig) -> list[int]:
    lowest, least = min(scores, default=0.0), config.minimum_score_diff_max_min
    found = [
        i
        for i, score in enumerate(scores)
        if (config.allow_negative_scores or score > 0) and (least == 0 or score - lowest > least)
    ]
    found.sort(key=lambda i: -scores[i])
    return found[: config.save_top_n_per_group]


if __name__ == "__main__":
    sys.exit(main())
