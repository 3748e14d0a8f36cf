"""The benchmarks run, and their figures are measurements."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from atroposlib.inference.servers.vllm import gather_choices, read_choices
from atroposlib.samples import group_advantages
from atroposlib.scored_data import Strictness
from atroposlib.wire import split_packed, unpack_group
from benchmarks._env_engine import Choice, create_app
from benchmarks._env_process import Probe
from benchmarks._hub_load import JSON, PACKED, Bodies, make_group
from benchmarks._hub_process import Hub, cpu_s, memory_bytes, probing, running_hub
from benchmarks._trainer_measure import Result
from benchmarks._trainer_work import Spec, make_step, step_flops
from benchmarks.trainer import PARTS, Row, Session, parse, run_parts, same_work, set_mfu
from tests.builders.programs import run_python
from tests.processes import ROOT

pytestmark = [pytest.mark.drill, pytest.mark.timeout(120)]


def tables_of(output: str) -> dict[str, list[dict[str, str]]]:
    """Read the printed tables: first words of the title -> rows by column."""
    tables = {}
    for title, text in re.findall(r"### (.*)\n\n((?:\|.*\n)+)", output):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
        rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
        tables[re.split(r"[:,]| of ", title)[0]] = rows
    return tables


def run_script(name: str, *argv: str) -> dict[str, list[dict[str, str]]]:
    """Run a script of `benchmarks/` and return the tables that it prints."""
    return tables_of(run_python(ROOT / "benchmarks" / name, *argv, timeout_s=100))


@pytest.mark.e2e
def test_a_quick_run_measures_a_started_hub(tmp_path: Path) -> None:
    with running_hub("memory", directory=tmp_path) as hub:
        argv = ["--quick", "--scale", "0.01", "--base-url", hub.base_url, "--seq-len", "256"]
        argv += ["--server-pid", str(hub.pid), "--only", "ingest,end-to-end,memory"]
        tables = run_script("hub.py", *argv)
    encodings = ["packed", "packed + zstd", "JSON", "JSON + gzip"]
    assert [row["encoding"] for row in tables["Ingest"]] == encodings
    assert all(0 < float(row["CPU s/Mtok"]) < 100 for row in tables["Ingest"])
    assert [row["encoding both ways"] for row in tables["End to end"]] == encodings
    assert all(0 <= float(row["server CPU s/Mtok"]) < 100 for row in tables["End to end"])
    met = {row["target"]: row["met"] for row in tables["Targets"]}
    assert met["packed in + out, durable"] == "-"  # which store a given hub has is not known
    assert met["JSON in + out, disk and memory"] in ("yes", "NO")


@pytest.mark.e2e
def test_a_short_run_measures_a_served_environment() -> None:
    tables = run_script("env.py", "--seconds", "2", "--only", "managed:512:8")
    [row] = tables["The environment process"]
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


async def test_the_instant_engine_answers_what_vllm_answers() -> None:
    """The same readers that read vLLM read it; the prompt comes back as it was sent."""
    choice = Choice(
        b'"token_ids":[7,8],"logprobs":{"token_logprobs":[-0.5,-1.0]},"prompt_token_ids":', b"", b""
    )
    async with TestClient(TestServer(create_app({2: [choice]}))) as client:
        body = {"model": "m", "n": 3, "max_tokens": 2, "prompt": [5, 6, 7]}
        reply = await client.post("/v1/completions", data=json.dumps(body, separators=(",", ":")))
        content = await reply.read()
    choices = read_choices(content, prompt_tokens=[5, 6, 7], where="instant")
    prompt, tokens, logprobs, _ = gather_choices(choices, where="instant")
    assert (prompt, tokens, logprobs) == ([5, 6, 7], [[7, 8]] * 3, [[-0.5, -1.0]] * 3)


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
    assert 180 <= max(waits.net_ms) <= max(waits.wall_ms)
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
def test_one_group_meets_no_more_names_than_it_did() -> None:
    """What is added on a group's way replaces something: the bounds are lowered with the figures, never raised."""
    rows = {
        row["part"]: row
        for row in run_script("names.py")["Functions and files that one group meets"]
    }
    num = {part: (int(row["functions"]), int(row["files"])) for part, row in rows.items()}
    assert num.keys() >= {"sample", "POST", "GET batch", "make_batch", "POST ack", "all"}
    assert min(functions for functions, _ in num.values()) > 0
    assert max(num["POST"]) < num["all"][0] <= 365
    assert num["all"][1] <= 48


