"""The hub over HTTP: `create_app(hub)` makes applications, `app` is one that keeps everything in memory.

An application is FastAPI with layers in front: figures and log, rights, back-pressure, bodies, hot handlers. All go by
the one table of routes in handlers.py. No CORS headers are sent. README.md is the wire contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib import __version__
from atroposlib.api.http.handlers import ROUTES, Services, is_ours
from atroposlib.api.http.limits import ByteBudget, HubLimits, Ladder, RequestBodies
from atroposlib.api.http.metrics import HubMetrics, Observe
from atroposlib.api.http.payloads import DecoderUnavailable, GroupCodec
from atroposlib.api.http.routes import Route
from atroposlib.api.http.security import Access, TokenSet
from atroposlib.api.run.environments import MIN_ENV_WEIGHT as MIN_ENV_WEIGHT
from atroposlib.api.run.environments import TooManyEnvironments, UnknownEnvironment
from atroposlib.api.run.hub import DEFAULT_RUN, Hub, TooManyRuns
from atroposlib.api.run.leases import LeaseLost, Superseded, UnknownBatch
from atroposlib.api.run.types import AnotherExperiment, Overloaded, RunReset
from atroposlib.api.schemas import EnvIdentifier as EnvIdentifier
from atroposlib.api.schemas import HubInfo, HubStatus
from atroposlib.api.schemas import RegisterEnv as RegisterEnv
from atroposlib.api.schemas import Registration as Registration
from atroposlib.api.schemas import ScoredData as ScoredData
from atroposlib.api.stores.base import StoreBroken, StoreFull, UnreadableRun
from atroposlib.errors import ConfigError, GroupError

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often leases, groups and environments are looked at for expiry when nobody calls."""
LAG_PERIOD_S = 0.05
_MAX_FAULTS = 20
"""Named in one refusal."""


def create_app(
    hub: Hub | None = None, *, limits: HubLimits | None = None, tokens: TokenSet | None = None
) -> FastAPI:
    """Build the application around a hub; `tokens` None: whoever reaches it may call it."""
    hub = hub or Hub()
    limits = limits or HubLimits()
    codec = GroupCodec()
    metrics = HubMetrics(lambda: hub.runs)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await hub.open()
        watchers = [
            asyncio.create_task(_let_time_pass(hub)),
            asyncio.create_task(_watch_lag(metrics)),
        ]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            await hub.close()
            await codec.close()

    def is_full(name: str) -> str | None:
        run = hub.runs.get(name)
        return None if run is None else run.overload()

    async def room(name: str, timeout_s: float) -> bool:
        run = hub.runs.get(name)
        if run is None or run.progress.is_closed:
            return False
        await run.progress.wait(timeout_s)
        return True

    app = HubApp(
        title="AtroposLib API",
        version=__version__,
        lifespan=lifespan,
        # A redirect would name the path without its run.
        redirect_slashes=False,
        servers=[{"url": "/", "description": "run `default`"}]
        + [{"url": "/runs/{run}", "variables": {"run": {"default": DEFAULT_RUN}}}],
    )
    app.state.hub = hub
    app.state.services = Services(
        hub=hub,
        limits=limits,
        codec=codec,
        metrics=metrics,
        batches=ByteBudget(limits.max_inflight_bytes),
        lookups=ByteBudget(limits.max_lookup_bytes),
    )
    for route in ROUTES:
        if route.handler is not None:
            app.add_api_route(route.template, route.handler, methods=[route.method], **route.api)
    _handle_errors(app, retry_after_s=limits.retry_after_s)
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    # From the inside out: a handler is called only after rights, room and body have been looked at.
    front: ASGIApp = HotRoutes(app.front, error_handlers=app.exception_handlers)
    front = RequestBodies(front, limits)
    front = Ladder(front, limits=limits, is_full=is_full, room=room, metrics=metrics)
    front = Access(front, ROUTES, tokens)
    app.front = Observe(front, metrics)
    return app


class HubApp(FastAPI):
    """FastAPI behind layers of ours.

    As FastAPI's own middleware they would be the same, but what FastAPI does before the first of them costs a quarter
    of the CPU time of a small request.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.front: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.front(scope, receive, send)


class _WholeRequest(Request):
    """A request whose body has come. Starlette's own would copy it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body: bytes) -> None:
        super().__init__(scope, receive, send)
        self._whole = body

    async def body(self) -> bytes:
        return self._whole


