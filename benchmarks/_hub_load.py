"""Payloads and requests of `hub.py`.

The payload is fixed so that results stay comparable: token ids log-uniform in 10..128255, the first eighth masked as a
prompt, logprobs of float32 precision. Packed groups have unique ids, and packed batches are leased and acknowledged, as
in `atroposlib.client`; JSON is sent and fetched like the original's clients do.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zstandard

from atroposlib import __version__
from atroposlib.scored_data import Strictness, check_group
from atroposlib.wire import CONTENT_TYPE_PACKED, join_packed, pack_group, split_packed
from benchmarks._hub_http import Address, Connection, Reply
from benchmarks._hub_process import Hub

NUM_ENVS = 4
ROW_LIMIT_S = 8.0
"""A row ends after this long and reports what it has done, so that slow hubs get a figure, too."""
GROUP_ID = b"group-identifier-of-the-benchmark"
OWN_CLIENT = {"Atropos-Client": f"atroposlib/{__version__}"}
MEBI = 2**20


class Failed(Exception):
    """The hub gave an answer with which a benchmark cannot continue."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of groups in requests and replies."""

    name: str
    is_packed: bool
    compression: str = ""

    def post_headers(self) -> dict[str, str]:
        headers = {"Content-Type": CONTENT_TYPE_PACKED if self.is_packed else "application/json"}
        if self.compression:
            headers["Content-Encoding"] = self.compression
        return headers | (OWN_CLIENT if self.is_packed else {})

    def get_headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": self.compression or "identity"}
        return headers | ({"Accept": CONTENT_TYPE_PACKED} | OWN_CLIENT if self.is_packed else {})

    def compress(self, body: bytes) -> bytes:
        if self.compression == "gzip":
            return gzip.compress(body, compresslevel=9 if len(body) < MEBI else 6)
        return zstandard.compress(body, level=1) if self.compression == "zstd" else body


PACKED = Encoding("packed", is_packed=True)
PACKED_ZSTD = Encoding("packed + zstd", is_packed=True, compression="zstd")
JSON = Encoding("JSON", is_packed=False)
JSON_GZIP = Encoding("JSON + gzip", is_packed=False, compression="gzip")


