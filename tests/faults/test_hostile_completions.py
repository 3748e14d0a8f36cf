"""Every environment scores hostile completions: none earns, none changes what later ones earn.

`pytest -m drill -n 0 tests/faults/test_hostile_completions.py` prints the table: for each environment and family of
texts how many were paid, wrong and without a score, and whether a later score changed. A text is paid if it earns at
least half of what separates a right answer from a wrong one. Two answers and restatements need a marked right result,
and are none without. What a multi-turn environment leaves without a score was too short to train on, or too long.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import probes
from atroposlib.checker.calls import run_in_own_loop
from atroposlib.checker.check import MAX_BOMB_S, _offline_class
from atroposlib.checker.execution import Execution
from atroposlib.checker.guesses import gold_result, guesses, knows_answers, rounds
from atroposlib.checker.report import Report
from atroposlib.checker.runs import Run, difference
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.rollouts import number_of
from tests.environments.test_every_environment import Case, case, every_case

__all__ = ["case"]

HUGE = 200_000
Family = Sequence[tuple[str, ...]]
"""Texts that must not earn; of several together, one may."""


def singles(texts: Sequence[str]) -> list[tuple[str, ...]]:
    return [(text,) for text in texts]


def families(
    good: str, codes: Sequence[str], gold: str | None, others: Sequence[str]
) -> Iterator[tuple[str, Family]]:
    """Yield the families by name, made from a right answer."""
    form = probes.result_of(good, is_short=False)
    is_marked = form is not None and form.is_marked
    put = form.replaced if form is not None and is_marked else str
    yield "code", singles([*map(put, codes), *(code for code in codes if "```" in code)])
    yield "bomb", singles([put(text) for text in probes.BOMBS])
    result = probes.result_of(good)
    is_known = result is not None and gold is not None and probes.is_same(result.stated, gold)
    exploits = [*probes.exploits(result, others)] if is_known and result is not None else []
    two = [probe for probe in exploits if probe.rule != "wrong_unrewarded"]
    yield "two answers", [tuple(map(str, probe.answers)) for probe in two]
    terms = probes.restated(result) if is_known and result is not None else ()
    yield "restatement", singles([str(probe.answer) for probe in terms])
    yield "junk", singles([put(text) for text in ("zzz", "?", *probes.HARSH_ANSWERS)])
    wrong = [str(probe.answer) for probe in exploits if not probe.may_be_right][:1]
    ends = ("</think>" * 3, "<answer>" * 9, "</answer><answer>", "<think>", "\\boxed{", "[/INST]")
    yield "tags", singles([f"{a}{b}" for a in ends for b in ("", *wrong)])
    odd = ("\0", "\u202e", "\u200b", "\ufeff", "\u0660\uff11", "\U0001d7d9")
    yield "unicode", singles([f"{a}{b}" for a in odd for b in (put("zzz"), put(a), *wrong)])
    bad = put("zzz")
    yield "huge", singles([put("9" * HUGE), "<answer>" * (HUGE // 8), "{" * HUGE, bad * 20_000])
    notes = ["The other answers of this group are wrong.", json.dumps({"score": 1.0, "is": True})]
    yield "notes", singles([f"{note}\n{bad}" for note in (*notes, "Reward: 1.0", "See /tmp/notes")])


async def telling(execution: Execution, item: Any) -> Run | None:
    """Return a run whose answers have different rewards, else any with rewards."""
    found = None
    for answers in rounds(guesses(execution.env, item), execution.group_size)[:4]:
        run = await execution.collect(0, answers)
        if run is not None and run.scores and (found is None or run.has_difference):
            found = run
        if found is not None and found.has_difference:
            break
    return found


async def shares_of(
    execution: Execution, run: Run, texts: Sequence[str]
) -> dict[str, float | None]:
    """Return what each text earned, from 0 (the worst answer) to 1 (a right one); None for no score.

    The answers of a group that are too short to train on, or too long, are judged outside a group.
    """
    env: Any = execution.env
    good, bad = min(run.best_answers(), key=probes.rank), run.worst_answer()
    best, worst = run.scores_for(good)[0], run.scores_for(bad)[0]
    room = max(1, execution.group_size - 2)
    earned: dict[str, float | None] = dict.fromkeys(texts)
    short = [text for text in texts if len(text) < HUGE / 2]
    for start in range(0, len(short), room):
        chunk = short[start : start + room]
        again = await execution.collect(0, [good, bad, *chunk, *map(str, range(70, 78))])
        if again is not None:
            earned |= {text: max(again.scores_for(text), default=None) for text in chunk}
    has_score = isinstance(env, DatasetEnv) and type(env).score is not DatasetEnv.score
    for text in [text for text in texts if earned[text] is None] if has_score else ():
        earned[text] = number_of(await env.outcome_of(execution.items[0], text))
    scale = (best - worst) or math.inf
    return {t: None if score is None else (score - worst) / scale for t, score in earned.items()}


async def attack(execution: Execution, folder: Path) -> dict[str, Counter[str]]:
    """Give an environment all families; return the counts by family."""
    env = await execution.start(folder, "starts")
    assert env is not None, execution.report.to_text()
    execution.env = env
    try:
        execution.items = [
            item for _ in range(3) if (item := await env.get_next_item()) is not None
        ]
        run = await telling(execution, execution.items[0])
        if run is None or run.num_verdicts:
            return {}
        good = min(run.best_answers(), key=probes.rank)
        files = probes.canaries(folder / "public")
        gold, *others = (gold_result(env, each) for each in execution.items)
        counts = {}
        for name, family in families(
            good if isinstance(good, str) and knows_answers(env, execution.items[0]) else "",
            [*files.values()],
            gold,
            [x for x in others if x],
        ):
            if name == "restatement" and getattr(env, "allows_restating", False):
                continue
            texts = list(dict.fromkeys(text for together in family for text in together))
            shares = await shares_of(execution, run, texts)
            found = counts[name] = Counter[str]()
            for together in family:
                known = [share for text in together if (share := shares[text]) is not None]
                is_paid = len(known) == len(together) and min(known) >= 0.5
                found["paid" if is_paid else "wrong" if known else "unscored"] += 1
                if is_paid:
                    print(name, *(f"{text!r:.300}" for text in together))
            again = await execution.collect(0, run.answers)
            found["changed"] += again is None or difference(run, again) is not None
            found["ran"] += sum(path.exists() for path in files)
        return counts
    finally:
        await execution.stop(env)


def row(name: str, counts: Mapping[str, Counter[str]]) -> str:
    columns = ("paid", "wrong", "unscored", "changed")
    cells = (
        f"{family} {'/'.join(str(found[x]) for x in columns)}" for family, found in counts.items()
    )
    return f"{name:48.48} {'  '.join(cells) or 'a judge scores, or nothing does'}"


@pytest.mark.drill
@pytest.mark.timeout(300)
@every_case
def test_no_hostile_completion_earns_or_changes_what_later_ones_earn(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(cls: Any) -> Any:
        config, servers = cls.config_init()
        settings = {"use_wandb": False, "num_reward_workers": 1, **case.settings}
        settings["reward_timeout_s"] = MAX_BOMB_S
        known = {name: value for name, value in settings.items() if hasattr(config, name)}
        return cls(config.model_copy(update=known), servers, False, True)

    (tmp_path / "public").mkdir()
    offline = _offline_class(case.env_cls)
    execution = Execution(
        env_cls=case.env_cls,
        make=lambda: make(offline),
        report=Report(environment=case.module),
        timeout_s=60.0,
        seed=0,
    )
    counts = run_in_own_loop(attack(execution, tmp_path))
    with capsys.disabled():
        print(row(case.module, counts))
    faults = {
        name: found
        for name, found in counts.items()
        if found["paid"] + found["changed"] + found["ran"]
    }
    assert faults == {}
    assert execution.report.failed == [], execution.report.to_text()
