"""A TCP proxy on loopback whose network can be made bad: slow, sliced, limited, silent, reset or cut.

Deterministic: chances come from a seeded generator, and `reset_after` counts bytes exactly. Everything may be changed
while connections are open. One event loop; only tests of network faults use it. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.processes import free_port

CHUNK_BYTES = 16_384
"""At most this much is read, and kept, per direction of a connection."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Direction(enum.Enum):
    REQUEST = "request"
    """From the client to the target."""
    REPLY = "reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toxics:
    """What is wrong with the network; the default is nothing."""

    latency_s: float = 0.0
    """Added to every chunk in each direction."""
    reset_chance: float = 0.0
    """That a chunk resets its connection instead of being passed on."""
    slice_bytes: int | None = None
    """Pass on pieces of at most this size, each written on its own."""
    bytes_per_s: float | None = None
    """For each direction of each connection."""
    is_blackhole: bool = False
    """Connections are accepted and stay open, but nothing passes until this ends; then everything does."""


class Proxy:
    """Passes `port` on to `target_port`. Open it with `async with`."""

    def __init__(self, target_port: int, *, seed: int = 0) -> None:
        self.port = free_port()
        self.num_passed: Counter[Direction] = Counter()
        """Bytes passed on."""
        self.num_resets = 0
        """Connections that toxics have reset; those that `cut` breaks are not counted."""
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._toxics = Toxics()
        self._changed = asyncio.Event()
        self._armed: tuple[Direction, int] | None = None
        self._listener: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def toxics(self) -> Toxics:
        return self._toxics

    @toxics.setter
    def toxics(self, toxics: Toxics) -> None:
        self._toxics = toxics
        self._changed.set()

    async def __aenter__(self) -> Self:
        await self.heal()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.cut()

    def reset_after(self, direction: Direction, num_bytes: int) -> None:
        """Once: pass on `num_bytes` more bytes in `direction`, over all connections, then break that connection.

        It breaks when one more byte would follow: the sender is reset, the receiver sees the end after those bytes.
        """
        self._armed = (direction, num_bytes)

    @property
    def is_armed(self) -> bool:
        """Has the reset asked for by `reset_after` not come yet?"""
        return self._armed is not None

    async def heal(self) -> None:
        """Take all toxics away, and listen again after a `cut`."""
        self.toxics = Toxics()
        self._armed = None
        if self._listener is None:
            self._listener = await asyncio.start_server(
                self._accept, "127.0.0.1", self.port, limit=CHUNK_BYTES
            )

    async def cut(self) -> None:
        """Reset every connection and refuse others until `heal`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        connections, self._connections = self._connections, {}
        for task, writers in connections.items():
            _reset(writers)
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        task = asyncio.create_task(self._serve(reader, writers))
        self._connections[task] = writers
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _serve(
        self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]
    ) -> None:
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._end_of_blackhole()
            target_reader, target_writer = await self._connect()
            writers.append(target_writer)
            for each in writers:
                each.transport.set_write_buffer_limits(0)  # `drain` means: the kernel has it
            pumps = [
                asyncio.create_task(self._pump(reader, target_writer, writers, Direction.REQUEST)),
                asyncio.create_task(
                    self._pump(target_reader, writers[0], writers, Direction.REPLY)
                ),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            _reset(writers)  # the target does not listen
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in writers:
                each.transport.abort() if each.transport.get_write_buffer_size() else each.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the target with a small receive buffer, so that it feels a client that does not read."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._target_port))
            return await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)
        except BaseException:
            sock.close()
            raise

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: list[asyncio.StreamWriter],
        direction: Direction,
    ) -> None:
        """Pass bytes on until the sender closes or the connection is reset."""
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self._toxics.latency_s)
                await self._end_of_blackhole()
                allowed = self._allowed(chunk, direction)
                for piece in self._pieces(chunk[:allowed]):
                    if self._toxics.bytes_per_s is not None:
                        await asyncio.sleep(len(piece) / self._toxics.bytes_per_s)
                    writer.write(piece)
                    await writer.drain()
                    self.num_passed[direction] += len(piece)
                if allowed < len(chunk):
                    self.num_resets += 1
                    # A reset may take back what its receiver has not read: bytes that count end with a plain close.
                    _reset([each for each in both if each is not writer or not allowed])
                    return
        except OSError:
            return  # one of the two has gone

    def _allowed(self, chunk: bytes, direction: Direction) -> int:
        """Bytes of the chunk that pass before the connection is reset; all of them if it is not."""
        if self._armed is not None and self._armed[0] is direction:
            left = self._armed[1]
            if left < len(chunk):
                self._armed = None
                return left
            self._armed = (direction, left - len(chunk))
        if self._toxics.reset_chance and self._rng.random() < self._toxics.reset_chance:
            return self._rng.randrange(len(chunk))
        return len(chunk)

    def _pieces(self, chunk: bytes) -> list[bytes]:
        size = self._toxics.slice_bytes or CHUNK_BYTES
        return [chunk[start : start + size] for start in range(0, len(chunk), size)]

    async def _end_of_blackhole(self) -> None:
        while self._toxics.is_blackhole:
            self._changed.clear()
            await self._changed.wait()


class Balancer(Proxy):
    """Passes each connection on to the next of several targets that accepts it."""

    def __init__(self, target_ports: Sequence[int]) -> None:
        super().__init__(target_ports[0])
        self.target_ports = list(target_ports)
        self._turn = itertools.count()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in self.target_ports:
            self._target_port = self.target_ports[next(self._turn) % len(self.target_ports)]
            try:
                return await super()._connect()
            except OSError:
                continue
        raise ConnectionRefusedError("no target accepts connections")


def _reset(writers: list[asyncio.StreamWriter]) -> None:
    for writer in writers:
        sock = writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        writer.transport.abort()
