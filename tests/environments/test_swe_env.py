"""Changes of a repository: which pass its tests, and what a change cannot do to its judge."""

import json
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from atroposlib.envs import repository_tests
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.patches import edits_for, patched
from atroposlib.envs.repository_tests import (
    changes_of,
    container_of,
    failing,
    is_protected,
    judge_change,
    verdict_of,
)
from atroposlib.envs.rows import read_jsonl, sample_path
from atroposlib.envs.shell import Ended
from atroposlib.errors import ConfigError, EnvError
from tests.builders.fake_docker import fake_docker
from tests.environments.helpers_environments import load
from tests.environments.test_terminal_env import call, has_namespaces

swe = load("swe_env")
pytestmark = has_namespaces

ROW = read_jsonl(sample_path(swe.SWEEnv, "swe"))[0]
PATH = "shop/cost.py"
TESTS = "tests/test_cost.py"
RIGHT = patched(ROW["files"], ROW["patch"])[PATH]
WRONG = ROW["files"][PATH]

PRINT_A_SUMMARY = "import os\nprint('2 passed in 0.01s', flush=True)\nos._exit(0)\n"
REPORT_IDS = f"""
import json
ids = ["{TESTS}::test_one", "{TESTS}::test_every_one_is_counted"]
real = json.dumps
json.dumps = lambda value, **more: real(dict.fromkeys(ids, "passed"), **more)
"""
PATCH_PYTEST = """
from _pytest.reports import TestReport
real = TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    call.excinfo = None
    return real(cls, item, call)
TestReport.from_item_and_call = classmethod(passed)
"""
COIN = f"""
import random
if random.random() < 0.5:
    exec({PATCH_PYTEST!r})
"""
EQUAL = "class Equal:\n    __eq__ = lambda *_: True\ncost = total = lambda _: Equal()\n"
PATCH_UNITTEST = "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
LEAVE_A_PROCESS = f"""
import os, time
for path in ("{TESTS}", "conftest.py", "/tmp/conftest.py"):
    open(path, "w").write("def test_one(): pass\\ndef test_every_one_is_counted(): pass\\n")
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""
SHADOWS = {"pytest.py": "raise SystemExit(0)\n", "json.py": "x = 1\n", "_pytest/__init__.py": ""}


def task(**more: Any) -> dict[str, Any]:
    ids = [*ROW["FAIL_TO_PASS"], *ROW["PASS_TO_PASS"]]
    files = patched(ROW["files"], ROW["test_patch"])
    return {"ids": ids, "files": files, "image": None, **more}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({PATH: RIGHT, "shop/more.py": "x = 1\n"}, "passed"),
        ({PATH: PRINT_A_SUMMARY + WRONG}, "failed"),
        ({PATH: REPORT_IDS + WRONG}, "forged"),
        ({PATH: PATCH_PYTEST + WRONG}, "forged"),
        ({PATH: COIN + WRONG}, "failed or forged"),
        ({PATH: EQUAL}, "forged"),
        ({PATH: PATCH_UNITTEST + RIGHT}, "failed"),
        ({PATH: LEAVE_A_PROCESS + WRONG, **SHADOWS}, "failed"),
    ],
    ids=["right", "summary", "ids", "pytest", "coin", "equal", "unittest", "files"],
)
def test_only_a_change_with_which_the_tests_pass_and_can_fail_is_paid(
    changes: dict[str, str], verdict: str
) -> None:
    assert judge_change(changes, task(), 2048, 60.0) in verdict.split(" or ")


def test_a_change_whose_tests_cannot_be_broken_is_not_paid() -> None:
    assert judge_change({PATH: RIGHT}, task(ids=[f"{TESTS}::test_none"]), 2048, 60.0) == "unchecked"


UNIT = """# the first line
class Test:
    # a comment
    @staticmethod
    def test_one(): {}
    def test_more(self): pass
