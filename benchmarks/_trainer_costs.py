"""What a step of `trainer.py` costs beside the model: all that grows with the tokens of its batch."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from atroposlib.scored_data import Strictness, check_group
from atroposlib.wire import join_packed, pack_group, split_packed, unpack_group
from benchmarks._hub_load import make_group
from example_trainer.config import TrainerConfig
from example_trainer.data import Layout, MicroBatch, make_batch
from example_trainer.gap import LogprobGap
from example_trainer.loss import LossShare, logprob_sums, policy_loss
from example_trainer.parallel import ALONE
from example_trainer.records import MetricsLog, describe_batch
from example_trainer.step import StepResult, data_options, describe_result, objective_of

REPEATS = 3


class Cost(NamedTuple):
    name: str
    cpu_s: float
    """The least of a few."""
    num_tokens: int


def costs(num_groups: int, group_size: int, seq_len: int) -> Iterator[Cost]:
    """Measure the work on a batch that grows with its tokens, all on the CPU."""
    num_tokens = num_groups * group_size * seq_len
    dicts = (
        make_group(num_sequences=group_size, num_tokens=seq_len, env_id=0, seed=i)
        for i in range(num_groups)
    )
    sent = [check_group(each, strictness=Strictness.MEANING) for each in dicts]
    body = join_packed([pack_group(group.replace(policy_version=0)) for group in sent])

    def decode() -> list[Any]:
        blobs = split_packed(body).blobs
        return [unpack_group(blob, strictness=Strictness.MEANING) for blob in blobs]

    groups = decode()
    yield Cost("decode and check a packed batch", _least(decode), num_tokens)
    with tempfile.TemporaryDirectory() as directory:
        config = TrainerConfig(model_name="none", seq_len=seq_len, save_path=Path(directory))
        layouts: tuple[Layout, ...] = ("padded", "packed")
        for layout in layouts:
            options = dataclasses.replace(data_options(config), layout=layout)
            cpu_s = _least(partial(make_batch, groups, options))
            yield Cost(f"make_batch, {layout}", cpu_s, num_tokens)
        batch = make_batch(groups, data_options(config))
        objective = objective_of(config)
        alone = cast(Any, SimpleNamespace(world=ALONE, device=ALONE.device, dtype=torch.float32))
        gap = LogprobGap(alone, limit=None)

        def compare() -> None:
            for micro_batch in batch.micro_batches:
                gap.observe(micro_batch, micro_batch.positions.sampled_logprobs_N, 0)
            gap.settle(0)

        yield Cost("compare sampled and own logprobs", _least(compare), num_tokens)

        def lose(micro_batch: MicroBatch) -> tuple[LossShare, Any]:
            own_N = micro_batch.positions.sampled_logprobs_N.clone().requires_grad_()
            share = policy_loss(objective, micro_batch.positions, own_N, entropy_N=own_N.detach())
            share.loss.backward()
            return share, logprob_sums(micro_batch.positions, own_N)

        def loss() -> None:
            for micro_batch in batch.micro_batches:
                lose(micro_batch)

        yield Cost("loss, its gradient, sums for the metrics", _least(loss), num_tokens)
        share, sums = lose(batch.micro_batches[0])
        fields = {**share._asdict(), **sums._asdict()}
        result = StepResult(
            lr=0.0,
            loss=0.0,
            grad_norm=0.0,
            sums={name: float(value.detach()) for name, value in fields.items()},
            gap=gap.settle(0),
        )
        with MetricsLog(config) as log:

            def record() -> None:
                log.write(describe_batch(batch, 0) | describe_result(result, batch) | {"step": 1})

            yield Cost("describe and log the step", _least(record), num_tokens)


def _least(call: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)
