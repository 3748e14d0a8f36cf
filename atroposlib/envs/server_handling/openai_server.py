"""Any API with OpenAI's chat and completion routes: hosted models, gateways, other engines.

Gives text only; training needs the token ids and logprobs of `VLLMServer`. Whether it is up is asked with
`GET <base_url>/models`, which costs nothing; an API without that route counts as up.
"""

from __future__ import annotations

import os
from typing import Any

from atroposlib.envs.server_handling.openai_routes import OpenAIRoutesServer
from atroposlib.envs.server_handling.reasoning import ReasoningConfig, is_official_openai
from atroposlib.envs.server_handling.resolve_configs import resolve_openai_configs
from atroposlib.envs.server_handling.server_config import APIServerConfig

__all__ = ["OPENAI_URL", "APIServerConfig", "OpenAIServer", "resolve_openai_configs"]

OPENAI_URL = "https://api.openai.com/v1"


class OpenAIServer(OpenAIRoutesServer):
    """Chat and text completions from an OpenAI-compatible API."""

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        # The variables are those of the openai package, with its precedence.
        root = config.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        api_key = config.api_key
        if not api_key and is_official_openai(root):
            api_key = os.environ.get("OPENAI_API_KEY")
        super().__init__(config, reasoning_config, root=root, prefix="", api_key=api_key)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[Any, ...]:
        raise NotImplementedError(
            "OpenAIServer returns no token ids; set server_type to 'vllm' to train on its completions"
        )
