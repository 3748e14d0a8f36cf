"""An environment is closed however its command ends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from atroposlib.runtime.evaluate import evaluate
from atroposlib.runtime.process import process
from tests.runtime.helpers_runtime import ScriptedEnv


class HalfSetUp(ScriptedEnv):
    """Its setup fails after it has opened something."""

    closed = 0

    async def setup(self) -> None:
        raise LookupError("no such data set")

    async def close(self) -> None:
        self.closed += 1


class Unclosable(HalfSetUp):
    """Its close relies on what its setup did not reach."""

    async def close(self) -> None:
        raise AttributeError("never opened")


def settings(folder: Path) -> dict[str, Any]:
    return {
        "data_path_to_save_groups": str(folder / "g.jsonl"),
        "data_dir_to_save_evals": str(folder / "evals"),
        "total_steps": 1,
    }


@pytest.mark.parametrize("run", [process, evaluate])
async def test_an_environment_whose_setup_raises_is_closed(tmp_path: Path, run: Any) -> None:
    env = HalfSetUp(**settings(tmp_path))

    with pytest.raises(LookupError):
        await run(env)

    assert env.closed == 1


@pytest.mark.parametrize("run", [process, evaluate])
async def test_the_error_of_close_does_not_hide_the_one_before(
    tmp_path: Path, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(LookupError):
        await run(Unclosable(**settings(tmp_path)))

    assert "never opened" in caplog.text
