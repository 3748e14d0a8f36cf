"""The hub's handlers, and `ROUTES`, the table of all routes.

Handlers translate between HTTP and a run's coordinator and keep no state; they share `app.state.services`. One that
is called directly takes the request and returns a response; FastAPI parses the bodies of the others. Routes that carry
tokens use raw bytes; pydantic parses control bodies only. To add a route, write a handler and its row.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ValidationError

from atroposlib.api import schemas
from atroposlib.api.http.limits import ByteBudget, HeldBytes, HubLimits, is_native
from atroposlib.api.http.metrics import HubMetrics
from atroposlib.api.http.payloads import MAX_JSON_RATIO, GroupCodec, choose_encoding, is_packed
from atroposlib.api.http.routes import Route, RouteTable, Scope
from atroposlib.api.http.sending import BatchResponse, JsonPieces, PlainBatchResponse
from atroposlib.api.run.coordinator import Coordinator, Delivery
from atroposlib.api.run.environments import EnvironmentNotFound
from atroposlib.api.run.hub import DEFAULT_RUN, Hub
from atroposlib.api.run.leases import LeaseRequest
from atroposlib.api.run.replica import Replica
from atroposlib.api.run.types import NotRegistered, Overloaded, Receipt
from atroposlib.api.stores.base import Durability, NewGroup, StoreFull
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.errors import GroupError
from atroposlib.scored_data import DISTILL_FIELDS, WIRE_KEYS
from atroposlib.utils import tracing
from atroposlib.wire import CONTENT_TYPE_JSON, CONTENT_TYPE_PACKED, group_id_of, json_pieces

Model = TypeVar("Model", bound=BaseModel)

_BATCH_BYTES = 32 * 2**20
"""Memory reserved while a batch of unknown size is read."""
_DEAD_PER_TEXT = 500
"""Dead groups encoded per piece: 2 ms."""
HOLD_CHECK_S = 1.0
"""How often a held request retries even if the run signals no progress."""
_NOT_IN_EMPTY_EXAMPLE = {"overrides", "group_overrides", "env_id", *DISTILL_FIELDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the handlers of one application share."""

    hub: Hub
    limits: HubLimits
    codec: GroupCodec
    metrics: HubMetrics
    batches: ByteBudget
    """For batches being read, encoded and sent."""
    lookups: ByteBudget
    """For other large responses being sent."""
    replica: Replica | None = None
    """None: this process is the only one that serves its runs."""


# The run of a request, whose name `Access` has set and checked the rights for


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def existing_run(request: Request) -> Coordinator:
    """Return the run named in the path. Raises 404 if there is none: only a trainer's registration creates one."""
    name, hub = request.scope["run"], _services(request).hub
    run = await hub.find(name)
    if run is None:
        raise HTTPException(404, f"there is no run {name!r}; POST /register begins it")
    return run


async def run_or_blank(request: Request) -> Coordinator:
    """Return the run named in the path, or an empty one if it does not exist."""
    name, hub = request.scope["run"], _services(request).hub
    return await hub.find(name) or Coordinator(MemoryStore(), name=name)


Run = Annotated[Coordinator, Depends(existing_run)]
RunOrBlank = Annotated[Coordinator, Depends(run_or_blank)]


# Groups


async def scored_data(request: Request) -> Response:
    run = await existing_run(request)
    [receipt] = await _take_in(run, request, many=False)
    if receipt.is_duplicate:
        reply: dict[str, Any] = {"status": "duplicate"}
    elif receipt.buffer_size is None:
        reply = {"status": "received"}
    else:
        reply = {"status": "buffered", "buffer_size": receipt.buffer_size}
    return _json_response(reply | _reply_status(run, request, [receipt]))


async def scored_data_list(request: Request) -> Response:
    run = await existing_run(request)
    receipts = await _take_in(run, request, many=True)
    reply: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffer_sizes = [r.buffer_size for r in receipts if r.buffer_size is not None]
    if buffer_sizes:
        reply |= {"buffered": len(buffer_sizes), "last_buffer_size": buffer_sizes[-1]}
    duplicates = sum(receipt.is_duplicate for receipt in receipts)
    if duplicates:
        reply["duplicates"] = duplicates
    return _json_response(reply | _reply_status(run, request, receipts))


