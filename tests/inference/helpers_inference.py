"""The scripted engine with the routes that stock vLLM has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.scripted_engine import (
    Fault,
    Script,
    ScriptedEngine,
    made_up_logprobs,
    made_up_tokens,
)
from atroposlib.inference.scripted_engine.generation import PRINTABLE
from atroposlib.inference.servers.vllm import ORIGINAL_ROUTE, TOKENS_ROUTE, VLLMServer

NOT_IN_STOCK_VLLM = (TOKENS_ROUTE, ORIGINAL_ROUTE, "/weight_info")


class FastVLLM(VLLMServer):
    """A client that waits for next to nothing between attempts and between health checks."""

    max_backoff_s = 0.0
    health_poll_s = 0.001


class StockVLLM(ScriptedEngine):
    """A scripted engine of the model `tiny`, by default without the routes and versions that stock vLLM lacks."""

    def __init__(
        self, script: Script | None = None, *, missing: tuple[str, ...] = NOT_IN_STOCK_VLLM
    ) -> None:
        super().__init__(
            script or Script(reports_spans=False),
            model_name="tiny",
            weight_version="7",
            missing_paths=missing,
        )

    def config(self, **changes: Any) -> APIServerConfig:
        """Return the configuration of a client of this engine."""
        values = {
            "base_url": f"{self.url}/v1",
            "model_name": "tiny",
            "server_type": "vllm",
            "health_wait_s": 20.0,
            **changes,
        }
        return APIServerConfig(**values)

    def fail(self, *statuses: int, path: str = "", times: int = 1) -> None:
        """Answer the next requests, or those for `path`, with these statuses, each `times` times."""
        kept = [fault for fault in self.script.faults if fault.path != path]
        faults = [Fault(kind="status", status=s, path=path, times=times) for s in statuses]
        self.set_script(msgspec.structs.replace(self.script, faults=(*kept, *faults)))


async def eventually(holds: Callable[[], bool]) -> None:
    """Return when a condition holds that has no event."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Sample(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def sample(
    prompt: list[int],
    choice: int = 0,
    *,
    num_tokens: int = 0,
    seed: int = 0,
    spans: Sequence[tuple[str, int]] = (),
) -> Sample:
    """Return what the engine samples after a prompt: `num_tokens` under its first weights, or `spans`."""
    spans = spans or [("7", num_tokens)]
    tokens = made_up_tokens(prompt, seed=seed, choice=choice, spans=spans, alphabet=PRINTABLE)
    return Sample(tokens, made_up_logprobs(prompt, tokens, spans=spans))
