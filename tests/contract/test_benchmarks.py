"""The benchmarks run, and their figures are measurements."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.inference.servers.vllm_bodies import read_completions
from atroposlib.scored_data import Strictness
from atroposlib.wire import split_packed, unpack_group
from benchmarks._env_engine import Choice, Engine
from benchmarks._env_process import Probe
from benchmarks._hub_load import JSON, PACKED, Bodies, make_group
from benchmarks._hub_process import Hub, cpu_s, memory_bytes, probing, running_hub
from benchmarks._trainer_measure import Result, Spec
from benchmarks.trainer import make_step, parse, same_work, spec_of

ROOT = Path(__file__).resolve().parents[2]


def tables_of(output: str) -> dict[str, list[dict[str, str]]]:
    """Read the printed tables: first words of the title -> rows by column."""
    tables = {}
    for title, text in re.findall(r"### (.*)\n\n((?:\|.*\n)+)", output):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
        tables[re.split(r"[:,]| of ", title)[0]] = rows
    return tables


@pytest.mark.e2e
def test_a_quick_run_measures_a_started_hub(tmp_path: Path) -> None:
    with running_hub("memory", directory=tmp_path) as hub:
        run = subprocess.run(
            [
                *(sys.executable, str(ROOT / "benchmarks/hub.py"), "--quick", "--scale", "0.01"),
                *("--base-url", hub.base_url, "--server-pid", str(hub.pid)),
                *("--only", "ingest,delivery,end-to-end,memory", "--seq-len", "256"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    tables = tables_of(run.stdout)
    encodings = ["packed", "packed + zstd", "JSON", "JSON + gzip"]
    assert [row["encoding"] for row in tables["Ingest"]] == encodings
    assert all(0 < float(row["CPU s/Mtok"]) < 100 for row in tables["Ingest"] + tables["Delivery"])
    costs = {
        row["encoding both ways"]: float(row["server CPU s/Mtok"]) for row in tables["End to end"]
    }
    assert costs["packed"] < costs["JSON"] < costs["JSON + gzip"]
    met = {row["target"]: row["met"] for row in tables["Targets"]}
    assert met["packed in + out, durable"] == "-"  # which store a given hub has is not known
    assert met["JSON in + out, any store"] in ("yes", "NO")


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_short_run_measures_a_served_environment() -> None:
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/env.py"), "--seconds", "2"),
            *("--only", "managed:512:8"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [row] = tables_of(run.stdout)["The environment process"]
    assert (row["path"], row["completion tokens"]) == ("managed_server", "512")
    rate = float(row["completions per CPU s"].replace(",", ""))
    per_group = float(row["CPU ms per group"])
    assert rate > 0
    assert rate * per_group == pytest.approx(8000, rel=0.02)  # two views of one measurement
    blocked = [
        float(value) for value in row["loop CPU between ticks, p50 / p99 / max ms"].split("/")
    ]
    assert 0 <= blocked[0] <= blocked[1] <= blocked[2]


async def test_the_environments_probe_sees_what_blocks_its_loop(tmp_path: Path) -> None:
    probe = Probe(tmp_path / "probe.json")
    probe.switch()
    task = asyncio.create_task(probe.run())
    await asyncio.sleep(0.03)
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    probe.write()
    seen = json.loads((tmp_path / "probe.json").read_text())
    assert max(seen["loop_cpu_ms"]) >= 45
    assert max(seen["late_ms"]) >= 30
    assert min(seen["loop_cpu_ms"]) < 20


def test_the_instant_engine_answers_what_vllm_answers() -> None:
    """The same readers that read vLLM read it; the prompt comes back as it was sent."""
    choice = Choice(
        b'"token_ids":[7,8],"logprobs":{"token_logprobs":[-0.5,-1.0]},"prompt_token_ids":', b"", b""
    )
    engine = Engine({2: [choice]})
    sent: list[bytes] = []

    class Transport(asyncio.Transport):
        def writelines(self, pieces: Any) -> None:
            sent.append(b"".join(pieces))

    engine.connection_made(Transport())
    body = b'{"model":"m","n":3,"max_tokens":2,"prompt":[5,6,7]}'
    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    for start in range(0, len(request), 40):  # as it may come from a socket
        engine.data_received(request[start : start + 40])
    [answer] = sent
    head, _, content = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(content)}".encode() in head
    found = read_completions(content, prompt_tokens=[5, 6, 7], label="instant")
    assert [(each.tokens, each.logprobs) for each in found] == [([7, 8], [-0.5, -1.0])] * 3


def test_cpu_time_counts_children_and_threads_that_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    parent = f"""
import subprocess, sys, threading, time
subprocess.run([sys.executable, "-c", {burn!r}], check=True)
living = subprocess.Popen([sys.executable, "-c", {burn!r} + "\\ninput()"], stdin=subprocess.PIPE)
thread = threading.Thread(target=exec, args=({burn!r},))
thread.start()
thread.join()
print("burnt", flush=True)
input()
living.communicate(b"\\n")
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        deadline = time.monotonic() + 10
        while (measured := cpu_s(process.pid)) < 0.59 and time.monotonic() < deadline:
            time.sleep(0.01)  # until the living child has burnt its share
        assert 0.59 <= measured < 1.2
        assert memory_bytes(process.pid) > memory_bytes(process.pid, "VmHWM") / 4
        process.communicate(b"\n")


