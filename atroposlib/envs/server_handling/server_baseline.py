"""The original's import path of names in `atroposlib.inference.config` and `atroposlib.inference.servers`."""

from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.servers.admission import AsyncSemWithAdaptiveWeight
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.reasoning import (
    EFFORT_TO_MAX_TOKENS,
    VALID_REASONING_EFFORTS,
    ReasoningConfig,
)
