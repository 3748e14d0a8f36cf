"""Judge a program by tests: run it in a sandbox per test, and compare its output outside of that sandbox.

Three forms of tests. stdin: the program reads the input and prints the output. Function: the input has one JSON
argument per line, and the output is the result as JSON. Python: code with assertions (`judge_function`). Called in a
reward worker (`DatasetEnv.in_worker`); arguments are JSON.
"""

from __future__ import annotations

import base64
import json
import math
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias, TypedDict

from atroposlib.envs.sandbox import DockerSandbox, SandboxLimits, SandboxResult, run_code

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
    """What a judge found."""

    verdict: Verdict
    explanation: str
    """The first test that failed, or what was printed to stderr; "" if none did."""


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


MAX_VALUES_BYTES = 1 << 25
"""Limit of the arguments or results of all calls together."""
MAX_UNPACKED_BYTES = 1 << 29
"""Limit of the tests of one problem, unpacked."""

_PLAIN_VALUES = """\
import builtins, copy, json, random, sys, types
sys.set_int_max_str_digits(0)
def plain(value):
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return [kind.__name__, kind(value)]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            found = [plain(each) for each in value]
            return [kind.__name__, found if kind in (list, tuple) else sorted(found, key=json.dumps)]
    if isinstance(value, dict):
        return ["dict", [[plain(key), plain(each)] for key, each in value.items()]]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", list(value)]
    if value is None:
        return ["None", None]
    raise TypeError(f"{type(value).__name__} is not plain data")
def restored(found):
    kind, value = found
    if kind in ("list", "tuple", "set", "frozenset"):
        made = [restored(each) for each in value]
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](made)
    if kind == "dict":
        return {restored(key): restored(each) for key, each in value}
    return complex(*value) if kind == "complex" else bytes(value) if kind == "bytes" else value
"""
"""To and from JSON: builtin values without their subclasses, so that no method of a program's own class is called."""

_RUN_TESTS = """\
given = json.loads(sys.stdin.read())
calls = []
def stand_in(*args, **kwargs):
    call = plain([list(args), kwargs])
    calls.append(call)
    if given is None:
        return real(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    number = len(calls) - 1
    assert json.dumps(call) == json.dumps(given[0][number]), "other arguments than the reference's"
    ended, value = given[1][number]
    if ended == "returned":
        return restored(value)
    kind = vars(builtins).get(value)
    raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)()
class Near(types.ModuleType):
    ndarray = ()
    def allclose(self, a, b, rtol=1e-5, atol=1e-8):
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(self.allclose(x, y, rtol, atol) for x, y in zip(a, b))
        return a == b or abs(a - b) <= atol + rtol * abs(b)
try:
    import numpy
except ImportError:
    sys.modules["numpy"] = Near("numpy")
own = {{"__name__": "tests"}}
exec(compile({reference!r}, "reference.py", "exec"), own)
real = own[{function!r}]
names = {{**own, {function!r}: stand_in, "candidate": stand_in}}  # the reference may call itself
random.seed(0)
exec(compile({tests!r}, "tests.py", "exec"), names)
assert calls, "the tests do not call the function"
print("\\n" + json.dumps(calls))
"""
"""Runs tests on the reference to record its calls (`null`), or on the recorded results of another program."""

_CALL_ALL = """\
calls = json.loads(sys.stdin.read())
solution = sys.modules["solution"] = types.ModuleType("solution")
exec(compile({program!r}, "solution.py", "exec"), solution.__dict__)
found = []
for call in calls:
    args, kwargs = restored(call)
    try:
        found.append(["returned", plain(getattr(solution, {function!r})(*args, **kwargs))])
    except Exception as error:
        found.append(["raised", type(error).__name__])
print("\\n" + json.dumps(found))
"""


