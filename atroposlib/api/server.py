"""The hub over HTTP: `create_app(coordinator)` makes applications, `app` is the one to serve.

Handlers translate between HTTP and the coordinator and hold no state. Token-carrying routes take
the raw body and return bytes; pydantic sees control bodies only. No CORS headers are sent and there
is no authentication. README.md is the wire contract.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.middleware.gzip import GZipMiddleware

from atroposlib import __version__
from atroposlib.api.coordinator import (
    Batch,
    Coordinator,
    NotRegistered,
    Receipt,
    UnknownEnvironment,
)
from atroposlib.api.limits import HubLimits, RequestBodies
from atroposlib.api.payloads import (
    GZIP_MINIMUM_BYTES,
    EncodedBody,
    decode_groups,
    encode_batch,
    is_packed,
    num_bytes,
    payload_json,
)
from atroposlib.api.schemas import (
    Acknowledgement,
    EnvIdentifier,
    EnvRegistration,
    EnvStatus,
    Failure,
    HubInfo,
    HubStatus,
    Ledger,
    Policy,
    RegisterEnv,
    Registration,
    RegistrationReply,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.api.stores.memory import MemoryStore
from atroposlib.errors import GroupError
from atroposlib.wire import CONTENT_TYPE_JSON, CONTENT_TYPE_PACKED

P = ParamSpec("P")
T = TypeVar("T")

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


class _Arrivals:
    """Wakes those who wait for groups to arrive.

    One event loop; between `wait()` and the caller's next look nothing is lost.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_closed = False

    def close(self) -> None:
        """Wake everybody for the last time: nobody waits from here on."""
        self.is_closed = True
        self._event.set()

    def announce(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next arrival or after `timeout_s`."""
        self._event.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass


def create_app(coordinator: Coordinator, *, limits: HubLimits | None = None) -> FastAPI:
    """Build the application around one run."""
    limits = limits or HubLimits()
    arrivals = _Arrivals()
    app = FastAPI(title="AtroposLib API", version=__version__)
    app.state.arrivals = arrivals
    # The middleware added last is the outermost: bodies are read and inflated before anything else.
    app.add_middleware(GZipMiddleware, minimum_size=GZIP_MINIMUM_BYTES, compresslevel=1)
    app.add_middleware(RequestBodies, limits=limits)

    async def offload(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU work on `size` bytes here, or in a thread when it would hold up other clients."""
        if size < limits.offload_bytes:
            return work(*args, **kwargs)
        return await asyncio.to_thread(work, *args, **kwargs)

    async def take_in(request: Request, *, many: bool) -> list[Receipt]:
        body = await request.body()
        content_type = request.headers.get("content-type", "")
        try:
            groups = await offload(
                len(body), decode_groups, body, content_type=content_type, many=many
            )
        except GroupError:
            coordinator.reject("invalid")
            raise
        receipts = coordinator.accept(groups)
        arrivals.announce()
        return receipts

    async def next_batch(request: Request, wait_s: float) -> Batch | None:
        """Return the next batch, waiting for it up to `wait_s`.

        A client that has left takes none.
        """
        await request.body()  # what follows the body is the disconnect that is looked for below
        deadline = time.monotonic() + wait_s
        batch = coordinator.next_batch()
        while batch is None and not arrivals.is_closed:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return None
            await arrivals.wait(remaining_s)
            if await request.is_disconnected():
                return None
            batch = coordinator.next_batch()
        return batch

    @app.exception_handler(GroupError)
    async def refuse_group(_: Request, error: GroupError) -> JSONResponse:
        path, _sep, what = str(error).partition(": ")
        detail = {"type": "group_error", "loc": ["body", path], "msg": what or path}
        return JSONResponse({"detail": [detail]}, status_code=422)

    @app.exception_handler(UnknownEnvironment)
    async def refuse_environment(_: Request, error: UnknownEnvironment) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=404)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "AtroposLib API"}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/register")
    async def register(registration: Registration) -> RegistrationReply:
        return RegistrationReply(uuid=coordinator.register(registration))

    @app.get("/wandb_info")
    async def wandb_info() -> WandbInfo:
        return coordinator.wandb_info()

    @app.get("/info")
    async def info() -> HubInfo:
        return coordinator.info()

    @app.get("/status", response_model_exclude_none=True)
    async def status() -> HubStatus:
        return coordinator.status()

    @app.get("/ledger")
    async def ledger() -> Ledger:
        return coordinator.ledger()

    @app.post("/policy")
    async def set_policy(policy: Policy) -> Acknowledgement:
        coordinator.set_policy(policy.version)
        return Acknowledgement()

    @app.post("/register-env")
    async def register_env(registration: RegisterEnv) -> EnvRegistration | WaitForTrainer:
        return coordinator.register_env(registration) or WaitForTrainer()

    @app.post("/disconnect-env")
    async def disconnect_env(environment: EnvIdentifier) -> Acknowledgement | Failure:
        try:
            coordinator.disconnect_env(environment.env_id)
        except UnknownEnvironment as e:
            return Failure(error=str(e))
        arrivals.announce()  # its minimum no longer holds a batch back
        return Acknowledgement()

    @app.get("/status-env", response_model_exclude_none=True)
    @app.post("/status-env", response_model_exclude_none=True)
    async def status_env(env_id: Annotated[int, Depends(_read_env_id)]) -> EnvStatus:
        return coordinator.status_env(env_id)

    @app.post("/scored_data", openapi_extra={"requestBody": _GROUP_BODY})
    async def scored_data(request: Request) -> dict[str, Any]:
        [receipt] = await take_in(request, many=False)
        if receipt.buffer_size is None:
            return {"status": "received"}
        return {"status": "buffered", "buffer_size": receipt.buffer_size}

    @app.post("/scored_data_list", openapi_extra={"requestBody": _GROUP_BODY})
    async def scored_data_list(request: Request) -> dict[str, Any]:
        return _list_reply(await take_in(request, many=True))

    @app.get("/batch", response_model=None)
    async def batch(
        request: Request,
        wait: Annotated[
            float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for a batch")
        ] = 0.0,
    ) -> Response | dict[str, Any]:
        try:
            ready = await next_batch(request, min(wait, limits.max_wait_s))
        except NotRegistered as e:
            return {"status": "error", "message": str(e), "batch": []}
        if ready is None:
            return {"batch": None}
        body = await offload(
            num_bytes(ready.payloads),
            encode_batch,
            ready,
            packed=is_packed(request.headers.get("accept", "")),
            compress="gzip" in request.headers.get("accept-encoding", "").lower(),
        )
        return _response(body)

    @app.get("/latest_example", response_model=None)
    async def latest_example() -> Response | dict[str, Any]:
        latest = coordinator.latest()
        if latest is None:
            return _EMPTY_EXAMPLE
        content = await offload(num_bytes([latest]), payload_json, latest)
        return Response(content, media_type=CONTENT_TYPE_JSON)

    @app.get("/reset_data", response_class=PlainTextResponse)
    async def reset_data() -> str:
        coordinator.reset()
        return "Reset successful"

    return app


