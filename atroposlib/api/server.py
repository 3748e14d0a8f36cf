"""The hub over HTTP: `create_app(hub)` makes applications, `app` is one that keeps everything in memory.

Handlers translate between HTTP and a run's coordinator and hold no state. Token-carrying routes take the raw body and
return bytes; pydantic sees control bodies only. Who may call what is decided in security.py, what a request may cost in
limits.py, before a handler runs. No CORS headers are sent. README.md is the wire contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib import __version__
from atroposlib.api.calls import (
    AnotherExperiment,
    Delivery,
    IncomingGroup,
    NotRegistered,
    Overloaded,
    Receipt,
    RunReset,
)
from atroposlib.api.coordinator import Coordinator
from atroposlib.api.environments import MIN_ENV_WEIGHT as MIN_ENV_WEIGHT
from atroposlib.api.environments import TooManyEnvironments, UnknownEnvironment
from atroposlib.api.hub import DEFAULT_RUN, Hub, TooManyRuns
from atroposlib.api.leases import LeaseLost, LeaseRequest, Superseded, UnknownBatch
from atroposlib.api.limits import HubLimits, Ladder, RequestBodies, replay
from atroposlib.api.metrics import HubMetrics, Observe
from atroposlib.api.payloads import (
    DecoderUnavailable,
    EncodedBody,
    GroupCodec,
    choose_encoding,
    is_packed,
)
from atroposlib.api.schemas import (
    EXPERIMENT_HEADER,
    Acknowledgement,
    AckReply,
    AckRequest,
    BatchQuery,
    Checkpoint,
    CheckpointReply,
    DeadGroups,
    DeadNumbers,
    EnvIdentifier,
    EnvRegistration,
    EnvStatus,
    Explanation,
    Failure,
    HeartbeatReply,
    HubInfo,
    HubStatus,
    LeaseRef,
    LeavingEnv,
    Ledger,
    Policy,
    Ready,
    RegisterEnv,
    RegisterTrainer,
    RegistrationReply,
    RejectReply,
    RejectRequest,
    Requeued,
    StatusQuery,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.api.schemas import Registration as Registration
from atroposlib.api.schemas import ScoredData as ScoredData
from atroposlib.api.security import Access, TokenSet, find_route
from atroposlib.api.stores.base import StoreBroken, StoreFull, UnreadableRun
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.errors import ConfigError, GroupError
from atroposlib.wire import CONTENT_TYPE_JSON, CONTENT_TYPE_PACKED

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

TICK_S = 1.0
"""How often leases, groups and environments are looked at for expiry when nobody calls."""
LAG_PERIOD_S = 0.05
_MAX_FAULTS = 20
"""Named in one refusal."""
_EMPTY_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
_GROUP_BODY = {"description": "Scored groups, see the wire contract", "required": True} | {
    "content": {
        CONTENT_TYPE_JSON: {"schema": {}},
        CONTENT_TYPE_PACKED: {"schema": {"type": "string", "format": "binary"}},
    }
}


def _query_parameters(model: type[BaseModel]) -> dict[str, Any]:
    """Describe what a handler reads from the query by itself, for the OpenAPI document."""
    properties = model.model_json_schema()["properties"]
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in properties.items()
        ]
    }


_STATUS_PARAMETERS = _query_parameters(StatusQuery) | {
    "requestBody": {
        "content": {CONTENT_TYPE_JSON: {"schema": EnvIdentifier.model_json_schema()}},
        "description": "In place of the query",
    },
}


async def _current_run(request: Request) -> Coordinator:
    """The run named in the path; for one that no trainer has begun, what it looks like before."""
    hub: Hub = request.app.state.hub
    name = request.scope.get("run", DEFAULT_RUN)
    run = await hub.find(name)
    if run is None and request.method == "POST" and request.scope["path"] != "/register-env":
        raise HTTPException(404, f"no trainer has begun the run {name!r}")
    return run or Coordinator(MemoryStore(), name=name)


Run = Annotated[Coordinator, Depends(_current_run)]


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

    app = _HubApp(
        title="AtroposLib API",
        version=__version__,
        lifespan=lifespan,
        # A redirect would name the path without its run.
        redirect_slashes=False,
        servers=[{"url": "/", "description": "run `default`"}]
        + [{"url": "/runs/{run}", "variables": {"run": {"default": DEFAULT_RUN}}}],
    )
    app.state.hub = hub

    async def take_in(run: Coordinator, request: Request, *, many: bool) -> list[Receipt]:
        """Decode, check and store; hold a client that would drop the group when there is no room."""
        body = await request.body()
        content_type = request.headers.get("content-type", "")
        try:
            groups = await codec.decode(body, content_type=content_type, many=many)
        except GroupError:
            run.reject("invalid")
            raise
        if is_ours(request):
            experiment = request.headers.get(EXPERIMENT_HEADER)
            return await run.accept(groups, experiment=experiment)
        return await accept_patiently(run, groups)

    async def accept_patiently(run: Coordinator, groups: list[IncomingGroup]) -> list[Receipt]:
        """Original clients drop a group at a refusal for load, so make them wait for room instead."""
        deadline = time.monotonic() + limits.hold_s
        while True:
            try:
                return await run.accept(groups)
            except (Overloaded, StoreFull):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or run.progress.is_closed:
                    raise
                await run.progress.wait(min(remaining_s, TICK_S))

    async def next_batch(
        run: Coordinator, request: Request, wait_s: float, lease: LeaseRequest | None
    ) -> Delivery | None:
        """Return the next batch, waiting for it up to `wait_s`. A client that has left takes none."""
        deadline = time.monotonic() + wait_s
        delivery = await run.deliver(lease)
        while delivery is None and not run.arrivals.is_closed:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            await run.arrivals.wait(remaining_s)
            if not run.may_deliver(lease):
                continue
            if await request.is_disconnected():
                return None
            delivery = await run.deliver(lease)
        return delivery

    def is_full(name: str) -> str | None:
        run = hub.runs.get(name)
        return None if run is None else run.overload()

    async def room(name: str, timeout_s: float) -> bool:
        run = hub.runs.get(name)
        if run is None or run.progress.is_closed:
            return False
        await run.progress.wait(timeout_s)
        return True

    shortcuts: dict[tuple[str, str], _Handler] = {}
    app.add_middleware(GZipMiddleware, minimum_size=1000, compresslevel=1)
    # From the inside out: a handler is called only after rights, room and body have been looked at.
    front: ASGIApp = _Shortcut(app.front, handlers=shortcuts, error_handlers=app.exception_handlers)
    front = RequestBodies(front, limits)
    front = Ladder(front, limits=limits, is_full=is_full, room=room, metrics=metrics)
    front = Access(front, tokens)
    app.front = Observe(front, metrics)
    _handle_errors(app, retry_after_s=limits.retry_after_s)

    @app.get("/status-env", response_model=EnvStatus, openapi_extra=_STATUS_PARAMETERS)
    @app.post("/status-env", response_model=EnvStatus, openapi_extra=_STATUS_PARAMETERS)
    async def status_env(request: Request) -> Response:
        run = await _current_run(request)
        query = await _read_status_query(request)
        asking = {"env_uid": query.env_uid, "experiment": query.experiment}
        found = run.status_env(query.env_id, **asking)
        deadline = time.monotonic() + min(query.wait, limits.max_wait_s)
        while (
            found.current_step == query.seen_step
            and query.seen_policy in (None, found.policy_version)
            and not run.progress.is_closed
            and (remaining_s := deadline - time.monotonic()) > 0
        ):
            await run.progress.wait(remaining_s)
            if await request.is_disconnected():
                break  # asking on its behalf would pass for a sign of life
            found = run.status_env(query.env_id, **asking)
        return _json_response(found.model_dump_json(exclude_none=True).encode())

    @app.post(
        "/scored_data", response_model=dict[str, Any], openapi_extra={"requestBody": _GROUP_BODY}
    )
    async def scored_data(request: Request) -> Response:
        run = await _current_run(request)
        [receipt] = await take_in(run, request, many=False)
        if receipt.is_duplicate:
            reply: dict[str, Any] = {"status": "duplicate"}
        elif receipt.buffer_size is None:
            reply = {"status": "received"}
        else:
            reply = {"status": "buffered", "buffer_size": receipt.buffer_size}
        return _json_response(_to_json(reply | _riding_status(run, request, [receipt])))

    @app.post(
        "/scored_data_list",
        response_model=dict[str, Any],
        openapi_extra={"requestBody": _GROUP_BODY},
    )
    async def scored_data_list(request: Request) -> Response:
        run = await _current_run(request)
        receipts = await take_in(run, request, many=True)
        reply = _list_reply(receipts) | _riding_status(run, request, receipts)
        return _json_response(_to_json(reply))

    @app.get("/batch", response_model=None, openapi_extra=_query_parameters(BatchQuery))
    async def batch(request: Request) -> Response:
        run = await _current_run(request)
        query = _checked(BatchQuery, dict(request.query_params), "query")
        wanted = None
        if query.lease:
            wanted = LeaseRequest(ttl_s=query.ttl, request_id=query.request_id, epoch=query.epoch)
        try:
            delivery = await next_batch(run, request, min(query.wait, limits.max_wait_s), wanted)
        except NotRegistered as e:
            return _json_response(_to_json({"status": "error", "message": str(e), "batch": []}))
        if delivery is None:
            return _json_response(b'{"batch":null}')
        for steps in delivery.staleness:
            metrics.observe_staleness(run.name, steps)
        meta: dict[str, Any] = {"step": delivery.step}
        if wanted is not None:
            meta |= {
                "batch_id": delivery.batch_id,
                "lease_id": delivery.lease_id,
                "epoch": delivery.epoch,
                "expires_in_s": delivery.expires_in_s,
            }
        try:
            body = await codec.encode_batch(
                delivery.payloads,
                meta,
                packed=is_packed(request.headers.get("accept", "")),
                encoding=choose_encoding(request.headers.get("accept-encoding", "")),
            )
        except BaseException:
            if wanted is None:
                await run.give_back(delivery.batch_id)
            raise
        if wanted is not None:
            return _BatchResponse(body, run, timeout_s=delivery.expires_in_s)
        return _PlainBatchResponse(body, run, delivery)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> Ready:
        # Not looked up: a run that was ended with DELETE begins anew when it is spoken of.
        run = await hub.run() if hub.is_open else None
        if run is None or run.arrivals.is_closed:
            raise HTTPException(503, "starting or stopping")
        return Ready(durability=run.durability.value)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    @app.post("/register", response_model_exclude_none=True)
    async def register(request: Request, registration: RegisterTrainer) -> RegistrationReply:
        return await hub.register(request.scope.get("run", DEFAULT_RUN), registration)

    @app.get("/wandb_info")
    async def wandb_info(run: Run) -> WandbInfo:
        return run.wandb_info()

    @app.get("/info")
    async def info(run: Run) -> HubInfo:
        return run.info()

    @app.get("/status", response_model_exclude_none=True)
    async def status(run: Run) -> HubStatus:
        return run.status()

    @app.get("/ledger", response_model_exclude_none=True)
    async def ledger(run: Run) -> Ledger:
        return run.ledger()

    @app.get("/explain")
    async def explain(run: Run) -> Explanation:
        await run.tick()
        return run.explain()

    @app.post("/policy")
    async def set_policy(run: Run, policy: Policy) -> Acknowledgement:
        await run.set_policy(policy.version, epoch=policy.epoch)
        return Acknowledgement()

    @app.post("/register-env", response_model_exclude_none=True)
    async def register_env(run: Run, registration: RegisterEnv) -> EnvRegistration | WaitForTrainer:
        return await run.register_env(registration) or WaitForTrainer()

    @app.post("/disconnect-env")
    async def disconnect_env(run: Run, environment: LeavingEnv) -> Acknowledgement | Failure:
        try:
            await run.disconnect_env(environment.env_id, env_uid=environment.env_uid)
        except UnknownEnvironment as e:
            return Failure(error=str(e))
        return Acknowledgement()

    @app.post("/batches/{batch_id}/heartbeat")
    async def heartbeat(run: Run, batch_id: int, lease: LeaseRef) -> HeartbeatReply:
        return HeartbeatReply(expires_in_s=await run.heartbeat(batch_id, lease.lease_id))

    @app.post("/batches/{batch_id}/ack")
    async def ack(run: Run, batch_id: int, lease: AckRequest) -> AckReply:
        return AckReply(step=await run.ack(batch_id, lease.lease_id, lease.step))

    @app.post("/batches/{batch_id}/release")
    async def release(run: Run, batch_id: int, lease: LeaseRef) -> Acknowledgement:
        await run.release(batch_id, lease.lease_id)
        return Acknowledgement()

    @app.post("/batches/{batch_id}/reject")
    async def reject(run: Run, batch_id: int, rejected: RejectRequest) -> RejectReply:
        return await run.reject_groups(
            batch_id, rejected.lease_id, rejected.groups, reason=rejected.reason
        )

    @app.post("/checkpoints")
    async def checkpoint(run: Run, reached: Checkpoint) -> CheckpointReply:
        return CheckpointReply(committed=await run.checkpoint(reached.step, epoch=reached.epoch))

    shortcuts |= {
        ("GET", "/batch"): batch,
        ("GET", "/status-env"): status_env,
        ("POST", "/status-env"): status_env,
        ("POST", "/scored_data"): scored_data,
        ("POST", "/scored_data_list"): scored_data_list,
        ("POST", "/batches/{batch_id}/heartbeat"): _unless_odd(heartbeat, LeaseRef),
        ("POST", "/batches/{batch_id}/ack"): _unless_odd(ack, AckRequest),
        ("POST", "/checkpoints"): _unless_odd(checkpoint, Checkpoint),
    }

    @app.get("/dead")
    async def dead(run: Run) -> DeadGroups:
        return DeadGroups(groups=run.dead())

    @app.post("/dead/requeue")
    async def requeue_dead(run: Run, numbers: DeadNumbers) -> Requeued:
        return Requeued(requeued=await run.requeue_dead(numbers.numbers))

    @app.get("/latest_example", response_model=None)
    async def latest_example(run: Run) -> Response | dict[str, Any]:
        latest = await run.latest()
        if latest is None:
            return _EMPTY_EXAMPLE
        return _json_response(await codec.group_json(latest))

    @app.get("/reset_data", response_class=PlainTextResponse)
    async def reset_data(run: Run) -> str:
        await run.reset()
        return "Reset successful"

    @app.delete("/runs/{run}")
    async def end_run(run: str) -> Acknowledgement:
        if not await hub.forget(run):
            raise HTTPException(404, f"there is no run {run!r}")
        metrics.forget_run(run)
        return Acknowledgement()

    return app


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


def is_ours(request: Request) -> bool:
    """Does the client know what 429 means? Those of the original drop the group."""
    return "atropos-client" in request.headers


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


_TURNS_TO_NOTICE = 3
"""Turns of the event loop between the return of `send` from a broken connection and the message that tells of it."""


class _WholeRequest(Request):
    """A request whose body has come; what it may still receive is the disconnect."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, body: bytes) -> None:
        super().__init__(scope, receive, send)
        self._whole = body

    async def body(self) -> bytes:
        return self._whole