def judge_function(
    program: str,
    function: str,
    reference: str,
    tests: str,
    limits: Mapping[str, Any],
    docker_image: str | None = None,
) -> Judgement:
    """Judge a function by tests that are Python code, without running them in the program's process.

    The tests run on `reference`, a program with the right function, to record its calls. The program gets their
    arguments and returns plain data: no exit, patched builtin or `__eq__` of it reaches an assertion. Then the tests
    run again on those results. They know the names of the reference, and may call the function `candidate`. Raises
    ValueError if the reference does not pass.
    """
    sandbox = None if docker_image is None else DockerSandbox(docker_image)

    def run(source: str, stdin: str) -> SandboxResult:
        all_limits = SandboxLimits(output_bytes=MAX_VALUES_BYTES, **limits)
        return run_code(_PLAIN_VALUES + source, stdin=stdin, limits=all_limits, sandbox=sandbox)

    testing = _RUN_TESTS.format(reference=reference, function=function, tests=tests)
    recorded = run(testing, "null")
    if recorded.reason != "exit" or recorded.exit_code != 0:
        raise ValueError(f"the reference fails its tests: {recorded.stderr[-500:]}")
    calls = _last_line(recorded.stdout)
    answered = run(_CALL_ALL.format(program=program, function=function), calls)
    if answered.reason != "exit" or answered.exit_code != 0:
        verdict: Verdict = "timeout" if answered.reason == "timeout" else "error"
        return {"verdict": verdict, "explanation": answered.stderr[-EXPLAINED_CHARS:].strip()}
    # Whatever the program printed can only stand in place of its results: the calls are before it.
    judged = run(testing, f"[{calls}, {_last_line(answered.stdout)}]")
    has_ended = judged.reason == "exit" and judged.exit_code == 0
    if has_ended and _last_line(judged.stdout) == calls:
        return {"verdict": "passed", "explanation": ""}
    return {"verdict": "wrong", "explanation": judged.stderr[-EXPLAINED_CHARS:].strip()}


def unpack_tests(packed: str) -> list[list[str]]:
    """Return the input and output of LiveCodeBench's tests: JSON, or base64 of zlib of a pickled text of JSON.

    The pickle is read as data: the text in it is found without running it. ValueError beyond `MAX_UNPACKED_BYTES`.

    >>> unpack_tests('[{"input": "1", "output": "2", "testtype": "stdin"}]')
    [['1', '2']]
    """
    if not packed.startswith("["):
        unpacker = zlib.decompressobj()
        pickled = unpacker.decompress(base64.b64decode(packed), MAX_UNPACKED_BYTES)
        if not unpacker.eof:
            raise ValueError(f"the tests are cut off or have more than {MAX_UNPACKED_BYTES} bytes")
        [packed] = [
            str(arg) for code, arg, _ in pickletools.genops(pickled) if "UNICODE" in code.name
        ]
    return [[test["input"], test["output"]] for test in json.loads(packed)]


def judge_packed(
    program: str,
    packed: Sequence[str],
    function: str | None,
    limits: Mapping[str, Any],
    docker_image: str | None = None,
) -> Judgement:
    """Judge a program by `judge_program` on the tests of LiveCodeBench, which take too much space unpacked."""
    tests = [test for each in packed for test in unpack_tests(each)]
    return judge_program(program, tests, function, limits, docker_image)


def _last_line(printed: str) -> str:
    return printed.rstrip("\n").rpartition("\n")[2]


def is_same_text(printed: str, expected: str, *, abs_tol: float = TOLERANCE) -> bool:
    """Whether all lines are equal, without surrounding space, or are numbers: equal integers, near decimals.

    `abs_tol` 0: decimals only differ by `TOLERANCE` relative to their size.

    >>> is_same_text("yes  \\n0.5000001 7\\n", "yes\\n0.5 7"), is_same_text("0", "0.00001"), is_same_text("1", "1\\n2")
    (True, False, False)
    """
    lines, wanted = _lines(printed), _lines(expected)
    pairs = zip(lines, wanted, strict=False)
    return len(lines) == len(wanted) and all(_is_same_line(*pair, abs_tol) for pair in pairs)


def is_same_value(printed: str, expected: str) -> bool:
    """Whether the last line printed is the expected value as JSON, floats being near; 1 equals 1.0 and not true.

    >>> is_same_value("debug\\n[1, 2.0]\\n", "[1.0,2]"), is_same_value("[1, 2", "[1, 2]"), is_same_value("1", "true")
    (True, False, False)
    """
    wanted = json.loads(expected)
    try:
        return _is_near(json.loads(_last_line(printed)), wanted)
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


def _is_same_line(line: str, wanted: str, abs_tol: float) -> bool:
    if line == wanted:
        return True
    words, wanted_words = line.split(), wanted.split()
    pairs = zip(words, wanted_words, strict=False)
    return len(words) == len(wanted_words) and all(_is_same_number(*p, abs_tol) for p in pairs)


def _is_same_number(word: str, wanted: str, abs_tol: float) -> bool:
    """Whether two texts are numbers and equal; if one is not an integer, within `TOLERANCE` or `abs_tol`."""
    if not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(wanted):
        return False
    if word.lstrip("+-").isdigit() and wanted.lstrip("+-").isdigit():
        return Decimal(word) == Decimal(wanted)
    a, b = float(word), float(wanted)
    return math.isfinite(b) and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=abs_tol)
