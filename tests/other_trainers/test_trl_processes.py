"""TRL under `accelerate launch` with FSDP2: two processes (gloo) do what one does, on a real hub's batches."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atroposlib.api.server import create_app
from atroposlib.cli.launch.parts import parts_of
from atroposlib.cli.launch.run_file import RunFile
from atroposlib.client import HubClient, TrainerClient
from atroposlib.scored_data import ScoredGroup
from tests.api.helpers_api import serving
from tests.trainer.helpers_bandit import (
    BATCH_SIZE,
    make_starting_model,
    sample_groups,
)
from tests.trainer.helpers_run import ledger_of

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.filterwarnings("ignore"),  # TRL's and accelerate's own
    pytest.mark.timeout(240),
]
pytest.importorskip(
    "trl.experimental.async_grpo",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)

from example_trainer.other_trainers import trl_worker  # noqa: E402
from tests.other_trainers import trl_process  # noqa: E402

NUM_STEPS = 3
NUM_BATCHES = 5
"""The trainer takes one batch ahead of the last step, the worker's queue begins another."""


def batches(model_path: Path) -> list[list[ScoredGroup]]:
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    torch.manual_seed(0)
    return [
        [
            group.replace(group_id=f"{batch}-{i}")
            for i, group in enumerate(sample_groups(policy, version=1))
        ]
        for batch in range(NUM_BATCHES)
    ]


async def send(url: str, sent: Sequence[Sequence[ScoredGroup]]) -> None:
    """Send as soon as the trainer has registered."""
    async with asyncio.timeout(180), HubClient(url) as hub:
        while (info := await hub.info()).batch_size < 0:  # noqa: ASYNC110 - it can only be asked
            await asyncio.sleep(0.1)
        assert info.batch_size == BATCH_SIZE
        for groups in sent:
            await hub.send(groups)


def flags(hub_url: str, out: Path, *, num_processes: int) -> dict[str, str | int | float]:
    return {
        "hub_url": hub_url,
        "output_dir": str(out),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": BATCH_SIZE // num_processes,
        "max_token_len": 16,
        "learning_rate": 3e-3,
        "token_budget": 0,
        "max_staleness": 9,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def run_processes(model_path: Path, hub_url: str, out: Path, *, num_processes: int) -> None:
    """Run the command of a run file, with its stand-ins; one process runs here, without FSDP."""
    trainer = {
        "gpus": num_processes,
        "accelerate": {"mixed_precision": "no"},
        "flags": flags(hub_url, out, num_processes=num_processes),
    }
    document = {"name": "trl", "model": str(model_path), "trainer": trainer}
    [part] = parts_of(RunFile.model_validate(document), on_one_machine=True)
    start = part.command.index(trl_worker.__name__)
    if num_processes == 1:
        trl_process.run(part.command[start + 1 :])
    else:
        command = [sys.executable, *part.command[1:]]
        command[start] = trl_process.__name__
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env)


def test_two_processes_with_fsdp2_train_what_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stand_in in trl_process.STAND_INS:
        monkeypatch.setattr(*stand_in)
    model_path = make_starting_model(tmp_path / "model")
    sent = batches(model_path)
    for num_processes in (1, 2):
        out = tmp_path / str(num_processes)
        with serving(create_app()) as hub_url, TrainerClient(hub_url) as hub:
            with ThreadPoolExecutor(1) as environment:
                sending = environment.submit(asyncio.run, send(hub_url, sent))
                run_processes(model_path, hub_url, out, num_processes=num_processes)
                sending.result()
            ledger = ledger_of(hub_url)
            released = [hub.lease_batch() for _ in range(NUM_BATCHES - NUM_STEPS)]
        assert ledger == {"trained": NUM_STEPS * 9, "queued": (NUM_BATCHES - NUM_STEPS) * 9}
        assert {g.group_id for batch in released if batch for g in batch.groups} == {
            group.group_id for groups in sent[NUM_STEPS:] for group in groups
        }

    whole = load_file(tmp_path / "1" / "rank-0.safetensors")
    first, second = (load_file(tmp_path / "2" / f"rank-{rank}.safetensors") for rank in (0, 1))
    published = load_file(tmp_path / "2" / "sent.safetensors")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "2", dtype=torch.float32).state_dict()
    start = load_file(model_path / "model.safetensors")
    assert whole.keys() == first.keys() == second.keys() == published.keys() == saved.keys()
    for name, value in whole.items():
        assert not torch.equal(value, start[name]), name
        assert torch.allclose(first[name], value, atol=5e-5), name
        for other in (second, published, saved):
            assert torch.equal(other[name], first[name]), name
