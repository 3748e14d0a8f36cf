"""`BaseEnv`, the author's base class: define `setup`, `get_next_item`, `collect_trajectories`, `evaluate`.

An environment defines what to ask and how to score the answers. `hooks.py` has what an author overrides;
`atroposlib.runtime` keeps items in flight, checks and sends groups and logs. Here are the commands that start it: the
only imports upwards. The constructor has the original's names and positional order, because existing environments call
`super().__init__` positionally.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from atroposlib.envs.env_config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.hooks import EnvHooks, ExtraServers
from atroposlib.inference.config import APIServerConfig, ServerBaseline, ServerManagerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.scored_data import ScoredDataGroup, ScoredDataItem
from atroposlib.type_definitions import UUID, Item, Message

if TYPE_CHECKING:
    from atroposlib.runtime.notebook import NotebookEnv

__all__ = [
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "ExtraServers",
    "Item",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "logger",
]

logger = logging.getLogger(__name__)

OpenaiConfig = APIServerConfig
"""Name imported by some community environments."""


class BaseEnv(EnvHooks):
    """One environment, with its commands."""

    @classmethod
    def cli(cls) -> None:
        """Run the command line (`serve`, `process`, `evaluate`, `check`) and exit."""
        from atroposlib.runtime.env_command import run_environment

        raise SystemExit(run_environment(cls))

    @classmethod
    def create(
        cls, model: str | None = None, base_url: str | None = None, **settings: Any
    ) -> NotebookEnv:
        """Return an environment for a notebook or a script, with `rollouts(n)` and `evaluate()`; uses no hub.

        `model` names the engine's model and the tokenizer. `settings` are the flags of `process`, without dashes:
        `group_size=4`, `tokenizer_name="..."`, `server_type="vllm"`, `config="my.yaml"`. The configuration is that of
        `config_init` otherwise. Raises ConfigError for an unknown name or a wrong value.
        """
        from atroposlib.runtime.notebook import create

        return create(cls, model, base_url, settings)

    @classmethod
    def get_cli_serve_config_cls(cls) -> type[Any]:
        """Return the class of the `serve` command: one field per flag, `from_argv(argv)` and `run()`."""
        return cls._command_class("serve")

    @classmethod
    def get_cli_process_config_cls(cls) -> type[Any]:
        """Return the class of the `process` command."""
        return cls._command_class("process")

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> type[Any]:
        """Return the class of the `evaluate` command."""
        return cls._command_class("evaluate")

    @classmethod
    def _command_class(cls, mode: str) -> type[Any]:
        from atroposlib.runtime.env_command import command_class

        return command_class(cls, mode)

    async def env_manager(self) -> None:
        """Serve until the trainer is done, as `python env.py serve` does."""
        from atroposlib.runtime.serve import serve

        await serve(self)

    async def process_manager(self) -> None:
        """Write `total_steps` groups to a file and a page, as `python env.py process` does."""
        from atroposlib.runtime.process import process_and_render

        await process_and_render(self, self.process_options)
