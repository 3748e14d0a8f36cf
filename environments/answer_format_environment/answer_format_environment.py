"""Answer in exactly the requested format, one of about 130: JSON, tags, LaTeX, phrases, delimiters, code, sections.

Each item is a question and a format, which the system prompt shows once, with `YOUR_ANSWER` where the answer belongs.
The reward is 1 if the text after the thinking follows the format exactly once, else 0; whether the answer is right does
not matter. Some formats are for mathematics or code alone. With --env.ensure_equivalent_ratios true, a format with
enough groups of mixed scores pauses until the others have as many.

Data: NousResearch/AcademicMCQA and openai/gsm8k, or --env.dataset_configs, or JSONL rows with `prompt`, `answer` and
`dataset_type` (generic, math_only or code_only).
Needs: extras datasets.

    python environments/answer_format_environment/answer_format_environment.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from atroposlib.envs.answer_formats import BLANK, FORMATS, AnswerFormat, Kind, is_in_format
from atroposlib.envs.answers import THINK_FIRST, after_thinking_once
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Split
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError

SHARE_SECTIONS = 0.3
"""Share of the training items that ask for a format of sections."""
NUM_TRIES = 5
"""Answers from which the success in a format is a figure."""
NUM_RECENT = 50
"""Groups in the metrics of recent scores."""


class DataConfig(BaseModel):
    """One data set on the hub."""

    name: str
    config: str | None = None
    split: str = "train"
    sample_size: int = Field(default=20_000, ge=1)
    """Rows used, from the start."""
    prompt_field: str = "prompt"
    dataset_type: Kind = "generic"


class Item(NamedTuple):
    """A question and the name of the format of its answer."""

    question: str
    answer_format: str


class Question(NamedTuple):
    text: str
    kind: Kind


class AnswerFormatConfig(DatasetEnvConfig):
    group_size: int = 16
    max_token_length: int = 12288
    temperature: float = 0.9
    eval_temperature: float | None = 0.1
    dataset_configs: list[DataConfig] = [
        DataConfig(name="NousResearch/AcademicMCQA", sample_size=50_000),
        DataConfig(
            name="openai/gsm8k", config="main", prompt_field="question", dataset_type="math_only"
        ),
    ]
    supported_formats: list[str] | None = None
    """Names of the formats to use; None: all."""
    ensure_equivalent_ratios: bool = False
    """Whether a format pauses once it has `format_group_threshold` groups of mixed scores and another has fewer."""
    format_group_threshold: int = Field(default=50, ge=1)


class AnswerFormatEnv(DatasetEnv):
    """Single turn, reward by form alone."""

    name = "answer_format"
    env_config_cls = AnswerFormatConfig
    config: AnswerFormatConfig
    preload = ("atroposlib.envs.answer_formats",)
    truncated_score = 0.0
    aliases = {
        "performance/accuracy": "train/percent_correct",
        "performance/eval_accuracy": "eval/percent_correct",
    }
    checkpointed = (
        "groups",
        "useful_groups",
        "failed_groups",
        "attempts",
        "successes",
        "recent_scores",
    )

    async def setup(self) -> None:
        """Load the questions; give every evaluation question a format."""
        names = self.config.supported_formats or list(FORMATS)
        if unknown := set(names) - set(FORMATS):
            raise ConfigError(f"supported_formats: there is no format {sorted(unknown)[0]!r}")
        self.formats = [FORMATS[name] for name in names]
        self.groups: Counter[str] = Counter()
        """Training groups, by format."""
        self.useful_groups: Counter[str] = Counter()
        """Those of mixed scores."""
        self.failed_groups: Counter[str] = Counter()
        """Those without an answer in the required format."""
        self.attempts: Counter[str] = Counter()
        """Training answers, by format."""
        self.successes: Counter[str] = Counter()
        """Training answers in the required format, by format."""
        self.recent_scores: list[float] = []
        """Mean scores of the last groups."""
        await super().setup()
        rng = random.Random(f"{self.config.seed}:eval")
        self.eval_rows = [
            Item(row.text, rng.choice(self.formats_for(row)).name) for row in self.eval_rows
        ]

    def load_rows(self, split: Split) -> list[Question] | None:
        """Return the rows of the configured file or data sets."""
        if split == "eval" or self.config.dataset_path:
            rows: list[Question] | None = super().load_rows(split)
            return rows
        found = []
        for data in self.config.dataset_configs:
            loaded = HubRows(path=data.name, config=data.config, split=data.split).load()
            found += [
                Question(row[data.prompt_field], data.dataset_type)
                for row in loaded[: data.sample_size]
            ]
        return found

    def parse_row(self, row: dict[str, Any]) -> Question:
        return Question(row["prompt"], row.get("dataset_type", "generic"))

    def formats_for(self, row: Question) -> list[AnswerFormat]:
        """Return the formats that fit a question."""
        found = [each for each in self.formats if each.kind in ("generic", row.kind)]
        if not found:
            raise ConfigError(f"supported_formats: none is for questions of type {row.kind}")
        return found

    async def get_next_item(self) -> Item:
        """Return the next question with a format; the choice depends on seed, position and balance."""
        row: Question = await super().get_next_item()
        rng = random.Random(f"{self.config.seed}:{self.num_items}")
        found = self.formats_for(row)
        if self.config.ensure_equivalent_ratios:
            lacking = [
                each
                for each in found
                if self.useful_groups[each.name] < self.config.format_group_threshold
            ]
            found = lacking or found
        wants_sections = rng.random() < SHARE_SECTIONS
        preferred = [each for each in found if each.is_sectioned == wants_sections]
        return Item(row.text, rng.choice(preferred or found).name)

    def prompt(self, row: Item) -> list[dict[str, Any]]:
        """Return the required format, and the question."""
        form = (
            f"After the thinking, write nothing but your answer in exactly this format, with your text in place of "
            f"{BLANK}:\n\n{FORMATS[row.answer_format].example}"
        )
        return [
            {"role": "system", "content": f"{THINK_FIRST} {form}"},
            {"role": "user", "content": row.question},
        ]

    def example_answers(self, item: Item) -> list[str]:
        example = FORMATS[item.answer_format].example
        return [f"<think>A or B?</think>\n{example.replace(BLANK, 'A')}"]

    async def score(self, row: Item, answer: str) -> Outcome:
        text = after_thinking_once(answer) or ""
        # YAML and some patterns take seconds on a hostile text: not on the event loop.
        follows: Outcome = await self.in_worker(is_in_format, text, row.answer_format)
        return follows

    def shape_group(self, row: Item, group: ScoredDataGroup) -> ScoredDataGroup:
        """Count the group and its answers for the format."""
        name, scores = row.answer_format, group["scores"]
        self.groups[name] += 1
        self.useful_groups[name] += len(set(scores)) > 1
        self.failed_groups[name] += max(scores) == 0.0
        self.attempts[name] += len(scores)
        self.successes[name] += scores.count(1.0)
        self.recent_scores = [*self.recent_scores, statistics.fmean(scores)][-NUM_RECENT:]
        return group

    def train_metrics(self) -> dict[str, float]:
        """Return the balance of the formats and how well they are followed, since the start."""
        total = self.groups.total()
        if not total:
            return {}
        failed, recent = self.failed_groups.total(), self.recent_scores
        used = self.groups.values()
        parts = {
            "balance": self.balance(),
            "formats": success_of_formats(self.attempts, self.successes),
            "groups": {
                "total_processed": total,
                "successful": total - failed,
                "failed": failed,
                "success_rate": 1 - failed / total,
                "avg_score_overall": self.successes.total() / self.attempts.total(),
                "avg_score_recent": statistics.fmean(recent),
                "best_score_recent": max(recent),
                "worst_score_recent": min(recent),
            },
            "distribution": {
                "most_used_format_pct": 100 * max(used) / total,
                "least_used_format_pct": 100 * min(used) / total,
                "usage_ratio": max(used) / min(used),
            },
        }
        return {f"{part}/{name}": x for part, found in parts.items() for name, x in found.items()}

    def balance(self) -> dict[str, float]:
        """Return how near the formats are to the threshold of groups of mixed scores."""
        counts = [self.useful_groups[each.name] for each in self.formats]

        def num_at(percent: int) -> int:
            return sum(100 * n >= percent * self.config.format_group_threshold for n in counts)

        return {
            "completion_percentage": 100 * num_at(100) / len(counts),
            "formats_completed": num_at(100),
            "formats_total": len(counts),
            "min_successful_groups": min(counts),
            "max_successful_groups": max(counts),
            "avg_successful_groups": statistics.fmean(counts),
            **{f"formats_{percent}pct_progress": num_at(percent) for percent in (25, 50, 75)},
        }


def success_of_formats(attempts: Counter[str], successes: Counter[str]) -> dict[str, float]:
    """Return the success in all and over the formats that were tried often enough.

    >>> success_of_formats(Counter(json=8, yaml=8, xml=1), Counter(json=8, yaml=2))["avg_success_rate"]
    0.625
    """
    rates = [successes[name] / num for name, num in attempts.items() if num >= NUM_TRIES]
    metrics: dict[str, float] = {
        "total_attempts": attempts.total(),
        "total_successes": successes.total(),
        "overall_success_rate": successes.total() / attempts.total(),
        "num_formats_tested": len(rates),
        "high_performing_count": sum(rate >= 0.8 for rate in rates),
        "medium_performing_count": sum(0.5 <= rate < 0.8 for rate in rates),
        "low_performing_count": sum(rate < 0.5 for rate in rates),
    }
    if rates:
        metrics["avg_success_rate"] = statistics.fmean(rates)
        metrics["best_success_rate"], metrics["worst_success_rate"] = max(rates), min(rates)
    return metrics


if __name__ == "__main__":
    AnswerFormatEnv.cli()
