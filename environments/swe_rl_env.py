"""SWE-RL: repair a repository, given an issue and the files concerned, by SEARCH/REPLACE edits.

The model thinks in one `<think>` block, then gives edits. The reward is how similar their patch is to the real one: the
ratio of `difflib.SequenceMatcher` over the words of the two diffs, averaged over all files that either patch changes
(SWE-RL, arXiv:2502.18449). It is 0 if the thinking or the edits are malformed, or if the text to replace does not
occur; an answer that was cut at the token limit gets 0 and no advantage. The program is not run.

A worked example is in the prompt until `icl_prompt_threshold` of the answers between two logs have well-formed edits.

Data: NousResearch/SWE-smith-oracle, evaluation on princeton-nlp/SWE-bench_Lite_oracle, or JSONL rows with
`problem_statement`, `text` (files between `[start of PATH]` and `[end of PATH]`) and `patch` (a unified diff).
Needs: extras datasets.

    python environments/swe_rl_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once
from atroposlib.envs.dataset_env import (
    DatasetEnv,
    DatasetEnvConfig,
    Outcome,
    Rollout,
    Split,
    number_of,
)
from atroposlib.envs.patches import EDIT_FORM, apply_diff, edits_for, similarity_of_edits
from atroposlib.envs.rows import HubRows

EXAMPLE = """\
Example of an answer, for another issue, "area() ignores the height":
<think>The method multiplies the width by itself.</think>
### shapes/box.py
<<<<<<< SEARCH
    def area(self):
        return self.width * self.width
=======
    def area(self):
        return self.width * self.height
