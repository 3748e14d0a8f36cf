"""Walk the rows of a `DatasetEnv` without sampling: each needs a prompt and a gold answer that earns its reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from atroposlib.checker.execution import Execution
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rollouts import number_of
from atroposlib.envs.rows import content_of

WALK_S = 4.0
"""Time for the rows, unless all are asked for."""
MAX_FAULTY = 0.05
"""Share of the rows whose gold answer may earn too little: data sets have faults."""
MAX_SHARED = 0.05
"""Share of the evaluation rows that training may have: large data sets repeat some."""
MAX_COMPARED = 50_000
"""Rows of each split."""
_TURN_S = 0.02


async def walk_rows(execution: Execution, *, is_whole: bool) -> None:
    """Judge `rows_work` on all rows, or on as many as `WALK_S` allows."""
    env, report = _giving_rows(execution.env), execution.report
    if env is None:
        return
    is_scored = _is_of_the_base(env, "roll_out")
    num_verdicts = execution.engine.num_verdicts
    rows = [*env.train_rows, *env.eval_rows]
    began = turn = time.monotonic()
    num_walked = num_gold = 0
    low: list[str] = []
    for number, row in enumerate(rows):
        with execution.judging("rows_work", what=f"row {number} ({row!s:.80}): "):
            if not _is_of_the_base(env, "prompt"):  # agents begin in another way
                env.conversation(row)
            gold = env.gold_answer(row)
            env.example_answers(row)
            if gold is not None and is_scored:
                num_gold += 1
                if fault := _fault_of(await execution.within(env._probe(row, gold), "score"), env):
                    low.append(f"row {number} ({row!s:.80}): {fault}")
        num_walked += 1
        now = time.monotonic()
        if now - turn > _TURN_S:
            await asyncio.sleep(0)
            turn = now
        if now - began > WALK_S and not is_whole:
            break
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


def _giving_rows(env: Any) -> Any:
    """Return the environment if its items are the rows of a `DatasetEnv`, else None."""
    return env if _is_of_the_base(env, "get_next_item") else None


def _is_of_the_base(env: Any, method: str) -> bool:
    """Whether a method is that of `DatasetEnv` itself, which imports the commands and so cannot be imported here."""
    return str(getattr(type(env), method).__module__) == "atroposlib.envs.dataset_env"


def _fault_of(outcome: Any, env: Any) -> str | None:
    """Return why a gold answer does not pass; None if it does."""
    if isinstance(outcome, RewardFailure):
        return f"scoring the gold answer failed: {outcome.reason}: {outcome.detail[-200:]}"
    score = number_of(outcome)
    if score is None or score < env.success_score:
        return f"the gold answer earns {score}, and success is {env.success_score:g}"
    return None


def judge_held_out(execution: Execution) -> None:
    """Fail if training has the prompts of evaluation rows."""
    env, report = _giving_rows(execution.env), execution.report
    if env is None or not env.eval_rows or env.trains_on_evaluation:
        return
    trained = set(_keys(env, env.train_rows))
    shared = [key is not None and key in trained for key in _keys(env, env.eval_rows)]
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
            is_told = gold is not None and not _is_of_the_base(env, "prompt")
            found.append(content_of([env.conversation(row), gold] if is_told else row))
        except Exception:  # noqa: BLE001 - boundary: the author's code, which `rows_work` judges
            found.append(None)
    return found
