"""Bodies of the token routes: request bytes to checked groups, stored payloads to response bytes.

`GroupCodec` decides where that work runs, so that the event loop is never held up: on it, some milliseconds in each of
its rounds; in a thread what gives up the GIL, which is joining and compressing; in a process of its own (`decoding`)
what would take too long. A thread that gives up the GIL for moments only, as numpy does, is no help: whoever waits for
the GIL begins to wait anew each time, for up to 15 ms in all. No group is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

import msgspec
import zstandard
from isal import isal_zlib

from atroposlib.api.calls import IncomingGroup
from atroposlib.api.decoding import (
    MEMORY_LIMIT_VARIABLE,
    REPLY,
    REQUEST,
    Body,
    Reply,
    decode_body,
    is_light,
    num_nodes,
    receive_exactly,
)
from atroposlib.errors import AtroposError, GroupError
from atroposlib.wire import (
    CONTENT_TYPE_JSON,
    CONTENT_TYPE_PACKED,
    json_pieces,
    packed_pieces,
    split_packed,
    tail_texts,
)

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

COMPRESS_FROM_BYTES: Final = 1000
"""Smaller bodies are sent as they are."""

_GZIP_LEVEL: Final = 2
"""Of ISA-L, whose levels cost the same: a third of zlib's level 1, and smaller."""
_ZSTD_LEVEL: Final = 1  # of packed arrays, level 3 is no smaller
_GZIP_WBITS: Final = 16 + isal_zlib.MAX_WBITS

_PIECE_BYTES: Final = 2**20
"""Longest piece of a body, for sending and compressing. Shorter ones are joined up to a quarter of it."""

_INLINE_JOIN_BYTES: Final = 4 * 2**20
"""Copied on the event loop in 2 ms; a thread takes longer to wake."""

_INLINE_NODES: Final = 1000
"""Lists, objects and keys in a body that is decoded on the event loop: each costs some microseconds."""
_TURN_S: Final = 0.002
"""How long the event loop encodes before it looks after others."""

_DECODER_COMMAND: Final = ("-m", "atroposlib.api.decoding")
_DECODER_MEMORY_BYTES: Final = 4 * 2**30
"""Address space of a decoder process: several times the largest body we accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBody:
    """A response body, ready to send."""

    pieces: list[bytes]
    """Sent one after another, they are the body; each is at most about a MiB."""
    media_type: str
    encoding: str | None = None
    """Value of `Content-Encoding`."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


