"""What `tests/gpu` can do without a device is done on the CPU: a case must not fail for a mistake of its own."""

import os
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]


def test_the_tests_for_a_gpu_pass_on_the_cpu_as_far_as_they_can() -> None:
    known = {name: value for name, value in os.environ.items() if "ATROPOS" not in name}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-rs", "-n", "0"),
            *("-p", "no:cacheprovider", "--show-capture=no"),
        ],
        env={**known, "PYTHONPATH": str(ROOT), "ATROPOS_REHEARSE_GPU": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    found = re.search(r"(\d+) passed, (\d+) skipped", run.stdout)
    assert found
    assert int(found[1]) >= 30, run.stdout[-4000:]
