"""This project's side of `trainer.py`: groups as the hub hands them out, through `make_batch` and `take_step`.

`python -m benchmarks._trainer_ours DIRECTORY`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from benchmarks._trainer_measure import Batch, Meter, Spec, read_batch, read_spec
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options, take_step
from example_trainer.training import set_up_torch


def groups_of(batch: Batch, spec: Spec) -> list[ScoredGroup]:
    groups = []
    for start in range(0, len(batch.tokens), spec.group_size):
        members = range(start, start + spec.group_size)
        group = {
            "tokens": [batch.tokens[i].tolist() for i in members],
            "masks": [
                [-100] * spec.prompt_len + batch.tokens[i][spec.prompt_len :].tolist()
                for i in members
            ],
            "scores": batch.scores[start : start + spec.group_size].tolist(),
            "inference_logprobs": [
                [1.0] * spec.prompt_len + batch.logprobs[i].astype(np.float64).tolist()
                for i in members
            ],
        }
        checked = check_group(group, strictness=Strictness.MEANING)
        groups.append(checked.replace(policy_version=0))
    return groups


def config_of(spec: Spec, directory: Path) -> TrainerConfig:
    return TrainerConfig(
        model_name=str(directory / "model"),
        device=spec.device,
        dtype=spec.dtype,
        attention=spec.attention,
        packing="on" if spec.packing else "off",
        gradient_checkpointing=spec.checkpointing,
        batch_size=spec.sequences_per_micro_batch,
        gradient_accumulation_steps=spec.num_micro_batches,
        max_microbatch_tokens=spec.sequences_per_micro_batch * spec.seq_len,
        seq_len=spec.seq_len,
        lr=spec.lr,
        clip_eps=spec.clip,
        max_grad_norm=spec.max_grad_norm,
        threads=spec.threads,
        save_path=directory / "ours",
    )


def main(directory: Path) -> None:
    spec = read_spec(directory)
    config = config_of(spec, directory)
    set_up_torch(config)
    policy = load_policy(config)
    groups = groups_of(read_batch(directory, spec), spec)
    meter = Meter(spec, policy.model)
    optimizer = make_optimizer(policy, config)
    options = data_options(config)
    gap = LogprobGap(policy, limit=None)
    for step in range(spec.warmup_steps + spec.steps):
        with meter.step():
            batch = make_batch(groups, options)
            result = take_step(policy, optimizer, batch, config, step, gap)
        assert result.loss is not None
        assert result.grad_norm is not None
        meter.result.losses.append(result.loss)
        meter.result.grad_norms.append(result.grad_norm)
    meter.result.note = f"{len(batch.micro_batches)} micro-batches"
    meter.print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
