"""What does the hub cost per million tokens, and how long does it delay other requests?

`PYTHONPATH=. python benchmarks/hub.py` starts `run-api` with each of its stores and prints one table per question;
`--quick` takes a minute. `--stores disk,postgres --database URL --database-pid PID` measures a PostgreSQL, too: its
CPU time is added to the hub's, and its data is erased. `--replicas 3`: hubs on it; clients begin at one that does not
own the run, and those with packed groups go to the owner.
`--base-url URL [--server-pid PID]` measures a running hub, also the original's, and erases its data. CPU is that of the
server's process with all threads and children: a busy machine changes it least.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._hub_http import Connection
from benchmarks._hub_load import (
    JSON,
    JSON_GZIP,
    MEBI,
    NUM_ENVS,
    PACKED,
    PACKED_ZSTD,
    ROW_LIMIT_S,
    Bodies,
    Encoding,
    Failed,
    Site,
    acknowledge,
    fill_small,
    fresh_run,
    get,
    make_group,
    post,
    post_all,
    register_env,
    send,
    take_batch,
)
from benchmarks._hub_process import Cost, Hub, probing, running_hub, settled_cpu_s
from benchmarks._table import Table, shown

BATCHES_IN_FLIGHT = 3


def middle(values: Sequence[float]) -> str:
    """Format the median and range of repeated values."""
    if len(values) == 1:
        return shown(values[0])
    low, high = shown(min(values)), shown(max(values))
    return f"{shown(statistics.median(values))} ({low}-{high})"


def quantiles(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "-"
    return f"{ordered[len(ordered) // 2]:.3g} / {ordered[(99 * len(ordered)) // 100]:.3g}"


@dataclass(slots=True)
class Findings:
    """The results that have a target."""

    end_to_end: dict[tuple[str, str], float] = field(default_factory=dict)
    """CPU seconds per million tokens by (store, encoding)."""
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    batch_ms: dict[tuple[int, str], float] = field(default_factory=dict)
    """Most expensive measured `GET /batch` by (groups queued, kind of queue), of the worst store."""
    status_ms: list[float] = field(default_factory=list)
    many_envs_ms: dict[str, float] = field(default_factory=dict)
    """Of `MANY_ENVS` environments, by path."""
    block_ms: dict[str, float] = field(default_factory=dict)
    """By activity."""
    refused: list[str] = field(default_factory=list)
    """Valid input that was not answered with 200, with the answer."""


class Options(argparse.Namespace):
    """The flags, as `main` describes them."""

    base_url: str
    server_pid: int | None
    token: str | None
    stores: list[str]
    data_dir: Path
    run_api_flags: str
    database: str | None
    database_pid: int | None
    replicas: int
    only: list[str]
    quick: bool
    scale: float
    group_size: int
    seq_len: int
    batch_groups: int
    queue_sizes: list[int]

    @property
    def tokens_per_group(self) -> int:
        return self.group_size * self.seq_len

    def groups_for(self, tokens: float) -> int:
        """Return the number of groups in whole batches with about `tokens * scale` tokens, at least two batches."""
        wanted = self.scale * tokens / self.tokens_per_group
        return self.batch_groups * max(2, round(wanted / self.batch_groups))

    def groups(self, env_ids: Sequence[int], *, variants: int = 2) -> list[dict[str, Any]]:
        return [
            make_group(
                num_sequences=self.group_size, num_tokens=self.seq_len, env_id=env_id, seed=seed
            )
            for seed in range(variants)
            for env_id in env_ids
        ]

    @property
    def batch_size(self) -> int:
        return self.group_size * self.batch_groups


async def fresh_bodies(site: Site, options: Options, encoding: Encoding) -> Bodies:
    """Begin a run of the usual size; return bodies with groups for it."""
    with site.connect() as connection:
        env_ids = await fresh_run(
            connection, batch_size=options.batch_size, group_size=options.group_size
        )
    return Bodies(encoding, options.groups(env_ids))


# Questions


async def ask_ingest(site: Site, options: Options, findings: Findings) -> None:
    table = Table(
        f"Ingest: POST /scored_data, {options.group_size} x {options.seq_len}, {site.hub.store} store",
        "encoding", "body KB", "CPU s/Mtok", "Mtok/s per core", "wall ktok/s", "POST p50 / p99 ms",
        "clients CPU s/Mtok",
    )  # fmt: skip
    for encoding in encodings_of(site):
        bodies = await fresh_bodies(site, options, encoding)
        await post_all(site, [bodies.one() for _ in range(8)], encoding)
        wanted = options.groups_for(6e6 if encoding.is_packed else 3e6)
        prepared = [bodies.one() for _ in range(wanted)]
        async with Cost(site.hub) as cost:
            latencies_ms = await post_all(site, prepared, encoding)
        mtok = 1e-6 * len(latencies_ms) * options.tokens_per_group
        table.row(
            encoding.name,
            len(prepared[0]) / 1e3,
            cost.server_s / mtok,
            mtok / cost.server_s,
            1e3 * mtok / cost.wall_s,
            quantiles(latencies_ms),
            cost.client_s / mtok,
        )


def encodings_of(site: Site) -> Iterator[Encoding]:
    if site.is_packed:
        yield PACKED
    if site.is_zstd:
        yield PACKED_ZSTD
    yield JSON
    yield JSON_GZIP


class Flow(NamedTuple):
    """Cost of posting and fetching groups."""

    server_s_per_mtok: float
    client_s_per_mtok: float
    ktok_per_s: float


async def flow(site: Site, options: Options, encoding: Encoding, *, num_groups: int) -> Flow:
    """Post and fetch concurrently, at most `BATCHES_IN_FLIGHT` batches apart."""
    bodies = await fresh_bodies(site, options, encoding)

    async def pass_through(num_groups: int) -> int:
        room = asyncio.Semaphore(BATCHES_IN_FLIGHT * options.batch_groups)
        deadline = time.perf_counter() + ROW_LIMIT_S
        num_to_send = num_groups
        num_sent = num_taken = 0

        async def environment() -> None:
            nonlocal num_to_send, num_sent
            with site.connect() as connection:
                while num_to_send > 0:
                    await room.acquire()
                    # Past the deadline (slow hubs), send only enough to complete the last batch.
                    is_late = time.perf_counter() > deadline
                    if is_late and num_to_send > num_to_send % options.batch_groups:
                        num_to_send %= options.batch_groups
                    if num_to_send <= 0:
                        room.release()
                        return
                    num_to_send -= 1
                    await send(connection, "/scored_data", bodies.one(), encoding)
                    num_sent += 1

        async def trainer(senders: Sequence[asyncio.Task[None]]) -> None:
            nonlocal num_taken
            with site.connect() as connection:
                while num_taken < num_sent or not all(sender.done() for sender in senders):
                    began = time.perf_counter()
                    taken = await take_batch(site, connection, encoding, wait_s=1)
                    if taken is None:
                        if time.perf_counter() - began < 0.5:  # this hub has no long poll
                            await asyncio.sleep(0.005)
                        continue
                    await acknowledge(connection, taken)
                    num_taken += options.batch_groups
                    for _ in range(options.batch_groups):
                        room.release()

        async with asyncio.TaskGroup() as tasks:
            senders = [tasks.create_task(environment()) for _ in range(NUM_ENVS)]
            tasks.create_task(trainer(senders))
        return num_taken

    await pass_through(2 * options.batch_groups)
    async with Cost(site.hub) as cost:
        num_taken = await pass_through(num_groups)
    mtok = 1e-6 * num_taken * options.tokens_per_group
    return Flow(cost.server_s / mtok, cost.client_s / mtok, 1e3 * mtok / cost.wall_s)


async def ask_end_to_end(site: Site, options: Options, findings: Findings) -> None:
    table = Table(
        f"End to end: in and out, {options.group_size} x {options.seq_len}, batches of"
        f" {options.batch_groups} groups, {NUM_ENVS} environments, {site.hub.store} store",
        "encoding both ways", "server CPU s/Mtok", "clients CPU s/Mtok", "wall ktok/s",
    )  # fmt: skip
    for encoding in encodings_of(site):
        num_groups = options.groups_for(8e6 if encoding.is_packed else 2e6)
        flows = [
            await flow(site, options, encoding, num_groups=num_groups)
            for _ in range(1 if options.quick else 3)
        ]
        costs = [each.server_s_per_mtok for each in flows]
        findings.end_to_end[site.hub.store, encoding.name] = statistics.median(costs)
        table.row(
            encoding.name,
            middle(costs),
            middle([each.client_s_per_mtok for each in flows]),
            middle([each.ktok_per_s for each in flows]),
        )


async def ask_memory(site: Site, options: Options, findings: Findings) -> None:
    if site.hub.pid is None:  # a client cannot measure this
        return
    table = Table(
        f"Memory: growth per queued token, {options.group_size} x {options.seq_len},"
        f" {site.hub.store} store",
        "encoding", "Mtok queued", "RSS B/token", "RSS at the end MB",
    )  # fmt: skip
    for encoding in (site.native, JSON) if site.native is not JSON else (JSON,):
        bodies = await fresh_bodies(site, options, encoding)
        # The first groups warm up the allocator and the connections' buffers.
        num_groups = options.groups_for(24e6 if encoding.is_packed else 12e6)
        for _ in range(max(4, num_groups // 64)):
            await post_all(site, [bodies.one() for _ in range(32)], encoding)
        before = site.hub.memory_bytes()
        num_counted = 0
        for _ in range(num_groups // 32):
            num_counted += len(await post_all(site, [bodies.one() for _ in range(32)], encoding))
        after = site.hub.memory_bytes()
        num_tokens = num_counted * options.tokens_per_group
        per_token = (after - before) / num_tokens
        key = site.hub.store
        findings.bytes_per_token[key] = max(findings.bytes_per_token.get(key, 0.0), per_token)
        table.row(encoding.name, 1e-6 * num_tokens, per_token, after / 1e6)


async def ask_status(site: Site, options: Options, findings: Findings) -> None:
    table = Table(
        f"GET /status-env, {site.hub.store} store",
        "groups queued", "CPU ms per request", "p50 / p99 ms",
    )  # fmt: skip
    num_requests = 200 if options.quick else 1000
    with site.connect() as connection:
        env_ids = await fresh_run(connection, batch_size=256)
        body = json.dumps({"env_id": env_ids[0]}).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"}
        for num_queued in (0, 10_000):
            await fill_small(site, connection, env_ids, num_groups=num_queued)
            latencies_ms = []
            async with Cost(site.hub) as cost:
                for _ in range(num_requests):
                    began = time.perf_counter()
                    reply = await connection.request("GET", "/status-env", body, headers)
                    latencies_ms.append(1e3 * (time.perf_counter() - began))
                    if reply.status != 200:
                        raise Failed(f"GET /status-env: {reply.status} {reply.body[:300]!r}")
            cost_ms = 1e3 * cost.server_s / num_requests
            findings.status_ms.append(cost_ms)
            table.row(f"{num_queued:,}", cost_ms, quantiles(latencies_ms))


MIXED_SIZES = range(1, 17)
QUEUES: Mapping[str, tuple[Sequence[float | None] | None, Sequence[int]]] = {
    "no minimums": (None, (8,)),
    "minimums": ((0.25, 0.1, 0.1, 0.1), (8,)),
    "sizes 1 to 16": (None, MIXED_SIZES),
    "sizes 1 to 16, minimums": ((0.25, 0.1, 0.1, 0.1), MIXED_SIZES),
}
"""Kind of queue -> the four environments' minimum allocations, and the sizes of the groups."""


