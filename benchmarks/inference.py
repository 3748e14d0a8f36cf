"""What does a request through `ServerManager` cost compared with bare aiohttp, with thousands of them in flight?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/inference.py` starts a scripted engine as a process and keeps
`--concurrency` requests in flight from this one, in turn with bare aiohttp (encode, POST, read, decode or not),
`ServerManager.tokens_and_logprobs_completion` and managed chats. CPU is that of this process with all its threads;
answers and latencies are the same for all. All requests start together; the engine's answers are spread over time.
`loop` is the CPU time of the event loop's thread between two ticks 10 ms apart, `late` the lateness of a tick minus the
time without a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine import ByteTokenizer, Latency, Script
from atroposlib.inference.servers.vllm import NEUTRAL_SAMPLING
from atroposlib.utils.event_loop import collect_less_often, loop_with_short_rounds
from benchmarks._env_process import Probe
from benchmarks._hub_process import listening, running
from benchmarks._table import Table

MODEL = "scripted"
QUESTION = "Which group of sequences is cut into the next batch, and why? Question "
SIGMA = 0.3
"""Standard deviation of the logarithm of the answers' latency."""

Ask = Callable[[int], Awaitable[int]]
"""Send request i and return the number of tokens in the answer."""
Asks = contextlib.AbstractAsyncContextManager[Ask]


class Row(NamedTuple):
    cpu_s: float
    wall_s: float
    loop_cpu_ms: list[float]
    late_ms: list[float]


@contextmanager
def running_engine(script: Script, *, without: Sequence[str] = ()) -> Iterator[str]:
    """Run a scripted engine as a process during the block and yield its address."""
    argv = ["-m", "atroposlib.inference.scripted_engine"]
    argv += ["--script", msgspec.json.encode(script).decode()]
    for path in without:
        argv += ["--without", path]
    with tempfile.TemporaryDirectory() as directory:
        log_path = Path(directory) / "engine.log"
        with running(argv, log_path=log_path) as process:
            yield listening(process, log_path)