@pytest.mark.e2e
def test_a_quick_run_compares_requests_with_bare_ones() -> None:
    argv = ["--per-worker", "1", "--tokens", "16", "--latency", "0.05", "--repeats", "1"]
    (rows,) = run_script("inference.py", "--concurrency", "20", *argv).values()
    kinds = ("bare aiohttp", "bare, not decoded", "token calls", "managed chats")
    names = [f"{kind}, 16" for kind in kinds]
    assert [row["requests, tokens"] for row in rows] == names
    assert rows[0]["times bare"] == "1.00"
    assert all(float(row["CPU us per request"]) > 50 for row in rows)
    assert all(0.05 < float(row["wall s"]) < 5 for row in rows)


ENGINE_OF_THIS_PROJECT = """#!{python}
# Stands in for vLLM: the engine of this project, which speaks its routes and takes no adapters.
import os, sys
argv = sys.argv[1:]
if "--enable-lora" in argv:
    sys.exit("no adapters here")
if "vllm.entrypoints.openai.api_server" in argv:
    value = dict(zip(argv[2:], argv[3:]))
    argv = ["-m", "atroposlib.engine", "--device", "cpu", "--dtype", "float32"]
    argv += ["--model", value["--model"], "--port", value["--port"]]
    argv += ["--served_model_name", value["--served-model-name"]]
    os.environ["PYTHONPATH"] = {root!r}
os.execv({python!r}, [{python!r}, *argv])
"""


@pytest.mark.e2e
@pytest.mark.timeout(900)  # eleven processes import torch
def test_all_parts_of_a_day_with_a_gpu_run_on_the_cpu_and_one_that_fails_ends_no_other(
    tmp_path: Path,
) -> None:
    vllm_python = tmp_path / "vllm_python"
    vllm_python.write_text(ENGINE_OF_THIS_PROJECT.format(python=sys.executable, root=str(ROOT)))
    vllm_python.chmod(0o755)
    out = tmp_path / "out" / "day.json"
    known = {k: v for k, v in os.environ.items() if k != "ATROPOS_TRL_PYTHON"}
    run = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks/trainer.py"), "--device", "cpu"),
            *("--shapes", "tiny", "--out", str(out)),
        ],
        env={**known, "PYTHONPATH": str(ROOT), "ATROPOS_VLLM_PYTHON": str(vllm_python)},
        capture_output=True,
        text=True,
    )
    found = json.loads(out.read_text())
    rows = {(row["part"], row["case"], row["side"]): row for row in found["rows"]}
    failed = [key for key, row in rows.items() if row["error"]]
    assert failed == [("bridges", "lora, tiny", "")], run.stderr
    assert run.returncode == 1
    assert "no adapters here" in rows["bridges", "lora, tiny", ""]["error"]
    not_run = {key[1]: row["not_run"] for key, row in rows.items() if row["not_run"]}
    assert not_run == {
        "tiny, 8 x 32, mixed lengths": "no TRL (set ATROPOS_TRL_PYTHON)",
        "transfer ipc, tiny": "needs 1 GPU(s), found 0",
        "transfer nccl, tiny": "needs 2 GPU(s), found 0",
    }
    notes = [row["note"] for (part, *_), row in rows.items() if part == "tests"]
    assert len(notes) == 4
    assert all("skipped" in note for note in notes)
    ours = rows["trainer", "tiny, 8 x 32, mixed lengths", "atropos"]
    [result] = ours["results"]
    assert (ours["note"], ours["mfu"], result["num_tokens"]) == ("2 micro-batches", None, 116)
    assert ours["tokens_per_s"] == pytest.approx(116 / ours["cpu_s"])
    assert ours["peak_bytes"] == result["peak_bytes"] > 0
    assert result["losses"][1] < result["losses"][0]
    assert "GB with the model" in rows["memory", "tiny, 8 x 32, checkpointing", "atropos"]["note"]
    published = {bridge: rows["bridges", f"{bridge}, tiny", ""] for bridge in ("restart", "reload")}
    num_publishes = {k: len(row["results"][0]["wall_s"]) for k, row in published.items()}
    assert num_publishes == {"restart": 1, "reload": 3}
    assert 0 < published["reload"]["wall_s"] < published["restart"]["wall_s"]
    assert "of all logits" in rows["head", "1024 positions, vocabulary 300", ""]["note"]
    assert found["machine"]["versions"]["vLLM"] == found["machine"]["versions"]["here"]
    lines = out.with_suffix(".md").read_text()
    assert lines in run.stdout
    assert [line.split(" | ")[0].strip("| ") for line in lines.splitlines()[2:]] == [
        row["part"] for row in found["rows"]
    ]
    assert lines.count("NOT RUN: ") == 3
    assert lines.count("FAILED: ") == 1
    assert len({line.count("|") for line in lines.splitlines()}) == 1


