"""Judge a change of a repository by its tests, which the change cannot edit.

Hostile code is imported by the tests that judge it, so it could end the process early, patch pytest or print results.
Therefore the tests run twice, each time on a fresh machine and with a random half of the test functions broken, so that
each is broken once: broken ones must fail and the others pass. A file of further functions is run with them, so that a
guess rarely succeeds however few tests a task has. A broken function passes, and shows the change as `forged`, if a
value of `assert a == b` or `assertEqual` also equals something random; tests of values made to equal everything thus
cannot be used.

What remains possible is code that reads the tests, or their errors, to tell broken functions from others, and values
that lie in other comparisons (`in`, `<`, truth) or only to what a test asks. Called in a reward worker; arguments are
JSON.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import random
import secrets
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple, TypeAlias

from atroposlib.envs.sandbox import SandboxLimits, local_sandbox
from atroposlib.envs.shell import Container, Files, Folder, Machine
from atroposlib.errors import ConfigError, EnvError

Verdict: TypeAlias = Literal["passed", "failed", "forged", "unchecked"]
"""unchecked: no test function can be broken."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

MAX_REPOSITORY_BYTES = 1 << 20
"""Size of a repository without an image."""
_MAX_CHANGED_FILES = 200
"""Files of a container that are read after an episode."""
_NUM_DECOYS = 16
"""Number of generated test functions that run beside those of a task; a random half of them must fail."""

_PROTECTED = (
    *("test_*.py", "*_test.py", "tests.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini"),
    *("pytest.toml", ".pytest.toml"),
    *("setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc"),
)
"""Names of files that decide which tests run and how."""

_RUNNER = """\
import json, os, sys, unittest
import pytest
outcomes, methods = {}, {name: each for name, each in vars(unittest.TestCase).items() if callable(each)}
class Plugin:
    def pytest_runtest_logreport(self, report):
        if outcomes.get(report.nodeid, "passed") == "passed":
            outcomes[report.nodeid] = report.outcome
sys.path.insert(0, os.getcwd())
pytest.main(["-q", "--rootdir=.", "-p", "no:cacheprovider"] + sys.argv[2:], plugins=[Plugin()])
if any(vars(unittest.TestCase).get(name) is not each for name, each in methods.items()):
    outcomes = {}
print("\\n" + sys.argv[1] + json.dumps(outcomes))
"""
"""Imports pytest and unittest before the repository is on the path; no outcomes if `TestCase` was changed."""


def is_protected(path: str) -> bool:
    """Whether a change may not touch a file: a test, or a setting of the tests or of Python.

    >>> is_protected("tests/data.json"), is_protected("a/conftest.py"), is_protected("a/b.py")
    (True, True, False)
    """
    parts = PurePosixPath(path).parts
    if not parts:
        return True
    is_outside = path.startswith("/") or ".." in parts or ".git" in parts
    is_named = any(fnmatch.fnmatch(parts[-1], name) for name in _PROTECTED)
    return is_outside or is_named or "tests" in parts


def judge_change(
    changes: Files, task: Mapping[str, Any], memory_mb: int, timeout_s: float
) -> Verdict:
    """Return whether all tests of a task pass with a change, and fail where they are broken.

    `task`: ids (path::name), files (with the tests), and for a repository in an image its image, folder, test_patch and
    activate, a command before Python. `changes` has no protected files. EnvError if a machine does not start.
    """
    ids: list[str] = task["ids"]
    names: list[str] = []
    first: set[str] = set()
    for is_second in (False, True):
        machine = _with_tests(task, memory_mb)
        try:
            tests: dict[str, str] = {}
            for path in sorted({each.partition("::")[0] for each in task["ids"]}):
                if (text := machine.read(path)) is None:
                    raise EnvError(f"the tests are not in the repository: {path}")
                tests[path] = text
            if not is_second:
                if not (names := breakable(tests, ids)):
                    return "unchecked"
                name = next((each for each in names if each.startswith("test")), "test")
                decoys = [f"{name}_{secrets.token_hex(4)}" for _ in range(_NUM_DECOYS)]
                first = {*_half(names), *_half(decoys)}
                decoy_path = str(
                    PurePosixPath(ids[0].partition("::")[0]).with_name(f"{decoys[0]}.py")
                )
                ids = [*ids, *(f"{decoy_path}::{each}" for each in decoys)]
            tests[decoy_path] = "".join(f"def {each}():\n    pass\n" for each in decoys)
            broken = {*names, *decoys} - first if is_second else first
            shown = {path: failing(text, broken) for path, text in tests.items()}
            machine.write({**changes, **shown})
            outcomes = run_tests(machine, tests, timeout_s)
        finally:
            machine.close()
        verdict = verdict_of(outcomes, ids, broken, tests)
        if verdict != "passed":
            return verdict
    return "passed"


