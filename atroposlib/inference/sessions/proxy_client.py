"""`ProxyManagedServer`: a `ManagedServer` whose conversations live at a proxy, with the same calls and state.

The token sequences are fetched after each call, so that `get_state()` needs no request.
`ServerManager.managed_server` returns it if a proxy is configured. It never retries: the proxy does.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.servers.http_peer import HttpPeer, error_of
from atroposlib.inference.servers.openai_routes import (
    completion_from,
    read_request,
)
from atroposlib.inference.servers.sampling_notes import item_notes, note_sampling
from atroposlib.inference.sessions.sequences import SequenceNode, state_of
from atroposlib.inference.tools.messages import as_dict
from atroposlib.inference.tools.tool_messages import (
    OpenAIToolCall,
    completion_with_tool_calls,
)

TOKEN_VARIABLE = "ATROPOS_PROXY_TOKEN"
OWNER_HEADER = "X-Atropos-Owner-Key"
"""Header of requests for a session's sequences: the `owner_key` that the session was opened with."""
CALL_TIMEOUT_S = 3600.0
"""For one completion; the proxy's engine has its own timeouts."""
CONTROL_TIMEOUT_S = 60.0


class _Nodes(BaseModel):
    """The answer to a request for a session's sequences."""

    nodes: list[SequenceNode]
    broken_prefixes: dict[str, int] = {}


