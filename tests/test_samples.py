"""One record per sequence for any trainer: views, masks, advantages."""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from atroposlib.client import LeasedBatch, Sample, samples
from atroposlib.errors import GroupError
from atroposlib.samples import group_advantages
from atroposlib.scored_data import ScoredGroup, Strictness, check_group


def group(scores: list[float], *, policy_version: int | None = 3, **changes: Any) -> ScoredGroup:
    """Sequences of a prompt token and two trained ones."""
    tokens = [[5, 10 + i, 20 + i] for i in range(len(scores))]
    fields = {
        "tokens": tokens,
        "masks": [[-100, *row[1:]] for row in tokens],
        "scores": scores,
        "inference_logprobs": [[1.0, -0.5, -0.25 * i] for i in range(len(scores))],
    }
    checked = check_group(fields | changes, strictness=Strictness.MEANING)
    return checked.replace(policy_version=policy_version)


def advantages(found: list[Sample]) -> list[list[float]]:
    return [sample.advantages.round(3).tolist() for sample in found]


def test_every_sequence_is_one_record_in_the_order_sent() -> None:
    batch = LeasedBatch(groups=[group([1.0, 0.0]), group([0.0, 0.0, 2.0], policy_version=None)])
    found = samples(batch)
    assert [sample.group for sample in found] == [0, 0, 1, 1, 1]
    assert [sample.score for sample in found] == [1.0, 0.0, 0.0, 0.0, 2.0]
    assert [sample.policy_version for sample in found] == [3, 3, None, None, None]
    assert found[4].input_ids.tolist() == [5, 12, 22]
    assert found[4].completion_mask.tolist() == [False, True, True]
    assert found[4].sampled_logprobs.tolist() == [1.0, -0.5, -0.5]
    assert [s.input_ids.tolist() for s in samples(batch.groups)] == [
        s.input_ids.tolist() for s in found
    ]


def test_arrays_are_views_of_the_group() -> None:
    sent = group([1.0, 0.0])
    for sample in samples([sent]):
        assert np.shares_memory(sample.input_ids, sent.tokens)
        assert sent.inference_logprobs is not None
        assert np.shares_memory(sample.sampled_logprobs, sent.inference_logprobs)
        assert sample.advantages.base is not None
        assert sample.completion_mask.base is not None


def test_a_first_token_is_never_trained() -> None:
    logprobs = [[-0.5, -0.5, -0.5]] * 2
    sent = group([1.0, 0.0], masks=[[5, 10, 20], [5, -100, -100]], inference_logprobs=logprobs)
    assert [s.completion_mask.tolist() for s in samples([sent])] == [
        [False, True, True],
        [False, False, False],
    ]


def test_advantages_are_group_relative() -> None:
    scores = [1.0, 0.0, 0.25, 0.5]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    wanted = [(score - mean) / (std + 1e-4) for score in scores]
    assert group_advantages(np.array(scores)).tolist() == pytest.approx(wanted)
    unscaled = group_advantages(np.array(scores), scale=False)
    assert unscaled.tolist() == pytest.approx([score - mean for score in scores])
    found = samples([group(scores)])
    assert [s.advantages[1] for s in found] == pytest.approx(wanted)
    assert all(s.advantages[0] == 0 and s.advantages[1] == s.advantages[2] for s in found)


@pytest.mark.parametrize(("num_scores", "larger"), [(4, 1.155), (8, 1.069)])
def test_the_standard_deviation_is_the_populations_or_the_samples(
    num_scores: int, larger: float
) -> None:
    scores = np.random.default_rng(0).normal(size=num_scores)
    wanted = (scores - scores.mean()) / (statistics.stdev(scores.tolist()) + 1e-4)
    by_sample = group_advantages(scores, std="sample")
    assert by_sample.tolist() == pytest.approx(wanted.tolist())
    assert group_advantages(scores) / by_sample == pytest.approx(larger, abs=1e-3)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    scores = np.array([1.0, 0.0, 0.25])
    found = group_advantages(scores, baseline="rloo", scale=False)
    others = [statistics.fmean(np.delete(scores, i)) for i in range(3)]
    assert found.tolist() == pytest.approx([s - o for s, o in zip(scores, others, strict=True)])


