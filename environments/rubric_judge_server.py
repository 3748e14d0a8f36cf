"""Rubric judge: answer requests; a judge marks every answer by several weighted criteria.

A verdict has one mark from 0 to 10 for each criterion. The score is their weighted mean divided by 10. A verdict with a
missing, repeated, unknown or impossible mark gives no score instead of 0, so that a failing judge does not punish good
answers; `train/judge_unparsable` counts such verdicts.

Data: allenai/WildChat, or JSONL rows with `conversation`, `messages` or `prompt`.
Needs: extra datasets; --judge.base_url for a judge other than the policy.

    python environments/rubric_judge_server.py serve --judge.base_url http://localhost:9002/v1 --judge.model_name ...
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, Field, field_validator

from atroposlib.envs.answers import solution_of
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig, judge_prompt
from atroposlib.envs.rows import ChatPrompt, ChatRows

BEST_MARK = 10
_MARK = re.compile(r"[\s*_-]*([a-z][a-z0-9_]*)[\s*_]*[:=][\s*_]*(-?\d+(?:\.\d+)?)[\s*_]*")


class Criterion(BaseModel):
    """One criterion of a rubric."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    text: str
    """What the judge is asked."""
    weight: float = Field(default=1.0, gt=0)


class RubricJudgeConfig(JudgeEnvConfig):
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    group_size: int = 8
    max_token_length: int = 4096
    criteria: list[Criterion] = [
        Criterion(
            name="correct", text="Are all statements true and free of contradiction?", weight=3
        ),
        Criterion(name="helpful", text="Does it do all that the request asks for?", weight=2),
        Criterion(name="brief", text="Is every sentence needed?"),
    ]
    """In YAML a list, as a flag JSON."""

    @field_validator("criteria")
    @classmethod
    def _names_differ(cls, criteria: list[Criterion]) -> list[Criterion]:
        names = [criterion.name for criterion in criteria]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"there must be criteria, with different names; got {names}")
        return criteria


class RubricJudgeEnv(ChatRows, JudgeEnv):
    """Single turn, judged by a rubric."""

    name = "rubric_judge"
    env_config_cls = RubricJudgeConfig
    config: RubricJudgeConfig
    success_score = 0.8

    def judge_messages(self, row: ChatPrompt, answer: str) -> list[dict[str, Any]]:
        """Return the judge's prompt with all criteria."""
        criteria = self.config.criteria
        listed = "\n".join(f"{each.name}: {each.text}" for each in criteria)
        return judge_prompt(
            f"Mark an answer to a request by {len(criteria)} criteria, each from 0 (worst) to {BEST_MARK} (best):\n"
            f"{listed}",
            {"request": row.text(), "answer": answer},
            "\n".join(
                [*(f"{each.name}: N" for each in criteria), "with a number in place of each N."]
            ),
        )

    def parse_mark(self, verdict: str) -> float | None:
        """Return the weighted mean of the marks, 0 to 1; None unless every criterion has exactly one."""
        marks = read_marks(verdict, [each.name for each in self.config.criteria])
        if marks is None:
            return None
        total = sum(each.weight * marks[each.name] for each in self.config.criteria)
        return total / BEST_MARK / sum(each.weight for each in self.config.criteria)


def read_marks(verdict: str, names: list[str]) -> dict[str, float] | None:
    """Return the marks in the last lines; None if one is missing, repeated, unknown or out of range.

    >>> read_marks("Sound, but long.\\ncorrect: 9\\nbrief: 4", ["correct", "brief"])
    {'correct': 9.0, 'brief': 4.0}
    >>> read_marks("correct: 9\\ncorrect: 9", ["correct", "brief"]) is None
    True
    """
    lines = [line for line in solution_of(verdict).splitlines() if line.strip()]
    found = [match for line in lines[-len(names) :] if (match := _MARK.fullmatch(line))]
    marks = {match[1]: float(match[2]) for match in found}
    is_valid = set(marks) == set(names) and all(0 <= mark <= BEST_MARK for mark in marks.values())
    return marks if is_valid else None


if __name__ == "__main__":
    RubricJudgeEnv.cli()
