"""The generated puzzles of reasoning-gym: about a hundred tasks, from arithmetic to Sudoku.

Each item is a puzzle of a random task. The score, 0 to 1, is of the text inside the only `<answer>` block after the
thinking; 0 without one. If all answers of a group score 0.5 or more, long ones lose score. The complexity is the task's
default, random, or (`complexity_mode: curriculum`) follows the success in each task; it selects levels of the task's
curriculum in reasoning-gym. Puzzles are made and scored in reward workers, which are killed if they hang.

`graders.py` says how each task is graded: by the library's grader, by the whole answer, or, where the library evaluates
the answer or pays for a text that solves nothing, by a stricter rule. A puzzle is not used if its own answer does not
earn 1, or if nonsense earns 0.5.

Data: generated.
Needs: extra reasoning.

    python environments/reasoning_gym_environment/reasoning_gym_environment.py process --env.tasks '["gcd"]' ...
"""

from __future__ import annotations

import ast
import asyncio
import functools
import logging
import random
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from atroposlib.environments.reasoning_gym_environment import graders
from pydantic import Field

from atroposlib.envs.answers import THINK_FIRST, only_tagged, solution_of
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Split
from atroposlib.envs.lengths import length_penalties
from atroposlib.envs.rewards import Canary, RewardFailure
from atroposlib.errors import ConfigError, EnvError, require
from atroposlib.utils.wording import nearest

logger = logging.getLogger(__name__)

NONSENSE = ("zzz", "nan", "[NaN]", "()")
"""Texts that answer no puzzle."""
NUM_EVAL_TASKS = 20
FIRST_COMPLEXITY = 0.3
"""Of a task in the curriculum."""
NUM_TRIES = 20
"""Puzzles tried before it is an error that none can be made; some tasks take too long at a high complexity."""
LENGTH_PENALTY_STARTS_AT = 0.75
"""Fraction of max_token_length above which the answers of an all-correct group lose score."""


class Source(NamedTuple):
    """What determines a puzzle."""

    task: str
    seed: int
    complexity: float | None
    """From 0 to 1; None: the task's default."""


class Puzzle(NamedTuple):
    source: Source
    question: str
    answer: str | None
    """A right answer; None if the task has none ready."""
    entry: str
    """The library's entry as a Python literal. Scores use it: some tasks make other puzzles in another process."""


class ReasoningGymEnvConfig(DatasetEnvConfig):
    group_size: int = 8
    max_token_length: int = 8192
    min_trained_tokens: int = 10
    seed: int = 1918
    eval_temperature: float | None = 0.1
    tasks: list[str] | None = None
    """Names of tasks in reasoning-gym; None: all."""
    mask_too_long_completions: bool = True
    """Whether an answer cut at the token limit has no advantage; it scores 0 either way."""
    num_eval_samples_per_task: int = Field(default=5, ge=1)
    eval_seed: int = 123
    complexity_mode: Literal["curriculum", "random"] | None = None
    """None: the default complexity of each task."""
    curriculum_target_accuracy: float = 0.7
    """Mean score of a task's groups at which its complexity stays."""