async def ask_queue(site: Site, options: Options, findings: Findings) -> None:
    num_batches = 10 if options.quick else 20
    table = Table(
        f"GET /batch of 256 sequences by queue length, {site.hub.store} store",
        "groups queued", "kind", "first CPU ms", f"next {num_batches} CPU ms, median",
        "slowest", "first wall ms",
    )  # fmt: skip
    for num_queued in options.queue_sizes:
        for kind, (shares, sizes) in QUEUES.items():
            with site.connect() as connection:
                env_ids = await fresh_run(
                    connection, batch_size=256, group_size=min(sizes), shares=shares
                )
                await fill_small(site, connection, env_ids, num_groups=num_queued, sizes=sizes)
                await settled_cpu_s(site.hub)
                costs_ms, walls_ms = [], []
                for _ in range(1 + num_batches):
                    before, began = site.hub.cpu_s(), time.perf_counter()
                    taken = await take_batch(site, connection, site.native, wait_s=0)
                    walls_ms.append(1e3 * (time.perf_counter() - began))
                    costs_ms.append(1e3 * (site.hub.cpu_s() - before))
                    if taken is None:
                        raise Failed(f"no batch although {num_queued} groups are queued ({kind})")
                    await acknowledge(connection, taken)
            slowest = max(costs_ms)
            key = (num_queued, kind)
            findings.batch_ms[key] = max(findings.batch_ms.get(key, 0.0), slowest)
            table.row(
                f"{num_queued:,}",
                kind,
                costs_ms[0],
                statistics.median(costs_ms[1:]),
                slowest,
                walls_ms[0],
            )