async def _take_in(run: Coordinator, request: Request, *, many: bool) -> list[Receipt]:
    """Decode, check and store groups; if there is no room, hold an original client, which would drop the groups."""
    began_at = time.time()
    services = _services(request)
    body = request.scope["body"]
    content_type = request.headers.get("content-type", "")
    try:
        groups = await services.codec.decode(body, content_type=content_type, many=many)
    except GroupError:
        run.reject("invalid")
        raise
    if is_native(request.scope):
        experiment = request.headers.get(schemas.EXPERIMENT_HEADER)
        receipts = await run.accept(groups, experiment=experiment)
    else:
        held_s: float = request.scope.get("held_s", 0.0)
        hold_s = services.limits.hold_s - held_s
        receipts = await _accept_patiently(run, groups, hold_s=hold_s)
    if tracing.is_on():
        for group, receipt in zip(groups, receipts, strict=True):
            tracing.record_group(
                "store",
                group.header.group_id,
                began_at=began_at,
                attributes={
                    "atropos.run": run.name,
                    "atropos.env_id": receipt.env_id,
                    "atropos.is_duplicate": receipt.is_duplicate,
                },
            )
    return receipts


async def _accept_patiently(
    run: Coordinator, groups: list[NewGroup], *, hold_s: float
) -> list[Receipt]:
    """Retry for up to `hold_s` while the run is full: original clients drop a refused group."""
    deadline = time.monotonic() + hold_s
    while True:
        try:
            return await run.accept(groups)
        except (Overloaded, StoreFull):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or run.progress.is_closed:
                raise
            await run.progress.wait(min(remaining_s, HOLD_CHECK_S))


def _reply_status(
    run: Coordinator, request: Request, receipts: Sequence[Receipt]
) -> dict[str, Any]:
    """Return the `env_status` of the reply, which saves native clients a request; empty for original ones."""
    env_ids = {receipt.env_id for receipt in receipts}
    if not is_native(request.scope) or len(env_ids) != 1:
        return {}
    [env_id] = env_ids
    if env_id is None or run.state.environments.find(env_id) is None:
        return {}
    return {"env_status": run.status_env(env_id).model_dump(exclude_none=True)}


# Environments


async def register_env(
    run: RunOrBlank, registration: schemas.RegisterEnv
) -> schemas.EnvRegistration | schemas.WaitForTrainer:
    return await run.register_env(registration) or schemas.WaitForTrainer()


async def disconnect_env(
    run: RunOrBlank, environment: schemas.LeavingEnv
) -> schemas.Acknowledgement | schemas.Failure:
    try:
        await run.disconnect_env(environment.env_id, env_uid=environment.env_uid)
    except EnvironmentNotFound as e:
        return schemas.Failure(error=str(e))
    return schemas.Acknowledgement()


async def status_env(request: Request) -> Response:
    run = await run_or_blank(request)
    query = await _read_status_query(request)
    asking = {"env_uid": query.env_uid, "experiment": query.experiment}
    found = run.status_env(query.env_id, **asking)
    if query.items_in_flight is not None:
        run.note_items(query)
    deadline = time.monotonic() + min(query.wait, _services(request).limits.max_wait_s)
    while (
        found.current_step == query.seen_step
        and query.seen_policy in (None, found.policy_version)
        and not run.progress.is_closed
        and (remaining_s := deadline - time.monotonic()) > 0
    ):
        await run.progress.wait(remaining_s)
        if await request.is_disconnected():
            break  # `status_env` would record the environment as alive
        found = run.status_env(query.env_id, **asking)
    hidden = None if is_native(request.scope) else schemas.NATIVE_STATUS_FIELDS
    return _json_response(found.model_dump(exclude_none=True, exclude=hidden))


