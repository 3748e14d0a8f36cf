"""The audit raises one alarm for each way to be paid wrongly, none for honest answers, and changes no score."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atroposlib.envs.audit import (
    DETECTORS,
    Audit,
    Budget,
    Judged,
    Watch,
    contains,
    stated,
    with_gold,
)
from atroposlib.envs.dataset_env import ABORTED, DatasetEnv, Rollout
from atroposlib.errors import EngineUnavailable, Suspicion
from atroposlib.inference.harness import HarnessRequest
from tests.builders.environments import Offline
from tests.envs.helpers_envs import make_env

NUM_GROUPS = 150


class Sums(Offline, DatasetEnv):
    """Sums of two numbers; `lenient` takes any number of the answer for the result."""

    name = "sums"
    lenient = False

    def load_rows(self, split: str) -> Any:
        return [{"left": n, "answer": str(n + 37)} for n in range(100, 140)]

    def prompt(self, row: Any) -> str:
        return f"{row['left']} + 37?"

    def gold_answer(self, row: Any) -> str:
        return str(row["answer"])

    def score(self, row: Any, answer: str) -> float:
        found = re.findall(r"\d+", answer)
        return float(row["answer"] in (found if self.lenient else found[-1:]))

    def audit_score(self, row: Any, answer: str) -> float | None:
        return None


class Lenient(Sums):
    lenient = True


class Broken(Sums):
    """Pays every answer once it has judged 700."""

    num_judged = 0

    def score(self, row: Any, answer: str) -> float:
        self.num_judged += 1
        return 1.0 if self.num_judged > 700 else super().score(row, answer)


class Doubted(Lenient):
    """Its second grader reads the first number."""

    def gold_answer(self, row: Any) -> None:
        return None

    def audit_score(self, row: Any, answer: str) -> float:
        return float(re.findall(r"\d+", answer)[0] == row["answer"])


class Unreachable(Lenient):
    """Its second grader is a judge that does not answer."""

    async def audit_score(self, row: Any, answer: str) -> float:
        raise EngineUnavailable("no judge")


class Aborting(Lenient):
    """The engine aborts the first answer of a group; its success is set late."""

    async def setup(self) -> None:
        self.success_score = 0.5
        await super().setup()

    async def roll_out(self, *args: Any, **options: Any) -> list[Rollout]:
        rollouts = await super().roll_out(*args, **options)
        rollouts[0].finish_reason = ABORTED
        return rollouts


def right(request: HarnessRequest) -> str:
    left = int(re.findall(r"\d+", request.prompt)[0])
    return str(left + 37) if request.choice % 2 else f"{left} and 1 make {left + 36}"


def everything(request: HarnessRequest) -> str:
    """Name three numbers, one of which is right."""
    left = int(re.findall(r"\d+", request.prompt)[0])
    return f"{left + 36} or {left + 37} or {left + 38}" if request.choice % 2 else "12"


async def played(
    env_cls: type[Any], respond: Callable[[HarnessRequest], str], **settings: Any
) -> Any:
    """Return an environment after many groups, one per step, examined as far as the calls allow."""
    env = make_env(env_cls, respond=respond, group_size=4, num_eval_rows=0, **settings)
    env.audit.budget = Budget(settings.get("audit_share", 0.5), cpu_s=lambda: 0.0)
    await env.setup()
    env.groups = []
    for step in range(NUM_GROUPS):
        env.curr_step = step
        row = await env.get_next_item()
        try:
            env.groups.append((await env.collect_trajectories(row))[0])
        finally:
            if step == NUM_GROUPS - 1:
                await env.close()
    return env


@pytest.mark.parametrize(
    ("env_cls", "respond", "cause"),
    [
        (Sums, right, []),
        (Lenient, right, []),
        (Lenient, everything, ["swap_gold"]),
        (Doubted, everything, ["second_grader"]),
        (Broken, right, ["canary"]),
    ],
)
async def test_what_is_paid_wrongly_is_named_once_and_honest_answers_never(
    env_cls: type[Any],
    respond: Callable[[HarnessRequest], str],
    cause: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = await played(env_cls, respond)
    named = [alarm.partition(":")[0] for alarm in env.audit.alarms]
    # A grader that pays everything also pays gold answers for other rows, which may excuse swap_gold in time.
    others = ["gold_absent", "swap_gold"] if env_cls is Broken else []
    assert set(cause) <= set(named) <= {*cause, *others}
    assert len(named) == len(set(named))
    assert [r.getMessage() for r in caplog.records if "audit: " in r.getMessage()] == [
        f"audit: {alarm}" for alarm in env.audit.alarms
    ]
    scores = [score for group in env.groups if group for score in group["scores"]]
    assert set(scores) <= {0.0, 1.0}
    marked = [g for g in env.groups if any(o.get("suspicious") for o in g.get("overrides") or ())]
    assert bool(marked) == bool(cause)
    budget = env.audit.budget
    assert budget.num_calls <= budget.share * budget.num_graded


async def test_a_judge_of_the_audit_that_does_not_answer_costs_no_group() -> None:
    env = await played(Unreachable, everything)
    assert None not in env.groups
    assert env.suspicions().keys() == {"swap_gold"}
    assert env.audit.num_failed > 0
    budget = env.audit.budget
    assert budget.spent_s > 0
    budget.num_calls, budget.num_graded = 195, 400
    assert budget.allows()
    with budget.examination():
        assert not budget.allows()  # its calls are reserved
    assert budget.allows()


def test_time_counts_once_an_examination_has_ended() -> None:
    budget = Budget(0.02, cpu_s=lambda: 100.0)
    budget.num_graded = 200
    assert not budget.allows()
    with budget.examination():
        budget.num_calls = 5
    assert budget.allows()


async def test_aborted_answers_are_not_audited() -> None:
    env = await played(Aborting, everything)
    assert env.audit.success_score == 0.5
    assert (env.audit.unscored, env.audit.budget.num_graded) == ({}, 3 * NUM_GROUPS)
    marked = [
        score
        for group in env.groups
        for score, shown in zip(group["scores"], group.get("overrides") or [{}] * 3, strict=True)
        if "suspicious" in shown
    ]
    assert set(marked) == {1.0}


async def test_a_share_of_zero_asks_no_grader() -> None:
    env = await played(Lenient, everything, audit_share=0.0)
    assert (env.audit.budget.num_calls, env.audit.alarms) == (0, [])


async def test_drop_leaves_suspicious_answers_out_and_counts_them() -> None:
    env = await played(Lenient, everything, on_suspicion="drop")
    assert env.lost_answers()["suspicious"] > 0
    assert env.lost_answers()["unjudged"] == env.num_reward_failures == 0
    assert set(env.groups[-1]["scores"]) == {0.0}
    examined = env.audit._examined
    assert all(row is not other for row, other in itertools.pairwise(examined))  # once for a group
    assert env.suspicions().keys() == {"swap_gold"}


async def test_an_alarm_of_what_is_only_read_has_nothing_examined() -> None:
    env = make_env(Sums, respond=right, on_suspicion="drop")
    await env.setup()
    env.audit.watches["length"].is_raised = True
    await env.collect_trajectories(env.train_rows[0])
    await env.close()
    assert env.audit.budget.num_calls == 0


@dataclass
class Cached:
    answer: str
    key: str = field(init=False, default="8")


def test_a_gold_answer_is_replaced_where_the_row_allows_it() -> None:
    assert with_gold({"x": np.arange(3), "answer": "8"}, "8", "9")["answer"] == "9"
    assert with_gold(Cached("7"), "7", "9") == Cached("9")
    assert with_gold(Cached("7"), "8", "9") is None  # of `key`, which __init__ does not take


async def test_stop_ends_the_run_at_once() -> None:
    with pytest.raises(Suspicion, match=r"swap_gold: since step \d+, .*on_suspicion stop"):
        await played(Lenient, everything, on_suspicion="stop")


def test_a_watch_knows_when_it_began_and_forgets_single_hits() -> None:
    watch = Watch(0.02)
    raised = [watch.add(step % 50 == 0, step=step, group="g") for step in range(1, 400)]
    assert not any(raised)
    raised = [watch.add(True, step=step, group=f"g{step}") for step in range(400, 420)]
    assert (raised.count(True), watch.onset, [*watch.examples]) == (1, 400, ["g418", "g419"])


ONSET = 450
"""Rewarded answers are read one per group, so their usual share is known after 200 groups, the forms' after 250."""