NUM_LOOKS = 20
MANY_ENVS = 5000


async def ask_environments(site: Site, options: Options, findings: Findings) -> None:
    table = Table(
        "CPU ms per request by environments in one run, each with a group queued; batches of 256 sequences;"
        f" {site.hub.store} store, medians of {NUM_LOOKS}",
        "environments", "/register-env", "/batch", "/status-env after a change", "/explain", "kB",
        "/status", "/metrics", "/ledger",
    )  # fmt: skip
    for num_envs in (1, 1000) if options.quick else (1, 1000, MANY_ENVS):
        with site.connect() as connection:

            async def look(path: str, connection: Connection = connection) -> float:
                before = site.hub.cpu_s()
                await get(connection, path)
                return 1e3 * (site.hub.cpu_s() - before)

            async with Cost(site.hub) as cost:
                env_ids = await fresh_run(connection, batch_size=256, num_envs=num_envs)
            num_groups = max(num_envs, 32 * (NUM_LOOKS + 1))
            await fill_small(site, connection, env_ids, num_groups=num_groups)
            batches_ms, changed_ms = [], []
            for _ in range(NUM_LOOKS):
                before = site.hub.cpu_s()
                taken = await take_batch(site, connection, site.native, wait_s=0)
                batches_ms.append(1e3 * (site.hub.cpu_s() - before))
                if taken is None:
                    raise Failed("no batch although enough is queued")
                await acknowledge(connection, taken)
                await post(connection, "/disconnect-env", {"env_id": env_ids[-1]})
                await register_env(connection)
                changed_ms.append(await look(f"/status-env?env_id={env_ids[0]}"))
            costs_ms = {"/batch": batches_ms, "/status-env": changed_ms} | {
                path: [await look(path) for _ in range(NUM_LOOKS)]
                for path in ("/explain", "/status", "/metrics", "/ledger")
            }
            kilobytes = len((await get(connection, "/explain")).body) / 1e3
        medians_ms = {path: statistics.median(values) for path, values in costs_ms.items()}
        if num_envs == MANY_ENVS:
            findings.many_envs_ms = medians_ms
        batch, status, explain, *others = medians_ms.values()
        registration_ms = 1e3 * cost.server_s / num_envs
        table.row(f"{num_envs:,}", registration_ms, batch, status, explain, kilobytes, *others)