async def _read_status_query(request: Request) -> schemas.StatusQuery:
    """Read the parameters from the query, or from a JSON body, which deployed clients send even with GET."""
    value = dict[str, Any](request.query_params)
    if "env_id" in value:
        return _checked(schemas.StatusQuery, value, "query")
    body = request.scope["body"]
    decoded = _decoded(body) if body else {}
    return _checked(
        schemas.StatusQuery, value | decoded if isinstance(decoded, dict) else decoded, "body"
    )


# Batches


async def batch(request: Request) -> Response:
    run = await run_or_blank(request)
    services = _services(request)
    query = _checked(schemas.BatchQuery, dict(request.query_params), "query")
    wanted = None
    if query.lease:
        wanted = LeaseRequest(ttl_s=query.ttl, request_id=query.request_id, epoch=query.epoch)
    wait_s = min(query.wait, services.limits.max_wait_s)
    held = HeldBytes(services.batches)
    reply: dict[str, Any] = {"batch": None}
    try:
        delivery = await _next_batch(run, request, wait_s, wanted, held)
        if delivery is not None:
            return await _batch_response(run, request, delivery, wanted, held)
    except NotRegistered as e:
        reply = {"status": "error", "message": str(e), "batch": []}
    except BaseException:
        held.hold(0)
        raise
    held.hold(0)
    return _json_response(reply)


async def _batch_response(
    run: Coordinator,
    request: Request,
    delivery: Delivery,
    wanted: LeaseRequest | None,
    held: HeldBytes,
) -> Response:
    began_at = time.time()
    services, row = _services(request), delivery.row
    if not delivery.is_repeated:
        staleness = services.metrics.staleness.labels(run.name)
        for steps in delivery.staleness:
            staleness.observe(steps)
    meta: dict[str, Any] = {"step": row.step}
    if wanted is not None:
        meta |= {
            "batch_id": row.number,
            "lease_id": row.lease_id,
            "epoch": row.epoch,
            "expires_in_s": row.ttl_s,
        }
    packed = is_packed(request.headers.get("accept", ""))
    try:
        if not packed:
            await held.grow(held.num_bytes * (1 + MAX_JSON_RATIO))
        body = await services.codec.encode_batch(
            delivery.payloads,
            meta,
            packed=packed,
            encoding=choose_encoding(request.headers.get("accept-encoding", "")),
        )
    except BaseException:
        if wanted is None:
            await run.give_back(row)
        raise
    held.hold(body.num_bytes)
    if tracing.is_on():
        for payload, steps in zip(delivery.payloads, delivery.staleness, strict=True):
            tracing.record_group(
                "deliver",
                group_id_of(payload),
                began_at=began_at,
                attributes={
                    "atropos.run": run.name,
                    "atropos.batch_id": row.number,
                    "atropos.step": row.step,
                    "atropos.staleness": steps,
                },
            )
    if wanted is not None:
        return BatchResponse(body, held, timeout_s=row.ttl_s)
    return PlainBatchResponse(body, held, run, row)


async def _next_batch(
    run: Coordinator, request: Request, wait_s: float, lease: LeaseRequest | None, held: HeldBytes
) -> Delivery | None:
    """Return the next batch; None after `wait_s`, at shutdown, or if the client disconnects."""
    deadline = time.monotonic() + wait_s
    while True:
        # Its true size is known only afterwards.
        await held.grow(_BATCH_BYTES)
        delivery = await run.deliver(lease)
        if delivery is not None:
            held.hold(sum(map(len, delivery.payloads)))
            return delivery
        held.hold(0)
        is_possible = False
        while not is_possible:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or run.arrivals.is_closed:
                return None
            await run.arrivals.wait(remaining_s)
            is_possible = run.may_deliver(lease)
        if await request.is_disconnected():
            return None


async def heartbeat(run: Run, batch_id: int, lease: schemas.LeaseRef) -> schemas.HeartbeatReply:
    return schemas.HeartbeatReply(expires_in_s=await run.heartbeat(batch_id, lease.lease_id))


