"""A scripted engine as an HTTP server: vLLM's, SGLang's and TRL's routes, and faults on the wire.

Tests start it in their own event loop, `python -m atroposlib.inference.scripted_engine` in its own process. It checks
no API keys and is for loopback only.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec
from aiohttp import web

from atroposlib.http_bodies import ApiError
from atroposlib.inference.answerer import Answers, Ask
from atroposlib.inference.scripted_answers import ByteTokenizer, Respond, vocab_size_of
from atroposlib.inference.scripted_engine import dialects
from atroposlib.inference.scripted_engine.generation import Generator, Tell
from atroposlib.inference.scripted_engine.script import Fault, Schedule, Script
from atroposlib.utils.answer_bodies import model_card

BACKLOG = 4096
"""Connections that may wait to be accepted: a client opens thousands at once."""
NUM_KEPT_REQUESTS = 10_000
_ROUNDS_TO_ACCEPT = 4
"""asyncio needs three rounds of its loop to accept a connection."""
_CLEAN_UP_S = 1.0
"""How long `stop` waits for cancelled handlers."""


@dataclass(slots=True)
class ServedRequest:
    """One generation request, as received."""

    path: str
    body: dict[str, Any]
    fault: str | None = None
    """Kind of its fault."""
    was_generated: bool = False
    """Whether tokens were sampled, delivered or not."""


class _Dialect(NamedTuple):
    read: Callable[[dict[str, Any], dialects.Engine], list[Ask]]
    write: Callable[[dict[str, Any], Sequence[Answers], dialects.Engine], Any]


_SGLANG = _Dialect(dialects.read_sglang, dialects.write_sglang)
_TRL = _Dialect(dialects.read_trl, dialects.write_trl)
_DIALECTS = {
    "/v1/completions": _Dialect(dialects.read_completions, dialects.write_completions),
    "/v1/chat/completions": _Dialect(dialects.read_chat, dialects.write_chat),
    "/inference/v1/generate": _Dialect(dialects.read_scale_out, dialects.write_scale_out),
    "/generate/": _TRL,
}
GENERATION_PATHS = frozenset({*_DIALECTS, "/generate"})


def _dialect_of(path: str, body: dict[str, Any]) -> _Dialect:
    if path in _DIALECTS:
        return _DIALECTS[path]
    # Two projects use the path /generate; their prompt keys differ.
    return _TRL if "prompts" in body else _SGLANG


class _Reply(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str]


class ScriptedEngine:
    """An engine with a made-up model. Open it with `async with`; `url` is its root, without `/v1`."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        model_name: str = "scripted",
        tokenizer: Any = None,
        respond: Respond | None = None,
        weight_version: str = "default",
        max_model_len: int = 32768,
        missing_paths: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.tokenizer: Any = tokenizer or ByteTokenizer()
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size_of(self.tokenizer)
        self.host = host
        self.port = port
        """The actual port once started; a restart reuses it."""
        self.counts: Counter[str] = Counter()
        """Requests by path, faults by kind, and `status <number>` of every answer."""
        self.served: deque[ServedRequest] = deque(maxlen=NUM_KEPT_REQUESTS)
        """Generation requests, oldest first."""
        self.generator = Generator(
            tokenizer=self.tokenizer,
            script=script or Script(),
            respond=respond,
            weight_version=weight_version,
        )
        self._schedule = Schedule(self.generator.script, now_s=time.monotonic())
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None
        gets, posts = self._control_routes()
        self._gets = {p: h for p, h in gets.items() if p not in missing_paths}
        self._posts = {p: h for p, h in posts.items() if p not in missing_paths}
        self._generation_paths = GENERATION_PATHS - set(missing_paths)

    # Start and stop.

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen; raises OSError when the port is taken."""
        # A client that disconnects ends its generation, as in vLLM.
        self._web = web.Server(self._handle, handler_cancellation=True, access_log=None)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._web, self.host, self.port, backlog=BACKLOG, reuse_address=True
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and break every connection, as a killed process does. `start` restarts it."""
        if self._listener is not None:
            # Connections being accepted must be broken, too: closing the listener first would leave them open.
            for listening in self._listener.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(_ROUNDS_TO_ACCEPT):
                await asyncio.sleep(0)
            self._listener.close()
            self._listener = None
        if self._web is not None:
            for protocol in list(self._web.connections):
                if protocol.transport is not None:
                    protocol.transport.abort()
            await self._web.shutdown(_CLEAN_UP_S)
            self._web = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # The script and the weights.

    @property
    def script(self) -> Script:
        return self.generator.script

    def set_script(self, script: Script) -> None:
        """Replace the script; running generations keep their pace."""
        self.generator.set_script(script)
        self._schedule = Schedule(script, now_s=time.monotonic())

    @property
    def weight_version(self) -> str:
        return self.generator.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.generator.set_weight_version(version)

    # Requests.

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        self.counts[path] += 1
        payload = await request.content.read()
        generates = path in self._generation_paths and request.method == "POST"
        try:
            fault = self._schedule.next(path, generates=generates, now_s=time.monotonic())
            if fault is not None:
                self.counts[fault.kind] += 1
                if fault.kind in ("drop_before", "status") and generates:
                    self.served.append(ServedRequest(path, _object(payload), fault.kind))
                if fault.kind == "drop_before":
                    return _dropped(request)
                if fault.kind == "status":
                    raise ApiError(
                        f"scripted failure {fault.status}",
                        status=fault.status,
                        retry_after_s=fault.retry_after_s,
                    )
            body = _object(payload) if generates else {}
            if body.get("stream") and _dialect_of(path, body) is _SGLANG:
                return await self._stream(request, body, fault)
            if generates:
                results = await self._answers(path, body, fault)
                written = _dialect_of(path, body).write(body, results, self)
                reply = _Reply(200, msgspec.json.encode(written), {})
            else:
                reply = await self._control(request, payload)
        except ApiError as e:
            retry = {} if e.retry_after_s is None else {"Retry-After": f"{e.retry_after_s:g}"}
            reply = _Reply(e.status, msgspec.json.encode(e.body()), retry)
            fault = None
        self.counts[f"status {reply.status}"] += 1
        return await _deliver(request, reply, fault)

    async def _answers(
        self, path: str, body: dict[str, Any], fault: Fault | None, tell: Tell | None = None
    ) -> list[Answers]:
        asks = _dialect_of(path, body).read(body, self)
        served = ServedRequest(path, body, None if fault is None else fault.kind)
        self.served.append(served)
        swaps = served.fault == "swap_weights"
        results = await asyncio.gather(
            *(self.generator.answer(ask, swaps_weights=swaps, tell=tell) for ask in asks)
        )
        served.was_generated = True
        if served.fault == "wrong_lengths":
            results[0].completions[0].logprobs.pop()
        return results

    async def _stream(
        self, request: web.BaseRequest, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        """Send the events of SGLang's `/generate`; a fault that drops the answer drops its last event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        ended: set[int] = set()

        async def tell(answers: Answers) -> None:
            if not response.prepared:
                await response.prepare(request)
            for event in dialects.sglang_events(body, answers, self, ended=ended):
                await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

        (answers,) = await self._answers(request.path, body, fault, tell)
        if fault is not None and fault.kind.startswith("drop"):
            return _dropped(request)
        await tell(answers)
        await response.write(b"data: [DONE]\n\n")
        self.counts["status 200"] += 1
        return response

    # Everything but generation.

    async def _control(self, request: web.BaseRequest, payload: bytes) -> _Reply:
        path = request.path
        found = (self._gets if request.method == "GET" else self._posts).get(path)
        if found is None:
            known = path in self._gets or path in self._posts or path in self._generation_paths
            detail = "Method Not Allowed" if known else "Not Found"
            return _Reply(405 if known else 404, msgspec.json.encode({"detail": detail}), {})
        body = _object(payload) if payload else {}
        answer = found({**body, **request.query})
        if inspect.isawaitable(answer):
            answer = await answer
        return _Reply(200, answer if isinstance(answer, bytes) else msgspec.json.encode(answer), {})

    def _control_routes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the GET and the POST routes: functions of the body and the query."""
        gets = {
            "/health": lambda body: b"",
            "/health/": lambda body: {"status": "ok"},
            "/version": lambda body: {"version": "scripted"},
            "/v1/models": self._models,
            "/openapi.json": lambda body: {
                "paths": dict.fromkeys([*self._gets, *self._posts, *self._generation_paths], {})
            },
            "/is_paused": lambda body: {"is_paused": self.generator.is_paused},
            "/weight_info": self._version,
            "/weight_version": self._version,
            "/get_weight_version": self._version,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/script": self._show,
        }
        posts = {
            "/tokenize": self._tokenize,
            "/pause": self._pause,
            "/resume": lambda body: self._resumed({"status": "resumed"}),
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_weight_version,
            "/reset_prefix_cache": lambda body: {"success": True},
            "/flush_cache": lambda body: b"Cache flushed.\n",
            "/pause_generation": self._pause_generation,
            "/continue_generation": lambda body: self._resumed(
                {"message": "Generation continued successfully.", "status": "ok"}
            ),
            "/update_weights_from_disk": self._update_weights_from_disk,
            "/script": self._take_script,
        }
        return gets, posts

    def _version(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"weight_version": self.weight_version}

    def _models(self, body: dict[str, Any]) -> dict[str, Any]:
        card = model_card(self.model_name, owner="scripted", context_len=self.max_model_len)
        return {"object": "list", "data": [card]}

    def _model_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "model_path": self.model_name,
            "tokenizer_path": self.model_name,
            "is_generation": True,
            "weight_version": self.weight_version,
        }

    def _show(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"script": msgspec.to_builtins(self.script), "counts": dict(self.counts)}

    def _take_script(self, body: dict[str, Any]) -> Any:
        try:
            self.set_script(msgspec.convert(body, Script))
        except msgspec.ValidationError as e:
            raise ApiError(f"script: {e}") from e
        return self._show(body)

    def _tokenize(self, body: dict[str, Any]) -> Any:
        if body.get("messages") is not None:
            tokens = dialects.read_chat({**body, "max_tokens": 1}, self)[0].prompt_tokens or []
        else:
            special = body.get("add_special_tokens", True)
            tokens = self.tokenizer.encode(body.get("prompt", ""), add_special_tokens=special)
        return {
            "count": len(tokens),
            "max_model_len": self.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }

    async def _pause(self, body: dict[str, Any]) -> Any:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ApiError(
                f"mode: Input should be 'abort', 'wait' or 'keep', got {mode!r}", param="query.mode"
            )
        await self.generator.pause(mode)
        return {"status": "paused"}

    def _resumed(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.generator.resume()
        return answer

    def _collective_rpc(self, body: dict[str, Any]) -> Any:
        method = body.get("method")
        if method is None:
            raise ApiError("Missing 'method' in request body")
        if method != "reload_weights":
            raise ApiError(f"Call to collective_rpc method failed: no {method!r}", status=500)
        self.weight_version = self.generator.next_version()
        return {"results": [None]}

    def _update_weight_version(self, body: dict[str, Any]) -> Any:
        version = body.get("new_version")
        if version is None:
            raise ApiError("1 validation error: Field required", param="body.new_version")
        self.weight_version = str(version)
        return self._version(body)

    async def _pause_generation(self, body: dict[str, Any]) -> Any:
        # Of SGLang's modes, retract and in_place both resume later.
        await self.generator.pause("abort" if body.get("mode", "abort") == "abort" else "keep")
        return {"message": "Generation paused successfully.", "status": "ok"}

    def _update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        if body.get("model_path") is None:
            raise ApiError("model_path: Field required", status=422, param="model_path")
        version = body.get("weight_version")
        self.weight_version = self.generator.next_version() if version is None else str(version)
        return {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": self.generator.num_running if self.generator.is_paused else 0,
        }


def _object(payload: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(payload)
    except msgspec.DecodeError as e:
        raise ApiError(f"JSON decode error: {e}") from e
    if not isinstance(body, dict):
        raise ApiError("Request body must be a JSON object")
    return body


def _dropped(request: web.BaseRequest) -> web.Response:
    """Break the connection; the returned response is never sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _deliver(
    request: web.BaseRequest, reply: _Reply, fault: Fault | None
) -> web.StreamResponse:
    """Send an answer with its fault; faults that are already in the body need nothing here."""
    body = reply.body
    kind = None if fault is None else fault.kind
    if kind == "drop_after":
        return _dropped(request)
    if kind == "drop_in_body":
        response = web.StreamResponse(
            status=reply.status,
            headers={"Content-Type": "application/json", "Content-Length": str(len(body))},
        )
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.close()  # `abort` would discard what was written
        return response
    if kind == "cut_json":
        body = body[: len(body) // 2]
    return web.Response(
        status=reply.status, body=body, content_type="application/json", headers=reply.headers
    )