def make_group(*, num_sequences: int, num_tokens: int, env_id: int, seed: int) -> dict[str, Any]:
    """Return a group as an environment sends it; the module docstring describes its values."""
    rng = np.random.default_rng(seed)
    shape = (num_sequences, num_tokens)
    tokens = np.exp(rng.uniform(math.log(10), math.log(128256), shape)).astype(np.int64)
    masks = tokens.copy()
    masks[:, : num_tokens // 8] = -100
    logprobs = -rng.exponential(0.5, shape).astype(np.float32)
    logprobs[:, : num_tokens // 8] = 1.0
    return {
        "tokens": tokens.tolist(),
        "masks": masks.tolist(),
        "scores": rng.choice([-1.0, 1.0], num_sequences).tolist(),
        "inference_logprobs": logprobs.astype(np.float64).tolist(),
        "env_id": env_id,
    }


class SmallGroups:
    """Hundreds of groups with 8 tokens per sequence, made quickly from a few templates."""

    def __init__(self, *, is_packed: bool) -> None:
        self._is_packed = is_packed
        self._templates: dict[tuple[int, int], bytes] = {}

    def list_body(self, groups: Sequence[tuple[int, int]]) -> bytes:
        """Return a body of `POST /scored_data_list` for groups given as (environment id, number of sequences)."""
        parts = [self._template(*group) for group in groups]
        if not self._is_packed:
            return b"[" + b",".join(parts) + b"]"
        return join_packed([part.replace(GROUP_ID, new_group_id()) for part in parts])

    def _template(self, env_id: int, num_sequences: int) -> bytes:
        key = (env_id, num_sequences)
        if key not in self._templates:
            group = make_group(num_sequences=num_sequences, num_tokens=8, env_id=env_id, seed=0)
            self._templates[key] = (
                pack_named(group) if self._is_packed else json.dumps(group).encode()
            )
        return self._templates[key]


class Bodies:
    """Prepared request bodies; each packed one gets a unique group id."""

    def __init__(self, encoding: Encoding, groups: Sequence[Mapping[str, Any]]) -> None:
        self.encoding = encoding
        self._next = 0
        if encoding.is_packed:
            self._templates = [join_packed([pack_named(group)]) for group in groups]
        else:
            self._templates = [encoding.compress(json.dumps(group).encode()) for group in groups]

    def one(self) -> bytes:
        template = self._templates[self._next % len(self._templates)]
        self._next += 1
        if not self.encoding.is_packed:
            return template
        return self.encoding.compress(template.replace(GROUP_ID, new_group_id()))


def pack_named(group: Mapping[str, Any]) -> bytes:
    """Pack a group with a placeholder for its id."""
    named = {**group, "group_id": GROUP_ID.decode()}
    return pack_group(check_group(named, strictness=Strictness.WIRE))


def new_group_id() -> bytes:
    return uuid.uuid4().hex.encode().ljust(len(GROUP_ID), b"-")


class Taken(NamedTuple):
    """A fetched batch."""

    num_groups: int
    lease: dict[str, Any]
    """`meta` of a packed batch; empty for JSON."""


@dataclass(slots=True, kw_only=True)
class Site:
    """A measured hub and its features."""

    hub: Hub
    token: str | None = None
    is_packed: bool = False
    is_zstd: bool = False
    is_leasing: bool = False

    def connect(self) -> closing[Connection]:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return closing(Connection(Address.of(self.hub.base_url), headers))

    @property
    def native(self) -> Encoding:
        """The cheapest encoding of this hub, for filling queues."""
        return PACKED if self.is_packed else JSON

    async def discover(self) -> None:
        """Detect the hub's features by trying them; the original has only JSON and gzip."""
        group = make_group(num_sequences=8, num_tokens=8, env_id=0, seed=0)
        with self.connect() as connection:
            for encoding in (PACKED, PACKED_ZSTD):
                [env_id] = await fresh_run(connection, batch_size=8, num_envs=1)
                body = Bodies(encoding, [{**group, "env_id": env_id}]).one()
                reply = await connection.request(
                    "POST", "/scored_data", body, encoding.post_headers()
                )
                if reply.status != 200:
                    break
                self.is_packed = True
                self.is_zstd = encoding is PACKED_ZSTD
                taken = await take_batch(self, connection, PACKED, wait_s=0)
                self.is_leasing = taken is not None and "lease_id" in taken.lease


async def get(connection: Connection, path: str) -> Reply:
    reply = await connection.request("GET", path)
    if reply.status != 200:
        raise Failed(f"GET {path}: {reply.status} {reply.body[:300]!r}")
    return reply


async def post(connection: Connection, path: str, value: Any) -> dict[str, Any]:
    body = json.dumps(value).encode()
    reply = await connection.request("POST", path, body, {"Content-Type": "application/json"})
    if reply.status != 200:
        raise Failed(f"POST {path}: {reply.status} {reply.body[:300]!r}")
    answer: dict[str, Any] = json.loads(reply.body)
    return answer


async def register_trainer(connection: Connection, *, batch_size: int, max_token_len: int) -> None:
    """Register a trainer and let environments in."""
    registration = {
        "wandb_group": "benchmark",
        "wandb_project": "benchmark",
        "batch_size": batch_size,
        "max_token_len": max_token_len,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10**6,
    }
    await post(connection, "/register", registration)
    await get(connection, "/batch")


async def fresh_run(
    connection: Connection,
    *,
    batch_size: int,
    num_envs: int = NUM_ENVS,
    group_size: int = 8,
    shares: Sequence[float | None] | None = None,
) -> list[int]:
    """Reset the hub, register a trainer and environments; return the environments' ids."""
    await get(connection, "/reset_data")
    await register_trainer(connection, batch_size=batch_size, max_token_len=32768)
    return [
        await register_env(
            connection, group_size=group_size, share=shares[index] if shares else None
        )
        for index in range(num_envs)
    ]


async def register_env(
    connection: Connection, *, group_size: int = 8, share: float | None = None
) -> int:
    """Register an environment; return its id: that of a disconnected one, if there is one."""
    environment = {
        "max_token_length": 32768,
        "desired_name": "benchmark",
        "weight": 1.0,
        "group_size": group_size,
        "min_batch_allocation": share,
    }
    env_id: int = (await post(connection, "/register-env", environment))["env_id"]
    return env_id


async def send(connection: Connection, path: str, body: bytes, encoding: Encoding) -> None:
    """Post groups; retry after `Retry-After` if the hub is full."""
    while True:
        reply = await connection.request("POST", path, body, encoding.post_headers())
        if reply.status == 200:
            return
        if reply.status not in (429, 503):
            raise Failed(f"POST {path}: {reply.status} {reply.body[:300]!r}")
        await asyncio.sleep(float(reply.headers.get("retry-after", "1")))


async def post_all(site: Site, bodies: Sequence[bytes], encoding: Encoding) -> list[float]:
    """Post bodies over `NUM_ENVS` connections, for at most `ROW_LIMIT_S`; return the milliseconds of each post."""
    latencies_ms: list[float] = []
    waiting = iter(bodies)
    deadline = time.perf_counter() + ROW_LIMIT_S

    async def environment() -> None:
        with site.connect() as connection:
            for body in waiting:
                began = time.perf_counter()
                await send(connection, "/scored_data", body, encoding)
                now = time.perf_counter()
                latencies_ms.append(1e3 * (now - began))
                if now > deadline:
                    return

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_ENVS):
            tasks.create_task(environment())
    return latencies_ms


async def take_batch(
    site: Site, connection: Connection, encoding: Encoding, *, wait_s: float
) -> Taken | None:
    """Fetch one batch, a packed one under a lease; None if there is none."""
    query = f"?lease=1&wait={wait_s:g}" if encoding.is_packed else f"?wait={wait_s:g}"
    reply = await connection.request("GET", f"/batch{query}", headers=encoding.get_headers())
    if reply.status != 200:
        raise Failed(f"GET /batch: {reply.status} {reply.body[:300]!r}")
    if len(reply.body) < 200 and b"null" in reply.body:
        return None
    if not encoding.is_packed:
        return Taken(-1, {})
    body = reply.body
    if reply.headers.get("content-encoding") == "zstd":
        body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    envelope = split_packed(body)
    return Taken(len(envelope.blobs), envelope.meta)


async def acknowledge(connection: Connection, taken: Taken, *, checkpoint_every: int = 4) -> None:
    """Acknowledge a batch and report checkpoints like a trainer; do nothing on hubs without leases."""
    if "lease_id" not in taken.lease:
        return
    batch_id, step = taken.lease["batch_id"], taken.lease["step"]
    await post(connection, f"/batches/{batch_id}/ack", {"lease_id": taken.lease["lease_id"]})
    if step % checkpoint_every == 0:
        await post(connection, "/checkpoints", {"step": step, "path": None})


async def fill_small(
    site: Site,
    connection: Connection,
    env_ids: Sequence[int],
    *,
    num_groups: int,
    sizes: Sequence[int] = (8,),
) -> None:
    """Queue small groups with numbers of sequences from `sizes`, spread over the environments."""
    rng = random.Random(1)
    small = SmallGroups(is_packed=site.is_packed)
    groups = [(env_ids[number % len(env_ids)], rng.choice(sizes)) for number in range(num_groups)]
    for start in range(0, num_groups, 250):
        body = small.list_body(groups[start : start + 250])
        await send(connection, "/scored_data_list", body, site.native)