async def ack(run: Run, batch_id: int, acked: schemas.AckRequest) -> schemas.AckReply:
    return schemas.AckReply(step=await run.ack(batch_id, acked.lease_id, acked.step))


async def release(run: Run, batch_id: int, lease: schemas.LeaseRef) -> schemas.Acknowledgement:
    await run.release(batch_id, lease.lease_id)
    return schemas.Acknowledgement()


async def reject(run: Run, batch_id: int, rejected: schemas.RejectRequest) -> schemas.RejectReply:
    return await run.reject_groups(
        batch_id, rejected.lease_id, rejected.groups, reason=rejected.reason
    )


async def checkpoint(run: Run, reached: schemas.Checkpoint) -> schemas.CheckpointReply:
    return schemas.CheckpointReply(
        committed=await run.checkpoint(reached.step, epoch=reached.epoch)
    )


# The run as a whole


async def register(
    request: Request, registration: schemas.RegisterTrainer
) -> schemas.RegistrationReply:
    token = request.scope.get("token_name")
    return await _services(request).hub.register(request.scope["run"], registration, token=token)


async def set_policy(run: Run, policy: schemas.PolicyUpdate) -> schemas.Acknowledgement:
    await run.set_policy(policy.version, epoch=policy.epoch)
    return schemas.Acknowledgement()


async def wandb_info(run: RunOrBlank) -> schemas.WandbInfo:
    return run.wandb_info()


async def info(run: RunOrBlank) -> schemas.HubInfo:
    return run.info()


async def status(request: Request, run: RunOrBlank) -> schemas.HubStatus:
    status = run.status()
    replica = _services(request).replica
    if replica is not None:
        covers = request.scope.get("covers", lambda name: True)
        status.replicas = [
            schemas.ReplicaStatus(
                address=member.address,
                runs=[name for name in runs if covers(name)],
                is_alive=member.is_alive,
            )
            for member, runs in replica.owned_runs()
        ]
    return status


async def ledger(run: RunOrBlank) -> schemas.Ledger:
    return run.ledger()


async def explain(
    run: RunOrBlank, page: Annotated[schemas.ExplainQuery, Query()]
) -> schemas.Explanation:
    await run.tick()
    return run.explain(offset=page.offset, limit=page.limit)


async def dead(request: Request, run: RunOrBlank) -> Response:
    return _lookup(request, _dead_texts(run))


def _dead_texts(run: Coordinator) -> Iterator[bytes]:
    """Encode `DeadGroups` as JSON, `_DEAD_PER_TEXT` groups at a time."""
    separator = b'{"groups":['
    groups = run.dead()
    while some := list(itertools.islice(groups, _DEAD_PER_TEXT)):
        yield separator + b",".join(group.model_dump_json().encode() for group in some)
        separator = b","
    yield (b"" if separator == b"," else separator) + b"]}"


async def requeue_dead(run: Run, numbers: schemas.DeadNumbers) -> schemas.Requeued:
    return schemas.Requeued(requeued=await run.requeue_dead(numbers.numbers))


async def latest_example(request: Request, run: RunOrBlank) -> Any:
    latest = await run.latest()
    if latest is None:
        return {name: [] for name in WIRE_KEYS if name not in _NOT_IN_EMPTY_EXAMPLE}
    return _lookup(request, json_pieces(latest))


async def reset_data(run: RunOrBlank) -> str:
    await run.reset()
    return "Reset successful"


async def end_run(request: Request, run: str) -> schemas.Acknowledgement:
    # The one that `Access` authorised; the parameter is for the OpenAPI document only.
    services, name = _services(request), request.scope["run"]
    if not await services.hub.forget(name):
        raise HTTPException(404, f"there is no run {name!r}")
    services.metrics.forget_run(name)
    if services.replica is not None and name == DEFAULT_RUN:
        await services.hub.run(name)  # it always exists; here it still has this owner
    return schemas.Acknowledgement()


# The hub as a whole


async def root() -> dict[str, str]:
    return {"message": "AtroposLib API"}


