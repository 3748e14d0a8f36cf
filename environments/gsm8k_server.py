"""GSM8K: grade-school mathematics with a boxed answer. The reference environment.

Each item is a question with its gold answer. A group of answers is sampled through the managed
server, which hands back tokens, masks and logprobs; each is judged by math-verify in a worker process
that is killed when it hangs. Right is +1, wrong is -1; when a whole group is right, shorter is better.

    python environments/gsm8k_server.py serve --openai.base_url http://localhost:9001/v1 --openai.model_name ...
    python environments/gsm8k_server.py process --env.dataset_path rows.jsonl ...
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.rewards import RewardFailure, RewardWorkers
from atroposlib.errors import ConfigError, EnvError, require

SYSTEM_PROMPT = (
    "You are a careful assistant. Think about the problem step by step inside <think> </think> tags, "
    "then give the solution. Put the final answer, and nothing else, inside \\boxed{}."
)
MIN_TRAINED_TOKENS = 10
"""Shorter completions (an empty answer, a refusal) are left out of the group."""
LENGTH_PENALTY_STARTS_AT = 0.5
"""Fraction of max_token_length from which right answers of an all-right group lose score."""


class Problem(NamedTuple):
    """One row of the data set."""

    question: str
    answer: str
    """The number after `####`, without thousands separators."""


class GSM8kConfig(BaseEnvConfig):
    """Settings of this environment beside the common ones."""

    dataset_path: str | None = Field(
        default=None,
        description="JSONL of rows with question and answer (GSM8K's own form); None: openai/gsm8k",
    )
    eval_dataset_path: str | None = Field(
        default=None, description="The same for evaluation; None: the test split, or dataset_path"
    )
    reward_timeout_s: float = Field(default=10.0, gt=0, description="To judge one answer, seconds")
    num_reward_workers: int = Field(default=2, ge=1, description="Processes that judge answers")
    seed: int = Field(default=42, description="Order of the training problems")


class GSM8kEnv(BaseEnv):
    """Single turn, verifiable reward."""

    name = "gsm8k"
    env_config_cls = GSM8kConfig
    config: GSM8kConfig

    @classmethod
    def config_init(cls) -> tuple[GSM8kConfig, list[APIServerConfig]]:
        """Return the defaults: a small instruction-tuned model on a local engine."""
        model_name = "Qwen/Qwen2.5-1.5B-Instruct"
        config = GSM8kConfig(
            tokenizer_name=model_name,
            group_size=8,
            use_wandb=False,
            max_token_length=2048,
            wandb_name="gsm8k",
        )
        server = APIServerConfig(
            model_name=model_name, base_url="http://localhost:9001/v1", server_type="vllm"
        )
        return config, [server]

    async def setup(self) -> None:
        """Load the problems; refuse those whose gold answer does not pass its own reward."""
        train_path, eval_path = self.config.dataset_path, self.config.eval_dataset_path
        self.train_problems = load_problems(train_path, split="train")
        self.eval_problems = load_problems(eval_path or train_path, split="test")
        random.Random(self.config.seed).shuffle(self.train_problems)
        self.reward_workers = RewardWorkers(
            num_workers=self.config.num_reward_workers, preload=("math_verify",)
        )
        await self.check_gold_answers(self.train_problems[:100])
        self.num_items = 0
        self.num_reward_failures = 0
        self.percent_correct: list[float] = []
        self.eval_metrics: dict[str, float] = {}

    async def check_gold_answers(self, problems: Sequence[Problem]) -> None:
        """Raise EnvError for the first gold answer that would not be rewarded."""
        outcomes = await asyncio.gather(
            *(self._judge(p.answer, f"\\boxed{{{p.answer}}}") for p in problems)
        )
        for problem, outcome in zip(problems, outcomes, strict=True):
            if outcome is not True:
                raise EnvError(f"the gold answer of {problem} does not pass its reward: {outcome}")

    async def get_next_item(self) -> Problem:
        """Return the next problem, over and over in the same order."""
        problem = self.train_problems[self.num_items % len(self.train_problems)]
        self.num_items += 1
        return problem

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Any]]:
        """Sample a group of answers and score each; None when fewer than two could be judged."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=_conversation(item),
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        answers = [choice.message.content or "" for choice in completion.choices]
        outcomes = await asyncio.gather(*(self._judge(item.answer, text) for text in answers))
        group = ScoredDataGroup(tokens=[], masks=[], inference_logprobs=[], scores=[], messages=[])
        for node, text, outcome in zip(nodes, answers, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                self.num_reward_failures += 1
                continue
            if sum(label != -100 for label in node.masked_tokens) < MIN_TRAINED_TOKENS:
                continue
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(1.0 if outcome else -1.0)
            group["messages"].append([*_conversation(item), {"role": "assistant", "content": text}])
        self.percent_correct += [float(score > 0) for score in group["scores"]]
        if len(group["scores"]) < 2:
            return None, []
        group["group_overrides"] = {"group_size": len(group["scores"])}
        if all(score > 0 for score in group["scores"]):
            group["scores"] = length_scores(group["masks"], self.config.max_token_length)
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure greedy accuracy on the evaluation problems."""
        started_at = time.time()

        async def is_right(problem: Problem) -> bool | RewardFailure:
            completion = await self.server.chat_completion(
                messages=_conversation(problem),
                n=1,
                max_tokens=self.config.max_token_length,
                temperature=0.0,
                split="eval",
            )
            return await self._judge(problem.answer, completion.choices[0].message.content or "")

        outcomes = await asyncio.gather(*(is_right(problem) for problem in self.eval_problems))
        num_failures = sum(isinstance(outcome, RewardFailure) for outcome in outcomes)
        self.eval_metrics = {
            "eval/percent_correct": sum(outcome is True for outcome in outcomes) / len(outcomes),
            "eval/reward_failures": float(num_failures),
        }
        await self.evaluate_log(
            self.eval_metrics,
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add accuracy and the number of answers that could not be judged."""
        metrics = {**(wandb_metrics or {}), **self.eval_metrics}
        metrics["train/reward_failures"] = self.num_reward_failures
        if self.percent_correct:
            metrics["train/percent_correct"] = sum(self.percent_correct) / len(self.percent_correct)
        self.percent_correct, self.eval_metrics = [], {}
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Remember the position in the problems."""
        super().save_checkpoint(step, {**(data or {}), "num_items": self.num_items})

    async def _judge(self, gold: str, text: str) -> bool | RewardFailure:
        outcome: bool | RewardFailure = await self.reward_workers.run(
            is_correct, gold, text, timeout_s=self.config.reward_timeout_s
        )
        return outcome


def is_correct(gold: str, text: str) -> bool:
    """Say whether the last boxed answer after the thinking equals the gold number; runs in a worker."""
    from math_verify import LatexExtractionConfig, parse, verify

    solution = text.rpartition("</think>")[2]
    # The worker has its own deadline, so math-verify's alarms are switched off.
    found = parse(solution, [LatexExtractionConfig(boxed_match_priority=0)], parsing_timeout=None)
    expected = parse(f"${gold}$", [LatexExtractionConfig()], parsing_timeout=None)
    return "\\boxed" in solution and bool(verify(expected, found, timeout_seconds=None))


def length_scores(masks: Sequence[Sequence[int]], max_token_length: int) -> list[float]:
    """Score right answers by length: 1 up to half of the limit, then linearly down to 0 at the limit.

    >>> length_scores([[7] * 40, [7] * 75, [7] * 200], max_token_length=100)
    [1.0, 0.5, 0.0]
    """
    start = LENGTH_PENALTY_STARTS_AT * max_token_length
    lengths = [sum(label != -100 for label in mask) for mask in masks]
    overruns = [(length - start) / (max_token_length - start) for length in lengths]
    return [1.0 - min(max(overrun, 0.0), 1.0) for overrun in overruns]


def load_problems(path: str | None, *, split: str) -> list[Problem]:
    """Read problems from a JSONL file, or the split of openai/gsm8k (extra `datasets`)."""
    if path is None:
        rows = require("datasets", extra="datasets").load_dataset(
            "openai/gsm8k", "main", split=split
        )
        return [parse_row(row) for row in rows]
    if not Path(path).is_file():
        raise ConfigError(f"--env.dataset_path {path}: there is no such file")
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    problems = [parse_row(json.loads(line)) for line in lines if line.strip()]
    if not problems:
        raise ConfigError(f"--env.dataset_path {path}: the file has no rows")
    return problems


def parse_row(row: dict[str, str]) -> Problem:
    """Take the number after `####` (all of `answer` without one).

    >>> parse_row({"question": "2 * 600?", "answer": "2 * 600 = 1,200 #### 1,200"}).answer
    '1200'
    """
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return Problem(question=row["question"], answer=answer)


def _conversation(problem: Problem) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
    ]


if __name__ == "__main__":
    GSM8kEnv.cli()
