"""Chat and text completions over the OpenAI routes, as every server with such routes answers them.

Builds the request, parses the answer into the types of the `openai` package; the transport is `HttpPeer`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.api_server import HEALTH_TIMEOUT_S, APIServer
from atroposlib.envs.server_handling.choices import merge_bodies, run_together
from atroposlib.envs.server_handling.http import HttpPeer, excerpt
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.errors import EngineProtocolError, EngineUnavailable

logger = logging.getLogger(__name__)


@functools.cache
def _openai_type(name: str) -> Any:
    # `openai` takes about a second to import.
    if name == "chat":
        from openai.types.chat import ChatCompletion

        return ChatCompletion
    from openai.types import Completion

    return Completion


def chat_completion_from(body: dict[str, Any]) -> Any:
    """Build a `ChatCompletion`. Engine-specific fields and finish reasons are kept rather than refused."""
    return _openai_type("chat").construct(**body)


def completion_from(body: dict[str, Any]) -> Any:
    """Build a `Completion`. Engine-specific fields and finish reasons are kept rather than refused."""
    return _openai_type("text").construct(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call's keywords, divided into what the server reads and what only this side reads."""

    body: dict[str, Any]
    timeout_s: float
    headers: dict[str, str]
    query: dict[str, str]
    skip_reasoning: bool


def read_request(kwargs: dict[str, Any], *, timeout_s: float) -> Request:
    """Divide keywords. None means "not given", as in the openai package; `timeout` is in seconds."""
    body = {key: value for key, value in kwargs.items() if value is not None}
    if body.pop("stream", False):
        raise ValueError("stream=True is not supported: completions are returned whole")
    extra_body = body.pop("extra_body", {})
    own_timeout = body.pop("timeout", None)
    headers = body.pop("extra_headers", {})
    query = body.pop("extra_query", {})
    skip_reasoning = bool(body.pop("skip_reasoning", False))
    body.pop("split", None)
    return Request(
        body={**body, **extra_body},
        timeout_s=float(own_timeout) if own_timeout is not None else timeout_s,
        headers=headers,
        query=query,
        skip_reasoning=skip_reasoning,
    )


class OpenAIRoutesServer(APIServer):
    """A server with `/chat/completions` and `/completions`."""

    def __init__(
        self,
        config: APIServerConfig,
        reasoning_config: ReasoningConfig | None = None,
        *,
        root: str,
        prefix: str,
        api_key: str | None,
    ) -> None:
        super().__init__(config, reasoning_config)
        self._peer = HttpPeer(root, api_key=api_key)
        self._prefix = prefix
        self._n_is_ignored = config.n_kwarg_is_ignored

    async def close(self) -> None:
        await super().close()
        await self._peer.close()

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        body = request.body
        if self.reasoning_config is not None and not request.skip_reasoning:
            body = self.reasoning_config.apply(body, base_url=self.config.base_url)
        return chat_completion_from(await self._complete("/chat/completions", body, request))

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        return completion_from(await self._complete("/completions", request.body, request))

    async def _complete(self, path: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
        """Return a body with exactly `n` choices, also from servers that ignore `n`."""
        n = int(body.get("n", 1))
        if n == 1:
            return await self._post(path, body, request)
        single = {**body, "n": 1}
        parts = []
        if not self._n_is_ignored:
            whole = await self._post(path, body, request)
            num_choices = len(whole["choices"])
            if num_choices == n:
                return whole
            if num_choices != 1:
                raise EngineProtocolError(
                    f"{self._label} answered {num_choices} choices, expected n = {n}"
                )
            logger.warning(
                "%s ignores n (asked for %d choices, got 1); sending n requests from now on."
                " Set n_kwarg_is_ignored to start that way",
                self._label,
                n,
            )
            self._n_is_ignored = True
            parts = [whole]
        num_missing = n - len(parts)
        parts += await run_together([self._post(path, single, request) for _ in range(num_missing)])
        return merge_bodies(parts)

    async def _post(self, path: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
        answer = await self._peer.post_json(
            self._prefix + path,
            body,
            timeout_s=request.timeout_s,
            headers=request.headers,
            query=request.query,
        )
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise EngineProtocolError(
                f"{self._label}{path} answered without a list of choices: {str(answer)[:400]}"
            )
        return answer

    async def _find_fault(self) -> str | None:
        return await self._ask("/models", accept_4xx=True)

    async def _ask(self, path: str, *, accept_4xx: bool) -> str | None:
        """GET a path and return why the server is not up, or None. `accept_4xx`: any answer shows that it is."""
        try:
            status, body = await self._peer.get(path, timeout_s=HEALTH_TIMEOUT_S)
        except EngineUnavailable as e:
            return str(e)
        if status < 400 or (accept_4xx and status < 500):
            return None
        return f"GET {self._peer.root}{path} answered {status}: {excerpt(body)}"
