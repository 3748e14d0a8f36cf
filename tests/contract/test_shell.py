"""shellcheck has nothing to say about the repository's shell files, and those that `atropos render` writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atroposlib.cli.launch.render import render
from tests.cli.helpers_launch import write_run
from tests.cli.test_launch_files import FULL, HUBS
from tests.cli.test_launch_quoting import RUN as HOSTILE
from tests.processes import ROOT

RUNS = {"full": FULL, "hubs": HUBS, "hostile": HOSTILE}
every_run = pytest.mark.parametrize(
    "run",
    [
        pytest.param("full", marks=pytest.mark.drill),
        pytest.param("hubs", marks=pytest.mark.drill),
        "hostile",
    ],
)
SHELLCHECK = shutil.which("shellcheck", path=Path(sys.executable).parent)
pytestmark = pytest.mark.skipif(SHELLCHECK is None, reason="pip install 'atroposlib[dev]'")


def check(files: list[Path], *, shell: str = "bash") -> str:
    """Return what shellcheck says. What `setup` reads is not known here (SC1091)."""
    assert SHELLCHECK is not None
    options = ["--severity=warning", "--exclude=SC1091", f"--shell={shell}"]
    options += ["--external-sources", "--source-path=SCRIPTDIR"]
    done = subprocess.run([SHELLCHECK, *options, *files], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr  # more: it did not run
    return done.stdout


def test_the_shell_files_of_the_repository_are_clean() -> None:
    files = [*ROOT.glob(".ci/*.sh"), ROOT / ".ci/run", *ROOT.glob("atroposlib/**/*.sh")]
    assert len(files) > 7
    assert check(files) == ""


def test_a_fault_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.sh").write_text("export A=$(false)\n")
    assert "SC2155" in check([tmp_path / "x.sh"])


@every_run
def test_the_jobs_for_slurm_are_clean(tmp_path: Path, run: str) -> None:
    render(write_run(tmp_path / "run.yaml", RUNS[run]), target="slurm", out=tmp_path / "jobs")
    assert check(sorted((tmp_path / "jobs").iterdir())) == ""


@every_run
def test_the_scripts_of_pods_and_tasks_are_clean(tmp_path: Path, run: str) -> None:
    file = write_run(tmp_path / "file.yaml", RUNS[run])
    tasks: list[Path] = []
    waits: list[Path] = []
    render(file, target="skypilot", out=tmp_path)
    for task in list(yaml.safe_load_all((tmp_path / "run.yaml").read_text()))[1:]:
        tasks.append(tmp_path / f"{task['name']}.task")
        tasks[-1].write_text(task["run"])
    render(file, target="kubernetes", out=tmp_path)
    for manifest in yaml.safe_load_all((tmp_path / "run.yaml").read_text()):
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        ends = pod.get("containers", ()) if manifest["metadata"]["name"].endswith("-end") else ()
        for wait in [*pod.get("initContainers", ()), *ends]:
            waits.append(tmp_path / f"{manifest['metadata']['name']}-{wait['name']}.wait")
            waits[-1].write_text(wait["command"][2].replace("$$", "$"))
    assert check(tasks) == ""
    assert check(waits, shell="sh") == ""
