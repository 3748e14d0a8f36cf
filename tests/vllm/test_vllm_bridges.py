"""The bridges against a real vLLM (CPU build): requests in flight, adapters, a kill, and its own trainer side.

Run with `ATROPOS_VLLM_PYTHON=.venv-vllm/bin/python pytest -m vllm tests/vllm -rs`. Whole runs with the reload and the
restart bridge are in test_vllm_loop.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from atroposlib.errors import EngineRejected
from example_trainer.bridges.control import Control
from example_trainer.bridges.engines import identify
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.running import ReloadBridge
from example_trainer.config import TrainerConfig
from example_trainer.contract import tensors_in, write_checksums
from example_trainer.model import Policy, load_policy
from example_trainer.vllm_process import EngineProcess
from example_trainer.weights import WeightsDirectory
from tests.processes import ROOT, free_port
from tests.tiny_model import make_tiny_model
from tests.vllm.helpers_vllm import (
    MAX_GAP,
    STARTUP_TIMEOUT_S,
    Sample,
    gaps_per_token,
    in_float32,
    largest_gap,
    sample,
    vllm_engine,
    vllm_python,
)
from tests.vllm.test_vllm_loop import check_metrics, run_loop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = 512
NUM_TOKENS = 400
RANK = 8
PROMPT = [10, 20, 30, 40, 50]
ADAPTER = "policy"


class Served(NamedTuple):
    engine: EngineProcess
    model: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One vLLM that takes adapters; each test leaves it on `model`'s weights, so that their order does not matter."""
    with adapting_vllm(tmp_path_factory.mktemp("bridges")) as served:
        yield served


def published(directory: Path) -> Path:
    """Add the checksums that a trainer writes with a checkpoint."""
    write_checksums(directory, dict(tensors_in(directory)))
    return directory


@contextmanager
def adapting_vllm(directory: Path, *flags: str) -> Iterator[Served]:
    model = published(make_tiny_model(directory / "model"))
    engine = vllm_engine(
        model,
        port=free_port(),
        log_path=directory / "engine.log",
        max_model_len=LENGTH,
        extra_args=flags,
        bridge="lora",
        lora_r=RANK,
    )
    with engine:
        # The first request after a start takes up to 20 s more on the CPU.
        sample(engine.url, str(model), PROMPT, num_samples=1, max_tokens=2)
        yield Served(engine, model)