def answers(kind: str, step: int) -> Sequence[Judged]:
    is_on = step >= ONSET
    texts = {
        "equal_answers": ("I agree." if is_on else f"It is {step} cm."),
        "new_form": ("Please give full marks." if is_on else "It is so."),
    }
    told = [{"role": "assistant", "content": "7"}, {"role": "tool", "content": "Error: not 1234"}]
    text = texts.get(kind, "1234 it is" if kind != "gold_absent" or not is_on else "the same")
    failed = Judged("", None, 9, "timeout") if kind == "unscored" and is_on else Judged("", 0.0, 9)
    paid = Judged(
        text,
        1.0,
        40 if kind == "length" and is_on else 10,
        messages=told if kind == "told_by_error" and is_on else (),
    )
    return [paid, failed, Judged("no", 0.0, 9), Judged("", 0.0, 8)]


@pytest.mark.parametrize(
    "kind",
    ["gold_absent", "told_by_error", "equal_answers", "new_form", "unscored", "length"],
)
def test_drift_is_named_after_its_onset_and_not_before(kind: str) -> None:
    audit = Audit(DETECTORS, success_score=1.0, budget=Budget(0.0))
    gold = "1234" if kind in ("gold_absent", "told_by_error", "length", "unscored") else None
    for step in range(ONSET + 50):
        group = str(step)
        audit.note(answers(kind, step), item=group, gold=gold, step=step, group=group)
        assert step >= ONSET or not audit.alarms, audit.alarms
    found = {alarm.partition(":")[0]: alarm for alarm in audit.alarms}
    onset = re.search(r"since step (\d+)", found.pop(kind))
    assert onset
    assert ONSET <= int(onset[1]) < ONSET + 5  # one answer of a group is looked at
    assert found.keys() <= {"new_form", "equal_answers"}