async def ask_blocks(site: Site, options: Options, findings: Findings) -> None:
    table = Table(
        "How long others wait: GET /healthz 200 times a second during another request,"
        f" {site.hub.store} store, ms",
        "meanwhile", "answer", "wall p50 / p99", "wall max", "net max",
        "loop CPU max", "server CPU s", "peak RSS growth MB",
    )  # fmt: skip

    async def observe(
        name: str, work: Callable[[], Awaitable[str]], *, is_accepted: bool = True
    ) -> None:
        site.hub.forget_peak()
        resident = site.hub.memory_bytes()
        began_s = site.hub.cpu_s()
        with probing(site.hub, token=site.token) as waits:
            answer = await work()
            await asyncio.sleep(0.2)
        growth = site.hub.memory_bytes("VmHWM") - resident
        is_known = site.hub.pid is not None
        worst = max(waits.net_ms, default=math.nan) if is_known else math.nan
        if is_accepted and answer != "-" and not answer.endswith("200"):
            findings.refused.append(f"{name}: {answer}")
        if is_accepted and is_known:
            findings.block_ms[f"{name} ({site.hub.store})"] = worst
        table.row(
            name,
            answer,
            quantiles(waits.wall_ms),
            max(waits.wall_ms, default=math.nan),
            worst,
            max(waits.loop_cpu_ms, default=math.nan) if is_known else math.nan,
            site.hub.cpu_s() - began_s,
            growth / 1e6,
        )

    with site.connect() as connection:
        await observe("nothing", idle)
        encodings = [site.native, JSON] if options.quick else list(encodings_of(site))
        for tokens in (2048, 32768):
            for encoding in encodings:
                env_ids = await fresh_run(connection, batch_size=32)
                groups = [make_group(num_sequences=8, num_tokens=tokens, env_id=env_ids[0], seed=0)]
                bodies = Bodies(encoding, groups)
                num_groups = (40 if options.quick else 100) * 2048 // tokens
                prepared = [bodies.one() for _ in range(max(4, num_groups))]

                async def posts(
                    prepared: Sequence[bytes] = prepared, encoding: Encoding = encoding
                ) -> str:
                    return f"{len(await post_all(site, prepared, encoding))} x 200"

                await observe(f"POST 8 x {tokens} {encoding.name}", posts)
        for encoding in encodings:
            env_ids = await fresh_run(connection, batch_size=256)
            groups = [make_group(num_sequences=8, num_tokens=2048, env_id=env_ids[0], seed=0)]
            bodies = Bodies(site.native, groups)
            await post_all(site, [bodies.one() for _ in range(64)], site.native)

            async def takes(encoding: Encoding = encoding) -> str:
                for number in range(2):
                    taken = await take_batch(site, connection, encoding, wait_s=0)
                    if taken is None:
                        return f"{number} batches"
                    await acknowledge(connection, taken)
                return "2 x 200"

            await observe(f"GET /batch of 0.5 Mtok, {encoding.name}", takes)
        for hostile in hostile_requests(options):
            await fresh_run(connection, batch_size=256)

            async def attack(hostile: Hostile = hostile) -> str:
                headers = {"Content-Type": "application/json"}
                headers |= {"Content-Encoding": "gzip"} if hostile.is_gzip else {}
                with site.connect() as attacker:
                    try:
                        reply = await attacker.request(
                            "POST", "/scored_data", hostile.body, headers
                        )
                    except (OSError, EOFError):
                        return "connection closed"
                return str(reply.status)

            await observe(hostile.name, attack, is_accepted=hostile.is_accepted)
        await fresh_run(connection, batch_size=256)