class ProxyManagedServer:
    """One session of a proxy."""

    def __init__(
        self,
        proxy_url: str,
        session_uuid: str,
        model_name: str = "unknown",
        base_url: str | None = None,
        *,
        track_tree: bool = False,
        owner_key: str | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self.proxy_url = proxy_url.rstrip("/")
        self.session_uuid = session_uuid
        self.model_name = model_name
        self.base_url = base_url
        """The engine behind the session; None if unknown."""
        self.track_tree = track_tree
        self.max_context_tokens: int | None = None
        """As of `ManagedServer`."""
        self.broken_prefixes: Counter[str] = Counter()
        """As of `ManagedServer`, when the sequences were fetched last; `counts` counts them as well."""
        self._counts = Counter() if counts is None else counts
        own = {OWNER_HEADER: owner_key} if owner_key else {}
        self._peer = HttpPeer(self.proxy_url, api_key=session_uuid, headers=own)
        self._nodes: list[SequenceNode] = []
        self._num_fetches = 0
        self._last_fetch = 0
        self._has_pending_reset = False
        """Whether `reset` was called but not yet sent to the proxy."""

    def get_url(self) -> str:
        """Return the URL that an OpenAI client uses as its base URL."""
        return f"{self.proxy_url}/{self.session_uuid}/v1"

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Sample the next message(s) of a conversation and return an `openai` `ChatCompletion`."""
        kwargs["messages"] = [as_dict(message) for message in kwargs["messages"]]
        body = await self._call("chat/completions", kwargs)
        has_calls = False
        for choice in body["choices"]:
            if calls := choice["message"].get("tool_calls"):
                has_calls = True
                choice["message"]["tool_calls"] = [OpenAIToolCall.of(call) for call in calls]
        return completion_with_tool_calls(body) if has_calls else completion_from(body)

    async def completion(self, **kwargs: Any) -> Any:
        """Sample continuations of a text prompt and return an `openai` `Completion`."""
        return completion_from(await self._call("completions", kwargs))

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a proxy returns no prompt logprobs; ask the engine itself")

    def get_state(self) -> dict[str, Any]:
        """Return the sequences after the latest call, in the form of `ManagedServer.get_state`."""
        return state_of(self._nodes, track_tree=self.track_tree)

    async def fetch_state(self) -> dict[str, Any]:
        """Fetch and return the sequences, including those of calls that an agent sent to the proxy itself."""
        await self._send_reset()
        self._num_fetches += 1
        number = self._num_fetches
        answer = await self._ask_nodes(self._peer.get)
        try:
            found = _Nodes.model_validate_json(answer)
        except ValidationError as e:
            url = f"{self.proxy_url}/{self.session_uuid}/nodes"
            raise EngineProtocolError(f"{url} answered without sequences: {e}") from e
        if number > self._last_fetch:  # of concurrent fetches, the one sent last wins
            self._last_fetch, self._nodes = number, found.nodes
        more = Counter(found.broken_prefixes) - self.broken_prefixes
        own = [] if (notes := item_notes.get()) is None else [notes.broken_prefixes]
        for counts in (self.broken_prefixes, self._counts, *own):
            counts.update(more)
        return self.get_state()

    def reset(self) -> None:
        """Clear all sequences; the proxy clears them before the next call."""
        self._nodes = []
        self._last_fetch = self._num_fetches
        self._has_pending_reset = True

    async def cleanup(self) -> None:
        """Close the session at the proxy, and the connection. An unknown session is no error."""
        try:
            status, body = await self._peer.delete(
                f"/{self.session_uuid}", timeout_s=CONTROL_TIMEOUT_S
            )
        finally:
            await self._peer.close()
        if status >= 400 and status not in (404, 410):
            raise error_of(status, body, where=f"DELETE {self.proxy_url}/{self.session_uuid}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.cleanup()

    async def _call(self, route: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        await self._send_reset()
        request = read_request(dict(kwargs), timeout_s=CALL_TIMEOUT_S)
        own = {"split": kwargs.get("split"), "max_context_tokens": self.max_context_tokens}
        answer: Any = await self._peer.post(
            f"/{self.session_uuid}/v1/{route}",
            {**request.body, **{name: value for name, value in own.items() if value}},
            timeout_s=request.timeout_s,
            headers=request.headers,
        )
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise EngineProtocolError(f"{self.get_url()}/{route}: no choices: {str(answer)[:400]}")
        usage = answer.get("usage") or {}
        note_sampling(kwargs, num_sampled=usage.get("completion_tokens") or 0)
        await self.fetch_state()
        return answer

    async def _send_reset(self) -> None:
        if self._has_pending_reset:
            self._has_pending_reset = False
            try:
                await self._ask_nodes(self._peer.delete)
            except BaseException:
                self._has_pending_reset = True
                raise

    async def _ask_nodes(self, send: Callable[..., Awaitable[tuple[int, bytes]]]) -> bytes:
        """Send a request about the session's sequences and return the body of the answer."""
        path = f"/{self.session_uuid}/nodes"
        status, body = await send(path, timeout_s=CONTROL_TIMEOUT_S)
        if status >= 400:
            raise error_of(status, body, where=self.proxy_url + path)
        return body


async def create_proxy_session(
    proxy_url: str,
    base_url: str | None = None,
    tool_parser: str | None = "hermes",
    track_tree: bool = False,
    model_name: str = "unknown",
    *,
    token: str | None = None,
    options: Mapping[str, Any] | None = None,
    counts: Counter[str] | None = None,
) -> ProxyManagedServer:
    """Open a session at a proxy; close it with `cleanup()`.

    `base_url` selects an engine of the proxy. `token` defaults to ATROPOS_PROXY_TOKEN. `options` are further fields of
    `/sessions/create`: max_tokens, max_context_tokens, sampling, split, keeps_distribution, owner_key, group (else
    the current item). `counts` counts the session's broken prefixes by reason.
    """
    peer = HttpPeer(proxy_url, api_key=token or os.environ.get(TOKEN_VARIABLE))
    body = {"tool_parser": tool_parser, "track_tree": track_tree, **(options or {})}
    if base_url is not None:
        body["base_url"] = base_url
    if (notes := item_notes.get()) is not None:
        body.setdefault("group", notes.key)
    try:
        made: Any = await peer.post("/sessions/create", body, timeout_s=CONTROL_TIMEOUT_S)
    finally:
        await peer.close()
    if not isinstance(made, dict) or not isinstance(made.get("uuid"), str):
        raise EngineProtocolError(f"{proxy_url}/sessions/create: no uuid: {str(made)[:400]}")
    name = made.get("model_name") or model_name
    return ProxyManagedServer(
        proxy_url,
        made["uuid"],
        name,
        made.get("base_url"),
        track_tree=track_tree,
        owner_key=body.get("owner_key"),
        counts=counts,
    )
