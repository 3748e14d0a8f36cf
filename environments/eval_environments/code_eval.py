"""HumanEval, MBPP (both also with EvalPlus' tests) and LiveCodeBench: programs that tests judge; pass@k.

The last Python block after the thinking runs in a sandbox that gets neither the tests nor the expected results, so that
no exit, patched builtin or comparison of its own passes them. Without bubblewrap or Docker it can read files of its
user, such as the data set (`atroposlib/envs/sandbox.py`). `--env.num_eval_samples 20` reports pass@1, @5, @10 and @20
by the unbiased estimator (arXiv:2107.03374). LiveCodeBench: name the problems by their date, as in
`--env.since 2024-08-01 --env.until 2025-02-01`.

Data: openai/openai_humaneval, evalplus/humanevalplus, google-research-datasets/mbpp (sanitized), evalplus/mbppplus,
livecodebench/code_generation_lite, or JSONL rows with the fields of one of them.
Needs: extras datasets.

    python environments/eval_environments/code_eval.py evaluate --env.benchmarks '["humaneval_plus"]' ...
"""

from __future__ import annotations

import ast
import json
from typing import Any, NamedTuple

from pydantic import Field

from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import Outcome, Row
from atroposlib.envs.eval_run import hash_of
from atroposlib.envs.program_env import ProgramEnv, ProgramEnvConfig, program_in
from atroposlib.envs.program_tests import judge_function, judge_packed
from atroposlib.envs.rows import HubRows

_LCB = "hf://datasets/livecodebench/code_generation_lite/test{}.jsonl"
BENCHMARKS = {
    "humaneval": HubRows(path="openai/openai_humaneval", split="test"),
    "humaneval_plus": HubRows(path="evalplus/humanevalplus", split="test"),
    "mbpp": HubRows(path="google-research-datasets/mbpp", config="sanitized", split="test"),
    "mbpp_plus": HubRows(path="evalplus/mbppplus", split="test"),
    "livecodebench": HubRows(
        path="json", files=tuple(_LCB.format(part) for part in ("", 2, 3, 4, 5, 6))
    ),
}


class Task(Question, total=False):
    """A row; the answer is the reference, "" if there is none."""

    function: str | None
    """The function to write; None: the program reads stdin."""
    before: str
    """Code before the function: imports and functions that it may use."""
    stub: str
    """The function's head; an answer without the head is its body."""
    tests: str
    """Key of its tests in the environment, for they may have megabytes."""


class Found(NamedTuple):
    """A task, and its tests apart."""

    task: Task
    tests: str | list[str]
    """Code with assertions, or LiveCodeBench's inputs and outputs."""


class CodeEvalConfig(BenchmarkConfig, ProgramEnvConfig):
    benchmarks: list[str] = Field(default=["humaneval_plus"], min_length=1)
    """One or several; each has its own accuracy."""
    num_tests_shown: int = Field(default=1, ge=0)
    """MBPP: assertions in the prompt; EvalPlus shows 1, the paper 3."""
    since: str = ""
    """LiveCodeBench: first date of the problems, as 2024-08-01."""
    until: str = "9999"
    """LiveCodeBench: the date before which the problems were published."""


