"""The original's import path for what now lives in `server_config`, `api_server`, `reasoning` and `limits`."""

from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.limiter import AsyncSemWithAdaptiveWeight
from atroposlib.inference.servers.reasoning import (
    EFFORT_TO_MAX_TOKENS,
    VALID_REASONING_EFFORTS,
    ReasoningConfig,
)

__all__ = [
    "EFFORT_TO_MAX_TOKENS",
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "ReasoningConfig",
    "ServerBaseline",
]
