"""Judge rewards: what the answers to an item earned, compared with what they are worth.

One fault, one finding: where a reward breaks a rule, the rules whose verdicts follow from it are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atroposlib.checker import probes
from atroposlib.checker.engine import Answer, shown
from atroposlib.checker.report import Report
from atroposlib.checker.runs import Run

_EXPLOITS = (
    "empty_unrewarded",
    "copy_unrewarded",
    "echo_unrewarded",
    "wrong_unrewarded",
    "list_unrewarded",
    "retraction_unrewarded",
    "restatement_unrewarded",
)
"""Answers that must not be rewarded; the first that is explains the others."""
EARNING_RULES = (*_EXPLOITS, "variants_rewarded")
_COMPARISONS = ("reward_ignores_order", "reward_varies", *EARNING_RULES)
"""Rules that compare rewards; none can be judged if the same answer earns different ones."""
_REWARD_RULES = ("reward_repeatable", "reward_finite", "grader_survives", *_COMPARISONS)
_UNKNOWN = "no right answer is known: define example_answers(self, item)"


@dataclass(kw_only=True)
class Earnings:
    """The runs of an environment, and the verdicts on its rewards."""

    report: Report
    knows_answers: bool = False
    """Whether the author or an item's field says what is right."""
    runs: list[Run] = field(default_factory=list)
    """The first run of each list of answers; repetitions are compared with it and not kept."""
    coincidences: dict[str, dict[int, str]] = field(default_factory=dict)
    """Rewarded answers that may be right by chance, by rule and item; "" for an item without one."""
    noted: dict[str, str] = field(default_factory=dict)
    """What is no fault although it may be unintended, by what to do about it."""

    def judge_answers(self) -> None:
        """Fail if no item became a group; single items may give none."""
        if any(run.groups for run in self.runs) or self.report.has_failed("aligned"):
            return
        if self.report.has_failed("grader_survives"):
            self.report.skip("grader_survives fails", "collects")
        elif not self.knows_answers:
            self.report.skip(f"no group came of the answers tried, and {_UNKNOWN}", "collects")
        for index in sorted({run.item for run in self.runs}):
            answers = [a for run in self.runs if run.item == index for a in run.answers]
            tried = ", ".join(map(shown, answers))
            self.report.fail(
                "collects",
                f"no group came of these answers: {tried:.300}",
                item=index,
                hint="return (group, backlog); if none of these answers can be right, define"
                " example_answers(self, item)",
            )

    def judge_rewards(self, *, has_fatal: bool) -> None:
        judged = [run for run in self.runs if run.earned]
        samples = [sample for run in self.runs for sample in run.samples]
        if not any(run.groups for run in self.runs):
            rules = ("group_size", "aligned", "token_exact", *_REWARD_RULES)
            self.report.skip("no group could be judged", *rules)
        if not samples:
            reason = "the environment asks nothing of the engine"
            self.report.skip(reason, "aligned", "token_exact", *_REWARD_RULES)
        if not any(sample.tokens for sample in samples):
            reason = "the environment samples text only; managed_server() would keep the tokens"
            self.report.skip(reason, "token_exact")
        if not judged:
            self.report.skip("no answer was found again in a group", *_REWARD_RULES)
            return
        self.report.dismiss("answer_runs_no_code", *_REWARD_RULES)
        self.report.dismiss("aligned", "reward_varies")  # the answers are not known
        self.report.dismiss("reward_repeatable", *_COMPARISONS)
        self.report.dismiss("reward_ignores_order", *EARNING_RULES)
        for what in self.noted.values():
            self.report.note("variants_rewarded", what)
        num_different = sum(run.has_difference for run in judged)
        self.report.look("reward_varies", num_different)
        for rule, by_item in self.coincidences.items():
            is_chance = len(by_item) < 2 or not all(by_item.values())
            self.report.look(rule, len([what for what in by_item.values() if not what]))
            for index, what in by_item.items() if not is_chance else ():
                self.report.fail(rule, what, item=index)
        for i, name in enumerate(_EXPLOITS):
            self.report.dismiss(name, *_EXPLOITS[i + 1 :])
        if not num_different:
            self._judge_equal_rewards(judged, has_fatal=has_fatal)

    def _judge_equal_rewards(self, judged: Sequence[Run], *, has_fatal: bool) -> None:
        if has_fatal:
            self.report.skip("the answers that can be scored earn the same", "reward_varies")
        elif not self.knows_answers:
            self.report.skip(f"all rewards are equal, and {_UNKNOWN}", "reward_varies")
        for run in judged:
            what = f"{len(run.earned)} answers all earned {run.scores[0]:g}: "
            self.report.fail(
                "reward_varies", what + ", ".join(map(shown, run.earned)), item=run.item
            )
        self.report.skip("all rewards are equal", *EARNING_RULES)

    def judge_probes(
        self, run: Run, good: Answer, bad: Answer, chunk: Sequence[probes.Probe]
    ) -> None:
        best, worst = max(run.scores_for(good), default=0.0), min(run.scores_for(bad), default=0.0)
        for probe in chunk if best > worst else ():
            said = [*map(run.texts_of, probe.answers)]
            is_whole = any(text.startswith(str(probe.answer)) for text in said[0])  # it was not cut
            if probe.must_score and is_whole and run.scores_for(good):
                self.report.look("grader_survives")
                if not run.scores_for(probe.answer):
                    what = f"{shown(probe.answer)} got no score, {shown(good)} {best:g}"
                    self.report.fail("grader_survives", what, item=run.item, hint=probe.hint)
            if not probe.rule or not all(said):
                continue
            earned = [max(run.scores_for(answer), default=worst) for answer in probe.answers]
            is_paid = min(earned) >= worst + (best - worst) / 2
            each = zip([*probe.answers, good], [*earned, best], strict=True)
            what = "; ".join(f"{shown(answer)} earned {score:g}" for answer, score in each)
            if probe.may_be_right:
                by_item = self.coincidences.setdefault(probe.rule, {})
                by_item[run.item] = what if is_paid else by_item.get(run.item, "")
            elif probe.must_earn is (not is_paid):  # None: noted
                self.report.fail(probe.rule, what, item=run.item, hint=probe.hint)
            else:
                self.report.look(probe.rule)
                if not is_paid and probe.must_earn is None:
                    self.noted.setdefault(probe.hint, f"{what}: {probe.hint}?")
