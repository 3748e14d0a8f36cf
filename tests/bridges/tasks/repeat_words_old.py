"""An environment of the old verifiers, with a tool; `judges_groups` adds a reward of the whole group."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def spell(word: str) -> str:
    """Spell a word.

    Args:
        word: The word.
    """
    return "-".join(word)


async def repeated(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def share_of_longer_answers(completions: list[Any]) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [sum(each < length for each in lengths) / len(lengths) for length in lengths]


def load_environment(num_rows: int = 6, judges_groups: bool = False) -> vf.Environment:
    words = [f"word{i}" for i in range(num_rows)]
    data = Dataset.from_list(
        [{"question": f"Spell {word}.", "answer": "-".join(word)} for word in words]
    )
    funcs: list[Any] = [repeated, *([share_of_longer_answers] if judges_groups else [])]
    rubric = vf.Rubric(funcs=funcs, weights=[2.0, 0.5][: len(funcs)])
    return vf.ToolEnv(dataset=data, tools=[spell], rubric=rubric, max_turns=4)
