"""`ProgramEnv`: the answer is a Python program, which tests judge in a sandbox.

It owns the limits of a program and counts the verdicts. The tests are those of `program_tests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.answers import last_block
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.program_tests import Judgement
from atroposlib.envs.rewards import RewardFailure


class ProgramEnvConfig(DatasetEnvConfig):
    test_timeout_s: float = Field(default=15.0, gt=0)
    """Time limit of a program in one test, in seconds; also of its processor time."""
    test_memory_mb: int = Field(default=1024, ge=64)
    """Memory limit of a program, MiB; at most 2048, the limit of a reward worker."""
    docker_image: str | None = None
    """Run programs in containers of this image, for example python:3.11-slim; None: in a sandbox of this machine."""
    reward_timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of all tests of one answer, in seconds."""
    num_reward_workers: int = Field(default=4, ge=1)
    """Programs that run at once."""


class ProgramEnv(DatasetEnv):
    """Tasks whose answer is a program."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = ProgramEnvConfig
    config: ProgramEnvConfig
    runs_model_code = True
    preload = ("atroposlib.envs.program_tests",)

    def is_isolated(self) -> bool:
        """Whether programs run in a container or in namespaces."""
        return self.config.docker_image is not None or super().is_isolated()

    async def judge_in_worker(
        self, judge: Callable[..., Judgement], program: str, *tests: Any
    ) -> bool | RewardFailure:
        """Return whether a program passes: `judge(program, *tests, limits, docker_image)` decides, in a worker."""
        limits = {
            "wall_s": self.config.test_timeout_s,
            "cpu_s": max(1, round(self.config.test_timeout_s)),
            "memory_mb": self.config.test_memory_mb,
        }
        found = await self.in_worker(judge, program, *tests, limits, self.config.docker_image)
        if isinstance(found, RewardFailure):
            return found
        self.counts[f"program_{found['verdict']}"] += 1
        self.note(**found)
        return bool(found["verdict"] == "passed")


def program_in(text: str) -> str | None:
    """Return the last Python block after the thinking; None without one."""
    return last_block(text, "python", "python3", "py", "")