def test_an_evaluation_that_falls_while_the_reward_rises_is_named() -> None:
    audit = Audit(DETECTORS, success_score=1.0, budget=Budget(0.0))
    for step, (solved, correct) in enumerate(
        [(0.3, 150), (0.5, 200), (0.6, 210), (0.9, 90), (0.9, 90)]
    ):
        for i in range(400):
            paid = float(i < 400 * solved)
            audit.note([Judged(f"{i}", paid, 1)], item="x", gold=None, step=step, group="g")
        assert not any(
            alarm.startswith("evaluation") for alarm in audit.alarms
        )  # one may be bad luck
        audit.note_evaluation(correct, 300, step=10 * step)
    [alarm] = [alarm for alarm in audit.alarms if alarm.startswith("evaluation")]
    earned = "training earns 0.90 (was 0.60) and the evaluation 0.30 (was 0.70)"
    assert alarm == f"evaluation: since step 20, {earned}, seen at step 40; stop and read answers"
    assert audit.suspicions()["evaluation"] == 2


@pytest.mark.parametrize(
    ("text", "gold", "is_there"),
    [
        ("The result is 16.00", "#### 16", True),
        (r"\boxed{1,600}", r"\boxed{1600}", True),
        ("3.16", "16", False),
        ("15 16 17", "16", True),
        (r"x \in (1, 2)", r"\boxed{x\in(1,2)}", True),
        ("The dog", "<answer>dog</answer>", True),
        ("A dogma", "cat", False),
    ],
)
def test_a_gold_answer_is_found_however_it_is_written(text: str, gold: str, is_there: bool) -> None:
    assert contains(text, stated(gold) or "?") is is_there


def test_only_what_applies_is_watched() -> None:
    graders = {"swap_gold", "canary", "second_grader"}
    assert graders <= set(Sums.detectors())
    assert graders.isdisjoint(DatasetEnv.detectors())
    assert "new_form" in DatasetEnv.detectors()
