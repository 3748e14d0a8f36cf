"""Code benchmarks: rows of every data set, and programs that try to pass tests without solving them."""

import base64
import json
import pickle  # noqa: TID251 - as the data set does it
import zlib
from typing import Any

import pytest

from atroposlib.envs.program_tests import judge_function, unpack_tests
from atroposlib.errors import ConfigError
from tests.environments.helpers_environments import load

CodeEval = load("eval_environments.code_eval").CodeEvalEnv

LIMITS = {"wall_s": 30, "cpu_s": 30}
REFERENCE = "def twice(xs): return [2 * x for x in xs]"
TESTS = """def check(candidate):
    for xs in ([1], [2, 3]):
        assert candidate(xs) == [2 * x for x in xs]
check(twice)"""
EXIT = "import os, sys; sys.stdout.flush(); os._exit(0)"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (REFERENCE, "passed"),
        ("class L(list): pass\nprint('debug')\ndef twice(xs): return L(x + x for x in xs)", "passed"),
        ("def twice(xs):\n    return [xs.pop() * 2 for _ in range(len(xs))][::-1]", "passed"),
        ("def twice(xs): return [2]", "wrong"),
        ("def twice(xs): return tuple(2 * x for x in xs)", "wrong"),
        ("def twice(xs): raise SystemExit(0)", "wrong"),
        (f"{EXIT}", "wrong"),
        ("import atexit, os\natexit.register(os._exit, 0)", "wrong"),
        ("class E:\n    def __eq__(self, other): return True\ndef twice(xs): return E()", "wrong"),
        ("class E(list):\n    def __eq__(self, other): return True\ndef twice(xs): return E()", "wrong"),
        ("import builtins\nbuiltins.AssertionError = None\ndef twice(xs): return 0", "wrong"),
        ("import json\njson.dumps = lambda x: 'true'\ndef twice(xs): return 0", "wrong"),
        ("import sys\nsys.modules['builtins'].len = lambda x: 2\ndef twice(xs): return 0", "wrong"),
        (f"""print('\\n[["raised", "SystemExit"], ["raised", "exit"]]'); {EXIT}""", "wrong"),
        (f"print('\\n' + '[' * 90000); {EXIT}", "wrong"),
        ("import inspect\ndef twice(xs): return inspect.stack()[1].frame.f_globals['expected']", "wrong"),
        ("def twice(", "error"),
    ],
)  # fmt: skip
def test_a_program_passes_only_by_its_results(program: str, verdict: str) -> None:
    assert judge_function(program, "twice", REFERENCE, TESTS, LIMITS)["verdict"] == verdict


def test_a_function_may_call_itself() -> None:
    fib = "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)"
    for program, verdict in ((fib, "passed"), (fib.replace("<", "<="), "wrong")):
        found = judge_function(program, "fib", fib, "assert fib(5) == 5", LIMITS)
        assert found["verdict"] == verdict


