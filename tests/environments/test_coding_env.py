"""Programs judged by tests: what passes, and what hostile programs earn."""

import json
from functools import partial
from typing import Any

import pytest

from atroposlib.envs.program_tests import judge_program
from tests.environments.helpers_environments import load, logged
from tests.faults.hostile_programs import ATTACKS

coding = load("code_execution_server.coding_server")

LIMITS = {"wall_s": 30, "cpu_s": 30}
PROBLEM = {
    "problem": "Print the double.",
    "tests": {"input": ["4\n", "8\n"], "output": ["8", "16"]},
}


def block(program: str) -> str:
    return f"```python\n{program}\n```"


@pytest.fixture
def started(started: Any) -> Any:
    return partial(started, coding.CodingEnv, group_size=2)


@pytest.mark.parametrize(
    ("program", "expected", "verdict"),
    [
        ("print(int(input()) * 2)", "8", "passed"),
        ("print('  8.0000004  ')", "\n8\n", "passed"),
        ("print('8.001')", "8", "wrong"),
        ("print('nan')", "8", "wrong"),
        ("print('the answer: 8')", "8", "wrong"),
        ("print(8); print(8)", "8", "wrong"),
        ("print('a 1.0')", "a 1", "wrong"),
        ("print('8'); raise SystemExit(1)", "8", "error"),
        ("print(", "8", "error"),
    ],
)
def test_lines_printed_are_compared(program: str, expected: str, verdict: str) -> None:
    assert judge_program(program, [("4\n", expected)], None, LIMITS)["verdict"] == verdict


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def pair(a, b): return (b, a)", "passed"),
        ("class Solution:\n    def pair(self, a: List[int], b): return [b, a]", "passed"),
        ("print('debug')\ndef pair(a, b):\n    print(a)\n    return b, a", "passed"),
        ("def pair(a, b): return b, a\nif __name__ == '__main__': input()", "passed"),
        ("def pair(a, b): return [a, b]", "wrong"),
        ("def other(a, b): return [b, a]", "error"),
        ("def pair(a, b): return {b, 1}", "error"),
        ("def pair(a, b):\n    print('[\"x\", [1]]'); import os; os._exit(1)", "error"),
        ("def pair(a, b):\n    print('[' * 90000); import os; os._exit(0)", "wrong"),
    ],
)
def test_a_function_is_called_with_the_arguments_of_each_line(program: str, verdict: str) -> None:
    assert (
        judge_program(program, [('[1]\n"x"\n', '["x", [1]]')], "pair", LIMITS)["verdict"] == verdict
    )


def test_every_test_must_pass() -> None:
    tests = [("1", "1"), ("2", "2")]
    assert judge_program("print(input())", tests, None, LIMITS)["verdict"] == "passed"
    assert judge_program("print(1)", tests, None, LIMITS) == {
        "verdict": "wrong",
        "explanation": "test 2 of 2: wrong. Input '2', expected '2', printed '1\\n'",
    }


@pytest.mark.drill
async def test_hostile_programs_are_counted_and_earn_nothing(started: Any) -> None:
    attacks = """
        loop memory fork_bomb exit_at_once forge_replies memory_of_the_parent descriptors_of_the_parent
        flood_stdout become_root
    """
    names = attacks.split()
    programs = ["print(int(input()) * 2)", *(ATTACKS[name].source for name in names)]
    answers = [*map(block, programs), "I do not know."]
    env = await started(answers, test_timeout_s=2.0, group_size=len(answers))
    group, _ = await env.collect_trajectories(env.parse_row(PROBLEM))
    again, _ = await env.collect_trajectories(env.parse_row(PROBLEM))
    assert group["scores"] == again["scores"] == [1.0, *[-1.0] * (len(names) + 1)]
    assert env.num_reward_failures == 0
    assert env.counts["program_passed"] == 2
    assert env.counts["no_program"] == 2
    assert env.counts["program_timeout"] >= 2
    assert env.counts["program_error"] >= 6
    assert env.counts.total() == 2 * len(group["scores"])


async def test_the_last_block_counts_and_a_cut_answer_gets_no_advantage(started: Any) -> None:
    right, wrong = block("print(int(input()) * 2)"), block("print(0)")
    env = await started([f"{wrong}\nor rather\n{right}", f"{right}\nno:\n{wrong}"])
    group, _ = await env.collect_trajectories(env.parse_row(PROBLEM))
    assert group["scores"] == [1.0, -1.0]
    env.config.max_token_length = 20
    group, _ = await env.collect_trajectories(env.parse_row(PROBLEM))
    assert group["scores"] == [-1.0, -1.0]
    assert group["overrides"] == [{"set_advantage_to_zero": True}] * 2


def test_rows_of_both_data_sets_are_read() -> None:
    tests = {"input": ["1"], "output": ["2"]}
    assert coding.tests_of({"tests": json.dumps(tests)}) == [("1", "2")]
    contests = {"private_tests": tests, "generated_tests": {"input": ["3"], "output": ["4"]}}
    assert coding.tests_of(contests) == [("1", "2"), ("3", "4")]


async def test_figures_of_training_and_evaluation(started: Any) -> None:
    right, wrong = block("print(int(input()) * 2)"), block("print(0)")
    env = await started([right, wrong], num_eval_samples=2)
    await env.collect_trajectories(env.parse_row(PROBLEM))
    metrics = await logged(env)
    assert metrics["train_rewards/rewards"] == 0.0
    assert metrics["train_rewards/pass@group_size"] == 1.0
    assert metrics["train_rewards/correct_completion_lengths"] > 20
    env.eval_rows = [env.parse_row({**PROBLEM, "difficulty": "easy"})]
    metrics = await env.evaluate()
    assert metrics["eval/pass_1"] == metrics["eval/easy_pass_1"] == 0.5
    assert metrics["eval/pass@2"] == 1.0