class ReasoningGymEnv(DatasetEnv):
    """Single turn, reward by the library."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymEnvConfig
    config: ReasoningGymEnvConfig
    system_prompt = (
        f"{THINK_FIRST} Give the final answer, and nothing else, inside <answer> </answer> tags."
    )
    success_score = 0.5
    truncated_score = 0.0
    preload = ("reasoning_gym",)
    isolates_graders = True
    checkpointed = ("task_complexity_levels", "task_performance_history")

    async def setup(self) -> None:
        """Check the names of the tasks and make the evaluation puzzles."""
        self.task_complexity_levels: dict[str, float] = {}
        """Complexity by task, in the curriculum."""
        self.task_performance_history: dict[str, list[float]] = {}
        """Mean scores of the last groups by task."""
        self.misgraded: set[str] = set()
        """Tasks with puzzles that their graders judge wrongly."""
        self.tasks = available_tasks(self.config.tasks)
        self.silences_truncated = self.config.mask_too_long_completions
        await super().setup()

    async def load_rows(self, split: Split) -> list[Any]:
        """Return the names of the tasks for training, puzzles for evaluation."""
        if split == "train":
            return self.tasks
        config = self.config
        rng = random.Random(config.eval_seed)
        chosen = rng.sample(self.tasks, k=min(NUM_EVAL_TASKS, len(self.tasks)))
        sources = [
            Source(task, config.eval_seed + i, None)
            for task in chosen
            for i in range(config.num_eval_samples_per_task)
        ]
        puzzles = await asyncio.gather(*map(self.puzzle, sources))
        return [puzzle for puzzle in puzzles if puzzle is not None]

    async def puzzle(self, source: Source) -> Puzzle | None:
        """Make a puzzle in a worker; None (counted) if that fails or takes too long."""
        made = await self.in_worker(make_puzzle, *source)
        if isinstance(made, RewardFailure):
            self.counts["puzzles_not_made"] += 1
            return None
        if isinstance(made, str):
            self.counts["puzzles_misgraded"] += 1
            log = logger.debug if source.task in self.misgraded else logger.warning
            log("a puzzle of %s is not used: %s", source.task, made)
            self.misgraded.add(source.task)
            return None
        puzzle = Puzzle(source, *made)
        if self.reward_workers.canary is None:
            wrong = [*source, puzzle.entry, NONSENSE[0]]
            value = await self.in_worker(score_answer, *wrong)
            self.reward_workers.canary = Canary(score_answer, wrong, value)
        return puzzle

    async def get_next_item(self) -> Puzzle:
        """Make a puzzle of a random task."""
        for _ in range(NUM_TRIES):
            self.num_items += 1
            seed = self.config.seed + self.num_items
            rng = random.Random(seed)
            task = rng.choice(self.tasks)
            puzzle = await self.puzzle(Source(task, seed, self.complexity(task, rng)))
            if puzzle is not None:
                return puzzle
        raise EnvError(f"{NUM_TRIES} puzzles in a row could not be made; the log has the reasons")

    def complexity(self, task: str, rng: random.Random) -> float | None:
        """Return the complexity of the next puzzle of a task."""
        if self.config.complexity_mode == "random":
            return rng.random()
        if self.config.complexity_mode == "curriculum":
            return self.task_complexity_levels.setdefault(task, FIRST_COMPLEXITY)
        return None

    def prompt(self, row: Puzzle) -> str:
        return row.question

    def example_answers(self, item: Puzzle) -> list[str]:
        if item.answer is None:
            return []
        return [f"<think>I reason.</think> <answer>{item.answer}</answer>"]

    async def score(self, row: Puzzle, answer: str) -> Outcome:
        tagged = only_tagged(solution_of(answer), "answer")
        if not tagged:
            return 0.0
        outcome: Outcome = await self.in_worker(score_answer, *row.source, row.entry, tagged)
        return outcome

    def shape_group(self, row: Puzzle, group: ScoredDataGroup) -> ScoredDataGroup:
        """Adapt the complexity of the task; lower the scores of long answers if all are right."""
        scores = group["scores"]
        if self.config.complexity_mode == "curriculum":
            self.adapt_complexity(row.source.task, sum(scores) / len(scores))
        if min(scores) >= self.success_score:
            penalties = length_penalties(
                group["masks"], self.config.max_token_length, starts_at=LENGTH_PENALTY_STARTS_AT
            )
            group["scores"] = [s * (1.0 - p) for s, p in zip(scores, penalties, strict=True)]
        return group

    def adapt_complexity(self, task: str, mean_score: float) -> None:
        """Add the mean score of a group to the task's history, and move its complexity."""
        history = [*self.task_performance_history.get(task, []), mean_score][-10:]
        self.task_performance_history[task] = history
        level = self.task_complexity_levels.get(task, FIRST_COMPLEXITY)
        target = self.config.curriculum_target_accuracy
        self.task_complexity_levels[task] = next_complexity(level, history, target=target)

    def train_metrics(self) -> dict[str, float]:
        """Return the state of the curriculum."""
        levels = self.task_complexity_levels.values()
        if not levels:
            return {}
        metrics = {
            "total_tasks_tracked": len(levels),
            "tasks_with_adjustments": sum(x != FIRST_COMPLEXITY for x in levels),
            "target_accuracy": self.config.curriculum_target_accuracy,
            "avg_complexity": statistics.fmean(levels),
            "min_complexity": min(levels),
            "max_complexity": max(levels),
        }
        if histories := self.task_performance_history.values():
            recent = [statistics.fmean(history[-5:]) for history in histories]
            metrics["avg_recent_accuracy"] = statistics.fmean(recent)
        return {f"curriculum/{name}": value for name, value in metrics.items()}


