"""Walk the rows of an environment without sampling: each needs a prompt and a gold answer that earns its reward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from atroposlib.checker.execution import Execution
from atroposlib.envs.rows import content_of

WALK_S = 4.0
"""Time for the rows, unless all are asked for."""
MAX_FAULTY = 0.05
"""Share of the rows whose gold answer may earn too little: data sets have faults."""
MAX_SHARED = 0.05
"""Share of the evaluation rows that training may have: large data sets repeat some."""
MAX_COMPARED = 50_000
"""Rows of each split."""


async def walk_rows(execution: Execution, *, is_whole: bool) -> None:
    """Judge `rows_work` on all rows, or on as many as `WALK_S` allows."""
    env: Any = execution.env
    report, num_verdicts = execution.report, execution.engine.num_verdicts
    rows = [row for of_split in env.known_rows().values() for row in of_split]
    began = time.monotonic()
    num_walked = num_gold = 0
    low: list[str] = []
    for number, row in enumerate(rows):
        what = f"row {number} ({row!s:.80}): "
        with execution.judging("rows_work", what=what):
            fault = await execution.within(env.row_fault(row), "reading it")
            num_gold += fault is not None
            if fault:
                low.append(what + fault)
        num_walked += 1
        if time.monotonic() - began > WALK_S and not is_whole:
            break
    if not rows:
        return
    if execution.engine.num_verdicts > num_verdicts:  # a scripted judge's mean nothing
        low, num_gold = [], 0
    report.look("rows_work", num_walked)
    seen = f"{num_walked:,} of {len(rows):,} rows, {num_gold:,} gold answers scored"
    report.note("rows_work", seen + ("" if num_walked == len(rows) else "; --items all walks all"))
    if len(low) > MAX_FAULTY * num_gold:
        for what in low:
            report.fail("rows_work", what)
    elif low:
        report.note("rows_work", f"{len(low)} gold answers earn too little; {low[0]}")


def judge_held_out(execution: Execution) -> None:
    """Fail if training has the prompts of evaluation rows."""
    env: Any = execution.env
    report, rows = execution.report, env.known_rows()
    if not rows.get("eval") or env.trains_on_evaluation:
        return
    trained = set(_keys(env, rows["train"]))
    shared = [key is not None and key in trained for key in _keys(env, rows["eval"])]
    report.look("evaluation_held_out", len(shared))
    if sum(shared) > MAX_SHARED * len(shared):
        first = shared.index(True)
        what = f"{sum(shared):,} of {len(shared):,} evaluation rows are training rows, first row {first}"
        report.fail("evaluation_held_out", what)
    elif any(shared):
        report.note(
            "evaluation_held_out", f"{sum(shared):,} of {len(shared):,} rows are in training"
        )


def _keys(env: Any, rows: Sequence[Any]) -> list[bytes | str | None]:
    """Return what equal tasks share: the prompt with its gold answer, else the row; None where that raises."""
    found: list[bytes | str | None] = []
    for row in rows[:MAX_COMPARED]:
        try:
            gold = env.gold_answer(row)
            told = None if gold is None else [env.conversation(row), gold]
            found.append(content_of(told or row))
        except NotImplementedError:  # it has no prompt
            found.append(content_of(row))
        except Exception:  # noqa: BLE001 - boundary: the author's code, which `rows_work` judges
            found.append(None)
    return found
