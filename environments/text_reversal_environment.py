"""Reverse a text exactly, character by character.

The reward is 1 if the only `<reversed_text>` block holds the reversed text, else 0; spaces and line breaks around it do
not count. With --env.thinking_mode true the model must think first, in one `<think>` block.

Data: NousResearch/TextReversalDataset, or JSONL rows with `text`.
Needs: extras datasets.

    python environments/text_reversal_environment.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once, only_tagged
from atroposlib.envs.benchmark_env import means_of
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.rows import HubRows


class TextReversalConfig(DatasetEnvConfig):
    group_size: int = 8
    max_token_length: int = 8192
    seed: int = 42
    eval_temperature: float | None = 0.6
    thinking_mode: bool = False
    """Require thinking before the answer."""


class TextReversalEnv(DatasetEnv):
    """Single turn, exact reward."""

    name = "text_reversal"
    env_config_cls = TextReversalConfig
    config: TextReversalConfig
    train_data = HubRows(path="NousResearch/TextReversalDataset")
    eval_data = HubRows(path="NousResearch/TextReversalDataset", split="test")
    truncated_score = 0.0
    aliases = {"train/success_rate": "train/percent_correct"}

    def parse_row(self, row: dict[str, Any]) -> str | None:
        """Return the text; a row without one is skipped."""
        return row["text"].strip() or None

    def item_class(self, item: str) -> str:
        """Return the length, in steps of about a tenth: texts of similar length are equally difficult."""
        return f"length {round(8 * math.log2(len(item)))}"

    def prompt(self, row: str) -> list[dict[str, Any]]:
        """Return the task with the text, after a system message if the model is to think."""
        task = (
            "Reverse the text below, character by character, including spaces, punctuation and line breaks. "
            "Give only the result, inside <reversed_text> </reversed_text> tags.\n\n"
        )
        thinking = [{"role": "system", "content": THINK_FIRST}] if self.config.thinking_mode else []
        return [*thinking, {"role": "user", "content": task + row}]

    def gold_answer(self, row: str) -> str:
        thinking = "<think>I go from the end to the start.</think>"
        answer = f"<reversed_text>{row[::-1]}</reversed_text>"
        return thinking + answer if self.config.thinking_mode else answer

    def score(self, row: str, answer: str) -> float:
        given = self.read(answer)
        self.counts["format_errors"] += given is None
        self.record("train/format_error_rate", given is None)
        self.record("train/format_compliance_rate", given is not None)
        return float(given == row[::-1])

    def read(self, answer: str) -> str | None:
        """Return the reversed text of an answer; None if it does not have the required form."""
        solution = after_thinking_once(answer) if self.config.thinking_mode else answer
        return only_tagged(solution or "", "reversed_text")

    def train_metrics(self) -> dict[str, float]:
        """Return the numbers of right and wrong answers."""
        num, solved = len(self.train_scores), sum(self.train_scores)
        metrics = {"thinking_mode_enabled": self.config.thinking_mode, "total_attempts": num}
        metrics |= {"successful_reversals": solved, "failed_reversals": num - solved}
        if num:
            metrics["failure_rate"] = 1 - solved / num
        return {f"train/{name}": float(value) for name, value in metrics.items()}

    def sample_fields(self, row: str, answer: str) -> dict[str, Any]:
        """Return length and form of an answer."""
        return {
            "avg_response_length": len(answer),
            "thinking_utilization_rate": "<think>" in answer,
            "format_compliance_rate": self.read(answer) is not None,
        }

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the means of length and form, and the numbers of rows, answers and scores."""
        names = ("avg_response_length", "thinking_utilization_rate", "format_compliance_rate")
        lengths = [sample["avg_response_length"] for sample in samples]
        return {
            **super().summarize_samples(samples),
            **means_of(samples, {name: name for name in names}),
            "eval/response_length_std": statistics.pstdev(lengths) if lengths else 0.0,
            "eval/total_dataset_items": float(len(self.eval_rows)),
            "eval/evaluated_items": float(len(samples)),
            "eval/valid_scores": float(sum(sample["score"] is not None for sample in samples)),
        }


if __name__ == "__main__":
    TextReversalEnv.cli()
