"""This project's side of `trainer.py`: groups in the hub's form, through `make_batch` and `take_step`.

`python -m benchmarks._trainer_ours SPEC`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from benchmarks._trainer_measure import Meter
from benchmarks._trainer_work import Batch, Spec, make_step
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.memory import needs, sizes_of
from example_trainer.model import Policy, load_policy
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options, take_step
from example_trainer.training import set_up_torch


def groups_of(batch: Batch, spec: Spec) -> list[ScoredGroup]:
    groups = []
    for start in range(0, len(batch.tokens), spec.GROUP_SIZE):
        members = range(start, start + spec.GROUP_SIZE)
        group = {
            "tokens": [batch.tokens[i].tolist() for i in members],
            "masks": [
                [-100] * spec.prompt_len + batch.tokens[i][spec.prompt_len :].tolist()
                for i in members
            ],
            "scores": batch.scores[start : start + spec.GROUP_SIZE].tolist(),
            "inference_logprobs": [
                [1.0] * spec.prompt_len + batch.logprobs[i].astype(np.float64).tolist()
                for i in members
            ],
        }
        checked = check_group(group, strictness=Strictness.MEANING)
        groups.append(checked.replace(policy_version=0))
    return groups


def config_of(spec: Spec) -> TrainerConfig:
    return TrainerConfig(
        model_name=spec.model,
        device=spec.device,
        dtype=spec.dtype,
        attention=spec.attention,
        gradient_checkpointing=spec.checkpointing,
        batch_size=spec.micro_batch,
        gradient_accumulation_steps=spec.sequences // spec.micro_batch,
        max_microbatch_tokens=spec.micro_batch * spec.seq_len,
        seq_len=spec.seq_len,
        lr=spec.LR,
        lr_schedule="constant",
        clip_eps=spec.CLIP,
        dual_clip=math.inf,  # TRL has none
        max_grad_norm=spec.MAX_GRAD_NORM,
        threads=spec.NUM_THREADS,
        save_path=Path(spec.directory, "ours"),
    )


def run_steps(policy: Policy, spec: Spec, config: TrainerConfig, meter: Meter) -> None:
    """Take the steps on the prepared batch and measure them in `meter.result`."""
    prepared = make_step(spec)
    groups = groups_of(prepared, spec)
    optimizer = make_optimizer(policy, config)
    options = data_options(config)
    gap = LogprobGap(policy, limit=None)
    for step in range(spec.NUM_WARMUP + spec.steps):
        with meter.step():
            batch = make_batch(groups, options)
            result = take_step(policy, optimizer, batch, config, step, gap)
        assert result.loss is not None
        assert result.grad_norm is not None
        meter.result.losses.append(result.loss)
        meter.result.grad_norms.append(result.grad_norm)
    meter.result.num_tokens = sum(map(len, prepared.tokens))
    sizes = sizes_of(policy, config, shares_gpu=False)
    meter.result.expected_bytes = sum(needs(sizes, 0).values())
    meter.result.note = f"{len(batch.micro_batches)} micro-batches"


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    config = config_of(spec)
    set_up_torch(config)
    policy = load_policy(config)
    meter = Meter(policy.model, device=spec.device, num_warmup=spec.NUM_WARMUP)
    run_steps(policy, spec, config, meter)
    meter.result.print()


if __name__ == "__main__":
    main()
