"""`atropos-env pin`: the test that it writes fails with the bug and passes after the cure."""

import runpy
import subprocess
import sys

import msgspec
import pytest

from atroposlib.cli.environments import main
from atroposlib.cli.pin import judged_scores
from atroposlib.errors import ConfigError
from tests.builders.programs import refusal
from tests.cli.helpers_rollouts import RIGHT, SumsFolder

BUG = """float(answer.startswith(str(row["b"])))"""
"""Compares with a summand instead of the sum."""


def first_id(sums: SumsFolder) -> str:
    return str(msgspec.json.decode(sums.rollouts.read_bytes().splitlines()[0])["group_id"])


def pytest_of(sums: SumsFolder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(sums.folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.drill
def test_the_test_is_red_with_the_bug_and_green_after_the_cure(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    name = first_id(sums)[:8]
    test = sums.folder / f"test_pin_{name}.py"
    argv = ["pin", name, "--env", "sums.py", "--score", "0=1", "1=0", "--env.temperature", "0.5"]
    assert main(argv) == 0
    assert capsys.readouterr().out == (
        f"wrote {test.name}; it fails today:\n"
        "  sequence 0: today 0, should be 1\n  sequence 1: today 1, should be 0\n"
    )
    assert "flags=['--env.temperature', '0.5']" in test.read_text()
    sums.rollouts.unlink()
    red = pytest_of(sums)
    assert red.returncode == 1
    assert f"FAILED test_pin_{name}.py" in red.stdout
    sums.write(score=RIGHT)
    green = pytest_of(sums)
    assert "1 passed" in green.stdout, green.stdout


def test_code_that_raises_today_is_pinned(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(score="1 / 0")
    assert main(["pin", first_id(sums), "--env", "sums.py"]) == 0
    said = capsys.readouterr().out
    assert "it fails today:\n  today's code raised ZeroDivisionError: division by zero" in said


def test_data_are_loaded_if_the_prompt_needs_other_rows(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(prompt="""f"{row['a']} + {3 if len(self.train_rows) > 1 else 4}?\"""", score=BUG)
    assert main(["pin", first_id(sums), "--env", "sums.py"]) == 0
    assert "it passes today" in capsys.readouterr().out
    [test] = sums.folder.glob("test_pin_*.py")
    assert "loads_data=True" in test.read_text()
    runpy.run_path(str(test))[test.stem]()


def test_a_group_whose_requests_changed_is_refused(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sums.write(prompt="'Add!'")
    assert main(["pin", first_id(sums), "--env", "sums.py"]) == 1
    assert "cannot be replayed: its requests changed: 'Add!'" in capsys.readouterr().err
    assert list(sums.folder.glob("test_*")) == []


def test_a_group_without_an_id_is_not_found_by_one(
    sums: SumsFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sums.folder / "original.jsonl"
    file.write_text('{"scores": [1.0]}\n')
    assert main(["pin", "N", "--env", "sums.py", "--file", str(file)]) == 2
    assert "'N' is the id of no group" in capsys.readouterr().err


def test_what_is_wrong_is_one_line(sums: SumsFolder, capsys: pytest.CaptureFixture[str]) -> None:
    name = first_id(sums)
    file = ["--file", str(sums.rollouts)]
    for argv, message in [
        (["zzz", "--env", "sums.py", *file], "'zzz' is the id of no group"),
        (["", "--env", "sums.py"], "'' is the start of 3 ids: "),
        ([name, "--env", "sums.py", "--score", "2=1"], "the group has sequences 0 to 1"),
        ([name, "--env", "sums.py", "--file", "no.jsonl"], "cannot read 'no.jsonl': No such file"),
        ([name, "--env", "sums.py", "--env.sed", "1"], "did you mean --env.seed?"),
    ]:
        assert message in refusal(main(["pin", *argv]), capsys)
    assert main(["pin", name, "--env", "sums.py"]) == 0
    assert main(["pin", name, "--env", "sums.py"]) == 2
    assert "exists; remove it to pin the group again" in capsys.readouterr().err


def test_a_judged_score_names_sequence_and_value() -> None:
    for text in ("right", "0=nan"):
        with pytest.raises(ConfigError, match="give SEQUENCE=SCORE"):
            judged_scores([text])
