"""Decode request bodies into packed groups: the CPU work of `payloads.GroupCodec`.

`decode_body` runs in the hub for light bodies, otherwise in a separate process, which runs this module: it serves the
socket on its standard input, one request at a time, and ends with the hub. The module imports neither FastAPI nor the
coordinator, and keeps no state between requests.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from atroposlib.api.stores.base import NewGroup
from atroposlib.errors import GroupError
from atroposlib.scored_data import GroupHeader, ScoredGroup
from atroposlib.wire import (
    check_blob,
    header_of,
    iter_json_groups,
    pack_group,
    split_packed,
    tail_texts,
    with_group_id,
)

READY: Final = b"R"
"""Sent once, when the process can read requests."""
REQUEST: Final = struct.Struct("<Q??")
"""Size of the body that follows, `is_packed`, `many`."""
REPLY: Final = struct.Struct("<Q")
"""Size of the `Reply` that follows; after it come the payloads."""

MEMORY_LIMIT_VARIABLE: Final = "ATROPOS_DECODER_MEMORY"

_LIGHT_JSON_BYTES: Final = 2**19
_LIGHT_NODES: Final = 2000
"""Lists, objects and keys: at most as many as there are `[`, `{` and `:`. Each costs a few microseconds."""
_LIGHT_NUMBERS: Final = 2**16
"""This many take 2 ms, or 6 ms where both parsers read the body."""
_LIGHT_PACKED_BYTES: Final = 4 * 2**20
"""Copied in 2 ms and checked in 3 ms."""

Body = bytes | bytearray | memoryview


class Reply(msgspec.Struct, omit_defaults=True):
    headers: list[GroupHeader] = []
    refusal: str | None = None
    """Text of the `GroupError`."""
    bug: str | None = None
    """Traceback of any other exception."""


def is_light(body: Body, *, is_packed: bool) -> bool:
    """Whether `decode_body` takes a few milliseconds at most."""
    texts: Sequence[Body] = [body]
    if is_packed:
        if len(body) > _LIGHT_PACKED_BYTES:
            return False
        texts = [text for blob in split_packed(body).blobs for text in tail_texts(blob)]
        if not texts:
            return True
    return (
        sum(map(len, texts)) <= _LIGHT_JSON_BYTES
        and sum(_num_marks(text, "[{:") for text in texts) <= _LIGHT_NODES
        and sum(_num_marks(text, ",") for text in texts) <= _LIGHT_NUMBERS
    )


def _num_marks(text: Body, marks: str) -> int:
    """Count characters, five times as fast as `bytes.count`."""
    characters = np.frombuffer(text, np.uint8)
    return sum(int(np.count_nonzero(characters == ord(mark))) for mark in marks)


def decode_body(body: Body, *, is_packed: bool, many: bool) -> list[NewGroup]:
    """Decode and check the body of `/scored_data` or, with `many`, `/scored_data_list`; raises `GroupError`."""
    groups: list[NewGroup] = []
    try:
        split = _blobs if is_packed else iter_json_groups
        for group in split(body, many=many):
            try:
                groups.append(_incoming(group))
            except GroupError as e:
                raise GroupError(f"[{len(groups)}].{e}" if many else str(e)) from e
    except MemoryError as e:
        what = "the body needs more memory than one request may take; send fewer groups at once"
        raise GroupError(what) from e
    return groups


def _blobs(body: Body, *, many: bool) -> list[memoryview]:
    blobs = split_packed(body).blobs
    if not many and len(blobs) != 1:
        raise GroupError(f"groups: {len(blobs)} in the message, expected 1; use /scored_data_list")
    return blobs


def _incoming(group: ScoredGroup | memoryview) -> NewGroup:
    """Pack a group; one without an id, as original clients send it, gets one, which the trainer receives."""
    new_id = uuid.uuid4().hex
    if isinstance(group, ScoredGroup):
        header = header_of(group)
        if not header.group_id:
            group = group.replace(group_id=new_id)
        payload = pack_group(group)
    else:
        header = check_blob(group)
        payload = bytes(group) if header.group_id else with_group_id(group, new_id)
    # Without content digest: the hub need not remember an id that no client can send again.
    header = replace(header, group_id=header.group_id or new_id, num_bytes=len(payload))
    return NewGroup(header=header, payload=payload)


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Return the next bytes, in calls that release the GIL; raises `EOFError` if the peer closes first."""
    parts: list[bytes] = []
    while num_bytes:  # once, unless a signal interrupts the call
        parts.append(connection.recv(num_bytes, socket.MSG_WAITALL))
        if not parts[-1]:
            raise EOFError
        num_bytes -= len(parts[-1])
    return b"".join(parts)  # of a single part no copy


def serve(connection: socket.socket) -> None:
    """Answer requests until the hub closes its end."""
    while True:
        try:
            header = receive_exactly(connection, REQUEST.size)
        except EOFError:
            return
        num_bytes, is_packed, many = REQUEST.unpack(header)
        body = receive_exactly(connection, num_bytes)
        groups: list[NewGroup] = []
        try:
            groups = decode_body(body, is_packed=is_packed, many=many)
            reply = Reply(headers=[group.header for group in groups])
        except GroupError as e:
            reply = Reply(refusal=str(e))
        except Exception:  # noqa: BLE001 - the process boundary: the hub raises it again
            reply = Reply(bug=traceback.format_exc())
        del body
        encoded = msgspec.msgpack.encode(reply)
        connection.sendall(REPLY.pack(len(encoded)) + encoded)
        for group in groups:
            connection.sendall(group.payload)
        del groups


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3)."""


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of earlier bodies: fresh pages cost a fifth of ingesting a token. Needs glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_TRIM_THRESHOLD, 128 * 2**20)
    mallopt(_TOP_PAD, 16 * 2**20)


def main() -> None:
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the hub, which then closes its end
    limit = int(os.environ[MEMORY_LIMIT_VARIABLE])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as connection:
        try:
            connection.sendall(READY)
            serve(connection)
        except (EOFError, ConnectionError):
            return  # the hub ended in the middle of a request


if __name__ == "__main__":
    main()