async def idle() -> str:
    await asyncio.sleep(1.0)
    return "-"


class Hostile(NamedTuple):
    """A request that should not delay others."""

    name: str
    body: bytes
    is_gzip: bool = False
    is_accepted: bool = False
    """Whether it is a valid group, to which the limit on blocking applies."""


def hostile_requests(options: Options) -> Iterator[Hostile]:
    """Make one body at a time: they are large."""
    bomb_mb = 128 if options.quick else 1024
    group = make_group(num_sequences=8, num_tokens=8, env_id=0, seed=0)
    spaces = bomb(bomb_mb, b" ", json.dumps(group).encode())
    yield Hostile(f"gzip bomb, {bomb_mb} MB of spaces and a group", spaces, is_gzip=True)
    if options.quick:
        return
    zeros = b'{"tokens":[[' + b"0," * (50 * MEBI) + b'0]],"masks":[[]],"scores":[0]}'
    yield Hostile("gzip bomb, 100 MB of zeros as tokens", gzip.compress(zeros, 1), is_gzip=True)
    row_tokens = 60 * MEBI // 31 // 8
    large = make_group(num_sequences=8, num_tokens=row_tokens, env_id=0, seed=0)
    name = f"a valid group of {8 * row_tokens / 1e6:.2g} Mtok as JSON"
    yield Hostile(name, json.dumps(large).encode(), is_accepted=True)
    talk = {**group, "messages": [[{"role": "user", "content": "x" * 100}] * 60_000] * 8}
    name = "a valid group with 60 MB of messages as JSON"
    yield Hostile(name, json.dumps(talk).encode(), is_accepted=True)
    yield Hostile("60 MB that are not JSON", b"[" * (60 * MEBI))
    yield Hostile("60 MB of NaN", b"[" + b"NaN," * (15 * MEBI) + b"NaN]")