_Handler = Callable[[Request], Awaitable[Response | None]]
"""None: the request is one for FastAPI."""


def _unless_odd(endpoint: Callable[..., Awaitable[BaseModel]], model: type[BaseModel]) -> _Handler:
    """Call an endpoint that takes a JSON body, and a number in its path or none; what is wrong FastAPI says."""

    async def handle(request: Request) -> Response | None:
        numbers = request.scope["path"].split("/")[2:3]  # of /batches/7/ack
        is_usual = (
            request.headers.get("content-type") == CONTENT_TYPE_JSON
            and all(number.isascii() and number.isdecimal() for number in numbers)
            and all(len(number) < 19 for number in numbers)
        )
        if not is_usual:
            return None
        try:
            body = model.model_validate_json(await request.body())
        except ValidationError:
            return None
        reply = await endpoint(await _current_run(request), *map(int, numbers), body)
        return _json_response(reply.model_dump_json().encode())

    return handle


class _HubApp(FastAPI):
    """FastAPI behind layers of ours: what `front` answers, most requests, passes none of FastAPI's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.front: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.front(scope, receive, send)


class _Shortcut:
    """ASGI middleware: calls the handlers of nearly all requests directly.

    The way through FastAPI costs several times as much as they do. Errors become answers by the same handlers as there.
    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[tuple[str, str], _Handler],
        error_handlers: Mapping[Any, Callable[[Request, Any], Any]],
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._error_handlers = error_handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = find_route(scope["method"], scope["path"]) if scope["type"] == "http" else None
        handler = None if route is None else self._handlers.get((route.method, route.template))
        if handler is None:
            await self._app(scope, receive, send)
            return
        message = await receive()  # RequestBodies hands bodies over in one piece
        request = _WholeRequest(scope, receive, send, body=message["body"])
        try:
            response = await handler(request)
            if response is None:
                await self._app(scope, replay(message["body"], receive), send)
                return
        except Exception as e:
            known = (self._error_handlers.get(kind) for kind in type(e).__mro__)
            answer = next(filter(None, known), None)
            if answer is None:
                raise
            response = await answer(request, e)
        await response(scope, receive, send)