def test_values_of_every_builtin_type_are_compared_and_exceptions_expected() -> None:
    program = """def f(x):
    if x is None:
        raise ValueError
    return {(1, "a"): {b"x", 2j}, "none": None, "n": 10 ** 5000, "x": x}"""
    tests = """y = f({1, 2.5})
assert y[(1, "a")] == {b"x", 2j} and y["n"] == 10 ** 5000 and y["x"] == {1, 2.5} and y["none"] is None
try:
    f(None)
except ValueError:
    pass
else:
    assert False"""
    assert judge_function(program, "f", program, tests, LIMITS)["verdict"] == "passed"
    other = program.replace("ValueError", "KeyError")
    assert judge_function(other, "f", program, tests, LIMITS)["verdict"] == "wrong"
    with pytest.raises(ValueError, match="the reference fails its tests"):
        judge_function(program, "f", "def f(x): return x", tests, LIMITS)


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef root(x):\n    return math.sqrt(x)\n\n\ndef roots(xs):\n    """Return roots."""\n',
    "canonical_solution": "    return [root(x) for x in xs]\n",
    "entry_point": "roots",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert abs(candidate([4])[0] - root(4)) < 1e-6\n",
}
EVALPLUS = {
    **HUMANEVAL,
    "test": (
        "import numpy as np\n\n\ndef assertion(out, exp, atol):\n"
        "    assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n\n\n"
        "def check(candidate):\n    inputs = [[[4, 9]]]\n    results = [[2.0, 3.0]]\n"
        "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 1e-06)\n"
    ),
}
CODE = "def helper(x): return x\ndef is_even(x): return helper(x) % 2 == 0"
MBPP = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 2,
    "prompt": "Write a function to find even numbers.",
    "code": CODE,
    "test_imports": ["import math"],
    "test_list": ["assert is_even(4)", "assert is_even(math.floor(3.5)) == False"],
}
MBPP_FULL = {
    "task_id": 601,
    "text": "Write a function to find even numbers.",
    "code": CODE,
    "test_list": ["assert is_even(4)"],
    "test_setup_code": "limit = 4",
    "challenge_test_list": ["assert is_even(limit)"],
}
PLUS = "inputs = [[4], [5]]\nfor inp in inputs:\n    assert is_even(*inp) == (inp[0] == 4)"
CASE = {"input": "3\n", "output": "6\n", "testtype": "stdin"}
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps([CASE])))).decode()
LCB = {
    "question_title": "Double",
    "question_content": "Print the double.",
    "platform": "atcoder",
    "question_id": "abc1",
    "contest_id": "abc",
    "contest_date": "2024-09-01T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([CASE]),
    "private_test_cases": PACKED,
    "metadata": "{}",
    "code": "print(int(input()) * 2)",
}


@pytest.mark.parametrize(
    ("raw", "answer", "score"),
    [
        (HUMANEVAL, "def roots(xs): return [root(x) for x in xs]", 1.0),
        (HUMANEVAL, "    return [math.sqrt(x) for x in xs]", 1.0),
        (HUMANEVAL, "def roots(xs): return xs", 0.0),
        (EVALPLUS, "def roots(xs): return [x ** 0.5 + 1e-7 for x in xs]", 1.0),
        (EVALPLUS, "def roots(xs): return [x ** 0.5 + 1e-4 for x in xs]", 0.0),
        (MBPP, CODE, 1.0),
        (MBPP_FULL, "def is_even(x): return True", 1.0),
        ({**MBPP, "test": PLUS}, "def is_even(x): return True", 0.0),
        (LCB, LCB["code"], 1.0),
        (LCB, "print(7)", 0.0),
    ],
)
async def test_rows_of_every_data_set_are_judged(
    made: Any, raw: Any, answer: str, score: float
) -> None:
    env = made(CodeEval)
    row = env.parse_row({"benchmark": "x", **raw})
    assert row["groups"]["benchmark"] == "x"
    assert await env.score(row, f"So:\n```python\n{answer}\n```") == score


def test_mbpp_shows_the_asserts_that_are_asked_for(made: Any) -> None:
    for num_shown in (0, 1, 2):
        prompt = made(CodeEval, num_tests_shown=num_shown).parse_row(MBPP)["question"]
        assert "`is_even`" in prompt
        assert prompt.count("assert ") == num_shown


def test_dates_choose_problems_of_livecodebench_and_benchmarks_are_known(made: Any) -> None:
    env = made(CodeEval, since="2024-08-01", until="2024-09-01")
    assert env.parse_row(LCB) is None
    assert made(CodeEval, since="2024-09-01").parse_row(LCB)["groups"] == {"difficulty": "easy"}
    with pytest.raises(ConfigError, match="there is no apps, only humaneval"):
        made(CodeEval, benchmarks=["apps"]).parts()


def test_a_pickle_of_tests_runs_nothing_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unpack_tests(PACKED) == [["3\n", "6\n"]]
    code = b"cbuiltins\nprint\n(Vowned\ntR."
    with pytest.raises(ValueError, match="Expecting value"):
        unpack_tests(base64.b64encode(zlib.compress(code)).decode())
    monkeypatch.setattr("atroposlib.envs.program_tests.MAX_UNPACKED_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        unpack_tests(PACKED)