def bomb(size_mb: int, filler: bytes, tail: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    block = filler * MEBI
    pieces = [packer.compress(block) for _ in range(size_mb)]
    return b"".join([*pieces, packer.compress(tail), packer.flush()])


QUESTIONS = {
    "ingest": ask_ingest,
    "end-to-end": ask_end_to_end,
    "memory": ask_memory,
    "status": ask_status,
    "queue": ask_queue,
    "environments": ask_environments,
    "blocks": ask_blocks,
}
PER_STORE = frozenset(QUESTIONS) - {"status", "environments"}
"""Questions for every store; the others do not depend on it and use the first one only."""
QUICK_PER_STORE = frozenset({"end-to-end", "memory"})


# Targets


def print_targets(findings: Findings) -> None:
    table = Table("Targets", "target", "limit", "measured", "met")

    def judge(name: str, limit: float, unit: str, measured: Sequence[float]) -> None:
        known = [value for value in measured if not math.isnan(value)]
        if known:
            is_met = "yes" if max(known) <= limit else "NO"
            table.row(name, f"<= {limit:g} {unit}", max(known), is_met)
        else:
            table.row(name, f"<= {limit:g} {unit}", "not measured", "-")

    flows = findings.end_to_end
    unit = "CPU s/Mtok"

    def of(encoding: Encoding, *stores: str) -> list[float]:
        return [
            cost
            for (store, name), cost in flows.items()
            if name == encoding.name and (not stores or store in stores)
        ]

    judge("packed in + out, durable", 0.06, unit, of(PACKED, "disk"))
    judge("packed in + out, in memory", 0.04, unit, of(PACKED, "memory"))
    judge("JSON in + out, disk and memory", 0.30, unit, of(JSON, "disk", "memory", "given"))
    judge(
        "JSON + gzip in + out, disk and memory", 0.6, unit, of(JSON_GZIP, "disk", "memory", "given")
    )
    for encoding in (PACKED, JSON):
        ratios = [
            database / disk
            for database in of(encoding, "postgres")
            for disk in of(encoding, "disk")
        ]
        judge(f"{encoding.name} in + out, PostgreSQL / disk", 4.0, "times", ratios)
    for store, limit in (("disk", 1.0), ("memory", 14.0)):
        values = [value for key, value in findings.bytes_per_token.items() if key == store]
        judge(f"RSS per queued token, {store}", limit, "B", values)
    for num_queued in (10_000, 50_000):
        for kind in QUEUES:
            values = [ms for key, ms in findings.batch_ms.items() if key == (num_queued, kind)]
            judge(f"slowest GET /batch, {num_queued:,} queued, {kind}", 5.0, "ms", values)
    judge("GET /status-env, empty and 10,000 queued", 0.3, "ms", findings.status_ms)
    for path, limit in (("/batch", 8.0), ("/status-env", 0.4), ("/explain", 10.0)):
        values = [ms for key, ms in findings.many_envs_ms.items() if key == path]
        judge(f"GET {path}, {MANY_ENVS:,} environments", limit, "ms", values)
    blocks = findings.block_ms
    where = f", at {max(blocks, key=lambda name: blocks[name])}" if blocks else ""
    judge(f"longest block at accepted input (net){where}", 10.0, "ms", list(blocks.values()))
    if findings.refused:
        print("\nValid input that was refused: " + "; ".join(findings.refused))


# Command line


def describe_machine(directory: Path) -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores of {found.group(1) if found else platform.machine()}, load {load},"
        f" Python {platform.python_version()}, data in {directory},"
        f" {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
    )


