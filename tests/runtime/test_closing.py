"""An environment is closed however its command ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.runtime.evaluate import evaluate
from atroposlib.runtime.process import process
from tests.runtime.helpers_runtime import ScriptedEnv


class HalfSetUp(ScriptedEnv):
    """Its setup fails after it has opened something, and its close relies on what the setup did not reach."""

    closed = 0

    async def setup(self) -> None:
        raise LookupError("no such data set")

    async def close(self) -> None:
        self.closed += 1
        raise AttributeError("never opened")


@pytest.mark.parametrize("run", [process, evaluate])
async def test_an_environment_whose_setup_raises_is_closed_and_its_error_is_not_hidden(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env = HalfSetUp(
        data_path_to_save_groups=str(tmp_path / "g.jsonl"),
        data_dir_to_save_evals=str(tmp_path / "evals"),
        total_steps=1,
    )
    with pytest.raises(LookupError):
        await run(env)
    assert env.closed == 1
    assert "never opened" in caplog.text
