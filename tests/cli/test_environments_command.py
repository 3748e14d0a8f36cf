"""`atropos-env`: every environment is listed and documented, is started by its name, and a new one runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from atroposlib.cli.environments import SHAPES, find_environments, lines, load, main
from atroposlib.errors import ConfigError
from atroposlib.runtime.env_command import read_flags
from tests.builders.programs import run_python
from tests.fake_packages import register

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_lists_every_environment() -> None:
    readme = (ROOT / "environments/README.md").read_text()
    audit = "none|gold|gold, second|second|form"
    in_table = re.findall(rf"^\| `(\w+)` \|.*\| (?:{audit}) \|$", readme, re.M)
    assert sorted(in_table) == [environment.name for environment in find_environments()]


def test_every_environment_says_what_it_needs() -> None:
    assert [each.name for each in find_environments() if not (each.task and each.needs)] == []


def test_list_prints_name_shape_task_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gsm8k_server" in line]
    assert line.split()[:2] == ["gsm8k_server", "dataset"]
    assert "grade-school mathematics" in line
    assert line.rstrip().endswith("extras datasets, math")


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gsm8k_serve", "gsm8k"):  # gsm8k_eval is shorter, but not to train on
        assert main(["run", name, "serve"]) == 2
        assert "did you mean gsm8k_server?" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 120, 200])
def test_in_a_terminal_each_environment_has_one_line_with_its_whole_name(width: int) -> None:
    listed = lines(find_environments(), width=width)
    assert len(listed) == len(find_environments()) + 1
    assert max(map(len, listed)) <= width
    assert ("needs" in listed[0]) is (width >= 160)
    for each, line in zip(find_environments(), listed[1:], strict=True):
        assert line.startswith(f"{each.name} ")


def test_list_shows_one_environment_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "gsm8k_server"]) == 0
    shown = capsys.readouterr().out
    [listed] = [each for each in find_environments() if each.name == "gsm8k_server"]
    assert all(part in shown for part in (listed.task, listed.shape, listed.needs))
    assert main(["list", "gsm8k_serve"]) == 2
    assert "did you mean gsm8k_server?" in capsys.readouterr().err


def test_an_environment_may_be_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["new", "my_first_task"]) == 0
    commands = re.findall(r"python my_first_task.py (.*?)(?:  |$)", capsys.readouterr().out, re.M)
    asked = [shlex.split(command) for command in commands]
    assert [mode for mode, *_ in asked] == ["process", "process", "check"]
    for mode, *flags in asked[:2]:
        read_flags(load("my_first_task.py"), mode, flags, prog="new")
    assert load("my_first_task.py").name == "my_first_task"
    with pytest.raises(ConfigError, match="no such file"):
        load("another_task.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="no environment in it"):
        load("empty.py")


def test_flags_for_the_server_may_be_mixed_with_those_of_the_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["wordle", "--env.dataset_path", "sample", "--port", "1", "--env.grup_size", "2"]
    assert main(["openenv", *argv]) == 2
    assert "unknown flag --env.grup_size; did you mean --env.group_size?" in capsys.readouterr().err


def test_run_starts_the_command_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["atropos-env"])
    with pytest.raises(SystemExit) as ended:
        main(["run", "gsm8k_server", "--help"])
    assert ended.value.code == 0
    assert "usage: atropos-env run gsm8k_server COMMAND" in capsys.readouterr().out


def test_rescore_is_evaluate_with_a_stored_evaluation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["atropos-env"])
    with pytest.raises(SystemExit) as ended:
        main(["rescore", str(tmp_path), "--env", "gsm8k_eval"])
    assert ended.value.code == 2
    assert f"{tmp_path}: there is no evaluate_config.yaml" in capsys.readouterr().err
    assert main(["rescore", "nowhere", "--env", "gsm8k_eval"]) == 2
    assert "nowhere: there is no such file or directory" in capsys.readouterr().err


def test_a_module_runs_by_its_name_in_the_package() -> None:
    said = run_python("-m", "atroposlib.environments.gsm8k_server", "--help")
    assert "flags of GSM8kEnv" in said


@pytest.mark.drill
@pytest.mark.timeout(180)
def test_a_new_environment_of_every_shape_passes_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for shape in set(SHAPES.values()):
        assert main(["new", f"my_{shape}", "--shape", shape]) == 0
    said = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert "5 passed" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Task", "lower-case letters"),
        ("taken", "taken.py exists"),
        *((name, "is a word of Python") for name in ("class", "lambda", "async", "none", "true")),
        *((name, "its class would hide") for name in ("dataset_env", "exception")),
        *((name, "would hide the module") for name in ("random", "json", "numpy", "atroposlib")),
    ],
)
def test_new_refuses_a_bad_name_and_an_existing_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.py").touch()
    assert main(["new", name]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken.py"]


def test_environments_of_other_packages_are_listed_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["new", "foreign_task", "--shape", "multi_turn"])
    points = {
        "foreign": "foreign_task:ForeignTask",
        "gone": "gone.module:Gone",
        "broken": "broken_package.module:Broken",
    }
    register(tmp_path, monkeypatch, group="atropos.environments", points=points)
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.setattr(sys, "argv", ["atropos-env"])
    listed = {each.name: each for each in find_environments()}
    assert (listed["foreign"].shape, listed["foreign"].needs) == ("multi_turn", "nothing")
    assert listed["gone"].task == "the entry point gone.module:Gone does not exist"
    assert listed["broken"].task.endswith(":Broken cannot be imported: RuntimeError('no licence')")
    with pytest.raises(SystemExit):
        main(["run", "foreign", "--help"])
    assert "flags of ForeignTask" in capsys.readouterr().out
    assert main(["run", "gone", "serve"]) == 1
