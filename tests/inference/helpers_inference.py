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

    def __init__(self, *, routes: str = "vllm", ignores_n: bool = False) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []
        self.health_statuses: list[int] = []
        self.num_health = 0
        self.ignores_n = ignores_n
        self.gives_token_ids = True
        self.spans: list[dict[str, Any]] | None = None
        self.weight_version: str | None = None
        """What /weight_info tells; None: the route does not exist."""
        self.num_weight_info = 0
        self.swaps_weights = False
        """Every question finds newer weights than the one before."""
        self.drop_logprobs = 0
        self.hold: asyncio.Event | None = None
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        paths = {}
        if routes in ("vllm", "both"):
            app.router.add_post("/v1/completions", self._completions)
            app.router.add_post("/v1/chat/completions", self._chat)
            paths["/v1/completions"] = {}
        if routes in ("generate", "both"):
            app.router.add_post("/generate", self._generate)
            paths["/generate"] = {}

        async def openapi(request: web.Request) -> web.Response:
            return web.json_response({"paths": paths})

        app.router.add_get("/openapi.json", openapi)
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

    async def _weight_info(self, request: web.Request) -> web.Response:
        self.num_weight_info += 1
        if self.weight_version is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        answer = web.json_response({"weight_version": self.weight_version})
        if self.swaps_weights:
            self.weight_version = str(int(self.weight_version) + 1)
        return answer

    async def _read(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.requests.append((request.path, body))
        self.headers.append(dict(request.headers))
        if self.hold is not None:
            await self.hold.wait()
        if self.statuses:
            status = self.statuses.pop(0)
            text = f"scripted failure {status}"
            raise _Failure(web.Response(status=status, text=text))
        return body

    async def _completions(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
        except _Failure as e:
            return e.response
        prompt = body["prompt"]
        choices = []
        for i in range(1 if self.ignores_n else body.get("n", 1)):
            ids = prompt if isinstance(prompt, list) else [ord(c) for c in prompt]
            tokens, logprobs = sample(ids, i, body.get("max_tokens", 16))
            choice: dict[str, Any] = {
                "index": i,
                "text": "".join(chr(65 + t % 26) for t in tokens),
                "finish_reason": "length",
                "logprobs": None,
            }
            if body.get("logprobs") is not None:
                kept = logprobs[: len(logprobs) - self.drop_logprobs]
                choice["logprobs"] = {"token_logprobs": kept, "tokens": []}
            if body.get("return_token_ids") and self.gives_token_ids:
                choice |= {"token_ids": tokens, "prompt_token_ids": ids}
            if self.spans is not None:
                choice["weight_versions"] = self.spans
            if body.get("prompt_logprobs"):
                choice["prompt_logprobs"] = [None] + [
                    {
                        str(t): {"logprob": -0.5, "rank": 2},
                        str(t + 1): {"logprob": -0.25, "rank": 1},
                    }
                    for t in ids[1:]
                ]
            choices.append(choice)
        usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        return web.json_response(
            {
                "id": "c",
                "object": "text_completion",
                "created": 1,
                "model": "tiny",
                "choices": choices,
                "usage": usage,
            }
        )

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
        except _Failure as e:
            return e.response
        n = 1 if self.ignores_n else body.get("n", 1)
        message = {"role": "assistant", "content": f"echo {body['messages'][-1]['content']}"}
        choices = [{"index": i, "message": message, "finish_reason": "abort"} for i in range(n)]
        usage = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": "tiny",
                "choices": choices,
                "usage": usage,
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = await self._read(request)
        except _Failure as e:
            return e.response
        ids = body["prompt"]["prompt_token_ids"]
        sequences = []
        for i in range(body.get("n", 1)):
            tokens, logprobs = sample(ids, i, body.get("max_tokens", 16))
            sequences.append([[{str(t): v}] for t, v in zip(tokens, logprobs, strict=True)])
        return web.json_response(
            {"logprobs": sequences, "finish_reasons": ["stop"] * len(sequences)}
        )


class _Failure(Exception):
    def __init__(self, response: web.Response) -> None:
        self.response = response
