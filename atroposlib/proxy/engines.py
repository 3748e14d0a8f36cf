"""The engines of a proxy: its configuration file and the body of `/setup`."""

from __future__ import annotations

from pydantic import Field

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig, ServerType
from atroposlib.inference.manager import ServerManager
from atroposlib.proxy.turn import AgentBody


class EngineEntry(AgentBody):
    """One engine of a configuration."""

    base_url: str
    api_key: str = "x"
    server_type: ServerType = "vllm"
    num_max_requests_at_once: int = Field(default=512, ge=1)
    num_requests_for_eval: int = Field(default=64, ge=1)
    timeout: int = Field(default=1200, gt=0)


class Engines(AgentBody):
    """Engines of one model."""

    model_name: str
    tokenizer_name: str | None = None
    servers: list[EngineEntry] = Field(min_length=1)

    def manager(self) -> ServerManager:
        """Return a manager of these engines."""
        if len({entry.server_type for entry in self.servers}) > 1:
            raise ConfigError("servers: all must be of one server_type")
        manager = ServerManager(
            [
                APIServerConfig(
                    model_name=self.model_name,
                    tokenizer_name=self.tokenizer_name or "none",
                    **entry.model_dump(),
                )
                for entry in self.servers
            ]
        )
        manager.proxy_url = None  # ignore ATROPOS_PROXY_URL: it is meant for environments
        return manager
