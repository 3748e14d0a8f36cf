"""Judge a change of a repository by its tests, which the change cannot edit.

Hostile code is imported by the tests that judge it, so it could end the process early, patch pytest or print results.
Therefore all tests run a second time, on a fresh machine and with a failing statement at the end of each: a change with
which such a test still passes is `forged`. What remains possible is code that reads the tests to tell the runs apart.
Called in a reward worker; arguments are JSON.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

from atroposlib.envs.sandbox import SandboxLimits, local_sandbox
from atroposlib.envs.shell import Container, Files, Folder, Machine
from atroposlib.errors import ConfigError, EnvError

Verdict: TypeAlias = Literal["passed", "failed", "forged"]

MAX_REPOSITORY_BYTES = 1 << 20
"""Size of a repository without an image."""
_MAX_CHANGED_FILES = 200
"""Files of a container that are read after an episode."""

_PROTECTED = (
    *("test_*.py", "*_test.py", "tests.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini"),
    *("setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc"),
)
"""Names of files that decide which tests run and how."""

_RUNNER = """\
import json, os, sys
import pytest
outcomes = {}
class Plugin:
    def pytest_runtest_logreport(self, report):
        if outcomes.get(report.nodeid, "passed") == "passed":
            outcomes[report.nodeid] = report.outcome
sys.path.insert(0, os.getcwd())
pytest.main(["-q", "--rootdir=.", "-p", "no:cacheprovider"] + sys.argv[2:], plugins=[Plugin()])
print("\\n" + sys.argv[1] + json.dumps(outcomes))
"""
"""Imports pytest before the repository is on the path."""


def is_protected(path: str) -> bool:
    """Whether a change may not touch a file: a test, or a setting of the tests or of Python.

    >>> is_protected("tests/data.json"), is_protected("a/conftest.py"), is_protected("a/b.py")
    (True, True, False)
    """
    parts = PurePosixPath(path).parts
    is_outside = path.startswith("/") or ".." in parts or ".git" in parts
    is_named = any(fnmatch.fnmatch(parts[-1], name) for name in _PROTECTED)
    return is_outside or is_named or "tests" in parts


def judge_change(
    changes: Files, task: Mapping[str, Any], memory_mb: int, timeout_s: float
) -> Verdict:
    """Return whether all tests of a task pass with a change, and fail where they must.

    `task`: ids (path::name), files (with the tests), and for a repository in an image its image, folder, test_patch and
    activate, a command before Python. `changes` has no protected files. EnvError if a machine does not start.
    """
    ids: list[str] = task["ids"]
    for is_canary in (False, True):
        machine = _with_tests(task, memory_mb)
        try:
            tests: dict[str, str] = {}
            for path in sorted({each.partition("::")[0] for each in ids}):
                if (text := machine.read(path)) is None:
                    raise EnvError(f"the tests are not in the repository: {path}")
                tests[path] = text
            broken = {path: failing(text) for path, text in tests.items()}
            shown = {path: pair[0] for path, pair in broken.items()} if is_canary else tests
            machine.write({**changes, **shown})
            outcomes = run_tests(machine, tests, timeout_s)
        finally:
            machine.close()
        if not is_canary and any(outcomes.get(each) != "passed" for each in ids):
            return "failed"
    must_fail = [each for each in ids if function_of(each) in broken[each.partition("::")[0]][1]]
    return "forged" if any(outcomes.get(each) == "passed" for each in must_fail) else "passed"


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


def changes_of(machine: Machine, files: Mapping[str, str], commit: str) -> Files:
    """Return the text files that differ from `files`, or in a container from `commit`; binary ones are left out."""
    if isinstance(machine, Folder):
        found = {path: machine.files.get(path) for path in sorted({*machine.files, *files})}
        changes: Files = {path: text for path, text in found.items() if text != files.get(path)}
    else:
        names = f"git add --all && git diff --cached --no-renames --name-only -z {commit}"
        listed = machine.run(names, timeout_s=60.0)
        paths = listed.printed.split("\0")[:-1] if listed.status == 0 else []
        changes = {path: machine.read(path) for path in paths[:_MAX_CHANGED_FILES]}
    return {path: text for path, text in changes.items() if text is None or _is_text(text)}


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


def failing(source: str) -> tuple[str, list[str]]:
    """Return tests so changed that each fails at its end, and their names; ("...", []) if they cannot be parsed.

    >>> failing("def test_a():\\n    return 1")
    ('def test_a():\\n    try:\\n        return 1\\n    finally:\\n        raise AssertionError', ['test_a'])
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of another version of Python
        return source, []
    names: list[str] = []

    def break_all(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                break_all(node.body, f"{prefix}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                node.name.startswith("test")
            ):
                raises = ast.parse("raise AssertionError").body
                node.body = [ast.Try(body=node.body, handlers=[], orelse=[], finalbody=raises)]
                names.append(f"{prefix}{node.name}")

    break_all(tree.body, "")
    return ast.unparse(ast.fix_missing_locations(tree)), names


def function_of(test_id: str) -> str:
    """Return the name of a test's function.

    >>> function_of("tests/test_a.py::Group::test_b[x::y]")
    'Group::test_b'
    """
    return test_id.partition("::")[2].partition("[")[0]
