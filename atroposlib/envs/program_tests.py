"""Judge a program by tests: run it in a sandbox per test, and compare its output here, outside of the sandbox.

Two forms of tests. stdin: the program reads the input and prints the output. Function: the input has one JSON argument
per line, and the output is the result as JSON. Called in a reward worker (`DatasetEnv.in_worker`); arguments are JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias, TypedDict

from atroposlib.envs.sandbox import DockerSandbox, SandboxLimits, run_code

Verdict: TypeAlias = Literal["passed", "wrong", "timeout", "error"]
"""wrong: a test's output differs. error: an exception, a crash, too much memory or output."""

EXPLAINED_CHARS = 200
"""Of each text of a test in an explanation."""

TOLERANCE = 1e-6
"""Largest difference, relative or absolute, of two decimal numbers that count as equal in a stdin problem."""
JSON_TOLERANCE = 1e-9
"""The same for a function's result."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_MIN_OUTPUT_BYTES = 1 << 20

_CALL = """\
import json, sys, types
solution = sys.modules["solution"] = types.ModuleType("solution")
exec("from typing import *; from collections import *; from itertools import *; from functools import *; "
     "import bisect, collections, functools, heapq, itertools, math, re, string", solution.__dict__)
arguments = [json.loads(line) for line in sys.stdin.read().split("\\n") if line.strip()]
exec(compile({program!r}, "solution.py", "exec"), solution.__dict__)
owner = solution.Solution() if hasattr(solution, "Solution") else solution
result = json.dumps(getattr(owner, {function!r})(*arguments))
print("\\n" + result)
"""
"""Calls a function of the program, or a method of its class `Solution`, with names that programming sites import."""


class Judgement(TypedDict):
    """What `judge_program` found."""

    verdict: Verdict
    explanation: str
    """The first test that failed; "" if none did."""


def judge_program(
    program: str,
    tests: Sequence[Sequence[str]],
    function: str | None,
    limits: Mapping[str, Any],
    docker_image: str | None = None,
) -> Judgement:
    """Run a program on every (input, output) of `tests` until one fails.

    `function` is the name of the function to call; None: a stdin problem. `limits` are those of `SandboxLimits`, for
    each test. EnvError if the sandbox does not start.
    """
    sandbox = None if docker_image is None else DockerSandbox(docker_image)
    source = program if function is None else _CALL.format(program=program, function=function)
    for number, (given, expected) in enumerate(tests, start=1):
        output_bytes = max(_MIN_OUTPUT_BYTES, 4 * len(expected))
        result = run_code(
            source,
            stdin=given,
            limits=SandboxLimits(output_bytes=output_bytes, **limits),
            sandbox=sandbox,
        )
        is_right = is_same_text if function is None else is_same_value
        verdict: Verdict = "passed"
        if result.reason == "timeout":
            verdict = "timeout"
        elif result.reason != "exit" or result.exit_code != 0:
            verdict = "error"
        elif not is_right(result.stdout, expected):
            verdict = "wrong"
        if verdict != "passed":
            texts = (given, expected, result.stdout)
            shown = [repr(text[:EXPLAINED_CHARS]) for text in texts]
            said = result.stderr[-EXPLAINED_CHARS:].strip()
            return {
                "verdict": verdict,
                "explanation": f"test {number} of {len(tests)}: {verdict}. Input {shown[0]}, expected {shown[1]}, "
                f"printed {shown[2]}{said and f', stderr {said!r}'}",
            }
    return {"verdict": "passed", "explanation": ""}


def is_same_text(printed: str, expected: str) -> bool:
    """Whether all lines are equal, without surrounding space, or are numbers: equal integers, near decimals.

    >>> is_same_text("yes  \\n0.5000001 7\\n", "yes\\n0.5 7"), is_same_text("0", "0.00001"), is_same_text("1", "1\\n2")
    (True, False, False)
    """
    lines, wanted = _lines(printed), _lines(expected)
    return len(lines) == len(wanted) and all(map(_is_same_line, lines, wanted))


def is_same_value(printed: str, expected: str) -> bool:
    """Whether the last line printed is the expected value as JSON, floats being near; 1 equals 1.0 and not true.

    >>> is_same_value("debug\\n[1, 2.0]\\n", "[1.0,2]"), is_same_value("[1, 2", "[1, 2]"), is_same_value("1", "true")
    (True, False, False)
    """
    wanted = json.loads(expected)
    try:
        return _is_near(json.loads(printed.rstrip("\n").rpartition("\n")[2]), wanted)
    except (ValueError, RecursionError, OverflowError):  # also a float beside a long integer
        return False


def _is_near(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal, floats within `JSON_TOLERANCE`."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_near, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_near(a[key], b[key]) for key in a)
    if {type(a), type(b)} in ({float}, {float, int}):
        is_nan = math.isnan(a) and math.isnan(b)
        return is_nan or math.isclose(a, b, rel_tol=JSON_TOLERANCE, abs_tol=JSON_TOLERANCE)
    return type(a) is type(b) and bool(a == b)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, wanted_words = line.split(), wanted.split()
    return len(words) == len(wanted_words) and all(map(_is_same_number, words, wanted_words))


def _is_same_number(word: str, wanted: str) -> bool:
    """Whether two texts are numbers and equal; if one is not an integer, within `TOLERANCE`."""
    if not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(wanted):
        return False
    if word.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit():
        return Decimal(word) == Decimal(wanted)
    a, b = float(word), float(wanted)
    return math.isfinite(b) and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