class HotRoutes:
    """ASGI middleware: calls the handlers of the hot routes, which FastAPI, behind it, only describes.

    Errors become answers by the same handlers as there.
    """

    def __init__(self, app: ASGIApp, error_handlers: Mapping[Any, Callable[..., Any]]) -> None:
        self._app = app
        self._error_handlers = error_handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: Route | None = scope.get("hub_route")
        if route is None or not route.is_hot or route.handler is None:
            await self._app(scope, receive, send)
            return
        message = (
            await receive()
        )  # `RequestBodies` hands bodies over whole; what follows is the disconnect
        request = _WholeRequest(scope, receive, send, body=message["body"])
        try:
            response = await route.handler(request)
        except Exception as e:
            known = (self._error_handlers.get(kind) for kind in type(e).__mro__)
            answer = next(filter(None, known), None)
            if answer is None:
                raise
            response = await answer(request, e)
        await response(scope, receive, send)


# The names that importers of the original know them by.
Info = HubInfo
Status = HubStatus


class GZipRequestMiddleware(RequestBodies):
    """Inflates request bodies, for other applications: under one limit, whatever their paths."""

    def __init__(self, app: ASGIApp, limits: HubLimits | None = None) -> None:
        limits = limits or HubLimits()
        same = dataclasses.replace(limits, max_control_body_bytes=limits.max_body_bytes)
        super().__init__(app, same)


def stop_waiting(app: FastAPI) -> None:
    """Answer every waiting request now, for a quick shutdown."""
    app.state.hub.stop_waiting()


async def _let_time_pass(hub: Hub) -> None:
    """Expire what nobody asks for."""
    while True:
        await asyncio.sleep(TICK_S)
        try:
            await hub.tick()
        except StoreBroken:
            logger.exception("a store is broken; the hub has to be restarted")
            return
        except Exception:
            # Nobody awaits this task: its end would go unnoticed, and nothing would expire any more.
            logger.exception("expiry failed; it is tried again in %.0f s", TICK_S)


async def _watch_lag(metrics: HubMetrics) -> None:
    """Measure how late the event loop comes back: what it is doing meanwhile, everybody waits for."""
    while True:
        started = time.monotonic()
        await asyncio.sleep(LAG_PERIOD_S)
        metrics.observe_lag(time.monotonic() - started - LAG_PERIOD_S)


def _handle_errors(app: FastAPI, *, retry_after_s: int) -> None:
    """One place that turns errors into answers."""

    @app.exception_handler(RequestValidationError)
    async def refuse_request(_: Request, error: RequestValidationError) -> JSONResponse:
        # What was sent is not repeated: it may be long, or nothing that JSON can say, such as NaN.
        faults = error.errors()[:_MAX_FAULTS]
        detail = [{key: fault[key] for key in ("type", "loc", "msg")} for fault in faults]
        return JSONResponse({"detail": detail}, status_code=422)

    @app.exception_handler(GroupError)
    async def refuse_group(_: Request, error: GroupError) -> JSONResponse:
        path, _sep, what = str(error).partition(": ")
        detail = {"type": "group_error", "loc": ["body", path], "msg": what or path}
        return JSONResponse({"detail": [detail]}, status_code=422)

    def answer(status: int, kind: str) -> Any:
        async def handle(_: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"detail": {"type": kind, "msg": str(error)}}, status_code=status)

        return handle

    def answer_later(ours: int, kind: str) -> Any:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse(
                {"detail": {"type": kind, "msg": str(error)}},
                status_code=ours if is_ours(request) else 503,
                headers={"Retry-After": str(retry_after_s)},
            )

        return handle

    @app.exception_handler(UnknownEnvironment)
    async def refuse_environment(_: Request, error: UnknownEnvironment) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    app.add_exception_handler(UnknownBatch, answer(404, "unknown_batch"))
    app.add_exception_handler(LeaseLost, answer(409, "lease_expired"))
    app.add_exception_handler(Superseded, answer(409, "superseded"))
    app.add_exception_handler(RunReset, answer(409, "run_reset"))
    app.add_exception_handler(AnotherExperiment, answer(409, "another_run"))
    app.add_exception_handler(ConfigError, answer(409, "not_a_run"))
    app.add_exception_handler(TooManyRuns, answer_later(403, "too_many_runs"))
    app.add_exception_handler(TooManyEnvironments, answer_later(503, "too_many_environments"))
    app.add_exception_handler(DecoderUnavailable, answer_later(503, "decoder_unavailable"))
    app.add_exception_handler(Overloaded, answer_later(429, "overloaded"))
    app.add_exception_handler(StoreFull, answer_later(507, "store_full"))
    app.add_exception_handler(StoreBroken, answer_later(503, "store_broken"))
    app.add_exception_handler(UnreadableRun, answer_later(503, "run_unreadable"))


app = create_app()