async def healthz(request: Request, response: Response) -> dict[str, str]:
    replica = _services(request).replica
    if replica is not None:
        response.headers[schemas.REPLICA_HEADER] = str(replica.id)
    return {"status": "ok"}


async def readyz(request: Request) -> schemas.Ready:
    hub, replica = _services(request).hub, _services(request).replica
    if replica is not None:
        if not hub.is_open or not replica.is_trusted:
            raise HTTPException(503, "starting, stopping, or without its database")
        return _ready(hub, Durability.POWER)
    # `hub.run` recreates the default run after a DELETE.
    run = await hub.run() if hub.is_open else None
    if run is None or run.arrivals.is_closed:
        raise HTTPException(503, "starting or stopping")
    return _ready(hub, run.store.durability)


def _ready(hub: Hub, durability: Durability) -> schemas.Ready:
    # Without the reason: anyone may ask.
    is_full = any(run.store.usage().refusal for run in hub.runs.values())
    return schemas.Ready(status="degraded" if is_full else "ready", durability=durability.value)


async def show_metrics(request: Request) -> Response:
    metrics = _services(request).metrics
    covers = request.scope.get("covers")
    return Response(metrics.render(covers=covers), media_type=metrics.content_type)


# Reading and answering without FastAPI


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as e:
        where = ("body", getattr(e, "pos", 0))
        fault = {"type": "json_invalid", "loc": where, "msg": "JSON decode error"}
        raise RequestValidationError([fault]) from e


