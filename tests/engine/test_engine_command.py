"""`atropos-engine` before its model is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from atroposlib.engine.__main__ import main
from atroposlib.errors import install_command


def test_help_and_flags_need_no_torch() -> None:
    code = (
        "import sys; from atroposlib.engine.__main__ import main\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "print(main(['--no_such_flag', '1']), main(['--model', 'm']))\n"
        "main(['--help'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0
    assert run.stdout.startswith("2 1\nusage: atropos-engine")
    assert f"torch is not installed; run: {install_command('engine')}" in run.stderr
    assert "Traceback" not in run.stderr


def test_model_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--model" in capsys.readouterr().err
