"""TRL under `accelerate launch` with FSDP2: two processes (gloo) do what one does, on a real hub's batches."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atroposlib.api.server import create_app
from atroposlib.client import HubClient, TrainerClient
from atroposlib.scored_data import ScoredGroup
from tests.api.helpers_api import serving
from tests.trainer.helpers_bandit import (
    BATCH_SIZE,
    make_starting_model,
    registration,
    sample_groups,
)

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.filterwarnings("ignore"),  # TRL's and accelerate's own
    pytest.mark.timeout(120),
]
pytest.importorskip(
    "trl.experimental.async_grpo",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)

from tests.other_trainers import trl_process  # noqa: E402

NUM_STEPS = 3
NUM_BATCHES = 5
"""The trainer takes one batch ahead of the last step, the worker's queue begins another."""
LAUNCH = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version=2"),
    *("--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type=FULL_STATE_DICT"),
    *("--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"),
    *("-m", "tests.other_trainers.trl_process"),
]


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
    async with HubClient(url) as hub:
        for groups in sent:
            await hub.send(groups)


def flags(model_path: Path, hub_url: str, out: Path, *, num_processes: int) -> list[str]:
    return [
        f"--model_name={model_path}",
        f"--hub_url={hub_url}",
        f"--output_dir={out}",
        f"--max_steps={NUM_STEPS}",
        f"--per_device_train_batch_size={BATCH_SIZE // num_processes}",
        *("--max_token_len=16", "--learning_rate=3e-3", "--token_budget=0", "--max_staleness=9"),
        *("--use_cpu=True", "--bf16=False", "--gradient_checkpointing=False", "--report_to=none"),
        *("--save_strategy=no", "--disable_tqdm=True"),
    ]


def test_two_processes_with_fsdp2_train_what_one_trains(tmp_path: Path) -> None:
    model_path = make_starting_model(tmp_path / "model")
    sent = batches(model_path)
    for num_processes in (1, 2):
        out = tmp_path / str(num_processes)
        with serving(create_app()) as hub_url, TrainerClient(hub_url) as hub:
            hub.register(registration(NUM_STEPS))
            asyncio.run(send(hub_url, sent))
            argv = flags(model_path, hub_url, out, num_processes=num_processes)
            if num_processes == 1:
                trl_process.run(argv)
            else:
                env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
                subprocess.run([*LAUNCH, *argv], check=True, env=env)
            ledger = httpx.get(f"{hub_url}/ledger").json()
            released = [hub.lease_batch() for _ in range(NUM_BATCHES - NUM_STEPS)]
        assert (ledger["trained"], ledger["leased"]) == (NUM_STEPS * 9, 0), ledger
        assert ledger["produced"] == ledger["trained"] + ledger["queued"], ledger
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
