"""MMLU: multiple choice on 57 subjects; accuracy of every subject and of the paper's four categories.

Data: cais/mmlu, or JSONL rows with `question`, `choices`, `answer` (index) and `subject`; examples of its dev split.
Source: arXiv:2009.03300.
Needs: extras datasets.

    python environments/eval_environments/mmlu_eval.py evaluate --env.subjects '["astronomy"]' --env.num_few_shot 5 ...
"""

from __future__ import annotations

import string
from typing import Any

from atroposlib.envs.benchmark_env import ChoiceBenchmarkConfig, ChoiceBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows

STEM = """abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics
college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics high_school_biology
high_school_chemistry high_school_computer_science high_school_mathematics high_school_physics high_school_statistics
machine_learning"""
HUMANITIES = """formal_logic high_school_european_history high_school_us_history high_school_world_history
international_law jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory professional_law
world_religions"""
SOCIAL_SCIENCES = """econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics
high_school_microeconomics high_school_psychology human_sexuality professional_psychology public_relations
security_studies sociology us_foreign_policy"""
CATEGORIES = {
    subject: category
    for category, subjects in (
        ("stem", STEM),
        ("humanities", HUMANITIES),
        ("social_sciences", SOCIAL_SCIENCES),
    )
    for subject in subjects.split()
}
"""Category of a subject; those that are missing are in "other"."""


class MMLUEvalConfig(ChoiceBenchmarkConfig):
    subjects: list[str] | None = None
    """Subjects to evaluate; None: all."""


class MMLUEvalEnv(ChoiceBenchmarkEnv):
    """Four choices."""

    name = "mmlu_eval"
    env_config_cls = MMLUEvalConfig
    config: MMLUEvalConfig
    accuracy_name = "overall_accuracy"
    benchmark_data = HubRows(path="cais/mmlu", config="all", split="test")
    few_shot_data = HubRows(path="cais/mmlu", config="all", split="dev")

    part_key, part_setting = "subject", "subjects"

    def parse_row(self, row: dict[str, Any]) -> Question:
        subject = row["subject"]
        return Question(
            question=row["question"],
            choices=row["choices"],
            answer=string.ascii_uppercase[row["answer"]],
            groups={"subject": subject, "category": CATEGORIES.get(subject, "other")},
        )

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `mmlu_flan_cot_zeroshot`."""
        subject = row["groups"]["subject"].replace("_", " ")
        about = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        return about + self.lm_eval_examples(row, asked)


def asked(row: Question) -> str:
    """Return a question as lm-eval asks it."""
    options = " ".join(f"({a}) {choice}" for a, choice in zip("ABCD", row["choices"], strict=True))
    return f"Q: {row['question'].strip()}\n{options}\nA: Let's think step by step."


if __name__ == "__main__":
    MMLUEvalEnv.cli()