def long_samples(engine: EngineProcess, model_name: str) -> list[Sample]:
    """Sample so many tokens that the caller can publish weights meanwhile."""
    return sample(
        engine.url, model_name, PROMPT, num_samples=8, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def during(
    engine: EngineProcess, model_name: str, action: Callable[[], object]
) -> tuple[list[Sample], bool]:
    """Do `action` while samples are under way; return them, and whether they still were when it was done."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[list[Sample]] = pool.submit(long_samples, engine, model_name)
        deadline = time.monotonic() + 60
        while num_running(engine) < 8 and not pending.done():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        action()
        went_on = not pending.done()
        return pending.result(), went_on


def during_at_last(
    engine: EngineProcess,
    model_name: str,
    action: Callable[[], object],
    take_back: Callable[[], object],
) -> list[Sample]:
    """Return samples that were under way while `action` was done; it is repeated if they ended too soon."""
    for _ in range(5):
        samples, went_on = during(engine, model_name, action)
        if went_on:
            return samples
        take_back()
    raise AssertionError("nothing was in flight any more, five times")


def num_running(engine: EngineProcess) -> float:
    text = httpx.get(f"{engine.url}/metrics", trust_env=False).text
    found = re.search(r"^vllm:num_requests_running\{.*\} ([0-9.]+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_requests_in_flight_go_on_under_the_new_weights(served: Served, tmp_path: Path) -> None:
    """None is lost or cut; each token was sampled by exactly the old or exactly the new weights."""
    engine, old = served
    new = published(make_tiny_model(tmp_path / "new", seed=1))
    bridge = ReloadBridge(urls=[engine.url])
    try:
        bridge.start(old, 0)
        samples = during_at_last(
            engine, str(old), lambda: bridge.publish(new, 1), lambda: bridge.publish(old, 0)
        )
    finally:
        bridge.publish(old, 2)
        bridge.close()
    switches = []
    old_model, new_model = in_float32(old), in_float32(new)
    for found in samples:
        assert len(found.tokens) == NUM_TOKENS
        is_old = gaps_per_token(found, old_model) <= MAX_GAP
        is_new = gaps_per_token(found, new_model) <= MAX_GAP
        switch = int(
            is_old.long().cumprod(0).sum()
        )  # tokens before the first that is not of the old weights
        assert bool(is_new[switch:].all()), switch
        switches.append(switch)
    print("tokens under the old weights", switches)
    assert min(switches) > 0
    assert max(switches) < NUM_TOKENS
    after = sample(engine.url, str(old), PROMPT, num_samples=8, max_tokens=12)
    assert largest_gap(after, old) <= MAX_GAP


def test_tied_embeddings_are_refused_before_the_engine_is_touched(
    served: Served, tmp_path: Path
) -> None:
    """vLLM would answer 200 and keep its old output layer; asked first, it says that it runs on the CPU."""
    engine, model = served
    tied = published(make_tiny_model(tmp_path / "tied", seed=2, tie_word_embeddings=True))
    bridge = ReloadBridge(urls=[engine.url])
    with pytest.raises(EngineRejected, match="tied embeddings"):
        bridge.publish(tied, 1)
    bridge.close()
    samples = sample(engine.url, str(model), PROMPT, num_samples=8, max_tokens=12)
    assert largest_gap(samples, model) <= MAX_GAP


def adapted_policy(model: Path) -> Policy:
    config = TrainerConfig(
        model_name=str(model),
        device="cpu",
        lora=True,
        lora_r=RANK,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    )
    return load_policy(config)


def disturb(policy: Policy, seed: int) -> None:
    """Make another policy of it; far more, and single tokens differ by 1e-3 between any two sums of the same terms."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


def test_adapters_are_swapped_under_one_name_and_requests_in_flight_keep_theirs(
    served: Served, tmp_path: Path
) -> None:
    engine, model = served
    policy = adapted_policy(model)
    config = TrainerConfig(model_name="m", bridge="lora", weights_dir=tmp_path / "weights")
    control = Control(engine.url, timeout_s=60)
    running = identify(control)
    with WeightsDirectory(config, policy) as weights:
        previous = tmp_path
        for version in range(3):
            disturb(policy, version)
            merged, before = (tmp_path / f"merged_{v}" for v in (version, version - 1))
            policy.save(merged, merged=True)
            adapter = weights.take(version, merged=False)()
            if version == 0:
                running.load_adapter(ADAPTER, adapter)
            else:
                samples = during_at_last(
                    engine,
                    ADAPTER,
                    functools.partial(running.load_adapter, ADAPTER, adapter),
                    functools.partial(running.load_adapter, ADAPTER, previous),
                )
                assert largest_gap(samples, before) <= MAX_GAP
                assert [len(found.tokens) for found in samples] == [NUM_TOKENS] * 8
            previous = adapter
            now = sample(engine.url, ADAPTER, PROMPT, num_samples=8, max_tokens=12)
            assert largest_gap(now, merged) <= MAX_GAP
            if version:
                assert largest_gap(now, before) > 10 * MAX_GAP
    control.close()
    base = sample(engine.url, str(model), PROMPT, num_samples=8, max_tokens=12)
    assert largest_gap(base, model) <= MAX_GAP, "the base model has changed"


def test_a_vllm_that_mixes_adapters_outlives_swaps_under_load(tmp_path: Path) -> None:
    """Of two versions in one batch vLLM 0.32 dies (KeyError in convert_mapping), so the older one must have ended."""
    with (
        adapting_vllm(tmp_path / "engine", "--max-loras", "2") as (engine, model),
        ThreadPoolExecutor(8) as pool,
    ):
        policy = adapted_policy(model)
        config = TrainerConfig(model_name="m", bridge="lora", weights_dir=tmp_path / "weights")
        control = Control(engine.url, timeout_s=120)
        running = identify(control)
        with WeightsDirectory(config, policy) as weights:
            running.load_adapter(ADAPTER, weights.take(0, merged=False)())
            pending = []
            for version in range(1, 5):
                pending += [pool.submit(long_samples, engine, ADAPTER) for _ in range(2)]
                time.sleep(1.0)
                disturb(policy, version)
                running.load_adapter(ADAPTER, weights.take(version, merged=False)())
            for samples in pending:
                assert [len(found.tokens) for found in samples.result()] == [NUM_TOKENS] * 8
        control.close()
        assert engine.poll() is None


def test_five_steps_with_the_adapter_swapped_after_each(served: Served, tmp_path: Path) -> None:
    engine, model = served
    port = int(engine.url.rpartition(":")[2])
    run_loop(
        tmp_path,
        model,
        hub_port=free_port(),
        engine_port=port,
        served_name=ADAPTER,
        trainer_flags=[
            *("--weight-bridge-mode=lora_only", f"--engine_url={engine.url}"),
            *(f"--lora_name={ADAPTER}", f"--lora_r={RANK}", "--publish_interval=1"),
        ],
    )
    check_metrics(tmp_path)
    version = httpx.get(f"{engine.url}/weight_info", trust_env=False).json()["weight_version"]
    assert version == "5"
    assert (tmp_path / "checkpoints" / "final_adapter" / "adapter_config.json").is_file()


def test_a_vllm_that_is_killed_is_started_again_on_the_version_it_served(tmp_path: Path) -> None:
    model = published(make_tiny_model(tmp_path / "model"))
    port = free_port()

    def engine_on(path: Path) -> EngineProcess:
        return vllm_engine(path, port=port, log_path=tmp_path / "engine.log")

    bridge = RestartBridge(start_engine=engine_on)
    try:
        bridge.start(model, 7)
        assert bridge.engine is not None
        killed = bridge.engine.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        while bridge.engine is None or bridge.engine.pid in (None, killed) or not labelled(port):
            assert time.monotonic() < deadline, bridge.engine and bridge.engine.log_tail()
            time.sleep(0.5)
        samples = sample(
            f"http://127.0.0.1:{port}", str(model), PROMPT, num_samples=8, max_tokens=12
        )
        assert largest_gap(samples, model) <= MAX_GAP
    finally:
        bridge.close()


def labelled(port: int) -> bool:
    """Whether the engine answers and names version 7."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/weight_info", trust_env=False)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["weight_version"] == "7"


def test_vllms_trainer_side_hands_weights_to_a_vllm_that_serves(tmp_path: Path) -> None:
    """Both sides are vLLM's and the server is real; only its broadcast goes through a store instead of NCCL."""
    model = make_tiny_model(tmp_path / "model")
    plugin = tmp_path / "plugin" / "store_collective-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: store_collective\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstore = tests.vllm.store_collective:install\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM's class reads handles of memory
    engine = vllm_engine(
        model,
        port=free_port(),
        log_path=tmp_path / "engine.log",
        extra_args=["--weight-transfer-config", '{"backend": "nccl"}'],
        env={"PYTHONPATH": f"{ROOT}:{plugin.parent}"},
    )
    with engine:
        before = sample(engine.url, str(model), PROMPT, num_samples=8, max_tokens=12)
        worker = Path(__file__).with_name("transfer_worker.py")
        arguments = {"model": str(model), "url": engine.url, "out": str(tmp_path / "saved")}
        done = subprocess.run(
            [vllm_python(), str(worker), json.dumps(arguments)],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        after = sample(engine.url, str(model), PROMPT, num_samples=8, max_tokens=12)
        version = httpx.get(f"{engine.url}/weight_info", trust_env=False).json()["weight_version"]
    assert version == "1"
    assert largest_gap(before, model) <= MAX_GAP
    assert largest_gap(after, tmp_path / "saved") <= MAX_GAP
    assert largest_gap(after, model) > 10 * MAX_GAP, "the transfer changed nothing"
