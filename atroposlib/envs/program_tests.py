"""Judge a program by tests: run it in a sandbox per test, and compare its output here, outside of the sandbox.

Two forms of tests. stdin: the program reads the input and prints the output. Function: the input has one JSON argument
per line, and the output is the result as JSON. Called in a reward worker (`DatasetEnv.in_worker`); arguments are JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal, DecimalException
from typing import Any, Literal, TypeAlias

from atroposlib.envs.sandbox import DockerSandbox, SandboxLimits, run_code

Verdict: TypeAlias = Literal["passed", "wrong", "timeout", "error"]
"""wrong: a test's output differs. error: an exception, a crash, too much memory or output."""

TOLERANCE = Decimal("1e-4")
"""Largest difference of two numbers that count as equal in a stdin problem."""
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


def judge_program(
    program: str,
    tests: Sequence[Sequence[str]],
    function: str | None,
    limits: Mapping[str, Any],
    docker_image: str | None = None,
) -> Verdict:
    """Run a program on every (input, output) of `tests` until one fails.

    `function` is the name of the function to call; None: a stdin problem. `limits` are those of `SandboxLimits`, for
    each test. EnvError if the sandbox does not start.
    """
    sandbox = None if docker_image is None else DockerSandbox(docker_image)
    source = program if function is None else _CALL.format(program=program, function=function)
    for given, expected in tests:
        output_bytes = max(_MIN_OUTPUT_BYTES, 4 * len(expected))
        result = run_code(
            source,
            stdin=given,
            limits=SandboxLimits(output_bytes=output_bytes, **limits),
            sandbox=sandbox,
        )
        if result.reason == "timeout":
            return "timeout"
        if result.reason != "exit" or result.exit_code != 0:
            return "error"
        is_right = is_same_text if function is None else is_same_value
        if not is_right(result.stdout, expected):
            return "wrong"
    return "passed"


def is_same_text(printed: str, expected: str) -> bool:
    """Whether all lines are equal, without surrounding space, or are numbers that differ by at most `TOLERANCE`.

    >>> is_same_text("yes  \\n0.50001 7\\n", "yes\\n0.5 7"), is_same_text("yes 1", "yes 2"), is_same_text("1", "1\\n2")
    (True, False, False)
    """
    lines = zip(_lines(printed), _lines(expected), strict=False)
    return len(_lines(printed)) == len(_lines(expected)) and all(
        itertools.starmap(_is_same_line, lines)
    )


def is_same_value(printed: str, expected: str) -> bool:
    """Whether the last line printed is the expected value as JSON; 1 and 1.0 are equal, 1 and true are not.

    >>> is_same_value("debug\\n[1, 2.0]\\n", "[1.0,2]"), is_same_value("[1, 2", "[1, 2]"), is_same_value("1", "true")
    (True, False, False)
    """
    wanted = _canonical(expected)
    try:
        return _canonical(printed.rstrip("\n").rpartition("\n")[2]) == wanted
    except (ValueError, RecursionError):
        return False


def _canonical(text: str) -> str:
    """Return JSON in the form that all texts of a value share; whole numbers are integers."""

    def number(digits: str) -> int | float:
        value = float(digits)
        return int(value) if value.is_integer() else value

    return json.dumps(json.loads(text, parse_float=number), sort_keys=True)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, wanted_words = line.split(), wanted.split()
    if len(words) != len(wanted_words):
        return False
    try:
        return all(
            abs(Decimal(a) - Decimal(b)) <= TOLERANCE
            for a, b in zip(words, wanted_words, strict=True)
        )
    except DecimalException:  # text, or numbers such as NaN
        return False
