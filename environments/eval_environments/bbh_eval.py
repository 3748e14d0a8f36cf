"""BIG-Bench Hard: 27 reasoning tasks, zero-shot; accuracy of every task and their mean.

A task has lettered choices in its text, which are read like those of other benchmarks, or an answer of a few words,
symbols or digits, which must be equal: in `<answer>`, else after the last "the answer is" of the text, else the text if
it is one line.

Data: SaylorTwift/bbh, or JSONL rows with `input`, `target` and `subset`. Source: arXiv:2210.09261.
Needs: extras datasets.

    python environments/eval_environments/bbh_eval.py evaluate --env.subsets '["navigate", "word_sorting"]' ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from atroposlib.envs.answers import last_answer, plain_text, read_choice
from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.rows import HubRows

SUBSETS = """boolean_expressions causal_judgement date_understanding disambiguation_qa dyck_languages formal_fallacies
geometric_shapes hyperbaton logical_deduction_five_objects logical_deduction_seven_objects
logical_deduction_three_objects movie_recommendation multistep_arithmetic_two navigate object_counting
penguins_in_a_table reasoning_about_colored_objects ruin_names salient_translation_error_detection snarks
sports_understanding temporal_sequences tracking_shuffled_objects_five_objects tracking_shuffled_objects_seven_objects
tracking_shuffled_objects_three_objects web_of_lies word_sorting"""


class BBHEvalConfig(BenchmarkConfig):
    subsets: list[str] | None = None
    """Tasks to evaluate, such as `navigate`; None: all."""


class BBHEvalEnv(BenchmarkEnv):
    """Letters, words and brackets."""

    name = "bbh_eval"
    env_config_cls = BBHEvalConfig
    config: BBHEvalConfig
    all_parts = {
        name: HubRows(path="SaylorTwift/bbh", config=name, split="test") for name in SUBSETS.split()
    }
    part_setting = "subsets"

    def parse_row(self, row: dict[str, Any]) -> Question:
        groups = {"subset": row.get("subset", "none")}
        return Question(question=row["input"], answer=row["target"], groups=groups)

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `bbh_cot_zeroshot` without the description of the task that precedes it there."""
        return f"Q: {row['question']}\nA: Let's think step by step."

    def read(self, row: Question, text: str) -> Reading:
        """Read the letter of the only choice, or what the tag or the last statement says."""
        choices = re.findall(r"^\([A-Z]\) *(.*)$", row["question"], re.MULTILINE)
        if choices and re.fullmatch(r"\([A-Z]\)", row["answer"]):
            return Reading(*read_choice(text, choices))
        found = super().read(row, text)
        if found.answer is None and "<answer>" not in text.lower():
            if stated := last_answer(text):
                return Reading(stated, "stated")
            alone = text.strip() if "\n" not in text.strip() else ""
            return Reading(alone or None, "bare" if alone else "none")
        return found

    def grade(self, row: Question, answer: str) -> float:
        return float(plain(last_answer(answer) or answer) == plain(row["answer"]))

    def rates_of_parts(self, rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, float]:
        """Add the mean over the tasks, which counts small tasks like large ones."""
        rates = super().rates_of_parts(rows, samples)
        return {**rates, "eval/macro_accuracy": fmean(rates.values())} if rates else {}


def plain(answer: str) -> str:
    """Return an answer without its form: emphasis, case, spaces, commas, parentheses around a letter, `.0`.

    >>> plain("**True**."), plain("(B)"), plain("] ] )"), plain("Apple, pear"), plain("$-50.0$")
    ('true', 'b', ']])', 'applepear', '-50')
    """
    text = "".join(plain_text(answer).replace(",", " ").split())
    letter = re.fullmatch(r"\(([a-z])\)", text)
    return letter[1] if letter else re.sub(r"(?<=\d)\.0+$", "", text)


if __name__ == "__main__":
    BBHEvalEnv.cli()
