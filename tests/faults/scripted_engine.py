"""An inference server in the test's own event loop: stock vLLM's routes, bodies that are a function of the prompt.

Its faults are switched on and off by the test: answers of 5xx, connections dropped in the middle, a port that does not
listen. It samples nothing: `ANSWER_TOKENS` bytes per choice, which the tests recognise again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from aiohttp import web

from tests.processes import free_port

ANSWER_TOKENS = 6


def answer_tokens(prompt: list[int], choice: int) -> list[int]:
    """The ids every attempt with this prompt gets for this choice."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt)) + 31 * choice
    return [3 + (seed + 7 * i) % 250 for i in range(ANSWER_TOKENS)]


class ScriptedEngine:
    """Open it with `async with`; `url` goes to `--openai.base_url`."""

    def __init__(self, *, delay_s: float = 0.02, seed: int = 0) -> None:
        self.port = free_port()
        self.delay_s = delay_s
        self.error_chance = 0.0
        """That a request is answered 5xx, or a health check 503."""
        self.drop_chance = 0.0
        """That a connection is broken: before the answer, or in the middle of it."""
        self.counts: Counter[str] = Counter()
        """What requests came to: answered, refused, dropped."""
        self._rng = random.Random(seed)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()

    async def stop(self) -> None:
        """Break every connection and listen no more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> ScriptedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._rng.random() < self.error_chance else 200)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await asyncio.sleep(self.delay_s * (0.5 + self._rng.random()))
        if self._rng.random() < self.error_chance:
            self.counts["refused"] += 1
            return web.Response(status=self._rng.choice((500, 502, 503)), text="scripted failure")
        if self._rng.random() < self.drop_chance:
            return await self._drop(request)
        self.counts["answered"] += 1
        return web.json_response({"object": "text_completion", "choices": _choices(body)})

    async def _drop(self, request: web.Request) -> web.StreamResponse:
        self.counts["dropped"] += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 10_000
        if self._rng.random() < 0.5:
            await response.prepare(request)
            await response.write(b'{"object": "text_comp')
        assert request.transport is not None
        request.transport.abort()
        return response


def _choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for choice in range(body.get("n", 1)):
        tokens = answer_tokens(body["prompt"], choice)
        made.append(
            {
                "index": choice,
                "text": "".join(chr(65 + token % 26) for token in tokens),
                "token_ids": tokens,
                "logprobs": {"token_logprobs": [-token / 256 for token in tokens]},
                "finish_reason": "length",
            }
        )
    return made
