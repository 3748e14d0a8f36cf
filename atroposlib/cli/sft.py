"""`atropos-sft-gen FILE` saves the best answers of environments as rows for supervised training.

Reads a hub as its trainer (groups read count as trained), or files. See `_write_rows` for its guarantees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pydantic import Field

from atroposlib.cli._rows import Source, chats_of, decoder, messages_of, texts_of
from atroposlib.cli._write_rows import LeftOut, Row, RowsConfig, RowsOf, write_rows
from atroposlib.config import parse_flags
from atroposlib.errors import cli_boundary


class SftConfig(RowsConfig):
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
        positional=["filepath"],
    )
    write_rows(config, rows_for(config), groups_per_step=config.tasks_per_step)
    return 0


def rows_for(config: SftConfig) -> RowsOf:
    """Return a function from a group to its rows, best first.

    `{prefix, completion, score}`, `{messages, score}`, or in format `chat` `{prompt, completion, score}`.
    """
    contents_of = _contents_for(config)

    def rows_of(source: Source, left_out: LeftOut) -> list[Row]:
        scores = source.group.scores.tolist()
        contents = contents_of(source)
        return [{**contents[i], "score": scores[i]} for i in _best(scores, config, left_out)]

    return rows_of


def _contents_for(config: SftConfig) -> Callable[[Source], list[Row]]:
    """Return a function from a group to one row per sequence, without scores."""
    if config.format == "chat":
        return lambda source: [
            {"prompt": chat.prompt, "completion": chat.answer} for chat in chats_of(source)
        ]
    if config.save_messages:
        return lambda source: [{"messages": messages} for messages in messages_of(source)]
    decode = decoder(config.tokenizer)

    def texts(source: Source) -> list[Row]:
        prefix, completions = texts_of(source.with_tokens(), decode)
        return [{"prefix": prefix, "completion": text} for text in completions]

    return texts


def _best(scores: Sequence[float], config: SftConfig, left_out: LeftOut) -> list[int]:
    lowest, least = min(scores, default=0.0), config.minimum_score_diff_max_min
    high = [i for i, score in enumerate(scores) if config.takes(score)]
    found = [i for i in high if least == 0 or scores[i] - lowest > least]
    found.sort(key=lambda i: -scores[i])
    best = found[: config.save_top_n_per_group]
    left_out["low score"] += len(scores) - len(high)
    left_out["too near the worst of its group"] += len(high) - len(found)
    left_out["beyond --save-top-n-per-group"] += len(found) - len(best)
    return best


if __name__ == "__main__":
    sys.exit(main())