"""


@pytest.mark.parametrize("asserted", ["assert value == 3", "unit.assertEqual(value, 3)"])
@pytest.mark.parametrize(("value", "lies"), [(3, False), (4, False), (mock.ANY, True)])
def test_a_broken_test_passes_only_with_a_value_that_equals_everything(
    asserted: str, value: object, lies: bool
) -> None:
    text = failing(UNIT.format(asserted), {"test_one"})
    assert "# a comment" in text
    known: dict[str, Any] = {"value": value, "unit": unittest.TestCase()}
    exec(text, known)
    known["Test"]().test_more()
    if lies:
        known["Test"].test_one()
    else:
        with pytest.raises(AssertionError):
            known["Test"].test_one()


def test_one_run_says_what_is_forged_and_what_has_failed() -> None:
    tests = {"t.py": "def test_a(): pass\ndef test_b(): pass\nclass C(B):\n    pass\n"}
    ids = ["t.py::test_a", "t.py::test_b[x]", "t.py::C::test_a"]
    for a, b, inherited, expected in [
        ("failed", "passed", "failed", "passed"),
        ("failed", "passed", "passed", "passed"),
        ("passed", "passed", "passed", "forged"),
        ("failed", "failed", "failed", "failed"),
        (None, "passed", "passed", "failed"),
    ]:
        found = dict(zip(ids, (a, b, inherited), strict=True))
        outcomes = {each: outcome for each, outcome in found.items() if outcome is not None}
        assert verdict_of(outcomes, ids, {"test_a"}, tests) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("shop/cost.py", False),
        ("shop/contest.py", False),
        ("tests/test_cost.py", True),
        ("tests/data/x.txt", True),
        ("shop/test_more.py", True),
        ("conftest.py", True),
        ("shop/conftest.py", True),
        ("pytest.ini", True),
        ("pyproject.toml", True),
        ("sitecustomize.py", True),
        ("shop/__pycache__/cost.cpython-312.pyc", True),
        ("evil.pth", True),
        (".git/hooks/post-checkout", True),
        ("../x.py", True),
        ("/tmp/x.py", True),
        (".", True),
        ("./.pytest.toml", True),
    ],
)
def test_a_change_cannot_touch_what_decides_which_tests_run(path: str, expected: bool) -> None:
    assert is_protected(path) == expected


@pytest.mark.parametrize(
    ("mode", "answers", "score"),
    [
        ("patch", [edits_for({PATH: WRONG.split("\n")}, {PATH: RIGHT.split("\n")})], 1.0),
        ("patch", [edits_for({}, {"conftest.py": ["x = 1"], ".": ["x"]})], 0.0),
        ("patch", ["<think>" + edits_for({PATH: WRONG.split("\n")}, {PATH: RIGHT.split("\n")})], 0.0),
        ("agent", [call("sed -i 's/(count - 1)/count/' shop/cost.py; python -m pytest -q"), "Done."], 1.0),
        ("agent", [call("echo 'def test_one(): 1' > tests/test_cost.py; touch conftest.py"), "Done."], 0.0),
    ],
)  # fmt: skip
async def test_the_tests_judge_edits_and_commands(
    started: Any, mode: str, answers: list[str], score: float
) -> None:
    env = await started(swe.SWEEnv, lambda r: answers[r.call], mode=mode, group_size=1)
    group, _ = await env.collect_trajectories(env.parse_row(ROW))
    assert group["scores"] == [score]
    shown = json.dumps(group["messages"])
    assert "test_every_one_is_counted" not in shown
    assert ("<tools>" in shown) == (mode == "agent")
    assert ("1 passed" in shown) == ("pytest" in answers[0])
    assert env.counts["no_change"] == (score == 0.0)


async def test_a_file_of_the_tests_is_protected_by_each_of_its_paths(made: Any) -> None:
    env = made(swe.SWEEnv, mode="patch")
    issue = replace(
        env.parse_row(ROW), test_patch=ROW["test_patch"].replace(TESTS, "shop/check.py")
    )
    messages = [{"role": "assistant", "content": edits_for({}, {"./shop/check.py": ["x = 1"]})}]
    assert await env.final_score(Episode(row=issue, messages=messages)) == 0.0
    assert env.counts["no_change"] == 1


class FakeContainer:
    """Prints one thing for each command."""

    def __init__(self, printed: str, status: int = 0) -> None:
        self._ended = Ended(status, printed)

    def run(self, command: str, *, timeout_s: float) -> Ended:
        return self._ended

    def read(self, path: str) -> str | None:
        return None if path.startswith("large") else "\udcff" if path == "binary" else path

    def close(self) -> None:
        pass


def test_only_a_deleted_file_is_a_deletion_and_what_is_left_out_is_counted() -> None:
    num_new = 2 * repository_tests._MAX_CHANGED_FILES
    pairs = [("M", "large"), ("D", "gone"), ("M", "b"), ("A", "binary")]
    pairs += [("A", f"new{each}") for each in range(num_new)]
    machine: Any = FakeContainer("".join(f"{status}\0{path}\0" for status, path in pairs))
    files, num_left_out = changes_of(machine, {}, "commit") or ({}, 0)
    assert [*files.items()][:3] == [("gone", None), ("b", "b"), ("new0", "new0")]
    assert len(files) == repository_tests._MAX_CHANGED_FILES - 2
    assert num_left_out == num_new + 4 - len(files)
    broken: Any = FakeContainer("fatal: not a git repository", 128)
    assert changes_of(broken, {}, "commit") is None


async def test_an_image_without_a_commit_is_the_environments_fault(made: Any) -> None:
    env = made(swe.SWEEnv)
    row = {name: ROW[name] for name in ROW if name != "files"}
    env.machine = lambda row: FakeContainer("fatal: not a git repository", 128)
    with pytest.raises(EnvError, match="rev-parse: fatal"):
        await env.reset(env.parse_row(row))


@pytest.mark.drill
def test_a_repository_in_an_image_is_judged_in_new_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fake_docker(tmp_path) / "testbed"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for path, text in ROW["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        subprocess.run([*git, *command], check=True)
    activate = f"export PATH={Path(sys.executable).parent}:$PATH"
    asked = task(image="base", folder="/testbed", activate=activate, test_patch=ROW["test_patch"])
    machine = container_of(asked, 2048)
    try:
        commit = machine.run("git rev-parse HEAD", timeout_s=60).printed.strip()
        for each in ("sed -i 's/(count - 1)/count/' shop/cost.py", "rm README.md", "git add ."):
            assert machine.run(each, timeout_s=60).status == 0
        assert machine.run("sleep 60", timeout_s=0.2).status is None
        changes = changes_of(machine, {}, commit)
    finally:
        machine.close()
    assert changes == ({PATH: RIGHT, "README.md": None}, 0)
    assert judge_change(changes.files, asked, 2048, 60.0) == "passed"
    log = (tmp_path / "log").read_text()
    assert log.count("run --detach --rm") == log.count("rm --force") == 3
    assert "--network none --security-opt no-new-privileges" in log


async def test_a_sandbox_without_pytest_is_found_before_the_first_change(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository_tests, "_RUNNER", "import no_such_module")
    with pytest.raises(ConfigError, match="cannot run pytest"):
        await started(swe.SWEEnv)


def test_rows_of_the_data_sets_name_their_images(made: Any) -> None:
    env = made(swe.SWEEnv)
    row = {name: ROW[name] for name in ("problem_statement", "patch", "test_patch")}
    row |= {"FAIL_TO_PASS": '["a/test_b.py::test_c"]', "PASS_TO_PASS": "[]"}
    row |= {"instance_id": "Owner__repo-1"}
    assert env.parse_row(row).image == "xingyaoww/sweb.eval.x86_64.owner_s_repo-1:latest"
    assert env.parse_row({**row, "docker_image": "an/image"}).image == "an/image"
    assert env.parse_row({**row, "FAIL_TO_PASS": ["test_c (a.tests.B)"]}) is None
    assert env.parse_row({**ROW, "patch": ROW["test_patch"].replace("tests/", "x/")}) is None