class GroupCodec:
    """Decodes and encodes for one application; its lifespan ends with `close`. Used from one event loop."""

    def __init__(
        self,
        *,
        inline_bytes: int = 65536,
        inline_packed_bytes: int = 2**20,
        num_workers: int = 1,
        num_threads: int = 2,
        worker_timeout_s: float = 60.0,
    ) -> None:
        self._inline_bytes = inline_bytes
        self._inline_packed_bytes = inline_packed_bytes
        self._worker_timeout_s = worker_timeout_s
        self._threads = ThreadPoolExecutor(num_threads + num_workers, "hub-codec")
        self._thread_slots = asyncio.Semaphore(num_threads)
        self._worker_slots = asyncio.Semaphore(num_workers)
        self._turn = asyncio.Lock()
        """Work of milliseconds on the event loop: one piece in each of its rounds."""
        self._idle_workers: list[_DecoderProcess] = []

    async def decode(self, body: Body, *, content_type: str, many: bool) -> list[IncomingGroup]:
        """Decode and check the body of `/scored_data` or, with `many`, `/scored_data_list`; raises `GroupError`."""
        packed = is_packed(content_type)
        if self._is_quick(body, packed=packed):
            return decode_body(body, is_packed=packed, many=many)
        if is_light(body, is_packed=packed):
            return await self._in_turn(body, is_packed=packed, many=many)
        return await self._in_worker(body, is_packed=packed, many=many)

    def _is_quick(self, body: Body, *, packed: bool) -> bool:
        """Is `body` decoded in a millisecond, so that it need not wait for a turn?"""
        if packed:
            if len(body) > self._inline_packed_bytes:
                return False
            blobs = split_packed(body).blobs
            texts: list[Body] = [text for blob in blobs for text in tail_texts(blob)]
        else:
            texts = [body]
        if sum(map(len, texts)) > self._inline_bytes:
            return False
        return sum(map(num_nodes, texts)) <= _INLINE_NODES

    async def _in_turn(self, body: Body, *, is_packed: bool, many: bool) -> list[IncomingGroup]:
        """Decode on the event loop, one body in each of its rounds."""
        async with self._turn:
            try:
                return decode_body(body, is_packed=is_packed, many=many)
            finally:
                await asyncio.sleep(0)

    async def encode_batch(
        self,
        payloads: Sequence[bytes],
        meta: Mapping[str, Any],
        *,
        packed: bool,
        encoding: str | None,
    ) -> EncodedBody:
        """Encode the body of a `GET /batch` that delivers `payloads`.

        `encoding` is None, "gzip" or "zstd". JSON carries `meta` beside the batch only if it holds a lease.
        """
        is_mere_join = packed and encoding is None
        inline_bytes = _INLINE_JOIN_BYTES if is_mere_join else self._inline_bytes // 4
        if sum(map(len, payloads)) <= inline_bytes:
            return _encode_batch(payloads, meta, packed=packed, encoding=encoding)
        if packed:
            return await self._in_thread(
                _encode_batch, payloads, meta, packed=True, encoding=encoding
            )
        return await self._encode_json(_batch_json(payloads, meta), encoding)

    async def _encode_json(self, texts: Iterable[bytes], encoding: str | None) -> EncodedBody:
        pieces = await self._in_turns(_even(await self._in_turns(texts)))
        if encoding is not None:
            pieces = await self._in_thread(_compress, pieces, encoding)
        return EncodedBody(pieces=pieces, media_type=CONTENT_TYPE_JSON, encoding=encoding)

    async def _in_turns(self, steps: Iterable[bytes]) -> list[bytes]:
        """Exhaust `steps` on the event loop, some milliseconds in each of its rounds."""
        texts = iter(steps)
        pieces: list[bytes] = []
        is_whole = False
        while not is_whole:
            async with self._turn:
                end_s = time.perf_counter() + _TURN_S
                for piece in texts:
                    pieces.append(piece)
                    if time.perf_counter() >= end_s:
                        break
                else:
                    is_whole = True
                await asyncio.sleep(0)
        return pieces

    async def encode_group(self, payload: bytes, *, encoding: str | None = None) -> EncodedBody:
        """Encode the fourteen keys of a stored group as JSON."""
        if len(payload) <= self._inline_bytes // 4:
            return _encoded(json_pieces(payload), CONTENT_TYPE_JSON, encoding)
        return await self._encode_json(json_pieces(payload), encoding)

    async def group_json(self, payload: bytes) -> bytes:
        """Return `encode_group` in one piece, which takes 25 ms of the GIL for 60 MB."""
        return b"".join((await self.encode_group(payload)).pieces)

    async def close(self) -> None:
        """End the threads and processes. Nothing may be under way."""
        workers, self._idle_workers = self._idle_workers, []
        for worker in workers:
            await asyncio.to_thread(worker.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self._thread_slots:
            return await _outcome(self._threads.submit(work, *args, **kwargs))

    async def _in_worker(self, body: Body, *, is_packed: bool, many: bool) -> list[IncomingGroup]:
        async with self._worker_slots:
            try:
                return await self._one_attempt(body, is_packed=is_packed, many=many)
            except _DecoderDied:
                # Killed while idle, or by the kernel for memory that others used: not the body's fault.
                logger.warning("a decoder process ended unexpectedly; trying another")
            try:
                return await self._one_attempt(body, is_packed=is_packed, many=many)
            except _DecoderDied as e:
                raise GroupError("decoding the body ended the decoder process, twice") from e

    async def _one_attempt(self, body: Body, *, is_packed: bool, many: bool) -> list[IncomingGroup]:
        if self._idle_workers:
            worker = self._idle_workers.pop()
        else:  # starting a process takes long enough to hold others up
            worker = await _outcome(self._threads.submit(_DecoderProcess))
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            worker.kill()

        timer = asyncio.get_running_loop().call_later(self._worker_timeout_s, give_up)
        call = self._threads.submit(worker.decode, body, is_packed=is_packed, many=many)
        try:
            return await _outcome(call, on_cancel=worker.kill)
        except _DecoderDied as e:
            if is_late:
                text = f"decoding the body takes more than {self._worker_timeout_s:g} s"
                raise GroupError(f"{text}; send fewer groups at once") from e
            raise
        finally:
            timer.cancel()
            if worker.is_usable:
                self._idle_workers.append(worker)
            else:
                # It has ended or is about to: this waits for milliseconds.
                await _outcome(self._threads.submit(worker.close))


async def _outcome(call: Future[T], *, on_cancel: Callable[[], None] | None = None) -> T:
    """Await a call in a thread to its end, even when cancelled: it uses its slot for as long."""
    pending = asyncio.wrap_future(call)
    try:
        return await asyncio.shield(pending)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await asyncio.wait([pending])
        if not pending.cancelled():
            pending.exception()  # looked at: nobody else will
        raise


class _DecoderDied(AtroposError):
    """The process ended before it answered."""


class _DecoderProcess:
    """One process that decodes, started at its first request. `kill` may be called from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_killed = False

    @property
    def is_usable(self) -> bool:
        return self._process is not None and not self._is_killed

    def kill(self) -> None:
        """End the process now; a `decode` under way raises `_DecoderDied`."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process and wait for its end."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        if self._connection is not None:
            self._connection.close()

    def decode(self, body: Body, *, is_packed: bool, many: bool) -> list[IncomingGroup]:
        """Run `decode_body` in the process. Every wait releases the GIL, and nothing is copied under it."""
        try:
            connection = self._connection or self._start()
            connection.sendall(REQUEST.pack(len(body), is_packed, many))
            connection.sendall(body)
            (num_bytes,) = REPLY.unpack(receive_exactly(connection, REPLY.size))
            reply = msgspec.msgpack.decode(receive_exactly(connection, num_bytes), type=Reply)
            payloads = [receive_exactly(connection, facts.num_bytes) for facts in reply.groups]
        except (OSError, EOFError) as e:
            self._is_killed = True
            raise _DecoderDied(f"a decoder process ended: {e!r}") from e
        if reply.bug is not None:
            raise RuntimeError(f"in the decoder process:\n{reply.bug}")
        if reply.refusal is not None:
            raise GroupError(reply.refusal)
        return [
            IncomingGroup(
                facts.env_id,
                facts.num_sequences,
                facts.num_tokens,
                facts.policy_version,
                facts.group_id,
                facts.digest,
                payload,
            )
            for facts, payload in zip(reply.groups, payloads, strict=True)
        ]

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            MEMORY_LIMIT_VARIABLE: str(_DECODER_MEMORY_BYTES),
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *_DECODER_COMMAND],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # signals of the terminal are for the hub
            )
        self._connection = ours
        if self._is_killed:  # while it started
            self._process.kill()
        return ours


