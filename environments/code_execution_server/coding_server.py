"""Competitive programming: write a Python program that passes every test.

The last fenced block after the thinking that is Python, or names no language, is run in a sandbox, once per test:
without network, files of this machine, and the expected output. The reward is +1 if it passes all tests, -1 if not or
if there is no block; an answer that was cut at the token limit gets -1 and no advantage. A problem reads its input from
stdin, or asks for a function.

`atroposlib/envs/sandbox.py` describes the sandboxes: bubblewrap if it is installed, a limited process if not, and with
--env.docker_image python:3.11-slim a container per test.

Data: NousResearch/RLVR_Coding_Problems (or --env.dataset_name deepmind: deepmind/code_contests), or JSONL rows with
`problem`, `tests` ({"input": [...], "output": [...]}), and for a function `fn_name` and `starter_code`; evaluation on
NousResearch/lcb_test.
Needs: extras datasets.

    python environments/code_execution_server/coding_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import Outcome
from atroposlib.envs.lengths import num_trained
from atroposlib.envs.program_env import ProgramEnv, ProgramEnvConfig, program_in
from atroposlib.envs.program_tests import judge_program
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rows import HubRows

DATA = {
    "normal": HubRows(path="NousResearch/RLVR_Coding_Problems"),
    "deepmind": HubRows(path="deepmind/code_contests", split="train[:10000]"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    text: str
    tests: list[tuple[str, str]] = field(repr=False)
    """Inputs and expected outputs; they may have megabytes, and are left out where a row is shown."""
    function: str | None
    """The function to write; None: the program reads stdin."""
    starter_code: str
    difficulty: str
    solution: str | None = field(repr=False)


class CodeConfig(ProgramEnvConfig):
    tokenizer_name: str = "Qwen/Qwen3-14B"
    group_size: int = 8
    max_token_length: int = 32768
    dataset_name: Literal["normal", "deepmind"] = "normal"
    start_idx: int = Field(default=0, ge=0)
    """Training rows to skip at the start."""
    num_eval_samples: int = Field(default=16, ge=1)
    eval_temperature: float | None = 0.6


class CodingEnv(ProgramEnv):
    """Single turn, reward by tests in a sandbox."""

    name = "code_execution"
    env_config_cls = CodeConfig
    config: CodeConfig
    eval_data = HubRows(path="NousResearch/lcb_test", split="test")
    truncated_score = -1.0
    silences_truncated = True
    aliases = {"eval/pass_1": "eval/pass@1"}
    system_prompt = (
        "You are an expert Python programmer. You get a programming problem and write a correct, efficient program "
        "that passes all of its tests."
    )

    def __init__(self, config: CodeConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.train_data = DATA[config.dataset_name]
        self.num_items = config.start_idx

    def parse_row(self, row: dict[str, Any]) -> Problem | None:
        """Return the problem; one without tests is skipped."""
        tests = tests_of(row)
        is_function = row.get("problem_type") == "func" or bool(row.get("fn_name"))
        if not tests or (is_function and not row.get("fn_name")):
            return None
        return Problem(
            text=row.get("problem") or row["description"],
            tests=tests,
            function=row["fn_name"] if is_function else None,
            starter_code=row.get("starter_code") or "",
            difficulty=str(row.get("difficulty", "")),
            solution=row.get("solution"),
        )

    def prompt(self, row: Problem) -> str:
        """Return the problem and the required form of the program."""
        if row.function is None:
            form = (
                "Read the input from stdin and print the output to stdout, without any other text."
            )
        else:
            form = f"Write the function `{row.function}`; the input is not read from stdin."
        if row.starter_code:
            form += f" Begin with this code:\n```python\n{row.starter_code}\n```"
        return f"{row.text}\n\n{form}\nGive the whole program in one block:\n```python\n# code\n```"

    def example_answers(self, item: Problem) -> list[str]:
        return [] if item.solution is None else [f"```python\n{item.solution}\n```"]

    async def score(self, row: Problem, answer: str) -> Outcome:
        """Return 1 if the last Python block passes every test, else -1."""
        program = program_in(answer)
        if program is None:
            self.counts["no_program"] += 1
            return -1.0
        passes = await self.judge_in_worker(judge_program, program, row.tests, row.function)
        if isinstance(passes, RewardFailure):
            return passes
        return 1.0 if passes else -1.0

    def shape_group(self, row: Problem, group: ScoredDataGroup) -> ScoredDataGroup:
        """Record what is logged of the group."""
        overrides = group.get("overrides") or [{}] * len(group["scores"])
        for mask, score, override in zip(group["masks"], group["scores"], overrides, strict=True):
            length = num_trained(mask)
            kind = "correct" if score > 0 else "incorrect"
            self.record("train_rewards/rewards", score)
            self.record("train_rewards/overlong_ratio", "set_advantage_to_zero" in override)
            self.record("train_rewards/completion_lengths", length)
            self.record(f"train_rewards/{kind}_completion_lengths", length)
        self.record("train_rewards/pass@group_size", max(group["scores"]) > 0)
        return group

    def parts_of(self, row: Problem) -> list[str]:
        return [f"eval/{row.difficulty}_pass_1"] if row.difficulty else []


def tests_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return inputs and outputs of a row of either data set.

    >>> tests_of({"tests": '{"input": [[1, [2]]], "output": [3]}'})
    [('1\\n[2]', '3')]
    """
    found = [row[name] for name in ("tests", "private_tests", "generated_tests") if row.get(name)]
    parsed = [json.loads(tests) if isinstance(tests, str) else tests for tests in found]
    return [
        (
            given if isinstance(given, str) else "\n".join(json.dumps(each) for each in given),
            expected if isinstance(expected, str) else json.dumps(expected),
        )
        for tests in parsed
        for given, expected in zip(tests["input"], tests["output"], strict=True)
    ]


if __name__ == "__main__":
    CodingEnv.cli()
