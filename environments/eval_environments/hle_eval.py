"""HLE, Humanity's Last Exam, without the questions that have an image; accuracy by category, and calibration.

A choice is a letter; other answers are compared as text without case, or as numbers. The published figures need a judge
for them: `--env.use_llm_judge true --judge.base_url URL --judge.model_name J`. The calibration error is the root mean
square difference of stated confidence and accuracy in bins of 100 answers, as HLE's; ours counts the last bin, too.

Data: cais/hle (gated), or JSONL rows with `question`, `answer`, `answer_type`, `category` and `image`.
Source: arXiv:2501.14249.
Needs: extras datasets.

    python environments/eval_environments/hle_eval.py evaluate --env.use_llm_judge true ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.answers import read_choice, solution_of
from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import Outcome, Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig, judge_prompt, last_verdict
from atroposlib.envs.program_tests import is_same_text
from atroposlib.envs.rows import HubRows

BIN = 100
JUDGE_TASK = """\
Does a model's answer to a question equal the known answer? A small difference of a numerical answer does not matter;
anything ambiguous, inconsistent or incomplete does. Do not solve the question."""
_CHOICE = re.compile(r"^\s*\(?([A-Z])[.):]\s+(.+)$", re.MULTILINE)
_CONFIDENCE = re.compile(r"\bconfidence\b[\s*_]*[:=]?[\s*_]*(\d{1,3})(?:\.\d+)?\s*%", re.IGNORECASE)


class HLEConfig(BenchmarkConfig, JudgeEnvConfig):
    max_token_length: int = 32768
    use_llm_judge: bool = False
    """Whether a judge decides on answers that are no choice."""


class HLEEvalEnv(BenchmarkEnv, JudgeEnv):
    """Exact answers and choices."""

    name = "hle_eval"
    env_config_cls = HLEConfig
    config: HLEConfig
    benchmark_data = HubRows(path="cais/hle", split="test")

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the question; one with an image is skipped. A question with choices has them also as a list."""
        if row.get("image"):
            return None
        groups = {"category": row.get("category", "none"), "type": row["answer_type"]}
        parsed = Question(question=row["question"], answer=row["answer"], groups=groups)
        if row["answer_type"] == "multipleChoice":
            parsed["choices"] = choices_of(row["question"])
        return parsed

    def prompt(self, row: Row) -> str:
        """Return the question, and the form of the answer and its confidence."""
        what = "the letter of the right choice" if row.get("choices") else "the answer alone"
        return (
            f"{row['question']}\n\nEnd with {what} inside of <answer> </answer>, and then a line\n"
            "Confidence: N%\nwhere N, 0 to 100, says how sure you are."
        )

    def read(self, row: Row, text: str) -> Reading:
        """Read the letter of a choice, else the tag."""
        if row.get("choices"):
            return Reading(*read_choice(_CONFIDENCE.sub("", text), row["choices"]))
        return super().read(row, text)

    async def grade(self, row: Row, answer: str) -> Outcome:
        """Return 1 for the right answer, else 0; None if the judge gives no verdict."""
        if row["groups"]["type"] == "multipleChoice" or not self.config.use_llm_judge:
            return float(is_same_text(answer.lower(), row["answer"].lower(), abs_tol=0.0))
        parts = {"question": row["question"], "known_answer": row["answer"], "model_answer": answer}
        messages = judge_prompt(JUDGE_TASK, parts, "Correct: yes or no")
        return await self.ask_judge(messages, read_correct)

    def sample_fields(self, row: Row, answer: str) -> dict[str, Any]:
        """Add the stated confidence, 0 to 1; None without one."""
        stated = _CONFIDENCE.findall(solution_of(answer))
        confidence = min(100, int(stated[-1])) / 100 if stated else None
        return {**super().sample_fields(row, answer), "confidence": confidence}

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the calibration error of the judged answers that state a confidence."""
        metrics = super().summarize_samples(samples)
        stated = [
            (s["confidence"], bool(s["correct"]))
            for s in samples
            if s["confidence"] is not None and s["score"] is not None
        ]
        if stated:
            metrics["eval/calibration_error"] = calibration_error(stated)
        return metrics


def choices_of(question: str) -> list[str]:
    """Return the choices A, B, C, ... at the end of a question.

    >>> choices_of("Who?\\n\\nAnswer Choices:\\nA. I am\\nB. You are\\nC. He is")
    ['I am', 'You are', 'He is']
    """
    found = _CHOICE.findall(question)
    start = max((i for i, (letter, _) in enumerate(found) if letter == "A"), default=len(found))
    return [text.strip() for _, text in found[start:]]


def read_correct(verdict: str) -> float | None:
    """Return 1 for the last `Correct: yes` after the judge's reasoning, 0 for no, None without one.

    >>> read_correct("Not the same. **Correct:** no"), read_correct("yes") is None
    (0.0, True)
    """
    found = last_verdict(verdict, "correct", r"(?:yes|no)\b")
    return float(found == "yes") if found else None


def calibration_error(stated: Sequence[tuple[float, bool]]) -> float:
    """Return the root mean square difference of confidence and accuracy, in bins of answers with similar confidence.

    >>> calibration_error([(0.9, True), (0.9, False)])
    0.4
    """
    ordered = sorted(stated)
    num_bins = max(1, len(ordered) // BIN)
    ends = [*(i * BIN for i in range(1, num_bins)), len(ordered)]
    total, start = 0.0, 0
    for end in ends:
        binned = ordered[start:end]
        gap = sum(confidence - right for confidence, right in binned) / len(binned)
        total += len(binned) * gap**2
        start = end
    return math.sqrt(total / len(ordered))


if __name__ == "__main__":
    HLEEvalEnv.cli()
