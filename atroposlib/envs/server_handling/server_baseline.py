"""The original's import path for what now lives in `server_config`, `api_server`, `reasoning` and `limits`."""

from atroposlib.envs.server_handling.api_server import APIServer
from atroposlib.envs.server_handling.limits import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.reasoning import (
    EFFORT_TO_MAX_TOKENS,
    VALID_REASONING_EFFORTS,
    ReasoningConfig,
)
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline

__all__ = [
    "EFFORT_TO_MAX_TOKENS",
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "ReasoningConfig",
    "ServerBaseline",
]