>>>>>>> REPLACE
"""
_FILE = re.compile(r"^\[start of ([^\]\n]+)\]\n(.*?)^\[end of \1\]", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Issue:
    text: str
    files: dict[str, list[str]] = field(repr=False)
    repaired: dict[str, list[str]] = field(repr=False)
    """The files after the real patch."""


class SWERLEnvConfig(DatasetEnvConfig):
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    group_size: int = 16
    max_token_length: int = 15360
    min_trained_tokens: int = 10
    temperature: float = Field(default=0.8, ge=0)
    eval_temperature: float | None = 0.2
    dataset_name: str = "NousResearch/SWE-smith-oracle"
    dataset_config_name: str | None = None
    dataset_split_train: str = "train"
    dataset_name_eval: str | None = "princeton-nlp/SWE-bench_Lite_oracle"
    """None: `num_eval_rows` held-out training rows."""
    dataset_config_name_eval: str | None = None
    dataset_split_eval: str = "test"
    dataset_issue_column: str = "problem_statement"
    dataset_code_context_column: str = "text"
    dataset_oracle_patch_column: str = "patch"
    max_train_samples: int | None = Field(default=100_000, ge=1)
    max_test_samples: int | None = Field(default=500, ge=1)
    num_eval_rows: int = Field(default=500, ge=0)
    use_curriculum_learning: bool = True
    """Show an example until the answers are well-formed."""
    icl_prompt_threshold: float = Field(default=0.2, ge=0, le=1)
    """Share of well-formed edits between two logs from which the example is left out."""


class SWERLEnv(DatasetEnv):
    """Single turn, reward by the similarity of two patches."""

    name = "swe_rl"
    env_config_cls = SWERLEnvConfig
    config: SWERLEnvConfig
    system_prompt = THINK_FIRST
    truncated_score = 0.0
    silences_truncated = True
    checkpointed = ("shows_example",)
    aliases = {"eval/pass_at_1": "eval/pass@1"}

    def __init__(self, config: SWERLEnvConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.train_data = HubRows(
            path=config.dataset_name,
            config=config.dataset_config_name,
            split=config.dataset_split_train,
        )
        if config.dataset_name_eval is not None:
            self.eval_data = HubRows(
                path=config.dataset_name_eval,
                config=config.dataset_config_name_eval,
                split=config.dataset_split_eval,
            )
        self.shows_example = config.use_curriculum_learning

    def load_rows(self, split: Split) -> list[Issue] | None:
        rows: list[Issue] | None = super().load_rows(split)
        is_train = split == "train"
        limit = self.config.max_train_samples if is_train else self.config.max_test_samples
        return rows if rows is None else rows[:limit]

    def parse_row(self, row: dict[str, Any]) -> Issue | None:
        """Return the issue; one whose patch does not apply to the files shown is skipped."""
        files = files_of(row[self.config.dataset_code_context_column])
        try:
            repaired = apply_diff(files, row[self.config.dataset_oracle_patch_column])
        except ValueError:
            return None
        text = row[self.config.dataset_issue_column]
        return Issue(text=text, files=files, repaired=repaired)

    def prompt(self, row: Issue) -> str:
        """Return the issue, the files, and the form of an edit."""
        files = "\n\n".join(
            "\n".join([f"[start of {path}]", *lines, f"[end of {path}]"])
            for path, lines in row.files.items()
        )
        example = f"\n{EXAMPLE}" if self.shows_example else ""
        return f"Resolve this issue:\n{row.text}\n\nFiles:\n{files}\n\n{EDIT_FORM}{example}"

    def example_answers(self, item: Issue) -> list[str]:
        edits = edits_for(item.files, item.repaired)
        return [f"<think>I see the cause.</think>\n{edits}"]

    async def roll_out(self, row: Issue, n: int, *, split: Split) -> list[Rollout]:
        """Sample answers, and count those that are cut, which `score` does not get."""
        rollouts = await super().roll_out(row, n, split=split)
        for rollout in rollouts:
            if rollout.finish_reason == "length":
                self.count(rollout.completion, None)
        return rollouts

    async def score(self, row: Issue, answer: str) -> Outcome:
        """Return the similarity of the patches; 0 if the answer is malformed."""
        similarity: Outcome = None
        if (solution := after_thinking_once(answer)) is not None:
            similarity = await self.in_worker(
                similarity_of_edits, row.files, row.repaired, solution
            )
        self.count(answer, similarity)
        return 0.0 if similarity is None else similarity

    def count(self, answer: str, similarity: Outcome) -> None:
        """Count how an answer is formed. All at once: a log may come between two awaits."""
        self.counts["answers"] += 1
        self.counts["with_think_tags"] += "<think>" in answer and "</think>" in answer
        self.counts["with_one_thinking"] += after_thinking_once(answer) is not None
        if (number := number_of(similarity)) is not None:
            self.counts["with_edits"] += 1
            self.record("train/avg_similarity_score_for_correct_patches", number)

    def train_metrics(self) -> dict[str, float]:
        """Return what was well-formed, and leave the example out if that is enough."""
        metrics = {"env/using_icl_prompt": float(self.shows_example)}
        counts = self.counts
        if num := counts["answers"]:
            metrics["train/avg_think_tags_present_accuracy"] = counts["with_think_tags"] / num
            metrics["train/avg_think_tags_well_formed_accuracy"] = counts["with_one_thinking"] / num
            metrics["train/avg_patch_format_accuracy"] = edits = counts["with_edits"] / num
            self.shows_example &= edits < self.config.icl_prompt_threshold
        return metrics

    def summarize(self, scores: Sequence[Sequence[float | None]]) -> dict[str, float]:
        """Add what was well-formed in the evaluation."""
        metrics, counts = super().summarize(scores), self.counts
        num, edits = max(1, counts["answers"]), counts["with_edits"]
        total = sum(score for row in scores for score in row if score is not None)
        return metrics | {
            "eval/total_eval_items": float(counts["answers"]),
            "eval/total_patch_format_correct": float(edits),
            "eval/patch_format_accuracy": edits / num,
            "eval/avg_similarity_score_correct_patch_format": total / edits if edits else 0.0,
            "eval/avg_think_tags_present": counts["with_think_tags"] / num,
            "eval/avg_think_tags_well_formed": counts["with_one_thinking"] / num,
        }


def files_of(text: str) -> dict[str, list[str]]:
    """Return the files of a prompt of SWE-bench, without the line numbers that it may have.

    >>> files_of("[start of a.py]\\n1 x = 1\\n2 \\n[end of a.py]")
    {'a.py': ['x = 1', '']}
    """
    return {path: _unnumbered(code.split("\n")[:-1]) for path, code in _FILE.findall(text)}


def _unnumbered(lines: list[str]) -> list[str]:
    pairs = [line.partition(" ") for line in lines]
    is_numbered = all(pair[0] == str(number) for number, pair in enumerate(pairs, start=1))
    return [rest for _, _, rest in pairs] if is_numbered else lines


if __name__ == "__main__":
    SWERLEnv.cli()