class _BatchResponse(Response):
    """A batch on its way, piece by piece."""

    def __init__(self, body: EncodedBody, run: Coordinator, *, timeout_s: float) -> None:
        headers = {"Vary": "Accept, Accept-Encoding"}
        headers["Content-Length"] = str(body.num_bytes)
        if body.encoding is not None:
            headers["Content-Encoding"] = body.encoding
        super().__init__(None, media_type=body.media_type, headers=headers)
        self._pieces = body.pieces
        self._run = run
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin(send)
                *pieces, end = self._pieces
                for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": end})
        except (TimeoutError, OSError) as e:
            self._warn(e)

    async def _begin(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})

    def _warn(self, error: Exception) -> None:
        logger.warning("run %s: a batch could not be sent: %r", self._run.name, error)


class _PlainBatchResponse(_BatchResponse):
    """A batch without a lease, with a look at whether it got there.

    It counts as delivered when all its bytes were handed to the operating system while the client was still there; what
    the client makes of them nobody can know without a lease.
    """

    def __init__(self, body: EncodedBody, run: Coordinator, delivery: Delivery) -> None:
        super().__init__(body, run, timeout_s=delivery.expires_in_s)
        self._batch_id = delivery.batch_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(_disconnect(receive))
        is_whole = False
        *pieces, end = self._pieces
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begin(send)
                for piece in (*pieces, end[:-1]):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    if watcher.done():
                        break
                else:
                    # Returns when what was written before has left the process, or the connection has broken.
                    await send({"type": "http.response.body", "body": b"", "more_body": True})
                    for _ in range(_TURNS_TO_NOTICE):
                        await asyncio.sleep(0)
                    # Nobody leaves content before the last byte: who is gone by now was cut off.
                    is_whole = not watcher.done()
                    if is_whole:
                        last: Message = {"type": "http.response.body", "body": end[-1:]}
                        last["more_body"] = True
                        await send(last)
        except (TimeoutError, OSError) as e:
            self._warn(e)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            if is_whole:
                await self._run.confirm(self._batch_id)
            else:
                await self._run.give_back(self._batch_id)
        if is_whole:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


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
    app.add_exception_handler(Overloaded, answer_later(429, "overloaded"))
    app.add_exception_handler(StoreFull, answer_later(507, "store_full"))
    app.add_exception_handler(DecoderUnavailable, answer_later(503, "decoder_unavailable"))
    app.add_exception_handler(StoreBroken, answer_later(503, "store_broken"))
    app.add_exception_handler(UnreadableRun, answer_later(503, "run_unreadable"))


