"""A newcomer's day: five environments of five kinds, every verb on them, other styles, and planted bugs.

The table of the bugs stands in `atroposlib/envs/guides/check.md`.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import Report, check_env
from atroposlib.checker.guesses import verdict
from atroposlib.cli.environments import main as environments
from atroposlib.cli.sft import main as sft
from atroposlib.cli.view_run import StoredPage
from atroposlib.envs.base import BaseEnv
from atroposlib.runtime.env_command import run_environment
from tests.builders.rows import rows_in
from tests.checker.newcomers_environments import BUGS, SOUND, STYLES, Variant
from tests.processes import ROOT

_numbers = itertools.count()


def loaded(source: str, folder: Path) -> type[BaseEnv]:
    """Write an environment to a file, and return its class."""
    path = folder / f"newcomers_{next(_numbers)}.py"
    name = re.findall(r"^class (\w+)", source, re.MULTILINE)[-1]
    path.write_text(f'{source}\n\nif __name__ == "__main__":\n    {name}.cli()\n')
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    env_cls: type[BaseEnv] = getattr(module, name)
    return env_cls


def check(source: str, folder: Path) -> Report:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("atroposlib.checker.rows.WALK_S", 1.0)  # for the time that it takes
        return check_env(loaded(source, folder), num_items=2, budget_s=20.0)


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_is_caught_as_the_table_says(bug: Variant, tmp_path: Path) -> None:
    report = check(bug.text(), tmp_path)
    rule = bug.verdict.rstrip("+?")
    if bug.verdict == rule != "not":
        assert rule in report.failed, report.to_text()
    else:
        assert report.failed == [], report.to_text()
    if bug.verdict.endswith("+"):
        assert report.finding(rule).notes
    if bug.verdict.endswith("?"):
        assert rule in report.not_checked


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "source",
    [
        *(pytest.param(source, id=kind) for kind, source in SOUND.items()),
        *(pytest.param(style.text(), id=style.what) for style in STYLES),
    ],
)
def test_a_sound_environment_fails_no_rule(source: str, tmp_path: Path) -> None:
    report = check(source, tmp_path)
    assert report.failed == [], report.to_text()


SAID = {"+": "a note of `{}`", "?": "`{}` is not checked: a failure with `--strict`"}


def table() -> str:
    """Return the table of the planted bugs, as it stands in the README."""
    rows = []
    for bug in BUGS:
        said = SAID.get(bug.verdict[-1], "`{}` fails").format(bug.verdict.rstrip("+?"))
        rows.append(f"| {bug.what} | {'nothing' if bug.verdict == 'not' else said} |\n")
    return "| planted bug | what `check` says |\n|---|---|\n" + "".join(rows)


def test_the_table_of_planted_bugs_stands_in_the_readme() -> None:
    assert table() in (ROOT / "atroposlib/envs/guides/check.md").read_text()
    num_caught = sum(bug.verdict != "not" and not bug.verdict.endswith("?") for bug in BUGS)
    assert num_caught >= len(BUGS) * 15 / 16


def answer(request: Any) -> str:
    """Answer every second request right."""
    if (said := verdict(request.prompt)) is not None:
        return said
    question = request.prompt.rpartition("<user>")[2]
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    right = {"What is": 37, "Double": 2, "What do": {"a": 3, "p": 5, "f": 7}}
    for start, factor in right.items():
        if start in question and (request.call + request.choice) % 2:
            fruit = re.findall(r"of (\w)", question)
            return f"{numbers[0] * (factor[fruit[0]] if isinstance(factor, dict) else factor)}"
    return f"{request.call + request.choice}"


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SOUND)
def test_every_verb_runs_on_an_environment_of_each_kind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atroposlib.inference.manager.answer_from_hash", answer)
    env_cls = loaded(SOUND[kind], tmp_path)
    path = tmp_path / "groups.jsonl"
    flags = ["--testing", "--env.group_size=4", "--env.max_token_length=64"]
    saved = ["--env.total_steps=3", f"--env.data_path_to_save_groups={path}"]
    assert run_environment(env_cls, ["process", *flags, *saved]) == 0
    assert len(rows_in(path)) == 3
    evals = f"--env.data_dir_to_save_evals={tmp_path / 'evals'}"
    assert run_environment(env_cls, ["evaluate", *flags, evals]) == 0
    assert (tmp_path / "evals" / "metrics.json").is_file()
    page = StoredPage([path], tmp_path / "page.html", None).html()
    assert len(page) > 10_000
    rows = tmp_path / "rows.jsonl"
    chosen = ["--from_file", str(path), "--format", "chat", "--min_score", "-9"]
    assert sft(["--filepath", str(rows), *chosen]) == 0
    assert rows_in(rows)
    (source,) = tmp_path.glob("newcomers_*.py")
    assert environments(["rescore", str(path), "--env", str(source), "--testing"]) == 0
