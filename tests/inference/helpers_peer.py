"""A scripted HTTP server that records its requests, and a tokenizer of single characters."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.api_server import APIServer

S = TypeVar("S", bound=APIServer)


@dataclass(frozen=True)
class Reply:
    """One answer; a body that is bytes is sent as it is."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One POST that came in."""

    path: str
    body: Any
    headers: dict[str, str]
    query: dict[str, str]
    port: int
    """Of the client's side of the connection."""


class Peer:
    """Answers POSTs with `replies` in order (the last one again and again) and GETs from `gets`, else with 404."""

    def __init__(self, *replies: Any, gets: dict[str, Reply] | None = None) -> None:
        self.replies = [reply if isinstance(reply, Reply) else Reply(reply) for reply in replies]
        self.gets = gets or {}
        self.asked: list[Asked] = []
        self.gotten: list[str] = []
        self._opened: list[APIServer] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)

    async def __aenter__(self) -> Peer:
        await self.server.start_server()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._opened:
            await server.close()
        await self.server.close()

    def opened(self, server: S) -> S:
        """Return a client of this peer and close it with the peer."""
        self._opened.append(server)
        return server

    @property
    def url(self) -> str:
        return str(self.server.make_url("/")).rstrip("/")

    @property
    def bodies(self) -> list[Any]:
        return [asked.body for asked in self.asked]

    @property
    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            self.gotten.append(request.path)
            reply = self.gets.get(request.path, Reply({"detail": "Not Found"}, 404))
        else:
            assert request.transport is not None
            self.asked.append(
                Asked(
                    request.path,
                    json.loads(await request.read()),
                    dict(request.headers),
                    dict(request.query),
                    request.transport.get_extra_info("peername")[1],
                )
            )
            reply = self.replies[min(len(self.asked), len(self.replies)) - 1]
        raw = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {"Content-Type": "application/json", **reply.headers}
        return web.Response(body=raw, status=reply.status, headers=headers)

    def config(self, **changes: Any) -> APIServerConfig:
        values = {"base_url": self.url, "model_name": "m", "health_check": False, **changes}
        return APIServerConfig(**values)


class Characters:
    """A tokenizer whose ids are code points; 1 begins a text, 2 ends it, 3 ends a turn."""

    bos_token, bos_token_id = "\x01", 1
    eos_token, eos_token_id = "\x02", 2
    all_special_ids = (1, 2, 3)
    chat_template = "{role}:{content}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.all_special_ids)]
        return "".join(map(chr, kept))

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: list[Any] | None = None,
        **variables: Any,
    ) -> str:
        assert not tokenize
        lines = [f"tools={len(tools)}\n"] if tools else []
        lines += [f"{name}={value}\n" for name, value in variables.items()]
        lines += [f"{message['role']}:{message['content']}\n" for message in messages]
        text = "\x01" + "".join(lines) + ("assistant:" if add_generation_prompt else "")
        return text.removesuffix("\n") if continue_final_message else text