def _checked(model: type[Model], value: Any, where: str) -> Model:
    """Validate `value` from `where` ("query" or "body"); faults are reported as FastAPI does."""
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as e:
        errors = [{**error, "loc": (where, *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors) from e


def _direct(
    handler: Callable[..., Awaitable[BaseModel]], model: type[Model], *, of_batch: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Return what FastAPI makes of a handler of a run, with `of_batch` a batch id, and a body, at a fourth of the CPU
    time."""

    async def direct(request: Request) -> Response:
        run = await existing_run(request)
        addressed: list[int] = []
        if of_batch:
            path: str = request.scope["path"]
            where = _checked(_BatchPath, {"batch_id": path.split("/")[-2]}, "path")
            addressed.append(where.batch_id)
        text = request.scope["body"]
        if not text:
            fault = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
            raise RequestValidationError([fault])
        body = _checked(model, _decoded(text), "body")
        reply = await handler(run, *addressed, body)
        return Response(reply.model_dump_json(), media_type=CONTENT_TYPE_JSON)

    return direct


class _BatchPath(BaseModel):
    batch_id: int


def _lookup(request: Request, texts: Iterable[bytes]) -> Response:
    """Return a response that may be long, sent in pieces."""
    services = _services(request)
    held = HeldBytes(services.lookups)
    return JsonPieces(texts, held, timeout_s=services.limits.receive_timeout_s)


def _json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=CONTENT_TYPE_JSON)


# OpenAPI descriptions of handlers that parse requests themselves


def _takes(
    body: dict[str, Any] | None = None, *, query: type[BaseModel] | None = None, returns: Any = None
) -> dict[str, Any]:
    """Return the FastAPI route options that describe this body, query and response."""
    extra: dict[str, Any] = {}
    if query is not None:
        fields = query.model_json_schema()["properties"]
        extra["parameters"] = [
            {"name": name, "in": "query", "schema": schema} for name, schema in fields.items()
        ]
    if body is not None:
        extra["requestBody"] = body
    return {"response_model": returns, "openapi_extra": extra}


_GROUPS = {
    "description": "Scored groups, see the wire contract",
    "required": True,
    "content": {
        CONTENT_TYPE_JSON: {"schema": {}},
        CONTENT_TYPE_PACKED: {"schema": {"type": "string", "format": "binary"}},
    },
}
_TAKES_GROUPS = _takes(_GROUPS, returns=dict[str, Any])
_TAKES_STATUS = _takes(
    {
        "description": "In place of the query",
        "content": {CONTENT_TYPE_JSON: {"schema": schemas.EnvIdentifier.model_json_schema()}},
    },
    query=schemas.StatusQuery,
    returns=schemas.EnvStatus,
)
_WITHOUT_NULL = {"response_model_exclude_none": True}
_TEXT = {"response_class": PlainTextResponse}

# The table

ANYONE: tuple[Scope, ...] = ()
ANY_CLIENT = (Scope.PRODUCE, Scope.CONSUME, Scope.READ)
PRODUCE = (Scope.PRODUCE,)
CONSUME = (Scope.CONSUME,)
READ = (Scope.READ,)
ADMIN = (Scope.ADMIN,)
_local = functools.partial(Route, is_local=True)
_vital = functools.partial(Route, is_vital=True)
_heartbeat = _direct(heartbeat, schemas.LeaseRef, of_batch=True)
_ack = _direct(ack, schemas.AckRequest, of_batch=True)
_checkpoint = _direct(checkpoint, schemas.Checkpoint)
_groups = functools.partial(Route, scopes=PRODUCE, has_groups=True, api=_TAKES_GROUPS)

ROUTES = RouteTable(
    [
        _local("GET", "/", root, ANYONE),
        _local("GET", "/healthz", healthz, ANYONE, is_vital=True),
        _local("GET", "/readyz", readyz, ANYONE, is_vital=True),
        _local("GET", "/metrics", show_metrics, READ, is_hub_wide=True, api=_TEXT),
        _local("GET", "/openapi.json", None, READ),
        _local("GET", "/docs", None, READ),
        _local("GET", "/docs/oauth2-redirect", None, READ),
        _local("GET", "/redoc", None, READ),
        # Trainers
        Route("POST", "/register", register, CONSUME, begins_run=True, api=_WITHOUT_NULL),
        Route("GET", "/batch", batch, CONSUME, direct=batch, api=_takes(query=schemas.BatchQuery)),
        _vital("POST", "/batches/{batch_id}/heartbeat", heartbeat, CONSUME, direct=_heartbeat),
        _vital("POST", "/batches/{batch_id}/ack", ack, CONSUME, direct=_ack),
        Route("POST", "/batches/{batch_id}/release", release, CONSUME),
        Route("POST", "/batches/{batch_id}/reject", reject, CONSUME),
        _vital("POST", "/checkpoints", checkpoint, CONSUME, direct=_checkpoint),
        Route("POST", "/policy", set_policy, CONSUME),
        # Environments
        Route("POST", "/register-env", register_env, PRODUCE, api=_WITHOUT_NULL),
        Route("POST", "/disconnect-env", disconnect_env, PRODUCE),
        Route("GET", "/status-env", status_env, PRODUCE, direct=status_env, api=_TAKES_STATUS),
        Route("POST", "/status-env", status_env, PRODUCE, direct=status_env, api=_TAKES_STATUS),
        _groups("POST", "/scored_data", scored_data, direct=scored_data),
        _groups("POST", "/scored_data_list", scored_data_list, direct=scored_data_list),
        # Every client
        Route("GET", "/info", info, ANY_CLIENT),
        Route("GET", "/wandb_info", wandb_info, ANY_CLIENT),
        Route("GET", "/status", status, ANY_CLIENT, api=_WITHOUT_NULL),
        # People
        Route("GET", "/ledger", ledger, READ, api=_WITHOUT_NULL),
        Route("GET", "/explain", explain, READ),
        Route("GET", "/latest_example", latest_example, READ, api=_takes()),
        Route("GET", "/dead", dead, READ, api=_takes(returns=schemas.DeadGroups)),
        Route("POST", "/dead/requeue", requeue_dead, ADMIN, is_destructive=True),
        Route("GET", "/reset_data", reset_data, ADMIN, is_destructive=True, api=_TEXT),
        Route("DELETE", "/runs/{run}", end_run, ADMIN, is_destructive=True),
    ]
)
"""Every route of the hub. Any other path needs the admin scope, and then gets 404 or 405."""
