"""Mathematics that criticises itself: solve, compare two solutions, judge one, and try again after a verdict.

`Task`: the boxed answer after the thinking earns +1 if math-verify finds it equal to the gold answer, else -1. What
follows depends on the group and comes back as an item of its own:

- all right: the two least similar solutions become a `Comparison`, which the model decides by vote; the better is +1;
- mixed: sometimes a right and a wrong solution each become a `Judgement`: is it correct, and if not, how to solve it? A
  wrong verdict is -1. A verdict that a wrong solution is wrong earns the share of `Retry` answers that it makes right.

Groups in which nothing is right are dropped. If all is right, sometimes shorter is better, else the group is dropped.

Data: zwhe99/DeepMath-103K, or JSONL rows with `question` and `final_answer`; evaluation on AIME 2024, MATH-500 and AMC
2023.
Needs: extras datasets, math.

    python environments/math_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.answers import THINK_FIRST, solution_of
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import Outcome, Rollout, Split, number_of
from atroposlib.envs.lengths import num_trained
from atroposlib.envs.math_answers import boxed_answer
from atroposlib.envs.math_env import Problem, VerifiedMathConfig, VerifiedMathEnv
from atroposlib.envs.rows import HubRows
from atroposlib.inference.servers.sampling_notes import run_together

BOX = "Put the final answer, and nothing else, inside \\boxed{}."
SAME = 0.975
"""Share of common words from which comparing two solutions is pointless."""
NUM_VOTES = 3
"""Votes of a comparison, in each of the two orders."""
EVAL_PARTS = {
    "aime24": HubRows(path="HuggingFaceH4/aime_2024"),
    "math500": HubRows(path="HuggingFaceH4/MATH-500", split="test"),
    "amc23": HubRows(path="math-ai/amc23", split="test"),
}


@dataclass(kw_only=True)
class Task(Problem):
    """An item: a problem, and what came of it."""

    kind: ClassVar[str] = "normal"
    backlog: list[Task] = field(default_factory=list)
    """Items that follow from its group."""
    groups: list[ScoredDataGroup] = field(default_factory=list)
    """Further groups that were sampled while it was judged."""

    def text(self) -> str:
        return f"{self.question}\n\n{BOX}"


@dataclass(kw_only=True)
class Comparison(Task):
    """Two right solutions, of which the clearer and shorter one is to win."""

    kind = "rlaif"
    rollouts: list[Rollout]

    def vote_text(self, *, is_reversed: bool) -> str:
        """Return the prompt of a vote on the solutions in one of the two orders."""
        first, second = [solution_of(rollout.completion) for rollout in self.rollouts][
            :: -1 if is_reversed else 1
        ]
        return (
            f"Problem:\n{self.question}\n\nSolution 1:\n{first}\n\nSolution 2:\n{second}\n\nWhich solution is "
            "better: more concise, clearer and correct? End with \\boxed{1} or \\boxed{2}."
        )


@dataclass(kw_only=True)
class Judgement(Task):
    """A solution that is to be judged."""

    kind = "judge"
    solution: str
    is_right: bool

    def text(self) -> str:
        return (
            f"Problem:\n{self.question}\n\nSolution:\n{self.solution}\n\nIs the solution's final answer correct? If "
            "not, explain how to solve the problem. End with \\boxed{True} or \\boxed{False}."
        )


@dataclass(kw_only=True)
class Retry(Task):
    """A problem with a wrong solution and what a verdict said about it."""

    kind = "selfcorrect"
    solution: str
    verdict: str
    share_right: float | None = None
    """Share of right answers among those that could be judged; None if none could."""

    def text(self) -> str:
        return (
            f"Problem:\n{self.question}\n\nA solution:\n{self.solution}\n\nIts review:\n{self.verdict}\n\n"
            f"Solve the problem, using the review where it is right. {BOX}"
        )


class MathConfig(VerifiedMathConfig):
    tokenizer_name: str = "NousResearch/Hermes-4-14B"
    group_size: int = 16
    max_token_length: int = 16384
    percent_to_judge: float = Field(default=0.3, ge=0, le=1)
    """Probability that solutions of a mixed group are judged."""
    percent_length_penalty: float = Field(default=0.1, ge=0, le=1)
    """Probability that an all-right group is scored by length instead of dropped."""


class MathEnv(VerifiedMathEnv):
    """Verified answers, comparisons, verdicts and retries."""

    name = "math"
    env_config_cls = MathConfig
    config: MathConfig
    train_data = HubRows(path="zwhe99/DeepMath-103K")
    eval_parts = EVAL_PARTS
    system_prompt = THINK_FIRST
    judges_text = False  # to score a verdict samples retries

    def parse_row(self, row: dict[str, Any]) -> Task | None:
        problem = super().parse_row(row)
        if problem is None:
            return None
        return Task(question=problem.question, answer=problem.answer)

    async def get_next_item(self) -> Task:
        """Return the next problem, without what came of it in an earlier epoch."""
        row: Task = await super().get_next_item()
        return replace(row, backlog=[], groups=[])

    def prompt(self, row: Task) -> str:
        return row.text()

    def example_answers(self, item: Task) -> list[str]:
        return [f"<think>Let me see.</think> \\boxed{{{item.answer}}}", "\\boxed{0.123}"]

    async def collect_trajectories(self, item: Task) -> tuple[Any, list[Any]]:
        """Sample and judge a group; return it with those of its retries, and the items that follow."""
        item.backlog.clear()
        item.groups.clear()
        group, _ = await super().collect_trajectories(item)
        self.counts[f"{item.kind}_rollouts"] += 1
        return [*([group] if group else []), *item.groups] or None, item.backlog

    async def roll_out(self, row: Task, n: int, *, split: Split) -> list[Rollout]:
        """Sample answers; a comparison has them already."""
        if isinstance(row, Comparison):
            return row.rollouts
        return await super().roll_out(row, n, split=split)

    async def score_group(self, row: Task, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Judge answers, and note what follows from them."""
        if isinstance(row, Comparison):
            return await self.compare(row)
        outcomes = await super().score_group(row, rollouts)
        is_cut = [rollout.finish_reason == "length" for rollout in rollouts]
        if isinstance(row, Retry):
            is_right = [score == 1.0 for o in outcomes if (score := number_of(o)) is not None]
            for each in is_right:
                self.record("judge_train/judge_success_rate", each)
            row.share_right = statistics.fmean(is_right) if is_right else None
            return [0.0 if cut else o for o, cut in zip(outcomes, is_cut, strict=True)]
        if row.kind == "normal" and not self.is_evaluating:
            self.record_answers(rollouts, outcomes)
            whole = [
                (r, o) for r, o, cut in zip(rollouts, outcomes, is_cut, strict=True) if not cut
            ]
            row.backlog += await self.follow_ups(row, whole, is_all=len(whole) == len(rollouts))
        return outcomes

    async def follow_ups(
        self, row: Task, judged: Sequence[tuple[Rollout, Outcome]], *, is_all: bool
    ) -> list[Task]:
        """Return the items that follow from the answers that were not cut (`is_all`: from all)."""
        right = [rollout for rollout, outcome in judged if number_of(outcome) == 1.0]
        wrong = [rollout for rollout, outcome in judged if number_of(outcome) == -1.0]
        if is_all and len(right) == len(judged):
            pair = await asyncio.to_thread(least_similar, right)
            if pair is None:
                return []
            return [Comparison(question=row.question, answer=row.answer, rollouts=pair)]
        if not (right and wrong and self.happens(row, self.config.percent_to_judge)):
            return []
        return [
            Judgement(
                question=row.question,
                answer=row.answer,
                solution=solution_of(rollout.completion),
                is_right=is_right,
            )
            for is_right, rollout in ((True, right[0]), (False, wrong[0]))
        ]

    def happens(self, row: Task, probability: float) -> bool:
        """Draw with a probability; the result depends on seed and item alone, so that rewards are repeatable."""
        return random.Random(f"{self.config.seed}:{row.text()}").random() < probability

    def audit_score(self, row: Task, answer: str) -> bool | None:
        """Compare the last number of a solution; None for a verdict or a comparison."""
        is_solution = row.kind == "normal" or isinstance(row, Retry)
        return super().audit_score(row, answer) if is_solution else None

    async def score(self, row: Task, answer: str) -> Outcome:
        """Judge an answer, or a verdict by what it says and how much it helps."""
        if not isinstance(row, Judgement):
            return await self.verify(row, answer)
        is_right = boxed_answer(answer) == str(row.is_right)
        self.record("judge_train/percent_judge_correct", is_right)
        if not is_right:
            return -1.0
        if row.is_right:
            return 1.0
        retry = Retry(
            question=row.question,
            answer=row.answer,
            solution=row.solution,
            verdict=solution_of(answer),
        )
        groups, _ = await self.collect_trajectories(retry)
        row.groups += groups or []
        return retry.share_right

    async def compare(self, row: Comparison) -> list[Outcome]:
        """Let the model vote on both orders; the winner gets 1, the other -1, and nothing without a majority."""

        async def votes(*, is_reversed: bool) -> int:
            completion = await self.server.chat_completion(
                messages=[
                    {"role": "system", "content": THINK_FIRST},
                    {"role": "user", "content": row.vote_text(is_reversed=is_reversed)},
                ],
                n=NUM_VOTES,
                max_tokens=self.config.max_token_length,
                temperature=self.config.temperature,
                split="eval",  # the votes are not trained
            )
            said = [boxed_answer(choice.message.content or "") for choice in completion.choices]
            lead = said.count("1") - said.count("2")
            return -lead if is_reversed else lead

        lead = sum(await run_together([votes(is_reversed=False), votes(is_reversed=True)]))
        return [None, None] if lead == 0 else [math.copysign(1.0, lead), math.copysign(1.0, -lead)]

    def shape_group(self, row: Task, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Drop a group without a right answer; score one with nothing else by length, or drop it."""
        if max(group["scores"]) <= 0:
            return None
        if min(group["scores"]) < 1.0:
            return group
        if not self.happens(row, self.config.percent_length_penalty):
            return None
        group["scores"] = cosine_scores(list(map(num_trained, group["masks"])))
        return group if group["scores"] else None

    def train_metrics(self) -> dict[str, float]:
        names = ("judge_rollouts", "selfcorrect_rollouts")
        numbers = {f"judge_train/{name}": self.counts[name] for name in names}
        return {**super().train_metrics(), **numbers}


def least_similar(rollouts: Sequence[Rollout]) -> list[Rollout] | None:
    """Return the two rollouts whose solutions share the fewest words; None if even these are nearly the same.

    The order of the words does not count: an alignment of every pair of long solutions would take seconds.
    """
    words = [Counter(solution_of(rollout.completion).split()) for rollout in rollouts]

    def similarity(pair: tuple[int, int]) -> float:
        first, second = (words[i] for i in pair)
        return 2 * (first & second).total() / max(1, first.total() + second.total())

    pairs = itertools.combinations(range(len(rollouts)), 2)
    least = min(pairs, key=similarity, default=None)
    if least is None or similarity(least) >= SAME:
        return None
    return [rollouts[i] for i in least]


def cosine_scores(lengths: Sequence[int]) -> list[float]:
    """Score by length from 1, the shortest, to -1, the longest; [] if the lengths hardly differ.

    >>> cosine_scores([100, 150, 200]), cosine_scores([100, 109])
    ([1.0, 0.0, -1.0], [])
    """
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    if spread <= 0.1 * shortest:
        return []
    return [round(math.cos(math.pi * (n - shortest) / spread), 12) + 0.0 for n in lengths]


if __name__ == "__main__":
    MathEnv.cli()
