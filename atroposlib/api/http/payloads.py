"""Bodies of the token routes: request bytes to checked groups, stored payloads to response bytes.

`GroupCodec` decides where that work runs, so that it never blocks the event loop for more than a few milliseconds:
light bodies and pieces of JSON on the loop, one per iteration; compression in a thread, which holds the GIL only
briefly; heavy bodies in a separate process (`decoding`). In a thread, the parser would hold the GIL for 0.2 s for a
body of 60 MB, and a hostile body could exhaust the hub's memory. A socket connects the process: the executors of the
standard library unpickle what they receive, and copy it in one piece while they hold the GIL.

Measured (AMD EPYC, CPU s per million tokens of JSON): isal compresses in 0.09, zlib level 1 in 0.28, no smaller.
With zlib, JSON + gzip in and out would exceed its budget of 0.6.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zstandard
from isal import isal_zlib

from atroposlib.api.http.decoding import (
    MEMORY_LIMIT_VARIABLE,
    READY,
    REPLY,
    REQUEST,
    Body,
    Reply,
    decode_body,
    is_light,
)
from atroposlib.api.stores.base import NewGroup
from atroposlib.errors import AtroposError, GroupError
from atroposlib.wire import CONTENT_TYPE_JSON, CONTENT_TYPE_PACKED, json_pieces, packed_pieces

logger = logging.getLogger(__name__)

COMPRESS_FROM_BYTES: Final = 1000
"""Smaller bodies are sent uncompressed."""

MAX_JSON_RATIO: Final = 6
"""Bytes of JSON per packed byte, at most: a number of 4 bytes takes up to 24 characters, a token and its label 22."""

_GZIP_LEVEL: Final = 2  # of ISA-L, whose levels cost the same
_ZSTD_LEVEL: Final = 1  # of packed arrays, level 3 is no smaller
_GZIP_WBITS: Final = 16 + isal_zlib.MAX_WBITS

_PIECE_BYTES: Final = 2**20
"""Longest piece of a body, for sending and compressing. Shorter ones are joined up to a quarter of it."""

_INLINE_COMPRESS_BYTES: Final = 2**16
"""Compressed on the event loop in 0.3 ms; a thread takes as long to wake."""
_SHORT_S: Final = 0.001
_TURN_S: Final = 0.002
"""How long the event loop encodes before it runs other tasks."""

_DECODER_COMMAND: Final = ("-m", "atroposlib.api.http.decoding")
_DECODER_MEMORY_BYTES: Final = 4 * 2**30
"""Address space of a decoder process: several times the largest body we accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBody:
    """A response body, ready to send."""

    pieces: list[bytes]
    """Together the body; each is at most about 1 MiB."""
    media_type: str
    encoding: str | None = None
    """Value of `Content-Encoding`."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


class DecoderUnavailable(AtroposError):
    """No decoder process can start now; the body is not at fault and may be sent again."""


class GroupCodec:
    """Decodes and encodes for one application, on one event loop, until `close`."""

    def __init__(self, *, decoder_timeout_s: float = 60.0) -> None:
        self._decoder_timeout_s = decoder_timeout_s
        self._decoder: _DecoderProcess | None = None
        """Started for the first heavy body, and kept."""
        self._decoder_lock = asyncio.Lock()
        """The decoder takes one body at a time."""
        self._threads = ThreadPoolExecutor(2, "hub-codec")
        self._turn = asyncio.Lock()
        """For work of milliseconds on the event loop: one piece per iteration."""

    async def decode(self, body: Body, *, content_type: str, many: bool) -> list[NewGroup]:
        """Decode and check the body of `/scored_data` or, with `many`, `/scored_data_list`.

        Raises `GroupError`, and `DecoderUnavailable` if the body cannot be decoded now.
        """
        packed = is_packed(content_type)
        if not is_light(body, is_packed=packed):
            return await self._in_process(body, is_packed=packed, many=many)
        async with self._turn:
            began_s = time.perf_counter()
            try:
                return decode_body(body, is_packed=packed, many=many)
            finally:
                await _let_others_run(since_s=began_s)

    async def _in_process(self, body: Body, *, is_packed: bool, many: bool) -> list[NewGroup]:
        async with self._decoder_lock:
            for _ in range(2):
                decoder = self._decoder = self._decoder or _DecoderProcess()
                try:
                    async with asyncio.timeout(self._decoder_timeout_s):
                        return await decoder.decode(body, is_packed=is_packed, many=many)
                except TimeoutError as e:
                    if not decoder.is_started:
                        raise DecoderUnavailable("the decoder process does not start") from e
                    text = f"decoding the body takes more than {self._decoder_timeout_s:g} s"
                    raise GroupError(f"{text}; send fewer groups at once") from e
                except _DecoderDied:
                    # Perhaps killed while idle, or by the kernel for memory that others used: retry once.
                    logger.warning("a decoder process ended unexpectedly")
                finally:
                    if not decoder.is_idle:
                        self._decoder = None
                        await decoder.close()
            raise GroupError("decoding the body ended the decoder process, twice")

    async def encode_batch(
        self,
        payloads: Sequence[bytes],
        meta: Mapping[str, Any],
        *,
        packed: bool,
        encoding: str | None,
    ) -> EncodedBody:
        """Encode the body of a `GET /batch` that delivers `payloads`.

        `encoding` is None, "gzip" or "zstd". JSON includes `meta` only with a lease.
        """
        texts = packed_pieces(payloads, meta) if packed else _batch_json(payloads, meta)
        media_type = CONTENT_TYPE_PACKED if packed else CONTENT_TYPE_JSON
        pieces = (await self._in_turns(texts))[::-1]
        # Each is released when it is joined, so that a body is not in memory twice.
        joined = even_pieces(pieces.pop() for _ in range(len(pieces)))
        pieces = await self._in_turns(joined)
        num_bytes = sum(map(len, pieces))
        if encoding is None or num_bytes < COMPRESS_FROM_BYTES:
            return EncodedBody(pieces=pieces, media_type=media_type)
        if num_bytes <= _INLINE_COMPRESS_BYTES:
            pieces = _compress(pieces, encoding)
        else:
            loop = asyncio.get_running_loop()
            pieces = await loop.run_in_executor(self._threads, _compress, pieces, encoding)
        return EncodedBody(pieces=pieces, media_type=media_type, encoding=encoding)

    async def _in_turns(self, steps: Iterable[bytes]) -> list[bytes]:
        """Exhaust `steps` on the event loop, a few milliseconds per iteration."""
        texts = iter(steps)
        pieces: list[bytes] = []
        is_whole = False
        while not is_whole:
            async with self._turn:
                began_s = time.perf_counter()
                for piece in texts:
                    pieces.append(piece)
                    if time.perf_counter() >= began_s + _TURN_S:
                        break
                else:
                    is_whole = True
                await _let_others_run(since_s=began_s)
        return pieces

    async def close(self) -> None:
        """Stop the threads and the process. No call may be in flight."""
        if self._decoder is not None:
            await self._decoder.close()
            self._decoder = None
        self._threads.shutdown()


async def _let_others_run(*, since_s: float) -> None:
    """Yield to the event loop unless the work was short: then a client that half-closed still gets its response."""
    if time.perf_counter() - since_s > _SHORT_S:
        await asyncio.sleep(0)


class _DecoderDied(AtroposError):
    """The process ended before it answered."""


class _DecoderProcess:
    """One process that decodes one body at a time. Raises `DecoderUnavailable` if it cannot start."""

    def __init__(self) -> None:
        self.is_started = False
        """Whether the process has reported ready; if it ends before, no body is at fault."""
        self.is_idle = False
        """Whether the process waits for a body."""
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            MEMORY_LIMIT_VARIABLE: str(_DECODER_MEMORY_BYTES),
        }
        try:
            self._connection, theirs = socket.socketpair()
        except OSError as e:
            raise DecoderUnavailable(f"no socket for the decoder process: {e}") from e
        self._connection.setblocking(False)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", *_DECODER_COMMAND],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    process_group=0,  # terminal signals go to the hub only
                )
        except OSError as e:
            self._connection.close()
            raise DecoderUnavailable(f"the decoder process cannot start: {e}") from e

    async def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._connection.close()
        await asyncio.to_thread(self._process.wait)

    async def decode(self, body: Body, *, is_packed: bool, many: bool) -> list[NewGroup]:
        """Run `decode_body` in the process. If this is cancelled, the process must be closed."""
        self.is_idle = False
        send = functools.partial(asyncio.get_running_loop().sock_sendall, self._connection)
        try:
            if not self.is_started:
                await self._receive(len(READY))
                self.is_started = True
            await send(REQUEST.pack(len(body), is_packed, many))
            await send(body)
            (num_bytes,) = REPLY.unpack(await self._receive(REPLY.size))
            reply = msgspec.msgpack.decode(await self._receive(num_bytes), type=Reply)
            groups = [
                NewGroup(header=header, payload=await self._receive(header.num_bytes))
                for header in reply.headers
            ]
        except (OSError, EOFError) as e:
            if not self.is_started:
                raise DecoderUnavailable("the decoder process ended while it started") from e
            raise _DecoderDied(f"a decoder process ended: {e!r}") from e
        self.is_idle = True
        if reply.bug is not None:
            raise RuntimeError(f"in the decoder process:\n{reply.bug}")
        if reply.refusal is not None:
            raise GroupError(reply.refusal)
        return groups

    async def _receive(self, num_bytes: int) -> bytes:
        """Return the next bytes; raises `EOFError` if the process has ended."""
        receive = asyncio.get_running_loop().sock_recv
        parts: list[bytes] = []
        while num_bytes:
            # About what the system keeps of a socket.
            parts.append(await receive(self._connection, min(num_bytes, 2**18)))
            if not parts[-1]:
                raise EOFError
            num_bytes -= len(parts[-1])
        return b"".join(parts)


def _batch_json(payloads: Sequence[bytes], meta: Mapping[str, Any]) -> Iterator[bytes]:
    separator = b'{"batch":['
    for payload in payloads:
        yield separator
        yield from json_pieces(payload)
        separator = b","
    yield b"]" if payloads else b'{"batch":[]'
    if "lease_id" in meta:  # an original client gets only the batch
        yield b"," + msgspec.json.encode(dict(meta))[1:-1]
    yield b"}"


def even_pieces(pieces: Iterable[bytes], max_bytes: int = _PIECE_BYTES) -> Iterator[bytes]:
    """Join short pieces and cut long ones; those in between pass uncopied."""
    held: list[bytes] = []
    num_held = 0
    for piece in pieces:
        if num_held and num_held + len(piece) > max_bytes // 4:
            yield b"".join(held)
            held, num_held = [], 0
        if len(piece) > max_bytes // 4:
            for start in range(0, len(piece), max_bytes):
                yield piece[start : start + max_bytes]
        elif piece:
            held.append(piece)
            num_held += len(piece)
    if held:
        yield b"".join(held)


def _compress(pieces: Iterable[bytes], encoding: str) -> list[bytes]:
    compressor: Any
    if encoding == "zstd":
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
    else:
        compressor = isal_zlib.compressobj(_GZIP_LEVEL, isal_zlib.DEFLATED, _GZIP_WBITS)
    return list(even_pieces([*map(compressor.compress, pieces), compressor.flush()]))


def is_packed(header: str) -> bool:
    """Whether a Content-Type or Accept header names the packed encoding."""
    return CONTENT_TYPE_PACKED in header.lower()


def choose_encoding(accept_encoding: str) -> str | None:
    """Return the encoding that the client prefers, "zstd" (also for a tie) or "gzip"; None if it accepts neither.

    >>> choose_encoding("gzip, deflate, zstd"), choose_encoding("gzip;q=1.0, zstd;q=0"), choose_encoding("")
    ('zstd', 'gzip', None)
    """
    weights = {"zstd": 0.0, "gzip": 0.0}
    for part in accept_encoding.lower().split(","):
        name, _, parameter = part.replace(" ", "").partition(";q=")
        if name in weights:
            # An invalid weight counts as 0.
            is_number = re.fullmatch(r"(\d+(\.\d*)?)?", parameter) is not None
            weights[name] = float(parameter or 1) if is_number else 0.0
    best = max(weights, key=weights.__getitem__)
    return best if weights[best] > 0 else None
