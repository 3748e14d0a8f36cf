"""An in-process server with stock vLLM's bodies, whose samples are a pure function of the prompt's token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.inference.config import APIServerConfig


def sample(prompt: list[int], choice: int, num_tokens: int) -> tuple[list[int], list[float]]:
    """What the fake engine samples: ids and logprobs that depend on the whole prompt."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt)) + 31 * choice
    tokens = [3 + (seed + 7 * i) % 250 for i in range(num_tokens)]
    return tokens, [-((seed + i) % 97 + 1) / 100 for i in range(num_tokens)]


class FakeEngine:
    """Records requests; `statuses` are answered (and used up) before anything else."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.statuses: list[int] = []
        self.health_statuses: list[int] = []
        self.num_health = 0
        self.hold: asyncio.Event | None = None
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._health)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        self.server = TestServer(app)

    async def __aenter__(self) -> FakeEngine:
        await self.server.start_server()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.close()

    @property
    def url(self) -> str:
        return str(self.server.make_url("/")).rstrip("/")

    def config(self, **changes: Any) -> APIServerConfig:
        values = {
            "base_url": f"{self.url}/v1",
            "model_name": "tiny",
            "server_type": "vllm",
            "health_wait_s": 1.0,
            **changes,
        }
        return APIServerConfig(**values)

    async def _health(self, request: web.Request) -> web.Response:
        self.num_health += 1
        return web.Response(status=self.health_statuses.pop(0) if self.health_statuses else 200)

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.requests.append((request.path, body))
        if self.hold is not None:
            await self.hold.wait()
        if self.statuses:
            status = self.statuses.pop(0)
            raise _Failure(web.Response(status=status, text=f"scripted failure {status}"))
        return body

    async def _completions(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
        except _Failure as e:
            return e.response
        prompt = body["prompt"]
        choices = []
        for i in range(body.get("n", 1)):
            ids = prompt if isinstance(prompt, list) else [ord(c) for c in prompt]
            tokens, logprobs = sample(ids, i, body.get("max_tokens", 16))
            choice: dict[str, Any] = {
                "index": i,
                "text": "".join(chr(65 + t % 26) for t in tokens),
                "finish_reason": "length",
                "logprobs": None,
            }
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"token_logprobs": logprobs, "tokens": []}
            if body.get("return_token_ids"):
                choice |= {"token_ids": tokens, "prompt_token_ids": ids}
            choices.append(choice)
        return web.json_response({"id": "c", "choices": choices})

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
        except _Failure as e:
            return e.response
        n = body.get("n", 1)
        message = {"role": "assistant", "content": f"echo {body['messages'][-1]['content']}"}
        choices = [{"index": i, "message": message, "finish_reason": "stop"} for i in range(n)]
        return web.json_response({"id": "c", "choices": choices})


class _Failure(Exception):
    def __init__(self, response: web.Response) -> None:
        self.response = response
