"""DROP: questions about a passage that need counting, adding or sorting; F1 and exact match.

The score is the F1 of the official evaluation: numbers, dates or spans; the best of all annotators counts.

Data: lighteval/drop_harness, or JSONL rows with `passage`, `question`, `answer` and `validated_answers`.
Source: arXiv:1903.00161.
Needs: extras datasets.

    python environments/eval_environments/drop_eval.py evaluate --env.num_eval_rows 1000 ...
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.answers import solution_of
from atroposlib.envs.benchmark_env import BenchmarkEnv, Question, means_of
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.rows import HubRows


class Passage(Question):
    """A row with its annotators' answers."""

    golds: list[list[str]]
    """Per annotator one or several spans."""


class DROPEvalEnv(BenchmarkEnv):
    """Spans, separated by semicolons."""

    name = "drop_eval"
    benchmark_data = HubRows(path="lighteval/drop_harness", split="validation")

    def parse_row(self, row: dict[str, Any]) -> Passage | None:
        """Return the question with the answers of all annotators; rows without an answer are skipped."""
        more = row.get("validated_answers") or []
        if isinstance(more, dict):  # a table by columns
            more = [
                dict(zip(more, values, strict=True)) for values in zip(*more.values(), strict=True)
            ]
        golds = [gold for each in (row["answer"], *more) if (gold := spans_of(each))]
        if not golds:
            return None
        question = f"{row['passage']}\n\n{row['question']}"
        return Passage(question=question, answer="; ".join(golds[0]), golds=golds)

    def prompt(self, row: Row) -> str:
        return f"{super().prompt(row)} Separate several answers by semicolons."

    def grade(self, row: Row, answer: str) -> float:
        return max(f1(spans_in(answer), gold) for gold in row["golds"])

    def sample_fields(self, row: Row, answer: str) -> dict[str, Any]:
        found = self.read(row, solution_of(answer)).answer
        stated = normal_set(spans_in(found or ""))
        exact = any(stated == normal_set(gold) for gold in row["golds"])
        return {**super().sample_fields(row, answer), "exact_match": exact}

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        means = means_of(samples, {"avg_f1": "score", "exact_match": "exact_match"})
        return super().summarize_samples(samples) | means


def spans_of(answer: dict[str, Any]) -> list[str]:
    """Return the spans of one annotator: a number, else text, else a date.

    >>> spans_of({"number": "", "spans": [], "date": {"day": "7", "month": "May", "year": ""}})
    ['7 May']
    """
    if answer.get("number"):
        return [str(answer["number"])]
    if answer.get("spans"):
        return list(answer["spans"])
    date = answer.get("date") or {}
    text = " ".join(str(date[part]) for part in ("day", "month", "year") if date.get(part))
    return [text] if text else []


def spans_in(answer: str) -> list[str]:
    """Return the spans of a model's answer."""
    return [span for each in answer.split(";") if (span := each.strip())]


def words_of(span: str) -> frozenset[str]:
    """Return the words of a span without case, articles and punctuation; numbers in one form.

    >>> sorted(words_of("The 1,200-yard run.")), sorted(words_of("-5%"))
    (['1200.0', 'run', 'yard'], ['-5.0'])
    """
    words = set()
    for word in re.split(r"\s+|(?<=\w)-(?=\w)", span.lower()):
        number = number_in(word.replace(",", "").strip("()$%.;:?!\"'"))
        plain = number or "".join(c for c in word if c not in string.punctuation)
        if plain not in ("", "a", "an", "the"):
            words.add(plain)
    return frozenset(words)


def number_in(word: str) -> str | None:
    """Return a number in one form; None for another word."""
    return str(float(word)) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", word) else None


def normal_set(spans: Sequence[str]) -> frozenset[frozenset[str]]:
    """Return the words of every span, without order."""
    return frozenset(words_of(span) for span in spans)


def f1(stated: Sequence[str], gold: Sequence[str]) -> float:
    """Return the mean F1 of spans paired one to one, the most similar first; spans without a partner count 0.

    >>> f1(["red car"], ["car"]), f1(["1"], ["10"]), f1(["ann", "bob"], ["bob", "ann"]), f1([], ["x"])
    (0.6666666666666666, 0.0, 1.0, 0.0)
    """
    pairs = sorted(
        (
            (f1_of_words(words_of(one), words_of(two)), i, j)
            for i, one in enumerate(stated)
            for j, two in enumerate(gold)
        ),
        reverse=True,
    )
    total, used, taken = 0.0, set(), set()
    for value, i, j in pairs:
        if i not in used and j not in taken:
            used.add(i)
            taken.add(j)
            total += value
    return total / max(len(stated), len(gold))


def f1_of_words(stated: frozenset[str], gold: frozenset[str]) -> float:
    """Return the F1 of two sets of words; 0 if the gold span has numbers and none of them is stated."""
    numbers = {word for word in gold if number_in(word)}
    num_common = len(stated & gold)
    if num_common == 0 or (numbers and not numbers & stated):
        return 0.0
    precision, recall = num_common / len(stated), num_common / len(gold)
    return 2 * precision * recall / (precision + recall)


if __name__ == "__main__":
    DROPEvalEnv.cli()