def available_tasks(wanted: Sequence[str] | None) -> list[str]:
    """Return the wanted tasks, or all that can be graded; ConfigError for an unknown name or another task."""
    require("reasoning_gym", extra="reasoning")
    factory = require("reasoning_gym.factory", extra="reasoning")
    default = factory.ProceduralDataset.score_answer
    known = {
        task: graders.grader_of(task, kind[0], default) for task, kind in factory.DATASETS.items()
    }
    refused = {task: why for task, why in known.items() if isinstance(why, str)}
    for name in wanted or []:
        if name not in known:
            hint = nearest(name, sorted(known))
            raise ConfigError(f"--env.tasks: reasoning-gym has no task {name!r}; {hint}")
        if name in refused:
            raise ConfigError(f"--env.tasks: {name} cannot be graded: it {refused[name]}")
    if not wanted:
        reasons = ", ".join(f"{task} ({why})" for task, why in sorted(refused.items()))
        logger.warning("tasks of reasoning-gym that are not used: %s", reasons)
    return list(wanted or sorted(known.keys() - refused))


@functools.lru_cache(maxsize=8)
def dataset_of(source: Source) -> Any:
    """Return reasoning-gym's data set of one puzzle.

    A complexity selects a level of each attribute in the task's curriculum. If the task refuses the combination, or has
    no curriculum, its default is used.
    """
    factory = require("reasoning_gym.factory", extra="reasoning")
    defaults = {"seed": source.seed, "size": 1}
    if source.complexity is None or source.task not in factory.CURRICULA:
        return factory.create_dataset(source.task, **defaults)
    curriculum = factory.create_curriculum(source.task)
    for name, attribute in curriculum.attributes.items():
        level = round(source.complexity * (len(attribute.levels) - 1))
        curriculum.set_attr_level(name, level)
    try:
        return factory.DATASETS[source.task][0](curriculum.generate_configuration(defaults))
    except AssertionError:
        return factory.create_dataset(source.task, **defaults)


def make_puzzle(task: str, seed: int, complexity: float | None) -> list[str | None] | str:
    """Return question, answer and entry, or what is wrong with the puzzle; runs in a worker."""
    source = Source(task, seed, complexity)
    entry = dataset_of(source)[0]
    sent = repr(entry)
    try:
        ast.literal_eval(sent)
    except ValueError:
        # codeio and knights_knaves, whose graders read the answer alone
        sent = repr({**entry, "metadata": {}})
    answer = graders.right_answer(entry)
    if answer is not None and score_answer(*source, sent, answer.strip()) < 1.0:
        return f"the answer of the library, {answer[:200]!r}, does not earn 1"
    for text in NONSENSE:
        if text != answer and score_answer(*source, sent, text) >= ReasoningGymEnv.success_score:
            return f"the answer {text!r} earns {ReasoningGymEnv.success_score} or more"
    return [entry["question"], answer, sent]


def score_answer(task: str, seed: int, complexity: float | None, sent: str, answer: str) -> float:
    """Return the score of an answer from 0 to 1; runs in a worker."""
    factory = require("reasoning_gym.factory", extra="reasoning")
    dataset = dataset_of(Source(task, seed, complexity))
    grade = graders.grader_of(task, type(dataset), factory.ProceduralDataset.score_answer)
    assert not isinstance(grade, str)
    try:
        return grade(dataset, ast.literal_eval(sent), answer)
    except Exception:  # noqa: BLE001 - many tasks raise for an answer that they cannot parse
        return 0.0


def next_complexity(complexity: float, history: Sequence[float], *, target: float) -> float:
    """Return the complexity after the mean scores in `history`, oldest first.

    The mean of the last five decides, from three on: a step of 0.05 if it differs from the target by more than 0.05, or
    of 0.1 if the complexity is far off; smaller if the scores vary.

    >>> next_complexity(0.3, [1.0, 1.0, 1.0], target=0.7), next_complexity(0.3, [0.0, 0.0], target=0.7)
    (0.4, 0.3)
    """
    recent = history[-5:]
    if len(recent) < 3 or abs(statistics.fmean(recent) - target) <= 0.05:
        return complexity
    mean, stability = statistics.fmean(recent), max(0.5, 1 - statistics.pstdev(recent))
    is_far = (mean > 0.9 and complexity < 0.5) or (mean < 0.3 and complexity > 0.5)
    step = (0.1 if is_far and stability > 0.8 else 0.05) * stability
    return min(max(complexity + (step if mean > target else -step), 0.0), 1.0)


if __name__ == "__main__":
    ReasoningGymEnv.cli()
