"""A proxy over a scripted engine, and a client that calls it in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.tools.thoughts import THINK
from atroposlib.proxy.command import create_app
from atroposlib.proxy.sessions import SessionLimits
from atroposlib.scored_data import IGNORE_INDEX
from tests.builders.clocks import Clock

ENGINE_URL = "http://127.0.0.1:9/v1"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call_text(city: str) -> str:
    """What a Hermes model writes to call `weather`."""
    call = json.dumps({"name": "weather", "arguments": {"city": city}})
    return f"<tool_call>\n{call}\n</tool_call>"


def weather_agent(request: HarnessRequest) -> str:
    """Call the tool, then answer with what it said."""
    turn = request.prompt.count("<assistant>")
    return f"Let me look.\n{call_text('Oslo')}" if turn == 1 else f"It is {turn} degrees."


WEATHER_TALK = f"Let me look.\n{call_text('Oslo')}<eos>It is 2 degrees.<eos>"
"""What is trained of `weather_agent` in two turns."""


class Thinker(ByteTokenizer):
    """Its template opens the thought if it `opens`, and else knows what a thought is."""

    opens = False
    tags = THINK

    @property
    def chat_template(self) -> str:
        return f"<role>content<eos>{{# {self.tags.closing} #}}"

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        text = super().apply_chat_template(*args, **{**options, "tokenize": False})
        opens = self.opens and options.get("add_generation_prompt")
        return f"{text}{self.tags.opening}\n" if opens else text


class Proxy:
    """The application, its engine, and a client."""

    def __init__(
        self,
        respond: Callable[[HarnessRequest], str] = lambda request: "hello",
        *,
        token: str | None = None,
        limits: SessionLimits | None = None,
        is_private: bool = False,
    ) -> None:
        config = APIServerConfig(model_name="tiny", base_url=ENGINE_URL, server_type="vllm")
        self.engine = ServerHarness(config, respond=respond, weight_version="7")
        self.manager = ServerManager([config])
        self.manager.servers = [self.engine]
        self.clock = Clock(1000.0)
        self.tokenizer = ByteTokenizer()
        self.app = create_app(
            self.manager,
            self.tokenizer,
            "tiny",
            token=token,
            is_private=is_private,
            limits=limits,
            clock=self.clock,
        )
        self.sessions = self.app.state.sessions
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://proxy"
        )

    async def __aenter__(self) -> Proxy:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()
        await self.sessions.close_all()

    async def open(self, **body: Any) -> str:
        """Open a session and return its uuid."""
        answer = await self.client.post("/sessions/create", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["uuid"])

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        """Return the answer's JSON, which must be a success."""
        answer = await self.client.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def nodes(self, uuid: str) -> list[dict[str, Any]]:
        answer = await self.client.get(f"/{uuid}/nodes")
        assert answer.status_code == 200, answer.text
        nodes: list[dict[str, Any]] = answer.json()["nodes"]
        return nodes


class Held:
    """Holds the attempts of a proxy's engine until `go_on`; `asked` and `cancelled` tell where they are."""

    def __init__(self, engine: ServerHarness) -> None:
        self.asked, self.go_on, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_asked = 0
        self._answer = engine._tokens_and_logprobs_completion_wrapper
        engine._tokens_and_logprobs_completion_wrapper = self._wait  # type: ignore[method-assign]

    async def _wait(self, **kwargs: Any) -> Any:
        self.num_asked += 1
        self.asked.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await self._answer(**kwargs)


def trained_text(node: dict[str, Any]) -> str:
    """Return what is trained of a node, as text."""
    trained = [token for token in node["masked_tokens"] if token != IGNORE_INDEX]
    return ByteTokenizer().decode(trained)


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the JSON payloads of server-sent events, `[DONE]` left out."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