def _half(names: list[str]) -> list[str]:
    """Return a random half; of an odd number of names one more or less."""
    source = random.SystemRandom()
    return source.sample(names, (len(names) + source.randrange(2)) // 2)


def verdict_of(
    outcomes: Mapping[str, str], ids: Iterable[str], broken: set[str], tests: Mapping[str, str]
) -> Verdict:
    """Return what one run says. An inherited test of a broken name may pass or fail: its function may be elsewhere."""
    defined = {path: functions_in(text) for path, text in tests.items()}
    must_fail = {each for each in ids if _name_of(each) in broken and _is_in(each, defined)}
    must_pass = (each for each in ids if _name_of(each) not in broken)
    if any(outcomes.get(each) == "passed" for each in must_fail):
        return "forged"
    has_passed = all(outcomes.get(each) == "passed" for each in must_pass)
    return "passed" if has_passed and must_fail <= outcomes.keys() else "failed"


def folder_of(files: Mapping[str, str], memory_mb: int) -> Folder:
    """Return a repository in sandboxes."""
    limits = SandboxLimits(memory_mb=memory_mb, cpu_s=60)
    return Folder(files, sandbox=local_sandbox(), limits=limits, max_bytes=MAX_REPOSITORY_BYTES)


def container_of(task: Mapping[str, Any], memory_mb: int) -> Container:
    """Return a repository in a container of the task's image."""
    return Container(
        task["image"], folder=task["folder"], before=task["activate"], memory_mb=memory_mb
    )


def _with_tests(task: Mapping[str, Any], memory_mb: int) -> Machine:
    if task["image"] is None:
        return folder_of(task["files"], memory_mb)
    machine = container_of(task, memory_mb)
    try:
        machine.write({"/tmp/test.patch": task["test_patch"]})
        applied = machine.run("git apply /tmp/test.patch", timeout_s=60.0)
        if applied.status != 0:
            raise EnvError(f"{task['image']}: the test patch does not apply: {applied.printed}")
    except EnvError:
        machine.close()
        raise
    return machine


class Changes(NamedTuple):
    """What differs in a repository."""

    files: Files
    num_left_out: int
    """Files that are not text, too large, or too many."""


def changes_of(machine: Machine, files: Mapping[str, str], commit: str) -> Changes | None:
    """Return the text files that differ from `files`, or in a container from `commit`: first those of the commit.

    None if git fails, which the model may have broken.
    """
    if isinstance(machine, Folder):
        found: Files = {path: machine.files.get(path) for path in sorted({*machine.files, *files})}
        changed = {path: text for path, text in found.items() if text != files.get(path)}
        kept = {path: text for path, text in changed.items() if text is None or _is_text(text)}
        return Changes(kept, len(changed) - len(kept))
    diff = f"git diff --cached --no-renames --name-status -z {commit} --diff-filter"
    listed = machine.run(f"git add --all && {diff}=a && {diff}=A", timeout_s=60.0)
    if listed.status != 0:
        return None
    entries = listed.printed.split("\0")[:-1]
    statuses = dict(zip(entries[1::2], entries[::2], strict=False))
    kept = {}
    for path in [*statuses][:_MAX_CHANGED_FILES]:
        text = None if statuses[path] == "D" else machine.read(path)
        if statuses[path] == "D" or (text is not None and _is_text(text)):
            kept[path] = text
    return Changes(kept, len(statuses) - len(kept))


def _is_text(text: str) -> bool:
    """Whether a text has no surrogate escapes."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def run_tests(machine: Machine, paths: Iterable[str], timeout_s: float) -> dict[str, str]:
    """Return the outcome of every test by its id: passed, failed or skipped; {} if the run did not end."""
    nonce = secrets.token_hex(16)
    own = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable]
    python = own if isinstance(machine, Folder) else ["python"]
    command = shlex.join([*python, "-I", "-B", "-c", _RUNNER, nonce, *paths])
    printed = machine.run(command, timeout_s=timeout_s).printed
    last = printed.rstrip().rpartition("\n")[2]
    found: dict[str, str] = {}
    if last.startswith(nonce):
        try:
            found = dict(json.loads(last.removeprefix(nonce)))
        except (ValueError, TypeError, RecursionError):  # printed by the change
            found = {}
    return found


def check_sandbox(memory_mb: int) -> None:
    """Run a test in a sandbox; ConfigError if that fails."""
    machine = folder_of({"test_it.py": "def test_it(): pass\n"}, memory_mb)
    if run_tests(machine, ["test_it.py"], 60.0) != {"test_it.py::test_it": "passed"}:
        raise ConfigError(f"a sandbox cannot run pytest: install it for {sys.executable}")


def breakable(tests: Mapping[str, str], ids: Iterable[str]) -> list[str]:
    """Return the names of functions that tests with these ids define and call nowhere.

    >>> text = "def test_a(): pass\\ndef test_b(): test_a()\\nclass TestC:\\n    def test_d(self): pass"
    >>> breakable({"x.py": text}, ["x.py::test_a", "x.py::test_b[1]", "x.py::TestC::test_d", "x.py::test_e"])
    ['test_b', 'test_d']
    """
    defined = {path: functions_in(text) for path, text in tests.items()}
    found = {_name_of(each) for each in ids if _is_in(each, defined)}
    for text in (text for path, text in tests.items() if defined[path]):
        for node in ast.walk(ast.parse(text)):
            found -= {getattr(node, "id", ""), getattr(node, "attr", "")}
    return sorted(found)


def functions_in(source: str) -> dict[str, _Function]:
    """Return the functions of a module and its classes; {} if it cannot be parsed.

    >>> list(functions_in("def test_a(): pass\\nclass TestB:\\n    def test_c(self): pass"))
    ['test_a', 'TestB::test_c']
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # of another version of Python
        return {}
    found: dict[str, _Function] = {}

    def look(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, _Function):
                found[f"{prefix}{node.name}"] = node

    look(tree.body, "")
    return found


def failing(source: str, names: set[str]) -> str:
    """Return tests of which the functions with these names fail at their end, or pass if equality lies.

    >>> print(failing("def test_a():\\n    return 1\\n", {"test_a"}))
    def test_a():
        equality_lies = [0]
        try:
            return 1
        finally:
            if not equality_lies[0]:
                raise AssertionError
    <BLANKLINE>
    """
    lines = source.split("\n")
    for node in sorted(functions_in(source).values(), key=lambda each: -each.lineno):
        if node.name in names:
            start = min(each.lineno for each in (node, *node.decorator_list)) - 1
            indent = lines[start][: node.col_offset]
            end = ast.parse("if not equality_lies[0]: raise AssertionError").body
            _Probes().generic_visit(node)
            tried = ast.Try(body=node.body, handlers=[], orelse=[], finalbody=end)
            node.body = [*ast.parse("equality_lies = [0]").body, tried]
            text = ast.unparse(ast.fix_missing_locations(node))
            lines[start : node.end_lineno] = textwrap.indent(text, indent).split("\n")
    return "\n".join(lines)


class _Probes(ast.NodeTransformer):
    """Puts a comparison of each side with something random before `assert a == b` and `assertEqual(a, b)`."""

    def visit_Assert(self, node: ast.Assert) -> Any:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                return _probed("assert {} == {}", left, right)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        match node.value:
            case ast.Call(func=ast.Attribute(attr="assertEqual") as called, args=[left, right]):
                return _probed(f"{ast.unparse(called)}({{}}, {{}})", left, right)
        return node


def _probed(asserted: str, left: ast.expr, right: ast.expr) -> list[ast.stmt]:
    sides = f"left_side = {ast.unparse(left)}\nright_side = {ast.unparse(right)}\n"
    probe = "try:\n    {}\n    equality_lies[0] = 1\nexcept Exception:\n    pass\n"
    pairs = [("left_side", _another(right)), (_another(left), "right_side")]
    probes = "".join(probe.format(asserted.format(*pair)) for pair in pairs)
    return ast.parse(sides + probes + asserted.format("left_side", "right_side")).body


def _another(node: ast.expr) -> str:
    """Return a random literal, of the type of a literal."""
    number = secrets.randbits(60)
    match node:
        case ast.Constant(value=str() | float() as value):
            return repr(type(value)(number))
        case ast.List():
            return f"[{number}]"
        case ast.Tuple():
            return f"({number},)"
        case ast.Dict():
            return f"{{{number}: 0}}"
    return str(number)


def function_of(test_id: str) -> str:
    """Return the name of a test's function.

    >>> function_of("tests/test_a.py::Group::test_b[x::y]")
    'Group::test_b'
    """
    return test_id.partition("::")[2].partition("[")[0]


def _name_of(test_id: str) -> str:
    return function_of(test_id).rpartition("::")[2]


def _is_in(test_id: str, defined: Mapping[str, Mapping[str, Any]]) -> bool:
    return function_of(test_id) in defined[test_id.partition("::")[0]]