def _encode_batch(
    payloads: Sequence[bytes], meta: Mapping[str, Any], *, packed: bool, encoding: str | None
) -> EncodedBody:
    if packed:
        return _encoded(packed_pieces(payloads, meta), CONTENT_TYPE_PACKED, encoding)
    return _encoded(_batch_json(payloads, meta), CONTENT_TYPE_JSON, encoding)


def _encoded(texts: Iterable[bytes], media_type: str, encoding: str | None) -> EncodedBody:
    pieces = list(_even(texts))
    if sum(map(len, pieces)) < COMPRESS_FROM_BYTES:
        encoding = None
    if encoding is not None:
        pieces = _compress(pieces, encoding)
    return EncodedBody(pieces=pieces, media_type=media_type, encoding=encoding)


def _batch_json(payloads: Sequence[bytes], meta: Mapping[str, Any]) -> Iterator[bytes]:
    separator = b'{"batch":['
    for payload in payloads:
        yield separator
        yield from json_pieces(payload)
        separator = b","
    yield b"]" if payloads else b'{"batch":[]'
    if "lease_id" in meta:  # an original client is handed the batch and nothing else
        yield b"," + msgspec.json.encode(dict(meta))[1:-1]
    yield b"}"


def _even(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join short pieces and cut long ones; those in between pass uncopied."""
    held: list[bytes] = []
    num_held = 0
    for piece in pieces:
        if num_held and num_held + len(piece) > _PIECE_BYTES // 4:
            yield b"".join(held)
            held, num_held = [], 0
        if len(piece) > _PIECE_BYTES:
            for start in range(0, len(piece), _PIECE_BYTES):
                yield piece[start : start + _PIECE_BYTES]
        elif piece:
            held.append(piece)
            num_held += len(piece)
    if held:
        yield b"".join(held)


def _compress(pieces: Iterable[bytes], encoding: str) -> list[bytes]:
    return list(_even(_compressed(pieces, encoding)))


def _compressed(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    if encoding == "zstd":
        zstd = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
        yield from map(zstd.compress, pieces)
        yield zstd.flush()
        return
    assert encoding == "gzip", encoding
    gzip = isal_zlib.compressobj(_GZIP_LEVEL, isal_zlib.DEFLATED, _GZIP_WBITS)
    yield from map(gzip.compress, pieces)
    yield gzip.flush()


def is_packed(header: str) -> bool:
    """Does a Content-Type or Accept header name the packed encoding?"""
    return CONTENT_TYPE_PACKED in header.lower()


def choose_encoding(accept_encoding: str) -> str | None:
    """Return "zstd" or "gzip", whichever the client prefers and zstd where it does not care; None for neither.

    >>> choose_encoding("gzip, deflate, zstd"), choose_encoding("gzip;q=1.0, zstd;q=0"), choose_encoding("")
    ('zstd', 'gzip', None)
    """
    weights = {"gzip": 0.0, "zstd": 0.0}
    for part in accept_encoding.lower().split(","):
        name, _, parameter = part.partition(";")
        if name.strip() in weights:
            weights[name.strip()] = _weight(parameter)
    best = max(("zstd", "gzip"), key=weights.__getitem__)
    return best if weights[best] > 0 else None


def _weight(parameter: str) -> float:
    """Read `q=0.5`; 1 where there is none, 0 where it cannot be read."""
    name, _, value = parameter.partition("=")
    if name.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
