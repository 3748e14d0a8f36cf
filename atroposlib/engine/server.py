"""`atropos-engine`: vLLM's routes over the local engine.

One asyncio loop serves HTTP, one thread generates (`scheduler.Engine`); futures connect them. The sequences of a client
that disconnects are aborted. Weight routes have no authentication, as in vLLM: bind to loopback or a private network.
Tests use `create_app`, the command of `__main__.py` uses `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import transformers
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib import __version__
from atroposlib.engine.bodies import (
    ChatBody,
    CheckerBody,
    CompletionBody,
    DetokenizeBody,
    RpcBody,
    TokenizeBody,
    VersionBody,
    check_ids,
    check_prompt,
    parse_body,
    read_prompts,
    sampling_params,
)
from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import LoadedModel, load, warm_up
from atroposlib.engine.rendering import Renderer
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import PauseMode
from atroposlib.engine.sequences import Completion, EngineRequest
from atroposlib.engine.weights import read_checkpoint, weight_checksums
from atroposlib.errors import EngineError, EngineRejected, EngineUnavailable
from atroposlib.http_bodies import ApiError, BodyRefused, disconnected, read_body
from atroposlib.http_guard import CROSS_SITE, foreign_host, is_cross_site
from atroposlib.utils.answer_bodies import model_card
from atroposlib.utils.local_server import LocalServer, send_at_once

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

_Handler = Callable[..., Awaitable[Response]]

_SHUTDOWN_S = 5
"""Seconds for connections to end after SIGTERM."""
_BACKLOG = 2048
"""Limit of connections not yet accepted (uvicorn's default)."""


def create_app(loaded: LoadedModel) -> FastAPI:
    """Return the HTTP application over a started engine. It does not start or close the engine."""
    app = FastAPI(title="atropos-engine", version=__version__)
    app.add_middleware(_NoWebPages)
    _Routes(loaded).add_to(app)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(BodyRefused)
    async def unreadable(request: Request, error: BodyRefused) -> Response:
        return _error(ApiError(error.message, status=error.status))

    @app.exception_handler(EngineError)
    async def failed(request: Request, error: EngineError) -> Response:
        if isinstance(error, EngineRejected):
            return _error(ApiError(str(error)))
        return _error(ApiError(str(error), status=500))

    return app


class _NoWebPages:
    """ASGI middleware that refuses requests made by web pages in a local browser, before reading the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _web_refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        answer = ApiError(refusal, status=403)
        await _error(answer)(scope, receive, send)


def _web_refusal(scope: Scope) -> str | None:
    headers, server = scope["headers"], scope.get("server")
    if is_cross_site(headers):
        return CROSS_SITE
    host = foreign_host(headers, server=server[0] if server else None)
    if host is None:
        return None
    return f"this engine serves only its own machine, and {host!r} is not its name; use localhost"


class _Routes:
    """The handlers, bound to one engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.engine, self.tokenizer, self.limits, self.model_name = loaded
        self._renderer = Renderer(loaded.model_name, loaded.tokenizer)
        # Serialises reloads: concurrent ones would copy their weights in any order.
        self._reloading = asyncio.Lock()

    def add_to(self, app: FastAPI) -> None:
        read: dict[str, _Handler] = {
            "/health": self.health,
            "/version": self.version,
            "/v1/models": self.models,
            "/is_paused": self.is_paused,
            "/weight_info": self.weight_info,
            "/stats": self.stats,
        }
        write: dict[str, _Handler] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat_completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.collective_rpc,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weight_version": self.update_weight_version,
            "/weight_checker": self.weight_checker,
        }
        for path, handler in read.items():
            app.get(path)(handler)
        for path, handler in write.items():
            app.post(path)(handler)

    async def health(self) -> Response:
        """200 while the engine's thread runs; 503 with the reason after it died."""
        failure = self.engine.failure
        if failure is None:
            return Response(status_code=200)
        return _error(ApiError(failure, status=503))

    async def version(self) -> Response:
        return _json({"version": __version__, "engine": "atropos-engine"})

    async def models(self) -> Response:
        card = model_card(
            self.model_name, owner="atropos-engine", context_len=self.limits.context_len
        )
        return _json({"object": "list", "data": [card]})

    async def completions(self, request: Request) -> Response:
        body = await _read(request, CompletionBody)
        self._check_model(body.model)
        prompts = await asyncio.to_thread(read_prompts, body, self.tokenizer)
        for prompt_ids in prompts:
            check_prompt(prompt_ids, self.limits)
        longest = max(map(len, prompts))
        params = sampling_params(body, longest, self.limits, num_prompts=len(prompts))
        results = await self._generate(request, prompts, params)
        return _json(self._renderer.completion(body, params, prompts, results))

    async def chat_completions(self, request: Request) -> Response:
        body = await _read(request, ChatBody)
        self._check_model(body.model)
        prompt_ids = await asyncio.to_thread(self._render_chat, body)
        check_prompt(prompt_ids, self.limits)
        params = sampling_params(body, len(prompt_ids), self.limits)
        results = await self._generate(request, [prompt_ids], params)
        return _json(self._renderer.chat(body, params, prompt_ids, results[0]))

    async def tokenize(self, request: Request) -> Response:
        body = await _read(request, TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = await asyncio.to_thread(
                self.tokenizer.encode, body.prompt, add_special_tokens=special
            )
        else:
            tokens = await asyncio.to_thread(self._render_chat, body)
        return _json(
            {"count": len(tokens), "max_model_len": self.limits.context_len, "tokens": tokens}
        )

    async def detokenize(self, request: Request) -> Response:
        body = await _read(request, DetokenizeBody)
        self._check_model(body.model)
        check_ids(body.tokens, self.limits, param="tokens")
        text = await asyncio.to_thread(
            self.tokenizer.decode, body.tokens, skip_special_tokens=False
        )
        return _json({"prompt": text})

    async def pause(self, request: Request) -> Response:
        """`?mode=abort` (vLLM's default) | `wait` | `keep`; answers when nothing runs."""
        mode = request.query_params.get("mode", PauseMode.ABORT.value)
        if mode not in set(PauseMode):
            known = ", ".join(PauseMode)
            raise ApiError(f"unknown pause mode {mode!r}; one of {known}", param="mode")
        await asyncio.wrap_future(self.engine.pause(PauseMode(mode)))
        return _json({"status": "paused"})

    async def resume(self) -> Response:
        await asyncio.wrap_future(self.engine.resume())
        return _json({"status": "resumed"})

    async def is_paused(self) -> Response:
        return _json({"is_paused": self.engine.is_paused})

    async def collective_rpc(self, request: Request) -> Response:
        """Only `reload_weights`, with `weights_path` and optionally `weight_version`, set in the same step."""
        body = await _read(request, RpcBody)
        if body.method != "reload_weights":
            raise ApiError(
                f"method {body.method!r} is not implemented; this engine has 'reload_weights'",
                param="method",
            )
        kwargs = dict(body.kwargs or {})
        path = kwargs.pop("weights_path", None)
        label = kwargs.pop("weight_version", None)
        if body.args or kwargs:
            raise ApiError(
                f"reload_weights takes weights_path and weight_version by name, got also "
                f"{[*(body.args or []), *kwargs]}",
                param="kwargs",
            )
        if not isinstance(path, str) or "\0" in path:
            raise ApiError("reload_weights needs the keyword argument weights_path", param="kwargs")
        async with self._reloading:
            tensors = await asyncio.to_thread(read_checkpoint, self.engine.model, Path(path))
            reload = self.engine.reload(
                tensors, weight_version=None if label is None else str(label)
            )
            await asyncio.wrap_future(reload)
        return _json({"results": [None]})

    async def reset_prefix_cache(self) -> Response:
        """200, as in vLLM; there is no prefix cache."""
        return Response(status_code=200)

    async def update_weight_version(self, request: Request) -> Response:
        body = await _read(request, VersionBody)
        version = body.weight_version if body.new_version is None else body.new_version
        if version is None:
            raise ApiError("new_version: required, but missing", param="new_version")
        await asyncio.wrap_future(self.engine.set_weight_version(str(version)))
        return _json({"weight_version": self.engine.weight_version})

    async def weight_checker(self, request: Request) -> Response:
        """Of vLLM's actions only `checksum`; a checksum is not its SHA-256, but `tensor_checksum`."""
        body = await _read(request, CheckerBody)
        if body.action != "checksum":
            raise ApiError(
                f"action {body.action!r} is not implemented; this engine has 'checksum'",
                param="action",
            )
        sums = self.engine.control(lambda: weight_checksums(self.engine.model))
        return _json({"checksums": await asyncio.wrap_future(sums)})

    async def weight_info(self) -> Response:
        num_reloads = self.engine.stats.weight_reloads
        return _json({"weight_version": self.engine.weight_version, "num_reloads": num_reloads})

    async def stats(self) -> Response:
        return _json(await asyncio.wrap_future(self.engine.snapshot()))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                f"the model {name!r} does not exist; this engine serves {self.model_name!r}",
                param="model",
                status=404,
            )

    def _render_chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        """Apply the chat template; any error in it is the client's."""
        if body.add_generation_prompt and body.continue_final_message:
            raise ApiError(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        add_generation_prompt = body.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not body.continue_final_message
        try:
            text = self.tokenizer.apply_chat_template(
                [_text_message(message) for message in body.messages or []],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                chat_template=body.chat_template,
                **(body.chat_template_kwargs or {}),
            )
        except ApiError:
            raise
        except Exception as e:
            raise ApiError(
                f"the chat template failed: {type(e).__name__}: {e}", param="messages"
            ) from e
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def _generate(
        self, request: Request, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[list[Completion]]:
        """Run one request per prompt; abort them all if the client disconnects or this task is cancelled."""
        pending = [EngineRequest(prompt_ids, params) for prompt_ids in prompts]
        results = asyncio.gather(
            *(asyncio.wrap_future(self.engine.submit(work)) for work in pending)
        )
        gone = asyncio.ensure_future(disconnected(request.receive))
        try:
            waited: set[asyncio.Future[Any]] = {results, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                raise ApiError("the client closed the connection", status=499)
            return results.result()
        finally:
            gone.cancel()
            if not results.done():
                # asyncio reports the CancelledError of a cancelled gather as unretrieved unless it is read.
                results.add_done_callback(lambda done: done.exception())
                results.cancel()
                with contextlib.suppress(EngineUnavailable):
                    for work in pending:
                        self.engine.abort(work)


async def _read(request: Request, kind: type[T]) -> T:
    return parse_body(await read_body(request.receive), kind)


def _text_message(message: dict[str, Any]) -> dict[str, Any]:
    """Join the text parts of a message; refuse other parts."""
    content = message.get("content")
    if "role" not in message:
        raise ApiError("a message has no role", param="messages")
    if not isinstance(content, list):
        return message
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    other = [kind for kind in kinds if kind != "text"]
    if other:
        raise ApiError(
            f"message part of type {other[0]!r}: this engine takes only text", param="messages"
        )
    return {**message, "content": "".join(part["text"] for part in content)}


def _json(body: dict[str, Any], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def _error(error: ApiError) -> Response:
    return _json(error.body(), status=error.status)


def _bind(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded, so that a port in use fails at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    send_at_once(listener)
    try:
        listener.bind((host, port))
    except OSError as e:
        listener.close()
        raise EngineError(
            f"cannot listen on {host}:{port}: {e.strerror}; stop the process that uses it or choose "
            "another --port"
        ) from e
    return listener


async def _serve(loaded: LoadedModel, listener: socket.socket) -> int:
    """Serve until SIGTERM (exit code 0) or SIGINT (130); requests in flight then fail at once."""
    server = LocalServer(create_app(loaded), shutdown_s=_SHUTDOWN_S)
    code = 0

    def stop(exit_code: int) -> None:
        nonlocal code
        code = exit_code
        server.stop()
        loaded.engine.close()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop, 0)
    loop.add_signal_handler(signal.SIGINT, stop, 130)
    await server.serve(sockets=[listener])
    return code


def run(config: EngineConfig) -> int:
    """Load, warm up and serve; return the exit code."""
    transformers.utils.logging.disable_progress_bar()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    # More runnable threads than cores makes OpenMP spin: minutes instead of seconds on a busy laptop.
    torch.set_num_threads(config.threads or (1 if cores <= 2 else cores // 2))
    with contextlib.closing(_bind(config.host, config.port)) as listener:
        loaded = load(config)
        loaded.engine.start()
        try:
            warm_up(loaded.engine)
            host, port = listener.getsockname()[:2]
            listener.listen(_BACKLOG)  # before the log line below, whose reader may connect at once
            logger.info("serving %s on http://%s:%s", loaded.model_name, host, port)
            return asyncio.run(_serve(loaded, listener))
        finally:
            loaded.engine.close()