def messages_of(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{QUESTION}{i}"}]


def prompt_of(i: int) -> list[int]:
    tokens = ByteTokenizer().apply_chat_template(messages_of(i), add_generation_prompt=True)
    assert isinstance(tokens, list)
    return tokens


@asynccontextmanager
async def bare(
    url: str, prompts: list[list[int]], num_tokens: int, *, decodes: bool
) -> AsyncIterator[Ask]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(i: int) -> int:
            body = {
                **NEUTRAL_SAMPLING,
                "model": MODEL,
                "prompt": prompts[i],
                "max_tokens": num_tokens,
                "logprobs": 0,
                "return_token_ids": True,
            }
            async with session.post(
                f"{url}/v1/completions",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                answer = await response.read()
            if not decodes:
                return num_tokens if response.status == 200 else -1
            return len(msgspec.json.decode(answer)["choices"][0]["token_ids"])

        yield ask


@asynccontextmanager
async def open_manager(url: str, concurrency: int) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(
        base_url=f"{url}/v1",
        server_type="vllm",
        model_name=MODEL,
        num_max_requests_at_once=concurrency,
    )
    manager = ServerManager([config])
    try:
        yield manager
    finally:
        await manager.close()


def token_calls(manager: ServerManager, prompts: list[list[int]], num_tokens: int) -> Asks:
    async def ask(i: int) -> int:
        answer = await manager.tokens_and_logprobs_completion(
            input_ids=prompts[i], max_tokens=num_tokens
        )
        return len(answer.output_tokens[0])

    return contextlib.nullcontext(ask)


def managed_chats(manager: ServerManager, num_tokens: int) -> Asks:
    tokenizer = ByteTokenizer()

    async def ask(i: int) -> int:
        async with manager.managed_server(tokenizer=tokenizer) as managed:
            await managed.chat_completion(messages=messages_of(i), max_tokens=num_tokens)
            (node,) = managed.get_state()["nodes"]
        return len(node.masked_tokens) - node.masked_tokens.count(-100)

    return contextlib.nullcontext(ask)


async def measure(ask: Ask, *, concurrency: int, per_worker: int, num_tokens: int) -> Row:
    """Keep `concurrency` requests in flight; every worker sends `per_worker` requests."""

    async def work(worker: int) -> None:
        for _ in range(per_worker):
            num = await ask(worker)
            if num != num_tokens:
                raise RuntimeError(f"{num} tokens instead of {num_tokens}")

    probe = Probe(Path(os.devnull))
    probe.switch()
    ticking = asyncio.create_task(probe.run())
    await asyncio.sleep(0.05)
    probe.late_ms.clear()
    probe.loop_cpu_ms.clear()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for worker in range(concurrency):
            if worker % 25 == 0:  # creating 2,000 tasks at once takes 20 ms, starting them as long
                await asyncio.sleep(0)
            group.create_task(work(worker))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    await asyncio.sleep(0.02)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    return Row(cpu_s, wall_s, probe.loop_cpu_ms, probe.late_ms)


def report(
    table: Table, name: str, rows: list[Row], bare_rows: list[Row], num_requests: int
) -> None:
    cpu = statistics.median(row.cpu_s for row in rows)
    ratio = statistics.median(
        row.cpu_s / other.cpu_s for row, other in zip(rows, bare_rows, strict=True)
    )
    table.row(
        name,
        f"{1e6 * cpu / num_requests:.0f}",
        f"{ratio:.2f}",
        f"{statistics.median(row.wall_s for row in rows):.1f}",
        f"{statistics.median(statistics.quantiles(row.loop_cpu_ms, n=100)[98] for row in rows):.1f}",
        f"{statistics.median(max(row.loop_cpu_ms) for row in rows):.1f}",
        f"{statistics.median(max(row.late_ms) for row in rows):.1f}",
    )


async def compare(args: argparse.Namespace, url: str, num_tokens: int, table: Table) -> None:
    prompts = [prompt_of(i) for i in range(args.concurrency)]

    # One manager for all, whose limiter has adapted to the engine.
    async with open_manager(url, args.concurrency) as manager:
        kinds: dict[str, Callable[[], Asks]] = {
            "bare aiohttp": lambda: bare(url, prompts, num_tokens, decodes=True),
            "bare, not decoded": lambda: bare(url, prompts, num_tokens, decodes=False),
            "token calls": lambda: token_calls(manager, prompts, num_tokens),
            "managed chats": lambda: managed_chats(manager, num_tokens),
        }
        kinds = {name: kind for name, kind in kinds.items() if args.only in ("", name)}
        rows: dict[str, list[Row]] = {name: [] for name in kinds}
        for repeat in range(args.repeats + 1):
            for name, kind in kinds.items():
                # Clean up after one kind before measuring the next: bare clients close their connections here.
                gc.collect()
                async with kind() as ask:
                    row = await measure(
                        ask,
                        concurrency=args.concurrency,
                        per_worker=args.per_worker,
                        num_tokens=num_tokens,
                    )
                await asyncio.sleep(0.5)
                if repeat > 0:  # the first one warms up the engine
                    rows[name].append(row)
    first = next(iter(rows.values()))
    for name, found in rows.items():
        num_requests = args.concurrency * args.per_worker
        report(table, f"{name}, {num_tokens}", found, first, num_requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrency", type=int, default=2000)
    parser.add_argument("--per-worker", type=int, default=2, help="requests of each worker")
    parser.add_argument("--tokens", default="128,512", help="lengths of the completions")
    parser.add_argument("--latency", type=float, default=3.0, help="median seconds of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="one of the kinds, for a profiler")
    args = parser.parse_args()
    collect_less_often()  # like the commands of an environment, as is the event loop
    script = Script(latency=Latency(first_token_s=args.latency, sigma=SIGMA))
    title = (
        f"{args.concurrency} requests in flight, answers after {args.latency:g} s,"
        f" median of {args.repeats}"
    )
    columns = ("requests, tokens", "CPU us per request", "times bare", "wall s")
    table = Table(title, *columns, "loop p99 ms", "loop max ms", "late max ms")
    # All three use the route that stock vLLM has without further flags.
    with running_engine(script, without=["/inference/v1/generate", "/generate"]) as url:
        for num_tokens in args.tokens.split(","):
            with asyncio.Runner(loop_factory=loop_with_short_rounds) as runner:
                runner.run(compare(args, url, int(num_tokens), table))


if __name__ == "__main__":
    main()
