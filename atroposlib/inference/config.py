"""How to reach the inference servers: three small pydantic models.

Unknown keys given in code or YAML are ignored, with a warning that names them: existing environments
pass keys of their own (`weight` in YAML server entries, for example).
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from atroposlib.utils.entry_points import Registry

logger = logging.getLogger(__name__)

_SERVERS = "atroposlib.inference.servers"
ENGINES = Registry(
    "server_type",
    group="atroposlib.engines",
    own={
        "openai": f"{_SERVERS}.openai:OpenAIServer",
        "vllm": f"{_SERVERS}.vllm:VLLMServer",
        "sglang": f"{_SERVERS}.sglang:SGLangServer",
        "trl": f"{_SERVERS}.trl:TrlVllmServer",
    },
)
"""Kinds of inference servers: subclasses of `APIServer`, imported on first use."""

ServerType = Annotated[str, AfterValidator(ENGINES.checked)]


class _Config(BaseModel):
    model_config = ConfigDict(
        extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = sorted(str(key) for key in data if key not in cls.model_fields)
            if unknown:
                logger.warning("%s ignores unknown keys: %s", cls.__name__, ", ".join(unknown))
        return data


class ServerBaseline(_Config):
    """Settings shared by all servers of an environment; alone, it means local servers on the default ports."""

    timeout: int = Field(default=1200, gt=0)
    """Seconds one request may take."""
    num_max_requests_at_once: int = Field(default=512, ge=1)
    """Training requests in flight per server."""
    num_requests_for_eval: int = Field(default=64, ge=1)
    """Evaluation requests in flight per server, in addition to the training requests."""
    model_name: str = "default"
    """Model named in every request."""
    rolling_buffer_length: int = Field(default=1000, ge=1)
    """Requests covered by the timing statistics."""
    server_type: ServerType = "openai"
    """Protocol the servers speak: openai, vllm, sglang, trl, or a kind that an installed package registers."""
    tokenizer_name: str = "none"
    """Tokenizer to load; "none" means the one of `model_name`."""

    @property
    def tokenizer_source(self) -> str:
        """The name or path to load the tokenizer from."""
        return self.model_name if self.tokenizer_name in ("", "none") else self.tokenizer_name


class APIServerConfig(ServerBaseline):
    """One server."""

    api_key: str | None = ""
    """Bearer token; empty means none (for api.openai.com: the variable OPENAI_API_KEY)."""
    base_url: str | None = ""
    """For example http://localhost:9001/v1; empty means the OpenAI API."""
    n_kwarg_is_ignored: bool = False
    """Whether the server ignores `n` and returns one choice: send n requests instead."""
    health_check: bool = True
    """Whether to check the server's health before its first use and after a failed connection."""
    health_wait_s: float = Field(default=600.0, ge=0)
    """Seconds a request waits for a server that is down or asks to retry later, before it fails."""
    adaptive_concurrency: bool = True
    """Whether to send fewer requests at once than configured while the server is overloaded."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Limit of requests sent; they are spaced evenly. None means no limit."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Limit of prompt and completion tokens; estimated when a request is sent, corrected by the answer's usage."""
    answer_cache: str | None = None
    """Folder of chat and text completions: a request of an earlier run gets its earlier answer (extra `cache`)."""
    prompt_price: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens; with neither price, a small table of known models is used."""
    completion_price: float | None = Field(default=None, ge=0)
    """US dollars per million completion tokens."""

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url {value!r} has no scheme; write http://{value} or https://{value}"
            )
        return value


class ServerManagerConfig(_Config):
    """Settings of the `ServerManager` itself."""

    slurm: bool = False
    """Whether to find the servers on the nodes of the SLURM job."""
    testing: bool = False
    """Whether to use the scripted `ServerHarness` instead of a real server."""
    max_n_completions: int = Field(default=8, ge=1)
    """Requests for more completions than this are split."""
    proxy_url: str | None = None
    """URL of a managed-server proxy."""
