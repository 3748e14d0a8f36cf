"""Judge rewards: what the answers to an item earned, compared with what they are worth.

One fault, one finding: where a reward breaks a rule, the rules whose verdicts follow from it are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atroposlib.checker import probes
from atroposlib.checker.answers import EMPTY
from atroposlib.checker.engine import Answer, question_of, shown
from atroposlib.checker.report import Verdicts
from atroposlib.checker.runs import Run

USELESS_ANSWERS: dict[str, Answer] = {"empty_unrewarded": EMPTY, "echo_unrewarded": question_of}
_EXPLOITS = (
    "empty_unrewarded",
    "copy_unrewarded",
    "echo_unrewarded",
    "wrong_unrewarded",
    "list_unrewarded",
    "retraction_unrewarded",
)
"""Answers that must not be rewarded; the first that is explains the others."""
EARNING_RULES = (*_EXPLOITS, "variants_rewarded")
_REWARD_RULES = (
    "reward_repeatable",
    "reward_ignores_order",
    "reward_varies",
    "reward_finite",
    "grader_survives",
    *EARNING_RULES,
)
_UNKNOWN = "no right answer is known: define example_answers(self, item)"
_WITHOUT_LOOKS = {
    "no group had such an answer": tuple(USELESS_ANSWERS),
    "the prompts state no result": ("copy_unrewarded",),
    "no gold answer is known (gold_answer(row), or a field `answer`) that earns the reward": (
        "wrong_unrewarded",
        "list_unrewarded",
        "retraction_unrewarded",
    ),
    "the result is not marked by a box, a tag or words": ("variants_rewarded",),
}


@dataclass(kw_only=True)
class Earnings:
    """The runs of an environment, and the verdicts on its rewards."""

    verdicts: Verdicts
    knows_answers: bool = False
    """Whether the author or an item's field says what is right."""
    runs: list[Run] = field(default_factory=list)
    """The first run of each list of answers; repetitions are compared with it and not kept."""
    coincidences: dict[str, dict[int, str]] = field(default_factory=dict)
    """Rewarded answers that may be right by chance, by rule and item; "" for an item without one."""

    def judge_answers(self) -> None:
        """Fail if no item became a group; single items may give none."""
        if any(run.groups for run in self.runs) or self.verdicts.has_failed("aligned"):
            return
        if self.verdicts.has_failed("grader_survives"):
            self.verdicts.skip("grader_survives fails", "collects")
        elif not self.knows_answers:
            self.verdicts.skip(f"no group came of the answers tried, and {_UNKNOWN}", "collects")
        for index in sorted({run.item for run in self.runs}):
            answers = [a for run in self.runs if run.item == index for a in run.answers]
            tried = ", ".join(map(shown, answers))
            self.verdicts.fail(
                "collects",
                f"no group came of these answers: {tried:.300}",
                item=index,
                hint="return (group, backlog); if none of these answers can be right, define"
                " example_answers(self, item)",
            )

    def judge_rewards(self, *, num_items: int, has_fatal: bool) -> None:
        judged = [run for run in self.runs if run.earned]
        samples = [sample for run in self.runs for sample in run.samples]
        if not any(run.groups for run in self.runs):
            rules = ("group_size", "aligned", "token_exact", *_REWARD_RULES)
            self.verdicts.skip("no group could be judged", *rules)
        if not samples:
            reason = "the environment asks nothing of the engine"
            self.verdicts.skip(reason, "aligned", "token_exact", *_REWARD_RULES)
        if not any(sample.tokens for sample in samples):
            reason = "the environment samples text only; managed_server() would keep the tokens"
            self.verdicts.skip(reason, "token_exact")
        if not judged:
            self.verdicts.skip("no answer was found again in a group", *_REWARD_RULES)
            return
        if self.verdicts.has_failed("reward_repeatable"):
            self.verdicts.dismiss(
                "reward_repeatable", "reward_ignores_order", "reward_varies", *EARNING_RULES
            )
        elif self.verdicts.has_failed("reward_ignores_order"):
            self.verdicts.dismiss("reward_ignores_order", *EARNING_RULES)
        has_difference = [self._judge_earnings(i, judged) for i in range(num_items)]
        self.verdicts.look("reward_varies", sum(has_difference))
        for rule, by_item in self.coincidences.items():
            is_chance = len(by_item) < 2 or not all(by_item.values())
            self.verdicts.look(rule, len([what for what in by_item.values() if not what]))
            for index, what in by_item.items() if not is_chance else ():
                self.verdicts.fail(rule, what, item=index)
        if rewarded := [name for name in _EXPLOITS if self.verdicts.has_failed(name)]:
            first = _EXPLOITS.index(rewarded[0])
            self.verdicts.dismiss(rewarded[0], *_EXPLOITS[first + 1 :])
        if not any(has_difference):
            self._judge_equal_rewards(judged, has_fatal=has_fatal)
        for reason, names in _WITHOUT_LOOKS.items():
            self.verdicts.skip(
                reason, *(name for name in names if not self.verdicts.findings[name].num_looks)
            )

    def _judge_equal_rewards(self, judged: Sequence[Run], *, has_fatal: bool) -> None:
        if has_fatal:
            self.verdicts.skip("the answers that can be scored earn the same", "reward_varies")
        elif not self.knows_answers:
            self.verdicts.skip(f"all rewards are equal, and {_UNKNOWN}", "reward_varies")
        for run in judged:
            what = f"{len(run.earned)} answers all earned {run.scores[0]:g}: "
            self.verdicts.fail(
                "reward_varies", what + ", ".join(map(shown, run.earned)), item=run.item
            )
        self.verdicts.skip("all rewards are equal", *EARNING_RULES)

    def _judge_earnings(self, index: int, judged: Sequence[Run]) -> bool:
        """Compare the rewards of useless answers to one item with the best; return whether rewards differ."""
        runs = [run for run in judged if run.item == index]
        scores = [score for run in runs for score in run.scores]
        if len(set(scores)) < 2:
            return False
        worst, best = min(scores), max(scores)
        for name, answer in USELESS_ANSWERS.items():
            self.verdicts.look(name, sum(run.was_given(answer) for run in runs))
            most = max((x for run in runs for x in run.scores_for(answer)), default=worst)
            if most >= worst + (best - worst) / 2:
                what = f"earned {most:g}; all answers earned from {worst:g} to {best:g}"
                self.verdicts.fail(name, what, item=index)
        return True

    def judge_probes(
        self, run: Run, good: Answer, bad: Answer, chunk: Sequence[probes.Probe]
    ) -> None:
        best, worst = max(run.scores_for(good), default=0.0), min(run.scores_for(bad), default=0.0)
        for probe in chunk if best > worst else ():
            if not probe.rule or not run.was_given(probe.answer):
                continue
            earned = max(run.scores_for(probe.answer), default=worst)
            is_paid = earned >= worst + (best - worst) / 2
            what = f"{probe.answer!r:.160} earned {earned:g}; {shown(good)} earned {best:g}"
            if probe.may_be_right:
                by_item = self.coincidences.setdefault(probe.rule, {})
                by_item[run.item] = what if is_paid else by_item.get(run.item, "")
            elif is_paid is (probe.rule == "variants_rewarded"):
                self.verdicts.look(probe.rule)
            else:
                self.verdicts.fail(probe.rule, what, item=run.item, hint=probe.hint)
