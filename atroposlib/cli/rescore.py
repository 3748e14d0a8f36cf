"""`atropos-env rescore ROLLOUTS.jsonl --env my_env.py`: score stored rollouts with today's code, print what changed.

The file is read line by line, so its size does not matter. A group whose scores differ is scored twice, to tell a
changed reward from one that is random or depends on time. Exit code 0: every group was scored again and no score
differs; 1: otherwise. `--write` makes a file of the same groups with today's scores.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from atroposlib import __version__
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import ConfigError
from atroposlib.frontend.page import write_page
from atroposlib.frontend.view_groups import view_of_row
from atroposlib.frontend.vocabulary import decoder
from atroposlib.runtime.group_rows import source_of
from atroposlib.runtime.replay import Replay, Replayer, Row
from atroposlib.samples import group_advantages
from atroposlib.scored_data import FIELDS, Level
from atroposlib.utils.display import table_of
from atroposlib.utils.files import replacing
from atroposlib.utils.json_lines import on_one_line, read_lines
from atroposlib.utils.wording import counted

MAX_SHOWN = 40
"""Lines of the table, and groups listed as not replayed; the rest is counted."""
ID_CHARS = 8
_OF_SEQUENCES = {field.name for field in FIELDS if field.level is not Level.GROUP} | {
    "completions",
    "finish_reasons",
}
"""Keys of a row whose value has one entry per sequence."""


@dataclass(slots=True, kw_only=True)
class Rescored:
    """Counts and first examples of a file that was scored again."""

    num_groups: int = 0
    num_sequences: int = 0
    changed_groups: int = 0
    changed_sequences: int = 0
    flips: int = 0
    """Sequences whose advantage has the other sign."""
    unrepeatable: int = 0
    """Groups that got different scores when they were scored twice."""
    faults: Counter[str] = field(default_factory=Counter)
    """Groups that could not be scored again, by the kind of reason."""
    table: list[tuple[str, ...]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    """Groups that could not be scored again, with the reason."""
    written: Counter[str] = field(default_factory=Counter)
    """Groups by the reason why they are not in the new file; "" for those that are."""
    scores: list[list[float | None] | str] = field(default_factory=list)
    """[num_groups] today's scores, or why there are none, for the page."""

    @property
    def is_unchanged(self) -> bool:
        """Whether every group was scored again and no score differs."""
        return not (self.changed_groups or self.faults)

    def add(self, replay: Replay) -> None:
        self.num_groups += 1
        self.scores.append(replay.fault or replay.scores)
        name = str(replay.row.get("group_id"))[:ID_CHARS]
        if replay.fault is not None:
            self.faults[replay.fault.partition(":")[0]] += 1
            if len(self.examples) < MAX_SHOWN:
                self.examples.append(f"{name}: {replay.fault}")
            return
        self.num_sequences += len(replay.scores)
        if not replay.is_changed:
            return
        self.changed_groups += 1
        self.unrepeatable += not replay.is_repeatable
        advantages = advantages_of(replay)
        for i in replay.changed:
            self.changed_sequences += 1
            before, after = advantages[i]
            has_flipped = after is not None and before * after < 0
            self.flips += has_flipped
            notes = ["flips"] * has_flipped + ["not repeatable"] * (not replay.is_repeatable)
            if len(self.table) < MAX_SHOWN:
                item = replay.row.get("item_id")
                scores = _arrow(replay.row["scores"][i], replay.scores[i])
                shown = ("" if item is None else str(item), str(i), scores, _arrow(before, after))
                self.table.append((name, *shown, ", ".join(notes)))
        if replay.num_added and len(self.table) < MAX_SHOWN:
            self.table.append((name, "", "", "", "", f"{replay.num_added} more sequences today"))

    def to_text(self) -> str:
        lines = []
        if self.table:
            head = ("Group", "Item", "Sequence", "Score", "Advantage", "")
            lines.append(table_of([head, *self.table]).rstrip())
            if self.changed_sequences > MAX_SHOWN:
                lines.append(f"... {counted(self.changed_sequences, 'changed sequence')} in all")
        num_replayed = self.num_groups - self.faults.total()
        lines.append(
            f"{num_replayed:,} of {self.num_groups:,} groups scored again: {self.changed_groups:,} with other scores"
            f" ({self.changed_sequences:,} of {self.num_sequences:,} sequences), {self.flips:,} advantages flip"
        )
        if self.unrepeatable:
            lines.append(
                f"{self.unrepeatable:,} of them got other scores again when scored twice: the reward is random, or"
                " depends on time or on which of several equal requests got which answer, so this says nothing about a"
                " change of the code"
            )
        for kind, count in self.faults.most_common():
            lines.append(f"{counted(count, 'group')} cannot be replayed: {kind}")
        lines += [f"  {example}" for example in self.examples]
        if self.faults.total() > len(self.examples):
            lines.append("  ...")
        if self.written:
            left_out = [
                f", {count:,} left out: {why}" for why, count in self.written.items() if why
            ]
            lines.append(f"{counted(self.written[''], 'group')} written{''.join(left_out)}")
        return "\n".join(lines)