def stop_waiting(app: FastAPI) -> None:
    """Answer every waiting `GET /batch` now, for a quick shutdown."""
    app.state.arrivals.close()


async def _read_env_id(request: Request, env_id: int | None = None) -> int:
    """Read the id from the query or from a JSON body, which deployed clients send even with GET."""
    if env_id is not None:
        return env_id
    body = await request.body()
    try:
        value = json.loads(body) if body else {}
    except ValueError as e:
        detail = {"type": "json_invalid", "loc": ("body",), "msg": f"JSON decode error: {e}"}
        raise RequestValidationError([detail]) from e
    try:
        return EnvIdentifier.model_validate(value).env_id
    except ValidationError as e:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in e.errors()]
        raise RequestValidationError(errors) from e


def _list_reply(receipts: Sequence[Receipt]) -> dict[str, Any]:
    reply: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffer_sizes = [r.buffer_size for r in receipts if r.buffer_size is not None]
    if buffer_sizes:
        reply |= {"buffered": len(buffer_sizes), "last_buffer_size": buffer_sizes[-1]}
    return reply


def _response(body: EncodedBody) -> Response:
    headers = {"Vary": "Accept, Accept-Encoding"}
    if body.is_gzip:
        headers["Content-Encoding"] = "gzip"
    return Response(body.content, media_type=body.media_type, headers=headers)


app = create_app(Coordinator(MemoryStore()))
