"""The wheel holds all that users run and import, without the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.programs import run_python
from tests.processes import ROOT

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    offline = ["--no-deps", "--no-index"]
    built = ["wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *built], check=True)
    [wheel] = folder.glob("*.whl")
    subprocess.run([*pip, "install", *offline, f"--target={folder / 'site'}", wheel], check=True)
    return folder / "site"


def run(installed: Path, *args: str | Path) -> str:
    """Return what Python prints; -S leaves the repository, an editable install, out of its path."""
    dependencies = [path for path in sys.path if Path(path).name == "site-packages"]
    done = subprocess.run(
        [sys.executable, "-S", *args],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *dependencies])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_packages_come_from_the_wheel(installed: Path) -> None:
    code = "import atroposlib, example_trainer, sys; print(*sys.path)\n"
    code += "print(atroposlib.__file__, example_trainer.__file__)"
    searched, loaded = run(installed, "-c", code).splitlines()
    assert str(ROOT) not in searched.split()
    assert all(path.startswith(str(installed)) for path in loaded.split())


def test_an_environment_of_the_wheel_starts(installed: Path) -> None:
    said = run(installed, "-m", "atroposlib.environments.gsm8k_server", "--help")
    assert "flags of GSM8kEnv" in said


def test_the_command_lists_every_environment_of_the_repository(installed: Path) -> None:
    here = run_python("-m", "atroposlib.cli.environments", "list")
    assert "gsm8k_server" in here
    assert run(installed, installed / "bin" / "atropos-env", "list") == here


def test_every_tracked_file_of_the_packages_is_in_the_wheel(installed: Path) -> None:
    kept = subprocess.run(
        [
            "git",
            "ls-files",
            "atroposlib",
            "atropos_taskset",
            "atropos_verl",
            "example_trainer",
            "environments",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    where = (
        name.replace("environments/", "atroposlib/environments/", 1)
        if name.startswith("env")
        else name
        for name in kept.stdout.splitlines()
    )
    assert [name for name in where if not (installed / name).exists()] == []


def test_public_names_can_be_imported(installed: Path) -> None:
    shutil.copy(ROOT / "tests" / "contract" / "test_public_names.py", installed.parent)
    said = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_public_names.py")
    assert " passed" in said
