"""A small HTTP/1.1 client whose own cost is low enough not to affect the measurements.

One request at a time on one kept-alive connection, prebuilt bodies, no decompression, cookies or redirects. It goes to
the owner of a run that a replica names, as `atroposlib.client` does. Used by the hub's benchmark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 * 2**10
READ_BYTES = 2**20


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    """As received, still compressed."""


class Address(NamedTuple):
    host: str
    port: int
    prefix: str
    """Path of the run, `""` or like `/runs/NAME`."""

    @classmethod
    def of(cls, base_url: str) -> Address:
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"--base-url: expected http://host:port[/runs/NAME], got {base_url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"))


class Connection:
    """Opened at the first request, and reopened if the server closed it."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        self._headers = {"Host": f"{address.host}:{address.port}", **headers}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request and read the whole reply; raise `OSError` or `EOFError` if the peer disconnects."""
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server closes connections that were idle for some seconds
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._address.host, self._address.port, limit=READ_BYTES
            )
        reader, writer = self._streams
        lines = [f"{method} {self._address.prefix}{path} HTTP/1.1"]
        fields = {**self._headers, **(headers or {})}
        if body or method == "POST":
            fields["Content-Length"] = str(len(body))
        lines += [f"{name}: {value}" for name, value in fields.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        try:
            reply = await self._read(reader)
        except BaseException:
            self.close()
            raise
        if reply.headers.get("connection", "").lower() == "close":
            self.close()
        if named := reply.headers.get("atropos-replica"):  # the owner of the run
            self._address = Address.of(named.partition(" ")[2])
            self._headers["Host"] = f"{self._address.host}:{self._address.port}"
            self.close()
        return reply

    async def _read(self, reader: asyncio.StreamReader) -> Reply:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ", 2)[1])
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            pieces = []
            while size := int((await reader.readline()).split(b";")[0], 16):
                pieces.append(await reader.readexactly(size))
                await reader.readline()
            await reader.readline()
            return Reply(status, headers, b"".join(pieces))
        length = int(headers.get("content-length", "0"))
        return Reply(status, headers, await reader.readexactly(length) if length else b"")
