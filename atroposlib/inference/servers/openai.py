"""Any API with OpenAI's chat and completion routes: hosted models, gateways, other engines.

Returns text only; training needs the token ids and logprobs of `VLLMServer`. The health check is
`GET <base_url>/models`, which costs nothing; an API without that route counts as up. Which of the two names of the
token limit the API accepts is found out once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
from typing import Any
from urllib.parse import urlsplit

from atroposlib.errors import EngineRejected
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.api_server import read_stops
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.openai_routes import CallKeywords, OpenAIRoutesServer
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.utils.tokenizers import load_tokenizer

__all__ = ["OPENAI_URL", "APIServerConfig", "OpenAIServer"]

logger = logging.getLogger(__name__)

_loaded = functools.cache(load_tokenizer)

OPENAI_URL = "https://api.openai.com/v1"

LIMIT_NAMES = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
"""The two names of the token limit. OpenAI's reasoning models refuse the first, Mistral and others the second."""

_UNKNOWN_PARAMETER = re.compile(
    r"unsupported|not supported|extra_forbidden|not permitted|not allowed"
    r"|unrecognized|unknown|unexpected",
    re.IGNORECASE,
)


def _refuses_name(name: str, refusal: EngineHttpRejected) -> bool:
    text = str(refusal)
    is_named = refusal.status in (400, 422) and re.search(rf"\b{name}\b", text)
    return bool(is_named and _UNKNOWN_PARAMETER.search(text))


class OpenAIServer(OpenAIRoutesServer):
    """Chat and text completions from an OpenAI-compatible API."""

    prefix = ""
    health_path = "/models"
    is_up_at_4xx = True

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        # The variables are those of the openai package, with its precedence.
        root = config.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        api_key = config.api_key
        host = urlsplit(root).hostname or ""
        if not api_key and f".{host}".endswith(".api.openai.com"):
            api_key = os.environ.get("OPENAI_API_KEY")
        super().__init__(config, reasoning_config, root=root, api_key=api_key)
        self._limit_name: str | None = None
        """The accepted name of the token limit; None until a request was refused for its name."""
        self._takes_stop_ids = True

    async def _post(self, path: str, body: dict[str, Any], request: CallKeywords) -> dict[str, Any]:
        if "stop_token_ids" in body and not self._takes_stop_ids:
            body = await asyncio.to_thread(self._with_text_stops, body)
        sent = _with_limit(body, self._limit_name) if path == "/chat/completions" else body
        try:
            return await super()._post(path, sent, request)
        except EngineHttpRejected as e:
            if "stop_token_ids" in sent and _refuses_name("stop_token_ids", e):
                self._takes_stop_ids = False
                return await self._post(path, body, request)
            # The refusal of a limit that is too large names it, too; under the other name the API might ignore it.
            others = (
                other
                for given, other in LIMIT_NAMES.items()
                if given in body and other not in body and _refuses_name(given, e)
            )
            name = next(others, None) if path == "/chat/completions" else None
            if name is None or name == self._limit_name:
                raise
            answer = await super()._post(path, _with_limit(body, name), request)
            logger.info("%s takes %s, not %s", self._label, name, LIMIT_NAMES[name])
            self._limit_name = name
            return answer

    def _with_text_stops(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body with the text of its `stop_token_ids`. Raises EngineRejected without a tokenizer."""
        stops, name = read_stops(body), self.config.tokenizer_name
        if name in ("", "none"):
            raise EngineRejected(
                f"{self._label} takes no stop_token_ids, and the text of {stops.token_ids} is not known:"
                " set tokenizer_name to the model's tokenizer, or give stop as text"
            )
        texts = map(
            _loaded(name, flag="tokenizer_name").decode, ([token] for token in stops.token_ids)
        )
        kept = {key: value for key, value in body.items() if key != "stop_token_ids"}
        return {**kept, "stop": [*stops.strings, *texts]}

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[Any, ...]:
        raise NotImplementedError(
            "OpenAIServer returns no token ids; set server_type to 'vllm' to train on its completions"
        )


def _with_limit(body: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return a body with the token limit under `name`; None leaves the caller's name."""
    if name is None or LIMIT_NAMES[name] not in body:
        return body
    other = LIMIT_NAMES[name]
    return {name: body[other], **{key: value for key, value in body.items() if key != other}}
