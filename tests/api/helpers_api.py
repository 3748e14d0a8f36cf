"""Builders and an in-process client for the hub's tests."""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from atroposlib.api.http.limits import HubLimits, Ladder
from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.security import TokenSet
from atroposlib.api.run.batching import NoBatch, Plan
from atroposlib.api.run.coordinator import Coordinator, Signal
from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.queue import GroupQueue
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.server import create_app
from atroposlib.scored_data import GroupHeader
from atroposlib.utils.local_server import listening

FOURTEEN_KEYS = [
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
]


def registration(**changes: Any) -> dict[str, Any]:
    return {
        "wandb_group": "g",
        "wandb_project": "p",
        "batch_size": 4,
        "max_token_len": 128,
        "checkpoint_dir": "ck",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 3,
    } | changes


def environment(**changes: Any) -> dict[str, Any]:
    return {
        "max_token_length": 2048,
        "desired_name": "foo",
        "weight": 1.0,
        "min_batch_allocation": None,
        "group_size": 2,
    } | changes


def group(num_sequences: int = 2, first_token: int = 7, **changes: Any) -> dict[str, Any]:
    """A group whose first token tells it from others."""
    return {
        "tokens": [[first_token, i] for i in range(num_sequences)],
        "masks": [[-100, i] for i in range(num_sequences)],
        "scores": [float(i) for i in range(num_sequences)],
    } | changes


def _filled_with(groups: Iterable[GroupHeader]) -> GroupQueue:
    """A queue of these groups; empty ones never come to a queue."""
    queue = GroupQueue()
    for group in groups:
        if group.num_sequences:
            queue.add(group)
    return queue


def plan_batch(
    groups: Iterable[GroupHeader], *, batch_size: int, floors: Mapping[int, int] | None = None
) -> Plan | NoBatch:
    """What is cut from a queue of these groups."""
    return _filled_with(groups).plan(batch_size=batch_size, floors=floors or {})


class TracedHeader(GroupHeader):
    """A header that cannot be read without running a line of Python."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def plan_counted(
    groups: Iterable[GroupHeader],
    *,
    batch_size: int,
    floors: Mapping[int, int],
    overdue_before: int | None = None,
) -> tuple[Plan | NoBatch, int]:
    """Plan a batch, and count the lines of Python that run meanwhile: at least one for every group that is read."""
    queue = _filled_with(
        TracedHeader(number=each.number, env_id=each.env_id, num_sequences=each.num_sequences)
        for each in groups
    )
    num_lines = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    earlier = sys.gettrace()
    sys.settrace(count)
    try:
        plan = queue.plan(batch_size=batch_size, floors=floors, overdue_before=overdue_before)
    finally:
        sys.settrace(earlier)
    return plan, num_lines


class Hub:
    """One hub in this process and a client of it."""

    def __init__(self, http: httpx.AsyncClient, coordinator: Coordinator, app: FastAPI) -> None:
        self.http = http
        self.coordinator = coordinator
        """Of the default run."""
        self.app = app

    @property
    def runs(self) -> list[str]:
        return sorted(self.app.state.hub.runs)

    async def get(self, path: str, **request: Any) -> Any:
        return (await self.http.get(path, **request)).raise_for_status().json()

    async def post(self, path: str, body: Any) -> Any:
        return (await self.http.post(path, json=body)).raise_for_status().json()

    async def start(self, *environments: dict[str, Any], **changes: Any) -> None:
        """Register a trainer, let environments in and register them."""
        await self.post("/register", registration(**changes))
        await self.get("/batch")
        for each in environments:
            await self.post("/register-env", each)

    async def balanced_ledger(self) -> dict[str, Any]:
        ledger: dict[str, Any] = await self.get("/ledger")
        places = {
            name: count
            for name, count in ledger.items()
            if name not in ("produced", "rejected", "duplicates", "dead_reasons")
        }
        assert ledger["produced"] == sum(places.values()) + sum(ledger["rejected"].values()), ledger
        return ledger


@asynccontextmanager
async def running_hub(
    limits: HubLimits | None = None,
    *,
    runs: Runs | None = None,
    policy: RunPolicy | None = None,
    tokens: TokenSet | None = None,
    raise_app_exceptions: bool = True,
) -> AsyncIterator[Hub]:
    runs = runs or Runs(policy=policy)
    app = create_app(runs, limits=limits, tokens=tokens)
    transport = httpx.ASGITransport(app, raise_app_exceptions=raise_app_exceptions)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://hub") as http,
    ):
        yield Hub(http, await runs.run(), app)


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serve `app` on a loopback port; 0: a free one."""
    listener = listening("127.0.0.1", port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


async def unexpected_send(message: Any) -> None:
    raise AssertionError(message)


async def unexpected_receive() -> Any:
    raise AssertionError("the body was read")


class Answers(list[Any]):
    """The messages that an application sends."""

    async def send(self, message: Any) -> None:
        self.append(message)


class FullRun:
    """A run that is full until told otherwise, and what was counted."""

    def __init__(self) -> None:
        self.reason: str | None = "999 sequences are queued"
        self.progress = Signal()
        self.metrics = HubMetrics(dict)

    def overload(self) -> str | None:
        return self.reason

    @property
    def outcomes(self) -> dict[str, float]:
        found = self.metrics.back_pressure.collect()
        return {
            f"{sample.labels['run']} {sample.labels['outcome']}": sample.value
            for family in found
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def num_held(self) -> float:
        [family] = self.metrics.held.collect()
        return family.samples[0].value

    def ladder(self, app: ASGIApp, **limits: Any) -> Ladder:
        runs: Any = {"default": self, "math": self}
        return Ladder(app, limits=HubLimits(**limits), runs=runs, metrics=self.metrics)
