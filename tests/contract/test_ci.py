"""`.ci/run` fails with each of its stages; stand-ins take the place of make, the environments and pytest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

ENVIRONMENTS = ["bridges_env", "conformance_env", "cuda_env", "other_trainers_env", "vllm_env"]
RETRIED = ["tests", "bridges", "vllm"]
"""Stages of pytest whose failed tests are run again, alone."""
STAGE = """#!/bin/sh
stage=$(basename "$0" .sh)
[ "$stage" != make ] || stage=$(basename "$1")
if [ "$stage" = .installed ]; then mkdir -p "$VENV/bin" && cp "$CUDA/bin/python" "$VENV/bin"; fi
[ "$stage" != "$FAILS" ] || exit "$STATUS"
"""
PYTHON = f"""#!/bin/sh
case "$*" in
    .ci/last_failed.py*) exec {sys.executable} "$@" ;;
    *--last-failed*) echo again; exit 0 ;;
    *"-m bridges"*) stage=bridges ;; *"-m vllm"*) stage=vllm ;;
    *"-m cuda_wheel"*) stage=cuda_wheel ;; *"-m other_trainers"*) stage=other_trainers ;;
    *"-m conformance"*) stage=conformance ;;
    "-m pytest"*) stage=tests ;;
esac
echo "stage $stage"
[ "$stage" = "$FAILS" ] || exit 0
if [ -n "$FAILED" ]; then mkdir -p .pytest_cache/v/cache && echo "{{$FAILED}}" > .pytest_cache/v/cache/lastfailed; fi
exit "$STATUS"
"""


def run_ci(folder: Path, *, fails: str, status: int = 1, failed: str = "") -> tuple[int, str]:
    """Let a stage end with `status` and note `failed` as its failed tests; return the run's status and output."""
    (folder / ".ci").mkdir()
    for name in ("run", "last_failed.py"):
        shutil.copy(ROOT / ".ci" / name, folder / ".ci")
    venv = folder / "other"
    scripts = [folder / ".ci" / f"{name}.sh" for name in [*ENVIRONMENTS, "debian_packages"]]
    for path, text in {
        folder / "bin" / "make": STAGE,
        venv / "bin" / "python": PYTHON,
        **dict.fromkeys(scripts, STAGE),
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    variables = {
        "FAILS": fails,
        "STATUS": str(status),
        "FAILED": failed,
        "CUDA": str(venv),
        "UV": "",
    }
    for name in ("ATROPOS_CUDA_VENV", "ATROPOS_OTHER_TRAINERS_VENV"):
        variables[name] = str(venv)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", folder / ".ci" / "run"],
        env={**os.environ, **variables, "PATH": path, "CI_VENV": ".venv-ci"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_a_run_without_failures_passes_and_runs_every_stage(tmp_path: Path) -> None:
    status, said = run_ci(tmp_path, fails="")
    assert status == 0, said
    stages = [*RETRIED, "cuda_wheel", "other_trainers", "conformance"]
    assert sorted(line for line in said.splitlines() if line.startswith("stage")) == sorted(
        f"stage {stage}" for stage in stages
    )


@pytest.mark.parametrize(
    "stage",
    [".installed", "lint", *RETRIED, "cuda_wheel", "other_trainers", "conformance", *ENVIRONMENTS],
)
def test_a_stage_that_fails_fails_the_run(tmp_path: Path, stage: str) -> None:
    status, said = run_ci(tmp_path, fails=stage)
    assert status != 0, said
    assert "again" not in said.splitlines()


@pytest.mark.parametrize("stage", RETRIED)
def test_what_passes_only_when_run_alone_is_named(tmp_path: Path, stage: str) -> None:
    status, said = run_ci(tmp_path, fails=stage, failed='"tests/test_x.py::test_y": true')
    assert status == 0, said
    assert said.endswith("!! PASSED ONLY WHEN RUN ALONE: tests/test_x.py::test_y\n")


@pytest.mark.parametrize("stage", RETRIED)
@pytest.mark.parametrize("status", [2, 3])
def test_a_stage_that_broke_off_is_not_saved_by_the_tests_that_it_ran(
    tmp_path: Path, stage: str, status: int
) -> None:
    failed = '"tests/test_x.py::test_y": true'
    found, said = run_ci(tmp_path, fails=stage, status=status, failed=failed)
    assert found == status, said
