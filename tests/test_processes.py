"""What a test starts ends with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT

KILLED_OR_NOT = """
import subprocess, sys
from tests.processes import leaving_no_process
with leaving_no_process():
    started = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    print(started.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_test_process_leaves_none_of_those_that_it_started(is_killed: bool) -> None:
    command = [sys.executable, "-c", KILLED_OR_NOT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        started = Path(f"/proc/{int(process.stdout.readline())}/stat")
        if is_killed:
            process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while started.exists() and ") Z " not in started.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
