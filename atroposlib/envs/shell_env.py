"""`ShellEnv`: tasks that are solved with the commands of a shell.

Define `machine`, and `final_score` to judge its files. The model calls the tool `shell`, sees the exit status and what
was printed, and answers without a call when it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Any

from pydantic import Field

from atroposlib.envs.dataset_env import Row
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.sandbox import Sandbox, local_sandbox
from atroposlib.envs.shell import Machine
from atroposlib.envs.tool_env import MalformedCall, ToolCall, ToolEnv, ToolEnvConfig, ToolFailure
from atroposlib.errors import ConfigError, EnvError


class ShellEnvConfig(ToolEnvConfig):
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of a command, in seconds."""
    tool_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of a command with the start of its sandbox, in seconds."""


def shell(command: str, episode: Episode) -> str:
    """Run a command with sh in the task's folder. Each call starts in that folder, with the files as they are now."""
    timeout_s = episode.state["command_timeout_s"]
    ended = episode.state["machine"].run(command, timeout_s=timeout_s)
    if ended.status is None:
        raise ToolFailure("stopped", f"{ended.printed}.")
    return f"exit status {ended.status}\n{ended.printed}".rstrip("\n")


class ShellEnv(ToolEnv):
    """Several turns, reward by the state at the end."""

    env_config_cls = ShellEnvConfig
    config: ShellEnvConfig
    runs_model_code = True
    tools = (shell,)
    judges_text = False
    system_prompt = "You solve tasks with the commands of a shell. When the task is done, say so."

    @abstractmethod
    def machine(self, row: Row) -> Machine:
        """Return where the commands of an episode run; called in a thread."""

    async def setup(self) -> None:
        """Check that a sandbox may start processes, and load the rows."""
        if not self.is_isolated():
            raise ConfigError(
                f"{self.name}: without bubblewrap a program may not start processes; install it (apt install "
                "bubblewrap) or use Docker images"
            )
        await super().setup()

    def sandbox(self) -> Sandbox:
        """Return where commands run that need no image."""
        return local_sandbox()

    async def reset(self, row: Row) -> Episode:
        """Return an episode with the task's machine."""
        starting = asyncio.ensure_future(asyncio.to_thread(self.machine, row))
        try:
            machine = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(EnvError):  # it has not started
                await asyncio.to_thread((await starting).close)
            raise
        state = {"machine": machine, "command_timeout_s": self.config.command_timeout_s}
        return Episode(row=row, messages=self.conversation(row), state=state)

    async def end(self, episode: Episode) -> None:
        """Remove the machine."""
        await asyncio.to_thread(episode.state["machine"].close)

    def parse_calls(self, answer: str) -> list[ToolCall | MalformedCall]:
        """Return the call of an answer; several are refused, because the model has not seen what the first one did."""
        calls = super().parse_calls(answer)
        return calls if len(calls) < 2 else [MalformedCall(reason="give one call per answer")]

    def score(self, row: Row, answer: str) -> Any:
        """Return 0 for the last answer: the files decide."""
        return 0.0
