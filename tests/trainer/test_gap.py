"""`gap.py`: the comparison of sampled and own logprobs, against plain sums, and what it says of them."""

import dataclasses
import logging
import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from example_trainer.data import DataOptions, MicroBatch, make_batch
from example_trainer.gap import LogprobGap, LogprobGapError
from example_trainer.parallel import ALONE
from tests.trainer.helpers_trainer import make_group

OPTIONS = DataOptions(seq_len=512, max_sequences=2, max_tokens=10_000)
VERSION = 3


def gap_for(dtype: torch.dtype = torch.float32, limit: float | None = None) -> LogprobGap:
    policy = SimpleNamespace(world=ALONE, device=ALONE.device, dtype=dtype)
    return LogprobGap(cast(Any, policy), limit=limit)


def micro_batches_of(version: int | None = VERSION, length: int = 8) -> list[MicroBatch]:
    groups = [make_group([1.0, 0.0], seed=s, length=length, policy_version=version) for s in (1, 2)]
    return make_batch(groups, OPTIONS).micro_batches


def noisy(micro_batch: MicroBatch, noise: float, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    sampled_N = micro_batch.positions.sampled_logprobs_N
    return sampled_N + torch.from_numpy(rng.normal(0, noise, len(sampled_N))).float()


def observe(gap: LogprobGap, micro_batches: list[MicroBatch], noise: float) -> list[float]:
    differences: list[float] = []
    for seed, micro_batch in enumerate(micro_batches):
        own_N = noisy(micro_batch, noise, seed)
        gap.observe(micro_batch, own_N, VERSION)
        differences += (own_N - micro_batch.positions.sampled_logprobs_N).tolist()
    return differences


def test_mean_maximum_and_kl_are_those_of_a_slow_reference() -> None:
    gap = gap_for()
    d = observe(gap, micro_batches_of(), 0.3)
    report = gap.settle(VERSION)
    assert report.maximum == pytest.approx(max(map(abs, d)))
    assert report.mean == pytest.approx(sum(map(abs, d)) / len(d))
    assert report.kl == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / len(d))
    assert dataclasses.astuple(gap.settle(VERSION)) == (None, None, None)


@pytest.mark.parametrize("version", [VERSION - 1, None])
def test_samples_of_another_version_are_not_taken_for_those_of_this_one(
    version: int | None,
) -> None:
    gap = gap_for(limit=1e-3)
    observe(gap, micro_batches_of(version), 0.5)
    assert gap.settle(VERSION).mean is None


def test_tokens_of_one_sequence_are_compared_by_the_version_of_each() -> None:
    spans = [
        {"start": 0, "num_tokens": 4, "weight_version": str(VERSION - 1)},
        {"start": 4, "num_tokens": 2, "weight_version": str(VERSION)},
        {"start": 6, "num_tokens": 2, "weight_version": "default"},
    ]
    group = make_group(
        [1.0, 0.0], length=8, policy_version=VERSION - 1, weight_versions=[spans] * 2
    )
    batch = make_batch([group], OPTIONS)
    [micro_batch] = batch.micro_batches
    trained = [row.trained + 1 for row in micro_batch.rows]
    known = {**dict.fromkeys((4, 5), VERSION), **dict.fromkeys((6, 7), -1)}
    expected = [known.get(int(place), VERSION - 1) for row in trained for place in row]
    assert VERSION in expected
    assert micro_batch.version_N.tolist() == expected
    assert sorted(batch.versions) == sorted(expected)


def test_tokens_after_those_of_other_weights_are_compared_from_the_next_turn_on() -> None:
    """An engine continues an answer with the keys of the weights that began it; a new request has new keys."""
    before = {"start": 3, "num_tokens": 2, "weight_version": str(VERSION - 1)}
    spans = [
        [before, {"start": 5, "num_tokens": length - 5, "weight_version": str(VERSION)}]
        for length in (12, 13)
    ]
    rows = [row.tolist() for row in np.split(make_group([1.0, 0.0], length=12).tokens, [12])]
    masks = [[-100] * 3 + row[3:7] + [-100] + row[8:] for row in rows]
    group = make_group([1.0, 0.0], length=12, masks=masks, weight_versions=spans)
    [micro_batch] = make_batch([group], OPTIONS).micro_batches
    labels = [int(place) + 1 for row in micro_batch.rows for place in row.trained]
    gap = gap_for()
    d = observe(gap, [micro_batch], 0.3)
    second_turn = [
        abs(each)
        for each, label, version in zip(d, labels, micro_batch.version_N.tolist(), strict=True)
        if label > 7 and version == VERSION
    ]
    assert len(second_turn) == 9
    assert gap.settle(VERSION).mean == pytest.approx(sum(second_turn) / 9)


def test_the_noise_of_bfloat16_kernels_is_normal(caplog: pytest.LogCaptureFixture) -> None:
    """A standard deviation of 0.05 per token on unchanged weights has a maximum far above it."""
    gap = gap_for(torch.bfloat16)
    observe(gap, micro_batches_of(length=400), 0.05)
    report = gap.settle(VERSION)
    assert report.maximum is not None
    assert report.maximum > 0.1
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("version", [VERSION, None])
def test_other_weights_are_warned_of_once_until_all_is_well(
    dtype: torch.dtype, version: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    gap = gap_for(dtype)
    counts = []
    with caplog.at_level(logging.WARNING):
        for noise in (0.5, 0.5, 0.0, 0.5):
            observe(gap, micro_batches_of(version), noise)
            gap.settle(VERSION)
            counts.append(len(caplog.messages))
    assert counts == [1, 1, 1, 2]


def test_the_limit_is_one_of_the_mean() -> None:
    gap = gap_for(torch.bfloat16, limit=0.1)
    observe(gap, micro_batches_of(length=400), 0.05)
    gap.settle(VERSION)
    observe(gap, micro_batches_of(), 0.5)
    with pytest.raises(LogprobGapError, match=r"policy version 3 differ.*--max_logprob_gap 0\.1"):
        gap.settle(VERSION)