async def _read_status_query(request: Request) -> StatusQuery:
    """Read the parameters from the query, or from a JSON body, which deployed clients send even with GET."""
    where, value = "query", dict[str, Any](request.query_params)
    if "env_id" not in value:
        where, body = "body", await request.body()
        try:
            decoded = json.loads(bytes(body)) if body else {}
        except (ValueError, RecursionError) as e:
            detail = {"type": "json_invalid", "loc": ("body",), "msg": f"JSON decode error: {e}"}
            raise RequestValidationError([detail]) from e
        value = value | decoded if isinstance(decoded, dict) else decoded
    return _checked(StatusQuery, value, where)


def _checked(model: type[Model], value: Any, where: str) -> Model:
    """Check what came in `where`; a fault is answered as FastAPI would."""
    try:
        return model.model_validate(value)
    except ValidationError as e:
        errors = [{**error, "loc": (where, *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors) from e


def _list_reply(receipts: Sequence[Receipt]) -> dict[str, Any]:
    reply: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffer_sizes = [r.buffer_size for r in receipts if r.buffer_size is not None]
    if buffer_sizes:
        reply |= {"buffered": len(buffer_sizes), "last_buffer_size": buffer_sizes[-1]}
    duplicates = sum(receipt.is_duplicate for receipt in receipts)
    if duplicates:
        reply["duplicates"] = duplicates
    return reply


def _riding_status(
    run: Coordinator, request: Request, receipts: Sequence[Receipt]
) -> dict[str, Any]:
    """Tell our own clients their status with the answer, so that they need not ask for it."""
    env_ids = {receipt.env_id for receipt in receipts}
    if not is_ours(request) or len(env_ids) != 1:
        return {}
    [env_id] = env_ids
    if env_id is None or not run.knows(env_id):
        return {}
    return {"env_status": run.status_env(env_id).model_dump(exclude_none=True)}


_to_json = msgspec.json.encode


def _json_response(content: bytes) -> Response:
    return Response(content, media_type=CONTENT_TYPE_JSON)


app = create_app()
