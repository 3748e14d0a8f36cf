"""The hub over HTTP: `create_app(hub)` makes applications, `app` is one that keeps everything in memory.

An application is FastAPI behind middlewares: metrics and log, access rights, back-pressure, bodies. All use the table
of routes in handlers.py. No CORS headers are sent. README.md is the wire contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib import __version__
from atroposlib.api.http import handlers
from atroposlib.api.http.handlers import ROUTES, Services
from atroposlib.api.http.limits import (
    ByteBudget,
    HubLimits,
    Ladder,
    RequestBodies,
    is_native,
    refusal,
    return_memory,
)
from atroposlib.api.http.metrics import HubMetrics, Observe
from atroposlib.api.http.payloads import DecoderUnavailable, GroupCodec
from atroposlib.api.http.routes import Route
from atroposlib.api.http.security import Access, TokenSet
from atroposlib.api.run.environments import MIN_ENV_WEIGHT as MIN_ENV_WEIGHT
from atroposlib.api.run.environments import EnvironmentNotFound, TooManyEnvironments
from atroposlib.api.run.hub import DEFAULT_RUN, Hub, TooManyRuns
from atroposlib.api.run.leases import LeaseLost, Superseded, UnknownBatch
from atroposlib.api.run.replica import Replica
from atroposlib.api.run.types import ExperimentReplaced, Overloaded, RunFinished, RunMoved, RunReset
from atroposlib.api.schemas import EnvIdentifier as EnvIdentifier
from atroposlib.api.schemas import HubInfo, HubStatus
from atroposlib.api.schemas import RegisterEnv as RegisterEnv
from atroposlib.api.schemas import Registration as Registration
from atroposlib.api.schemas import ScoredData as ScoredData
from atroposlib.api.stores.base import OwnedElsewhere, StoreBroken, StoreFull, UnreadableRun
from atroposlib.errors import ConfigError, GroupError
from atroposlib.utils import tracing

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often leases, groups and environments are checked for expiry."""
TIDY_S = 60.0
"""How often idle runs are closed, and what was set aside is measured."""
LAG_PERIOD_S = 0.05
_MAX_FAULTS = 20
"""Faults named in one response."""


class _Refusal(NamedTuple):
    status: int
    kind: str
    is_temporary: bool = False
    """Whether a retry may succeed. Original clients, which would drop a group at another status, get 503."""


_REFUSALS: dict[type, _Refusal] = {
    UnknownBatch: _Refusal(404, "unknown_batch"),
    LeaseLost: _Refusal(409, "lease_expired"),
    Superseded: _Refusal(409, "superseded"),
    RunReset: _Refusal(409, "run_reset"),
    ExperimentReplaced: _Refusal(409, "another_run"),
    RunFinished: _Refusal(409, "run_finished"),
    ConfigError: _Refusal(409, "not_a_run"),
    TooManyRuns: _Refusal(403, "too_many_runs", is_temporary=True),
    TooManyEnvironments: _Refusal(503, "too_many_environments", is_temporary=True),
    DecoderUnavailable: _Refusal(503, "decoder_unavailable", is_temporary=True),
    Overloaded: _Refusal(429, "overloaded", is_temporary=True),
    StoreFull: _Refusal(507, "store_full", is_temporary=True),
    RunMoved: _Refusal(503, "run_moved", is_temporary=True),
    OwnedElsewhere: _Refusal(503, "run_moved", is_temporary=True),
    StoreBroken: _Refusal(503, "store_broken", is_temporary=True),
    UnreadableRun: _Refusal(503, "run_unreadable", is_temporary=True),
}


_router = APIRouter()
"""Its routes are made once, since that takes 25 ms."""
for _route in ROUTES:
    if _route.handler is not None:
        _router.add_api_route(
            _route.template, _route.handler, methods=[_route.method], **_route.api
        )


def create_app(
    hub: Hub | None = None,
    *,
    limits: HubLimits | None = None,
    tokens: TokenSet | None = None,
    replica: Replica | None = None,
    replica_tls: ssl.SSLContext | None = None,
) -> FastAPI:
    """Build the application around a hub; `tokens` None: requests need no token.

    `replica`: the hub's membership of several on one database, with the TLS settings for requests to the others.
    """
    hub = hub or Hub()
    limits = limits or HubLimits()
    if tokens is not None:
        hub.quota_of = tokens.quota_of
    codec = GroupCodec()
    metrics = HubMetrics(lambda: hub.runs)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tracing.is_on()  # imports the exporter, which takes half a second, before the first request
        await (replica or hub).open()
        work = {hub.tick: TICK_S, hub.close_idle: TIDY_S, hub.delete_surplus: TIDY_S}
        watchers = [
            *(
                asyncio.create_task(_repeat(each, every_s=every_s, may_recover=replica is not None))
                for each, every_s in work.items()
            ),
            asyncio.create_task(_watch_lag(metrics)),
            asyncio.create_task(return_memory(batches, bodies.received, bodies.inflated)),
        ]
        if sender is not None:
            await sender.open()
            watchers.append(asyncio.create_task(sender.watch()))
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await (replica or hub).close()
            if sender is not None:
                await sender.close()
            await codec.close()

    app = HubApp(
        title="AtroposLib API",
        version=__version__,
        lifespan=lifespan,
        # A redirect would lose the run in the path.
        redirect_slashes=False,
        servers=[{"url": "/", "description": "run `default`"}]
        + [{"url": "/runs/{run}", "variables": {"run": {"default": DEFAULT_RUN}}}],
    )
    app.state.hub = hub
    batches = ByteBudget(limits.max_inflight_bytes)
    app.state.services = Services(
        hub=hub,
        limits=limits,
        codec=codec,
        metrics=metrics,
        batches=batches,
        lookups=ByteBudget(limits.max_lookup_bytes),
        replica=replica,
    )
    app.router.routes += _router.routes
    _handle_errors(app)
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    # What a request passes, from its handler outwards: body, room in its run, its owner, access rights, the log.
    bodies = RequestBodies(app.serve, limits)
    front: ASGIApp = Ladder(bodies, limits=limits, runs=hub.runs, metrics=metrics)
    sender = None
    if replica is not None:
        # Brings aiohttp, a tenth of a start and 9 MB, which a hub alone does not need.
        from atroposlib.api.http.forwarding import Receiver, Sender

        metrics.watch_replica(replica)
        front = sender = Sender(front, replica, metrics, tls=replica_tls)
    front = Observe(Access(front, ROUTES, tokens), metrics)
    app.front = front if replica is None else Receiver(front, replica)
    return app


