"""Groups -> micro-batches: advantages, shift, weights, limits."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.data import Batch, DataOptions, group_advantages, make_batch
from tests.trainer.helpers_trainer import PROMPT, make_group

OPTIONS = DataOptions(seq_len=64, max_sequences=100, max_tokens=10_000)


def weight_of_tokens(batch: Batch) -> float:
    return sum(float(m.weights_BT.sum()) for m in batch.micro_batches)


def test_advantages_are_group_relative() -> None:
    scores = [1.0, 0.0, 0.25, 0.5]
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    wanted = [(score - mean) / (std + 1e-4) for score in scores]
    assert group_advantages(np.array(scores)).tolist() == pytest.approx(wanted)
    unscaled = group_advantages(np.array(scores), scale=False)
    assert unscaled.tolist() == pytest.approx([score - mean for score in scores])


def test_labels_logprobs_and_advantages_are_shifted_by_one() -> None:
    group = make_group([1.0, 0.0])
    micro_batch = make_batch([group], OPTIONS).micro_batches[0]
    row = 1  # longest first
    view = group.sequence(0)
    length = len(view.tokens) - 1
    assert micro_batch.tokens_BT[row, :length].tolist() == view.tokens[:-1].tolist()
    assert micro_batch.labels_BT[row, :length].tolist() == view.masks[1:].tolist()
    assert (micro_batch.labels_BT[row, length:] == -100).all()
    trained = micro_batch.labels_BT[row] != -100
    assert trained.sum() == len(view.tokens) - PROMPT
    assert (micro_batch.sampled_logprobs_BT[row][trained] == -1.0).all()
    assert (micro_batch.sampled_logprobs_BT[row][~trained] == 0.0).all()
    assert (micro_batch.advantages_BT[row][trained] > 0.9).all()
    assert (micro_batch.weights_BT[row][~trained] == 0.0).all()


def test_width_is_rounded_up() -> None:
    options = dataclasses.replace(OPTIONS, pad_to_multiple_of=64)
    assert make_batch([make_group([1.0, 0.0])], options).micro_batches[0].tokens_BT.shape == (2, 64)


def test_token_level_advantages_replace_those_of_the_scores() -> None:
    advantages = [[0.0] * PROMPT + [float(i) for i in range(5)], [0.0] * PROMPT + [-2.0] * 6]
    group = make_group([1.0, 1.0], advantages=advantages)
    micro_batch = make_batch([group], OPTIONS).micro_batches[0]
    assert micro_batch.advantages_BT[1].sum() == 0 + 1 + 2 + 3 + 4
    assert micro_batch.advantages_BT[0].sum() == -12


def test_overrides_can_zero_a_sequence_and_a_zero_sequence_costs_nothing() -> None:
    group = make_group([1.0, 0.0], overrides=[{}, {"set_advantage_to_zero": True}])
    batch = make_batch([group], OPTIONS)
    assert batch.micro_batches[0].tokens_BT.shape[0] == 1
    assert batch.num_skipped_zero_advantage == 1
    # The dropped sequence still counts in the mean: its 6 of 11 tokens weigh nothing.
    assert weight_of_tokens(batch) == pytest.approx(5 / 11)


def test_equal_scores_leave_nothing_to_train() -> None:
    batch = make_batch([make_group([1.0, 1.0, 1.0])], OPTIONS)
    assert batch.micro_batches == []
    assert batch.num_skipped_zero_advantage == 3


def test_a_kl_term_keeps_sequences_without_an_advantage() -> None:
    options = dataclasses.replace(OPTIONS, keep_zero_advantage=True)
    assert make_batch([make_group([1.0, 1.0])], options).num_skipped_zero_advantage == 0


def test_too_long_and_untrained_sequences_are_counted() -> None:
    group = make_group([1.0, 0.0, 0.5], length=8)  # 8, 9 and 10 tokens
    batch = make_batch([group], dataclasses.replace(OPTIONS, seq_len=9))
    assert (batch.num_skipped_too_long, batch.num_sequences) == (1, 3)
    masks = [[-100] * 8, *[list(map(int, group.sequence(i).masks)) for i in (1, 2)]]
    assert make_batch([make_group([1.0, 0, 0.5], masks=masks)], OPTIONS).num_skipped_untrained == 1


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("limit", [{"max_sequences": 2}, {"max_tokens": 24}])
def test_micro_batches_weigh_as_one_batch(loss_mean: str, limit: dict[str, int]) -> None:
    groups = [make_group([1.0, 0.0, 0.0], seed=seed, length=6 + 5 * seed) for seed in range(4)]
    options = dataclasses.replace(OPTIONS, loss_mean=loss_mean, **limit)
    batch = make_batch(groups, options)
    assert len(batch.micro_batches) > 3
    assert weight_of_tokens(batch) == pytest.approx(1.0)
    for micro_batch in batch.micro_batches:
        rows, width = micro_batch.tokens_BT.shape
        assert rows <= options.max_sequences
        assert rows == 1 or rows * width <= options.max_tokens
    assert sum(len(m.tokens_BT) for m in batch.micro_batches) == 12


def test_null_logprobs_name_the_environment_and_the_cure() -> None:
    group = make_group([1.0, 0.0], env_id=7).replace(inference_logprobs=None)
    with pytest.raises(GroupError, match=r"inference_logprobs.*environment 7.*managed_server"):
        make_batch([group], OPTIONS)


def test_temperature_counts_only_for_processed_logprobs() -> None:
    group = make_group(
        [1.0, 0.0],
        overrides=[{"temperature": 0.5}, {}],
        generation_params={"temperature": 0.7},
        group_overrides={"temperature": 0.9},
    )
    assert make_batch([group], OPTIONS).micro_batches[0].temperature_B.tolist() == [1.0, 1.0]
    options = dataclasses.replace(OPTIONS, processed_logprobs=True)
    found = make_batch([group], options).micro_batches[0].temperature_B
    torch.testing.assert_close(found, torch.tensor([0.7, 0.5]))