class Advantages(NamedTuple):
    """A sequence's advantage in its group; None if today's group does not have it."""

    before: float
    after: float | None


def advantages_of(replay: Replay) -> list[Advantages]:
    """Return the advantages that the trainer computes from the stored scores and from today's."""
    rollout = np.array(replay.row.get("rollout") or range(len(replay.scores)))
    before = group_advantages(np.array(replay.row["scores"], dtype=np.float64), rollout).tolist()
    is_known = np.array([score is not None for score in replay.scores])
    known = np.array([score for score in replay.scores if score is not None], dtype=np.float64)
    after = iter(group_advantages(known, rollout[is_known]).tolist())
    return [
        Advantages(old, None if score is None else next(after))
        for old, score in zip(before, replay.scores, strict=True)
    ]


async def rescore(env: EnvHooks, path: Path, *, write: Path | None = None) -> Rescored:
    """Score the groups of a file again, and write them to a file. ConfigError for a line that is not a group."""
    rescored, source = Rescored(), source_of(type(env))
    async with contextlib.AsyncExitStack() as stack:
        replayer = await stack.enter_async_context(Replayer(env))
        file = None if write is None else stack.enter_context(replacing(write))
        all_replays = replayer.replays(rows_of(path))
        await stack.enter_async_context(contextlib.aclosing(all_replays))
        async for replay in all_replays:
            rescored.add(replay)
            if file is not None:
                rescored.written[_write(replay, file, source)] += 1
    return rescored


def _write(replay: Replay, file: IO[bytes], source: dict[str, str] | None) -> str:
    """Write a group with today's scores if there are any that can be relied on; return what became of the group."""
    if replay.fault is not None:
        return "cannot be replayed"
    if not replay.is_repeatable:
        return "got other scores when scored twice"
    row = row_of_today(replay, source)
    if not row["scores"]:
        return "dropped by today's code"
    file.write(on_one_line(msgspec.json.encode(row)) + b"\n")
    return ""


def row_of_today(replay: Replay, source: dict[str, str] | None) -> dict[str, Any]:
    """Return a stored row with today's scores, and without the sequences that today's code leaves out.

    `scored_before` holds the scores of these sequences in the stored row, and the code that gave them. `source` is
    that of today's code (`source_of`).
    """
    stored, kept = replay.row, [i for i, score in enumerate(replay.scores) if score is not None]
    provenance = {"environment_source": source, "atroposlib_version": __version__}
    row = {**stored, **provenance, "scores": replay.scores}
    if "advantages" in row or replay.advantages is not None:
        row["advantages"] = replay.advantages
    for key in _OF_SEQUENCES & row.keys():
        row[key] = row[key] and [row[key][i] for i in kept]
    before = {key: stored.get(key) for key in provenance}
    row["scored_before"] = {"scores": [stored["scores"][i] for i in kept], **before}
    return row


def write_rescored_page(target: Path, path: Path, rescored: Rescored, *, tokenizer: Any) -> None:
    """Write a page of the groups of a file with both scores of every sequence, unchanged groups last."""
    decode = decoder(tokenizer)

    def views() -> Iterator[dict[str, Any]]:
        for is_unchanged in (False, True):
            # `process` may have added groups since: those have no score of today.
            for number, (today, row) in enumerate(
                zip(rescored.scores, rows_of(path), strict=False), start=1
            ):
                if (today == row["scores"]) == is_unchanged:
                    view = view_of_row(row, name=f"line-{number}", decode=decode)
                    if view is not None:
                        yield _with_both_scores(view, today)

    about = f"{path}; groups with other scores, and those that cannot be replayed, come first"
    write_page(target, views(), title=f"{path.name} scored again", about=about, decode=decode)


def _with_both_scores(view: dict[str, Any], today: list[float | None] | str) -> dict[str, Any]:
    """Add today's scores to a view group, or the reason why there are none."""
    if isinstance(today, str):
        view["facts"] = {"cannot be replayed": today, **view["facts"]}
        return view
    for sequence, score in zip(view["sequences"], today, strict=False):
        new = shown(score) if score is None else score
        sequence["metrics"] = {"old score": sequence["score"], "new score": new}
    return view


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the groups of a JSONL file; ConfigError if it cannot be read, or a line is not a group."""
    for number, row in enumerate(read_lines(path), start=1):
        if not isinstance(row.get("scores"), list):
            raise ConfigError(f"{path}, line {number}: not a group: it has no scores")
        yield row


def _arrow(before: Any, after: Any) -> str:
    return f"{shown(before)} -> {shown(after)}"


def shown(number: float | None) -> str:
    return "left out" if number is None else f"{number:.4g}"