STARTS_A_PROCESS = """
import pathlib, sys, time
from benchmarks._hub_process import running
with running(["-c", "import time; time.sleep(60)"], log_path=pathlib.Path(sys.argv[1])) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def test_a_benchmark_that_gets_sigterm_ends_what_it_started(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_PROCESS, str(tmp_path / "log")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        os.kill(pid, 0)
        benchmark.terminate()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


TIDIES_UP = """
import pathlib, signal, sys, time
try:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    time.sleep(60)
finally:
    pathlib.Path(sys.argv[1]).touch()
"""


def test_a_part_that_breaks_or_takes_too_long_leaves_its_error_and_what_was_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(session: Session) -> Iterator[Row]:
        yield Row(part="head", case="first")
        session.run("-c", TIDIES_UP, str(tmp_path / "tidy"))

    monkeypatch.setenv("ATROPOS_TRL_PYTHON", "/no/such/python")
    session = Session(parse(["--shapes", "tiny"]), tmp_path)
    assert "No such file" in session.machine["versions"]["TRL"]["error"]
    out = tmp_path / "day.json"
    kept = Row(part="trainer", case="earlier", wall_s=2.0, results=[Result(wall_s=[2.0])])
    again = Row(part="head", case="earlier")
    rows = [asdict(kept), asdict(again)]
    out.write_text(json.dumps({"machine": session.machine, "rows": rows}))
    session.limits_s = {"process": 5.0, "part": 99.0, "all": 99.0}
    monkeypatch.setitem(PARTS, "head", hangs)
    found = run_parts(session, ["head"], out)
    assert found[:2] == [kept, Row(part="head", case="first")]
    assert [(row.part, row.case) for row in found[2:]] == [("head", "what follows")]
    assert "not finished after 5 s" in found[2].cells()[-1]
    assert (tmp_path / "tidy").exists()
    assert json.loads(out.read_text())["rows"] == [asdict(row) for row in found]
    session.machine = {"gpus": ["another"]}
    assert len(run_parts(session, ["head"], out)) == 2


def test_mfu_is_to_the_peak_of_the_gpu_and_unknown_for_others(tmp_path: Path) -> None:
    session = Session(parse(["--shapes", "tiny"]), tmp_path)
    assert session.peak_flops is None
    session.on_gpu = True
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090"):
        session.machine = {"gpus": [name]}
        row = Row(part="trainer", case="", results=[Result(num_parameters=494_032_768)], wall_s=2)
        set_mfu(row, Spec(shape="0.5B", sequences=8, seq_len=8192), session)
        found[name.removeprefix("NVIDIA ")] = row.mfu
    per_s = step_flops(Spec(shape="0.5B", sequences=8, seq_len=8192), 494_032_768) / 2
    assert found["H100 80GB HBM3"] == pytest.approx(per_s / 989e12)
    assert found["H100 PCIe"] == pytest.approx(per_s / 756e12)
    assert found["GeForce RTX 4090"] is None


def test_sides_that_differ_in_loss_or_gradient_did_not_do_the_same_work() -> None:
    spec = Spec(shape="tiny", sequences=8, seq_len=64)
    ours = Result(losses=[0.064383, 0.05], grad_norms=[0.4657, 0.4])
    assert same_work(ours, Result(losses=[0.06438, 0.05], grad_norms=[0.4657, 0.4]), spec)
    assert not same_work(ours, Result(losses=[0.0655, 0.05], grad_norms=[0.4657, 0.4]), spec)
    assert not same_work(ours, Result(losses=[0.06438, 0.05], grad_norms=[0.4857, 0.4]), spec)


def test_the_step_that_is_compared_trains_every_sequence_with_the_projects_own_advantages() -> None:
    spec = Spec(shape="tiny", sequences=16, seq_len=64, mixed=True)
    batch = make_step(spec)
    lengths = [len(tokens) for tokens in batch.tokens]
    assert (max(lengths), spec.prompt_len, len(batch.scores)) == (64, 8, 16)
    assert len(set(lengths)) > 4
    assert [len(x) + 8 for x in batch.logprobs] == lengths
    assert (batch.advantages != 0).all()  # ours would leave such sequences out, TRL would not
    assert all((x <= 0).all() for x in batch.logprobs)
    groups = batch.scores.reshape(2, 8)
    assert batch.advantages.tolist() == [x for each in groups for x in group_advantages(each)]


def test_model_flops_are_those_of_the_matrix_products_and_of_attention() -> None:
    """An oracle written out: 2 FLOPs per weight, token and product, three products; attention over T tokens twice."""
    spec = Spec(shape="0.5B", sequences=8, seq_len=8192)
    matrices = 24 * (896 * (896 + 2 * 128 + 896) + 3 * 896 * 4864) + 896 * 151_936
    scores_and_values = 24 * 14 * 2 * (2 * 8192 * 8192 * 64)
    expected = 3 * (2 * matrices * 8192 + scores_and_values) * 8
    assert step_flops(spec, matrices) == pytest.approx(expected, rel=1e-12)
