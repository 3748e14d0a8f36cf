"""SimpleQA: short questions about facts, to be answered or left open.

The score is 1 for a right answer, 0.1 for none and 0 for a wrong one. By default answers are compared as text; the
published figures need a judge: `--env.use_llm_judge true --judge.base_url URL --judge.model_name J`. Figures have the
names and formulas of the reference, simple-evals: `is_correct`, `is_incorrect`, `is_not_attempted` and
`is_given_attempted` are shares of all answers, `accuracy_given_attempted` is that of right answers among the attempts,
and `f1` the harmonic mean of `is_correct` and `accuracy_given_attempted`.

Data: lighteval/SimpleQA, or JSONL rows with `problem`, `answer` and `metadata` (with a `topic`).
Source: arXiv:2411.04368.
Needs: extras datasets.

    python environments/eval_environments/simpleqa_eval.py evaluate --env.num_eval_rows 500 ...
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.answers import solution_of, words_of
from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading, means_of
from atroposlib.envs.dataset_env import Outcome
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig, judge_prompt, last_verdict
from atroposlib.envs.rows import HubRows

JUDGE_TASK = """\
Compare a model's answer to a question with the known answer.
CORRECT: it contains the known answer and contradicts it nowhere; wording and further facts do not matter.
INCORRECT: it contradicts the known answer, even if it hedges, or it gives several answers.
NOT_ATTEMPTED: it leaves the question open and contradicts nothing."""
LEFT_OPEN = 0.1
"""Score of no answer: it is better than a wrong one."""
GRADES = {"correct": 1.0, "incorrect": 0.0, "not_attempted": LEFT_OPEN}


class SimpleQAEvalConfig(BenchmarkConfig, JudgeEnvConfig):
    use_llm_judge: bool = False
    """Whether a judge decides, not the comparison of texts."""


class SimpleQAEvalEnv(BenchmarkEnv, JudgeEnv):
    """A name, a date or a number."""

    name = "simpleqa_eval"
    env_config_cls = SimpleQAEvalConfig
    config: SimpleQAEvalConfig
    benchmark_data = HubRows(path="lighteval/SimpleQA", split="test")
    aliases = {
        "eval/accuracy_if_attempted": "eval/accuracy_given_attempted",
        "eval/not_attempted_rate": "eval/is_not_attempted",
        "eval/f_score": "eval/f1",
    }

    def parse_row(self, row: dict[str, Any]) -> Question:
        metadata = row.get("metadata") or {}
        topic = (ast.literal_eval(metadata) if isinstance(metadata, str) else metadata).get("topic")
        groups = {"topic": topic} if topic else {}
        return Question(question=row["problem"], answer=row["answer"], groups=groups)

    def read(self, row: Question, text: str) -> Reading:
        """Read the tag; a text without one is the answer as a whole."""
        if re.search(r"</?answer>", text, re.IGNORECASE):
            return super().read(row, text)
        return Reading(text.strip(), "whole_text" if text.strip() else "none")

    async def grade(self, row: Question, answer: str) -> Outcome:
        """Return 1 for a right answer, 0.1 for none, 0 for a wrong one, None if the judge gives no grade."""
        if not answer:
            return LEFT_OPEN
        if not self.config.use_llm_judge:
            return float(is_same(answer, row["answer"]))
        parts = {"question": row["question"], "known_answer": row["answer"], "model_answer": answer}
        messages = judge_prompt(JUDGE_TASK, parts, "Grade: CORRECT, INCORRECT or NOT_ATTEMPTED")
        return await self.ask_judge(messages, read_grade)

    def sample_fields(self, row: Question, answer: str) -> dict[str, Any]:
        """Add how the texts compare."""
        found = self.read(row, solution_of(answer)).answer or ""
        return {
            **super().sample_fields(row, answer),
            "exact_match": words_of(found) == words_of(row["answer"]),
            "fuzzy_match": is_same(found, row["answer"]),
        }

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the figures of the reference, and how the texts compare."""
        metrics = super().summarize_samples(samples)
        keys = {f"{key}_accuracy": key for key in ("exact_match", "fuzzy_match")}
        metrics |= means_of(samples, keys)
        graded = [{**s, **marks_of(s["score"])} for s in samples if s["correct"] is not None]
        attempted = [sample for sample in graded if sample["is_given_attempted"]]
        names = [*marks_of(None), "accuracy_given_attempted"]
        metrics |= dict.fromkeys((f"eval/{name}" for name in names), 0.0)
        metrics |= means_of(graded, {name: name for name in marks_of(None)})
        metrics |= means_of(attempted, {"accuracy_given_attempted": "is_correct"})
        right, given = metrics["eval/is_correct"], metrics["eval/accuracy_given_attempted"]
        metrics["eval/f1"] = 2 * right * given / (right + given) if right + given else 0.0
        return metrics


def marks_of(score: float | None) -> dict[str, bool]:
    """Return the reference's marks of an answer; one without a readable grade counts as not attempted, as there."""
    is_correct, is_incorrect = score == 1.0, score == 0.0
    return {
        "is_correct": is_correct,
        "is_incorrect": is_incorrect,
        "is_not_attempted": not (is_correct or is_incorrect),
        "is_given_attempted": is_correct or is_incorrect,
    }


def read_grade(verdict: str) -> float | None:
    """Return the score of the last grade after the judge's reasoning; None without one.

    >>> read_grade("Not INCORRECT. Grade: CORRECT"), read_grade("Grade: NOT_ATTEMPTED"), read_grade("CORRECT")
    (1.0, 0.1, None)
    """
    found = last_verdict(verdict, "grade", rf"(?:{'|'.join(GRADES)})\b")
    return GRADES[found] if found else None


def is_same(answer: str, gold: str) -> bool:
    """Whether the last line has the words of `gold`, or one contains the other's and has at most twice as many.

    >>> is_same("President Obama", "Obama"), is_same("1990", "19"), is_same("1, 2, 3, 4 or 5", "4")
    (True, False, False)
    """
    last_line = answer.strip().rpartition("\n")[2]
    short, long = sorted((words_of(last_line), words_of(gold)), key=len)
    starts = range(len(long) - len(short) + 1)
    is_within = any(long[i : i + len(short)] == short for i in starts)
    return bool(short) and len(long) <= 2 * len(short) and is_within


if __name__ == "__main__":
    SimpleQAEvalEnv.cli()