def test_equal_scores_give_no_advantage() -> None:
    assert advantages(samples([group([0.1, 0.1, 0.1])])) == [[0.0, 0.0, 0.0]] * 3


SPLIT = [[0, 1, 2, *[3] * 9], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]]
"""Rollouts of sequences: the last rollout's context was split into nine."""


@pytest.mark.parametrize(
    ("scores", "rollout", "solved", "failed"),
    [
        ([1.0] * 3 + [0.0] * 9, SPLIT[0], 0.577, -1.732),
        ([1.0] + [0.0] * 9, SPLIT[1], 1.0, -1.0),
        ([0.0] * 3 + [1.0] * 9, SPLIT[0], 1.732, -0.577),
    ],
)
def test_the_baseline_counts_each_rollout_once(
    scores: list[float], rollout: list[int], solved: float, failed: float
) -> None:
    found = samples([group(scores, rollout=rollout)])
    wanted = [solved if score else failed for score in scores]
    assert [s.advantages[1] for s in found] == pytest.approx(wanted, abs=1e-3)
    assert [s.rollout for s in found] == rollout


def test_a_rollouts_score_is_the_mean_of_its_sequences() -> None:
    found = group_advantages(np.array([1.0, 0.0, 0.0]), np.array([7, 7, 2]), scale=False)
    assert found.tolist() == [0.25, 0.25, -0.25]
    equal = group_advantages(np.array([0.1] * 4), np.array([0, 0, 0, 1]))
    assert equal.tolist() == [0.0] * 4


def test_without_rollouts_each_sequence_is_one() -> None:
    scores = np.random.default_rng(0).random(9)
    numbered = group_advantages(scores, np.arange(9)[::-1])
    assert numbered.tolist() == group_advantages(scores).tolist()


def test_advantages_of_tokens_replace_those_of_scores() -> None:
    sent = group([1.0, 0.0], advantages=[[9.0, 0.5, -0.5], [9.0, 2.0, 0.0]])
    assert advantages(samples([sent])) == [[0.0, 0.5, -0.5], [0.0, 2.0, 0.0]]


def test_a_silenced_sequence_has_no_advantage_and_counts_in_the_mean() -> None:
    overrides = [{}, {"set_advantage_to_zero": True}, {}]
    sent = group([1.0, 1.0, 0.0], overrides=overrides)
    found = samples([sent])
    assert [s.is_silenced for s in found] == [False, True, False]
    assert advantages(found) == [[0.0, 0.707, 0.707], [0.0, 0.0, 0.0], [0.0, -1.414, -1.414]]
    with_tokens = group([1.0, 1.0, 0.0], overrides=overrides, advantages=[[0.0, 4.0, 4.0]] * 3)
    assert advantages(samples([with_tokens]))[1] == [0.0, 0.0, 0.0]


def test_a_sequence_without_a_trained_token_takes_no_part_in_the_comparison() -> None:
    masks = [[-100, 10, 20], [-100, 11, 21], [-100, -100, -100]]
    found = samples([group([1.0, 0.0, -50.0], masks=masks)])
    assert advantages(found) == [[0.0, 1.0, 1.0], [0.0, -1.0, -1.0], [0.0, 0.0, 0.0]]


def test_a_supervised_sequence_is_marked_and_takes_no_part_in_the_comparison() -> None:
    found = samples([group([9.0, 1.0, 0.0], overrides=[{"sft": True}, {}, {}])])
    assert [s.is_supervised for s in found] == [True, False, False]
    assert advantages(found) == [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, -1.0, -1.0]]
    whole = group([1.0, 0.0], group_overrides={"sft": True}, inference_logprobs=None)
    assert [s.is_supervised for s in samples([whole])] == [True, True]


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        (None, "inference_logprobs is null .*managed_server"),
        # vLLM's JSON has it for minus infinity.
        ([[1.0, -9999.0, -0.5]] * 2, "logprob -9999 of a trained token: its probability is 0"),
    ],
    ids=["none", "impossible"],
)
def test_logprobs_that_no_engine_sampled_with_are_refused(logprobs: Any, said: str) -> None:
    with pytest.raises(GroupError, match=said):
        samples([group([1.0, 0.0], inference_logprobs=logprobs)])


def test_no_torch_is_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; from atroposlib.client import samples"
    subprocess.run([sys.executable, "-c", code], check=True)