class CodeEvalEnv(BenchmarkEnv, ProgramEnv):
    """A function or a program, judged by tests."""

    name = "code_eval"
    env_config_cls = CodeEvalConfig
    config: CodeEvalConfig
    all_parts = BENCHMARKS
    part_key, part_setting = "benchmark", "benchmarks"

    def __init__(self, config: CodeEvalConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.tests: dict[str, str | list[str]] = {}

    def parse_row(self, row: dict[str, Any]) -> Task | None:
        """Return the task of a row of any benchmark; None outside of the dates."""
        if "entry_point" in row:
            task, tests = humaneval_task(row)
        elif "test_list" in row:
            task, tests = mbpp_task(row, num_shown=self.config.num_tests_shown)
        elif self.config.since <= row["contest_date"] < self.config.until:
            task, tests = livecodebench_task(row)
        else:
            return None
        task["tests"] = hash_of(tests)
        self.tests[task["tests"]] = tests
        if "benchmark" in row:
            task["groups"] = {"benchmark": row["benchmark"], **task.get("groups", {})}
        return task

    def prompt(self, row: Row) -> str:
        return f"{row['question']}\n\nGive the whole program in one block:\n```python\n# code\n```"

    def gold_answer(self, row: Row) -> None:
        """Return None: a reference that fails makes its row faulty, not the benchmark."""

    def example_answers(self, item: Row) -> list[str]:
        return [f"```python\n{item['answer']}\n```"] if item["answer"] else []

    def read(self, row: Row, text: str) -> Reading:
        """Read the program, with what the prompt has before it."""
        program = program_in(text)
        if program is None:
            return Reading(None, "none")
        stub = row.get("stub", "")
        has_head = not stub or f"def {row['function']}" in program
        return Reading(row.get("before", "") + ("" if has_head else stub) + program, "code_block")

    async def grade(self, row: Row, answer: str) -> Outcome:
        tests, function = self.tests[row["tests"]], row["function"]
        if isinstance(tests, list):
            return await self.judge_in_worker(judge_packed, answer, tests, function)
        return await self.judge_in_worker(judge_function, answer, function, row["answer"], tests)


def humaneval_task(row: dict[str, Any]) -> Found:
    """Return the task and tests of a row of HumanEval or HumanEval+."""
    function, prompt = row["entry_point"], row["prompt"]
    start = prompt.index(f"def {function}(")
    task = Task(
        question=f"Complete this function.\n```python\n{prompt.strip()}\n```",
        answer=prompt + row["canonical_solution"],
        before=prompt[:start],
        stub=prompt[start:],
        function=function,
    )
    return Found(task, f"{row['test']}\ncheck({function})\n")


def mbpp_task(row: dict[str, Any], *, num_shown: int) -> Found:
    """Return the task and tests of a row of MBPP, its sanitized form or MBPP+; the tests name the function."""
    imports = row.get("test_imports") or [row.get("test_setup_code") or ""]
    shown = "\n".join(row["test_list"][:num_shown])
    function = called_in(row["test_list"][0], row["code"])
    question = f"{row.get('prompt') or row['text']} Write the function `{function}`."
    if shown:
        question += f" It must pass:\n```python\n{shown}\n```"
    tests = row.get("test") or "\n".join(row["test_list"])
    task = Task(question=question, answer=row["code"], function=function)
    return Found(task, "\n".join([*imports, tests]))


def called_in(test: str, program: str) -> str:
    """Return the function of a program that a test calls.

    >>> called_in("assert set(heads([1])) == {1}", "def first(a): ...\\ndef heads(a): return a")
    'heads'
    """
    defined = [each.name for each in ast.parse(program).body if isinstance(each, ast.FunctionDef)]
    names = {each.id for each in ast.walk(ast.parse(test)) if isinstance(each, ast.Name)}
    return [name for name in defined if name in names][-1]


def livecodebench_task(row: dict[str, Any]) -> Found:
    """Return the task and tests of a row of LiveCodeBench, which has no reference; a sample may have one as `code`."""
    metadata = row.get("metadata") or {}
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    function, starter = metadata.get("func_name"), row.get("starter_code") or ""
    form = "Read the input from stdin and print the output to stdout, without any other text."
    if function:
        form = f"Begin with this code, and do not read stdin:\n```python\n{starter}\n```"
    task = Task(
        question=f"{row['question_content']}\n\n{form}",
        answer=row.get("code", ""),
        function=function,
        groups={"difficulty": row["difficulty"]},
    )
    return Found(task, [row["public_test_cases"], row.get("private_test_cases") or "[]"])


if __name__ == "__main__":
    CodeEvalEnv.cli()