class HubApp(FastAPI):
    """FastAPI behind the hub's middlewares; it only documents the routes that are served directly (`Route.direct`).

    The middlewares are not registered with FastAPI: its work before the first one costs a quarter of the CPU time of a
    small request.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.front: ASGIApp = self.serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.front(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that the middlewares have admitted."""
        route: Route | None = scope.get("hub_route")
        if route is None or route.direct is None:
            await super().__call__(scope, receive, send)
            return
        # `RequestBodies` passes the body in one message, and Starlette would copy it; the next is the disconnect.
        scope["body"] = (await receive())["body"]
        request = Request(scope, receive, send)
        try:
            response = await route.direct(request)
        except Exception as e:
            known = (self.exception_handlers.get(kind) for kind in type(e).__mro__)
            answer: Any = next(filter(None, known), None)
            if answer is None:
                raise
            response = await answer(request, e)
        await response(scope, receive, send)


# Names that code written for the original imports.
Info = HubInfo
Status = HubStatus
root = handlers.root
register = handlers.register
register_env_url = handlers.register_env
disconnect_env = handlers.disconnect_env
wandb_info = handlers.wandb_info
info = handlers.info
get_batch = handlers.batch
get_latest_example = handlers.latest_example
scored_data = handlers.scored_data
scored_data_list = handlers.scored_data_list
get_status = handlers.status
get_status_env = handlers.status_env
reset_data = handlers.reset_data


class GZipRequestMiddleware(RequestBodies):
    """Inflates request bodies for other applications, with the same limit for all paths."""

    def __init__(self, app: ASGIApp, limits: HubLimits | None = None) -> None:
        limits = limits or HubLimits()
        same = dataclasses.replace(limits, max_control_body_bytes=limits.max_body_bytes)
        super().__init__(app, same)


async def _repeat(
    work: Callable[[], Coroutine[Any, Any, None]], *, every_s: float, may_recover: bool
) -> None:
    """Do what is due even without requests. `may_recover`: broken stores are opened again."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except StoreBroken:
            if not may_recover:
                logger.exception("a store is broken; the hub has to be restarted")
                return
        except Exception:
            # This task is awaited only at shutdown: if it ended, nothing would expire, unnoticed.
            logger.exception("%s failed; it is tried again in %.0f s", work.__qualname__, every_s)


async def _watch_lag(metrics: HubMetrics) -> None:
    """Measure how late the event loop wakes this task: every request is delayed as much."""
    while True:
        started = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_S)
        metrics.lag.observe(max(0.0, time.monotonic() - started - LAG_PERIOD_S))


def _handle_errors(app: FastAPI) -> None:
    """Register the handlers that turn errors into responses."""

    @app.exception_handler(RequestValidationError)
    async def refuse_request(_: Request, error: RequestValidationError) -> JSONResponse:
        # The input is not repeated: it may be long, or not expressible in JSON, such as NaN.
        faults = error.errors()[:_MAX_FAULTS]
        detail = [{key: fault[key] for key in ("type", "loc", "msg")} for fault in faults]
        return JSONResponse({"detail": detail}, status_code=422)

    @app.exception_handler(GroupError)
    async def refuse_group(_: Request, error: GroupError) -> JSONResponse:
        path, _sep, what = str(error).partition(": ")
        detail = {"type": "group_error", "loc": ["body", path], "msg": what or path}
        return JSONResponse({"detail": [detail]}, status_code=422)

    @app.exception_handler(EnvironmentNotFound)
    async def refuse_environment(_: Request, error: EnvironmentNotFound) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        row = next(_REFUSALS[kind] for kind in type(error).__mro__ if kind in _REFUSALS)
        status = 503 if row.is_temporary and not is_native(request.scope) else row.status
        return refusal(status, row.kind, str(error), is_temporary=row.is_temporary)

    for kind in _REFUSALS:
        app.add_exception_handler(kind, refuse)


app = create_app()
