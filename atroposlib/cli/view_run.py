"""`view-run` shows the groups of a run in the browser: a live one at a hub, or the stored files of one.

A live run is only read: every two seconds the page adds the group that was queued last, a sample of the run, and takes
nothing from the trainer. With `--consume` it acts as the trainer, like the original viewer: shown batches are consumed.
A live run needs the extra `view`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import uvicorn
import xxhash
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import Route

from atroposlib.cli.run_api import listen
from atroposlib.client import TrainerClient, TrainerNotRegistered, TrainerRegistration
from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, GroupError, HubError, HubRejected, cli_boundary, require
from atroposlib.frontend.indexed_run import IndexedRun
from atroposlib.frontend.page import Index, IndexRow, row_of, served_page
from atroposlib.frontend.rendering import render
from atroposlib.frontend.run_files import find_run_files, write_run_page
from atroposlib.frontend.view_groups import view_of_group
from atroposlib.frontend.vocabulary import Decode, Vocabulary, decoder
from atroposlib.http_guard import foreign_host
from atroposlib.scored_data import ScoredGroup
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.wording import similar_path, without_users

Handler: TypeAlias = Callable[[Request], Response]

GROUPS_PER_STEP = 8
RETRY_FOR_S = 3.0
"""Short, because a person waits for the page."""
POLL_EVERY_S = 2.0
"""The page asks for new groups this often; all pages together make one request to the hub."""
MAX_GROUPS = 200
MAX_BYTES = 64_000_000
"""Limits of the groups that are kept to show, as JSON; one group alone may be larger."""
NOTHING_YET = "There is no group yet; the environments have sent none"

MAX_POINTS = 300
"""Of each curve; beyond, every second one is left out."""
MAX_RENDERED_BYTES = 2_000_000
"""Texts of one request for their rendered form, as JSON."""

_FRAME = """<style>footer {{ display: none !important; }}</style>
<iframe src="viewer" title="Groups of the run"
 style="position: fixed; inset: {top}px 0 0 0; width: 100%; height: calc(100dvh - {top}px); border: 0"></iframe>"""


class ViewConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    run: Path | None = None
    """A run's or an evaluation's directory, or a JSONL file, to show instead of a live run."""
    other: Path | None = None
    """A second one, to compare with the first."""
    api_url: str = "http://localhost:8000"
    """Address of the hub of a live run."""
    host: str = "127.0.0.1"
    """Address to serve the page on."""
    port: int = Field(default=9001, ge=0, le=65535)
    """Port to serve the page on."""
    tokenizer: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    """Name or path. For stored files the default is that of a model in the directory, if there is one."""
    consume: bool = False
    """Take batches as a trainer does, instead of only reading."""
    group_size: int = Field(default=2, ge=1)
    """With --consume: sequences per group."""
    max_token_len: int = Field(default=2048, ge=1)
    """With --consume: longest sequence."""
    share: bool = False
    """Publish the page of a live run through Gradio's servers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; 2 for a wrong flag or file, 1 without the extra `view`."""
    return cli_boundary(lambda: run(argv, ViewConfig, prog="view-run"))


def run(argv: Sequence[str] | None, model: type[ViewConfig], *, prog: str) -> int:
    """Parse the flags and serve a live run or stored files."""
    config = parse_flags(
        model,
        argv,
        prog=prog,
        description="Show the groups of a run in the browser, or compare two runs.",
        positional=["run", "other"],
    )
    if stored := [path for path in (config.run, config.other) if path is not None]:
        return serve_stored(stored, config)
    return serve_live(config)


# Stored files.