@contextlib.asynccontextmanager
async def open_site(options: Options, store: str) -> AsyncIterator[Site]:
    """Yield the hub at --base-url, or one started with this store."""
    with contextlib.ExitStack() as stack:
        if options.base_url:
            hub = Hub(base_url=options.base_url, pid=options.server_pid, store=store)
        else:
            # No environment of a long question falls silent.
            flags = ["--env_timeout_s", "3600", *options.run_api_flags.split()]
            pids = list[int]()
            if store == "postgres":
                flags += ["--database", options.database or ""]
                pids += [options.database_pid or 0]
            # The first replica owns the run; clients know the last one.
            for _ in range(options.replicas if store == "postgres" else 1):
                hub = stack.enter_context(
                    running_hub(store, directory=options.data_dir, extra=flags, more_pids=pids)
                )
                pids += [hub.pid or 0]
        site = Site(hub=hub, token=options.token)
        await site.discover()
        yield site


async def run(options: Options) -> None:
    findings = Findings()
    print(describe_machine(options.data_dir))
    for index, store in enumerate(["given"] if options.base_url else options.stores):
        repeated = QUICK_PER_STORE if options.quick else PER_STORE
        async with open_site(options, store) as site:
            for name, ask in QUESTIONS.items():
                if name in options.only and (index == 0 or name in repeated):
                    began = time.perf_counter()
                    await ask(site, options, findings)
                    print(f"\n({time.perf_counter() - began:.0f} s)")
    print_targets(findings)


def names(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", help="measure this hub; its data is erased")
    parser.add_argument("--server-pid", type=int, help="process of --base-url, for CPU and memory")
    parser.add_argument("--token", help="bearer token of --base-url")
    parser.add_argument("--stores", type=names, default=["disk", "memory"], help="also postgres")
    parser.add_argument("--data-dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--run-api-flags", default="", help="more flags for run-api")
    parser.add_argument("--database", help="URL of a running PostgreSQL, for --stores postgres")
    parser.add_argument("--database-pid", type=int, help="its first process, for CPU time")
    parser.add_argument("--replicas", type=int, default=1, help="hubs on the database")
    parser.add_argument("--only", type=names, help=f"some of {','.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="a minute instead of six")
    parser.add_argument("--scale", type=float, help="share of the usual number of tokens")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-groups", type=int, default=4)
    parser.add_argument("--queue-sizes", type=numbers, help="1000,10000,50000; quick 10000")
    options = parser.parse_args(namespace=Options())
    options.only = options.only or list(QUESTIONS)
    options.scale = options.scale or (0.2 if options.quick else 1.0)
    options.queue_sizes = options.queue_sizes or (
        [10_000] if options.quick else [1000, 10_000, 50_000]
    )
    if "postgres" in options.stores and not (options.database and options.database_pid):
        parser.error("--stores postgres needs --database URL and --database-pid PID")
    if unknown := set(options.only) - set(QUESTIONS):
        parser.error(f"--only: {sorted(unknown)} is not among {', '.join(QUESTIONS)}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    began = time.perf_counter()
    asyncio.run(run(options))
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
