"""What a command of a model cannot do to the machines that run it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import shell
from atroposlib.envs.sandbox import SandboxLimits, SandboxResult
from atroposlib.envs.shell import Ended, Folder, docker
from atroposlib.errors import EnvError


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("cat", b"given"),
        ("yes", "more than 1000 bytes"),
        ("yes >&2", "no end within 0.2 s"),
        ("exec sleep 60", "no end within 0.2 s"),
        ("sleep 60 &", "no end within 0.2 s"),
        ("echo reason >&2; exit 3", "exit status 3. reason"),
    ],
)
def test_the_client_of_docker_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str | bytes
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if isinstance(expected, bytes):
        assert docker("cp", given=b"given", timeout_s=10.0, max_bytes=1000) == expected
    else:
        with pytest.raises(EnvError, match=expected):
            docker("cp", timeout_s=0.2 if "0.2" in expected else 10.0, max_bytes=1000)


GOOD = {"status": 0, "printed": "x", "files": {"b/c": "1", "/logs/x": "2"}}


@pytest.mark.parametrize(
    ("changed", "exit_code"),
    [
        ({}, 0),
        ({}, 1),
        ({}, None),
        ({"files": {"/etc/x": ""}}, 0),
        ({"files": {"/logs/../x": ""}}, 0),
        ({"files": {"../x": ""}}, 0),
        ({"files": {"a": "1" * 200}}, 0),
        ({"files": {"a": 1}}, 0),
        ({"files": ["a"]}, 0),
        ({"printed": None}, 0),
        ({"status": "0"}, 0),
    ],
)
def test_forged_output_of_a_sandbox_changes_no_files(
    changed: dict[str, Any], exit_code: int | None
) -> None:
    class Forged:
        def run(self, source: str, **more: Any) -> SandboxResult:
            output = json.dumps({**GOOD, **changed})
            reason: Any = "crash" if exit_code is None else "exit"
            return SandboxResult(reason=reason, stdout=output, stderr="", exit_code=exit_code)

    folder = Folder(
        {"a": ""}, sandbox=Forged(), limits=SandboxLimits(), folders=("f", "/logs"), max_bytes=100
    )
    ended = folder.run("true", timeout_s=1.0)
    is_good = not changed and exit_code == 0
    assert (ended == Ended(0, "x")) == is_good
    assert folder.files == (GOOD["files"] if is_good else {"a": ""})


@pytest.mark.skipif(sys.platform != "linux", reason="PR_GET_DUMPABLE")
def test_a_command_cannot_open_the_process_that_reports_its_files(tmp_path: Path) -> None:
    given = {"files": {}, "command": "true", "folders": ["folder"], "max_bytes": 100}
    source = f"{shell._IN_SANDBOX}print(ctypes.CDLL(None).prctl(3))"
    argv = [sys.executable, "-c", source]
    printed = subprocess.run(
        argv, input=json.dumps(given), cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines()[-1] == "0"