def serve_stored(sources: Sequence[Path], config: ViewConfig) -> int:
    if config.share or config.consume:
        raise ConfigError("--share and --consume are for a live run; omit them or the directory")
    for path in sources:
        if not path.exists():
            hint = similar_path(path, otherwise="`process` writes data/NAME.jsonl")
            raise ConfigError(f"{path}: there is no such file or directory; {hint}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how far a long page is
    is_named = "tokenizer" in config.model_fields_set
    tokenizer = load_tokenizer(config.tokenizer, flag="--tokenizer") if is_named else None
    with (
        listen(config.host, config.port) as listener,
        tempfile.TemporaryDirectory(prefix="view-run-") as folder,
    ):
        page = StoredPage(sources, Path(folder) / "page.html", tokenizer)
        page.html()  # a file that cannot be read is reported here
        app = stored_app(page)
        port = listener.getsockname()[1]
        print(
            f"{' and '.join(map(str, sources))}: http://{config.host}:{port}/ (Ctrl-C ends)",
            flush=True,
        )
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        server.run(sockets=[listener])
    return 0


class StoredPage:
    """The page of stored files, made again when they have changed."""

    def __init__(self, sources: Sequence[Path], target: Path, tokenizer: Any) -> None:
        """`sources`: one run, or two to compare; their groups are read when they are shown.

        `target`: the page that was made last; that of an evaluation is whole.
        """
        self._sources = sources
        self._target = target
        self._tokenizer = tokenizer
        self._signature: object = None
        self._run: IndexedRun | None = None
        self._lock = threading.Lock()
        """Held while files are read: requests run in threads."""

    def html(self) -> bytes:
        """Return the current page; ConfigError if the files cannot be read."""
        with self._lock:
            runs = [find_run_files(source) for source in self._sources]
            # Taken first: what is added meanwhile is shown next time.
            signature = [run.signature for run in runs]
            if signature != self._signature:
                self._run = None
                if any(run.samples for run in runs):
                    other = runs[1] if len(runs) > 1 else None
                    options = {"tokenizer": self._tokenizer, "render": "render"}
                    write_run_page(runs[0], self._target, other=other, **options)
                else:
                    self._run = IndexedRun(*runs, tokenizer=self._tokenizer)
                    chunks = f"chunk/{_name_of(signature)}/"
                    self._target.write_bytes(self._run.page(chunks, render="render"))
                self._signature = signature
            return self._target.read_bytes()

    def chunk(self, version: str, number: int) -> bytes | None:
        """Return a chunk of the page; None if the files have changed since the page was made."""
        with self._lock:
            is_same = self._run is not None and version == _name_of(self._signature)
            return self._run.chunk(number) if is_same and self._run is not None else None


def _name_of(signature: object) -> str:
    return xxhash.xxh3_64_hexdigest(repr(signature).encode())


def stored_app(page: StoredPage) -> FastAPI:
    """Return the application that serves a page at `/`, and its chunks."""

    def show(request: Request) -> Response:
        try:
            return Response(page.html(), media_type="text/html", headers=_NOT_STORED)
        except ConfigError as error:
            return PlainTextResponse(f"{error}\n", 500)

    def chunk(request: Request) -> Response:
        found = page.chunk(request.path_params["version"], request.path_params["number"])
        if found is None:
            return PlainTextResponse("the files have changed; load the page again\n", 409)
        return Response(found, media_type="application/json", headers=_NOT_STORED)

    part = Route("/chunk/{version}/{number:int}", _guarded(chunk))
    return FastAPI(routes=[Route("/", _guarded(show)), part, render_route()])


def _guarded(handler: Handler) -> Handler:
    """Refuse web pages whose name was made to resolve to this machine (DNS rebinding)."""
    return lambda request: _refusal(request) or handler(request)


_NOT_STORED = {"Cache-Control": "no-store"}


def _refusal(request: Request) -> Response | None:
    server = request.scope.get("server")
    host = foreign_host(request.scope["headers"], server=server[0] if server else None)
    if host is None:
        return None
    return PlainTextResponse(f"this server is not {host!r}: call it as localhost\n", 403)


# A live run.


def serve_live(config: ViewConfig) -> int:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    gradio = require("gradio", extra="view")
    if config.port:
        listen(config.host, config.port).close()  # gradio's message would not name the flag
    decode = decoder(load_tokenizer(config.tokenizer, flag="--tokenizer"))
    with TrainerClient(config.api_url, retry_for_s=RETRY_FOR_S) as hub:
        seen = SeenGroups(hub, config, decode)
        page = build_page(gradio, seen, config=config)
        _, url, _ = page.launch(
            server_name=config.host,
            server_port=config.port or None,
            share=config.share,
            quiet=not config.share,  # else it proposes a public link
            prevent_thread_lock=True,
            ssr_mode=False,  # Gradio's other server does not know these routes
            app_kwargs={"routes": live_routes(seen, config)},
        )
        print(f"{without_users(config.api_url)}: {url} (Ctrl-C ends)", flush=True)
        page.block_thread()
    return 0


def build_page(gradio: Any, seen: SeenGroups, *, config: ViewConfig) -> Any:
    """Build Gradio's page: the viewer, and with `consume` a button that takes a batch."""
    with gradio.Blocks(title="Atropos run", analytics_enabled=False, fill_width=True) as page:
        if config.consume:
            button = gradio.Button("Take the next batch", variant="primary")
            button.click(seen.take_batch, outputs=gradio.Markdown())
        gradio.HTML(_FRAME.format(top=120 if config.consume else 0))
    return page


def live_routes(seen: SeenGroups, config: ViewConfig) -> list[Route]:
    """Return the routes of the viewer and of the groups it asks for."""
    head = {"title": without_users(f"Run at {config.api_url}"), "about": NOTHING_YET}
    live = {"poll": "newest-groups", "every_s": POLL_EVERY_S}
    page = served_page({**head, "live": live, "render": "render"}, Index())

    def viewer(request: Request) -> Response:
        return Response(page, media_type="text/html")

    def newest(request: Request) -> Response:
        answer = seen.newest(after=request.query_params.get("after"))
        return Response(answer, media_type="application/json", headers=_NOT_STORED)

    handlers = {"/viewer": viewer, "/newest-groups": newest}
    if config.share:  # Gradio's servers forward the page under their own name
        return [*starmap(Route, handlers.items()), render_route(guarded=False)]
    return [*(Route(path, _guarded(handler)) for path, handler in handlers.items()), render_route()]


def render_route(*, guarded: bool = True) -> Route:
    """Return the route that answers a JSON list of texts with a list of each text and its tree."""

    async def answer(request: Request) -> Response:
        refusal = _refusal(request) if guarded else None
        if refusal is not None:
            return refusal
        if request.headers.get("content-type") != "application/json":  # a form of another site
            return PlainTextResponse("send a JSON list of texts\n", 415)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_RENDERED_BYTES:
                return PlainTextResponse(f"more than {MAX_RENDERED_BYTES} bytes\n", 413)
        try:
            texts = msgspec.json.decode(body, type=list[str])
        except msgspec.DecodeError as error:
            return PlainTextResponse(f"{error}\n", 400)
        found = await asyncio.to_thread(lambda: [(text, render(text)) for text in texts])
        return Response(msgspec.json.encode(found), media_type="application/json")

    return Route("/render", answer, methods=["POST"])


class _Seen(NamedTuple):
    row: IndexRow
    json: msgspec.Raw
    pieces: dict[str, str]
    """Of its tokens, by id."""


class SeenGroups:
    """The newest groups of a run, as the viewer asks for them."""

    def __init__(self, hub: TrainerClient, config: ViewConfig, decode: Decode) -> None:
        self._hub = hub
        self._config = config
        self._decode = decode
        self._vocabulary = Vocabulary(decode)
        self._groups: OrderedDict[str, _Seen] = OrderedDict()
        """By group id, oldest first."""
        self._num_bytes = 0
        self._read_at = float("-inf")
        self._state = NOTHING_YET
        self._hub_state: dict[str, Any] | None = None
        """What `GET /explain` answered last; None if it does not answer."""
        self._points: list[dict[str, float | None]] = []
        """Readings of the hub, oldest first."""
        self._lock = threading.Lock()
        """Held during a request to the hub: handlers run in threads."""

    def newest(self, *, after: str | None) -> bytes:
        """Return the JSON of the groups that came after the one with that id; of all if it is unknown.

        Beside new groups it has the index of all that are kept.
        """
        with self._lock:
            if time.monotonic() - self._read_at >= POLL_EVERY_S / 2:
                self._read_at = time.monotonic()
                if not self._config.consume:
                    self._add(self._read)
                self._look()
            names = list(self._groups)
            start = names.index(after) + 1 if after is not None and after in names else 0
            seen = [self._groups[name] for name in names[start:]]
            title = without_users(f"Run at {self._config.api_url}")
            answer = {
                "head": {
                    "title": title,
                    "about": self._state,
                    "hub": self._hub_state,
                    "points": self._points,
                },
                "index": self._index() if seen else None,
                "groups": [each.json for each in seen],
                "vocabulary": dict(chain.from_iterable(each.pieces.items() for each in seen)),
            }
        return msgspec.json.encode(answer)

    def _index(self) -> dict[str, Any]:
        index = Index()
        for each in self._groups.values():
            index.add(each.row)
        return index.content()

    def take_batch(self) -> str:
        """Take a batch as the trainer; return what happened."""
        with self._lock:
            self._add(lambda: _take(self._hub, self._config))
            return self._state

    def _look(self) -> None:
        """Read the state of the hub, and note what the curves show."""
        try:
            found = self._hub.explain()
        except HubError:  # the line under the title says so; other hubs have no such endpoint
            self._hub_state = None
            return
        self._hub_state = found.model_dump(mode="json")
        scores = next(reversed(self._groups.values())).row.scores if self._groups else []
        stale = (
            None if found.oldest_version is None else found.policy_version - found.oldest_version
        )
        self._points.append(
            {
                "time": time.time(),
                "score": sum(scores) / len(scores) if scores else None,
                "step": found.current_step,
                "queued": found.queued_groups,
                "staleness": stale,
                "wait_s": found.trainer_waits_s,
            }
        )
        if len(self._points) > MAX_POINTS:
            self._points = self._points[::2]

    def _read(self) -> list[ScoredGroup]:
        group = self._hub.latest_example()
        return [] if group is None else [group]

    def _add(self, read: Callable[[], list[ScoredGroup]]) -> None:
        """Add the groups that `read` returns, and say how it went."""
        try:
            found = read()
        except (HubError, GroupError) as error:
            self._state = f"Cannot read from the hub: {error}"
            return
        for group in found:
            view = view_of_group(group, decode=self._decode)
            if view is not None and view["id"] not in self._groups:
                json = msgspec.Raw(msgspec.json.encode(view))
                self._groups[view["id"]] = _Seen(row_of(view), json, self._vocabulary.of([view]))
                self._num_bytes += len(bytes(json))
        while len(self._groups) > MAX_GROUPS or (
            self._num_bytes > MAX_BYTES and len(self._groups) > 1
        ):
            _, oldest = self._groups.popitem(last=False)
            self._num_bytes -= len(bytes(oldest.json))
        if self._config.consume and not found:
            self._state = "There is no batch yet; the hub has too few groups"
        elif not self._groups:
            self._state = NOTHING_YET
        else:
            sampled = f"A sample of the groups: the newest one every {POLL_EVERY_S:g} s"
            what = "Batches taken from the trainer" if self._config.consume else sampled
            self._state = f"{what}: {len(self._groups)} shown, at most {MAX_GROUPS}"


def _take(hub: TrainerClient, config: ViewConfig) -> list[ScoredGroup]:
    try:
        batch = hub.lease_batch()
    except TrainerNotRegistered:
        hub.register(
            TrainerRegistration(
                batch_size=config.group_size * GROUPS_PER_STEP,
                max_token_len=config.max_token_len,
                checkpoint_dir="checkpoints",
                save_checkpoint_interval=0,
                starting_step=0,
                num_steps=-1,
            )
        )
        batch = hub.lease_batch()
    if batch is None:
        return []
    try:
        hub.ack(batch)
    except HubRejected as e:
        print(f"the hub may deliver these groups again: {e}", file=sys.stderr)
    return batch.groups


if __name__ == "__main__":
    sys.exit(main())