BLOCKING_SERVER = """
import asyncio, time

async def answer(reader, writer):
    while await reader.readuntil(b"\\r\\n\\r\\n"):
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(input)
    began = time.process_time()
    {block}
    print("blocked", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("block", "loop_cpu_ms"),
    [("time.sleep(0.2)", 0.0), ("while time.process_time() < began + 0.2: pass", 100.0)],
    ids=["sleeping", "computing"],
)
def test_the_probe_sees_how_long_a_server_is_blocked(block: str, loop_cpu_ms: float) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKING_SERVER.format(block=block)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        hub = Hub(base_url=f"http://127.0.0.1:{port}", pid=process.pid, store="given")
        with probing(hub) as waits:
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"blocked\n"
            time.sleep(0.3)  # for the probe to see what comes after
        process.kill()
    assert len(waits.wall_ms) > 5
    assert max(waits.wall_ms) >= 190
    assert 190 <= max(waits.net_ms) <= max(waits.wall_ms)
    assert max(waits.loop_cpu_ms) >= loop_cpu_ms
    assert min(waits.net_ms) < 20


def test_packed_bodies_are_the_same_group_under_different_ids() -> None:
    group = make_group(num_sequences=2, num_tokens=16, env_id=3, seed=0)
    bodies = Bodies(PACKED, [group])
    first, second = (split_packed(bodies.one()).blobs[0] for _ in range(2))
    one, two = (unpack_group(blob, strictness=Strictness.WIRE) for blob in (first, second))
    assert one.group_id != two.group_id
    assert one.tokens.tolist() == two.tokens.tolist() == sum(group["tokens"], [])
    assert one.env_id == 3
    assert Bodies(JSON, [group]).one() == json.dumps(group).encode()


def test_the_payload_masks_the_prompt_and_only_the_prompt() -> None:
    group = make_group(num_sequences=3, num_tokens=80, env_id=0, seed=5)
    for tokens, masks, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert masks == [-100] * 10 + tokens[10:]
        assert logprobs[:10] == [1.0] * 10
        assert all(value <= 0 for value in logprobs[10:])
        assert min(tokens) >= 10
        assert max(tokens) < 128256


@pytest.mark.e2e
def test_a_quick_run_compares_requests_with_bare_ones() -> None:
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/inference.py"), "--concurrency", "20"),
            *("--per-worker", "1", "--tokens", "16", "--latency", "0.05", "--repeats", "1"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (rows,) = tables_of(run.stdout).values()
    kinds = ("bare aiohttp", "bare, not decoded", "token calls", "managed chats")
    names = [f"{kind}, 16" for kind in kinds]
    assert [row["requests, tokens"] for row in rows] == names
    assert rows[0]["times bare"] == "1.00"
    assert all(float(row["CPU us per request"]) > 50 for row in rows)
    assert all(0.05 < float(row["wall s"]) < 5 for row in rows)


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_the_limiter_is_compared_with_no_limit_and_the_best_fixed_number() -> None:
    def rows_of(*options: str) -> dict[str, dict[str, dict[str, str]]]:
        run = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks/concurrency.py"), "--seeds", "1", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        tables = tables_of(run.stdout)
        return {title: {row[""]: row for row in rows} for title, rows in tables.items()}

    [slow] = rows_of("--only", "slows down").values()
    rates = slow["completions per second"]
    assert list(rates) == ["", "adaptive", "none", "fixed, 64"]
    assert 1.5 * float(rates["none"]) < float(rates["adaptive"]) <= float(rates["fixed, 64"])
    assert slow["requests given up"]["none"] == "0"

    http = rows_of("--only", "no such server", "--http", "4")["Over HTTP"]
    refused = {name: float(row["refused per completion"]) for name, row in http.items()}
    assert 0 <= refused["adaptive"] < 0.5 < refused["none"]


@pytest.mark.e2e
@pytest.mark.timeout(240)  # three processes import torch
def test_a_quick_run_measures_a_step_and_what_is_beside_it() -> None:
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/trainer.py"), "--only", "step,beside"),
            *("--lengths", "mixed", "--sequences", "8", "--seq_len", "32", "--repeats", "1"),
            *("--vocabulary", "300", "--beside", "2,2,64"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    tables = tables_of(run.stdout)
    ours, theirs = tables["One optimizer step"]
    assert (ours["step"], ours["side"], ours["MFU"]) == ("8 x 32, mixed", "atropos", "-")
    assert 0 < float(ours["CPU s per 1k trained tokens"]) < 100
    assert float(ours["peak above the model, MB"]) > 0
    assert theirs["CPU s per 1k trained tokens"] == "not measured: no --trl_python"
    beside = {row["what"]: float(row["CPU ms"]) for row in tables["Beside the model"]}
    assert {"make_batch, padded", "make_batch, packed"} < set(beside)
    assert all(value >= 0 for value in beside.values())


def test_sides_that_differ_in_loss_or_gradient_did_not_do_the_same_work() -> None:
    spec = spec_of(parse([]), 512)
    ours = Result(losses=[0.064383, 0.05], grad_norms=[0.4657, 0.4])
    assert same_work(ours, Result(losses=[0.06438, 0.05], grad_norms=[0.4657, 0.4]), spec)
    assert not same_work(ours, Result(losses=[0.0655, 0.05], grad_norms=[0.4657, 0.4]), spec)
    assert not same_work(ours, Result(losses=[0.06438, 0.05], grad_norms=[0.4857, 0.4]), spec)


def test_the_step_that_is_compared_trains_every_sequence() -> None:
    spec: Spec = spec_of(parse(["--sequences", "16", "--seq_len", "64"]), 64)
    batch = make_step(spec, vocabulary=300, mixed=True)
    lengths = [len(tokens) for tokens in batch.tokens]
    assert (max(lengths), spec.prompt_len, len(batch.scores)) == (64, 8, 16)
    assert len(set(lengths)) > 4
    assert [len(x) + 8 for x in batch.logprobs] == lengths
    assert (batch.advantages != 0).all()  # ours would leave such sequences out, TRL would not
    assert all((x <= 0).all() for x in batch.logprobs)
