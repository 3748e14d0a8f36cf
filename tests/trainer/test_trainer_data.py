"""Groups -> micro-batches: advantages, shift, weights, limits."""

import dataclasses

import numpy as np
import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.config import TrainerConfig
from example_trainer.data import (
    Batch,
    DataOptions,
    Layout,
    MicroBatch,
    make_batch,
    require_trainable,
)
from example_trainer.objective import LossMean, RolloutWeight
from example_trainer.records import describe_batch
from example_trainer.step import data_options
from tests.trainer.helpers_trainer import PROMPT, make_group

OPTIONS = DataOptions(seq_len=64, max_sequences=100, max_tokens=10_000)


def weight_of_tokens(batch: Batch) -> float:
    return sum(float(m.positions.weights_N.sum()) for m in batch.micro_batches)


def of_sequence(values_N: torch.Tensor, micro_batch: MicroBatch, index: int) -> torch.Tensor:
    return values_N[micro_batch.positions.sequence_N == index]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_labels_logprobs_and_advantages_are_shifted_by_one(layout: Layout) -> None:
    logprobs = [[1.0] * PROMPT + [-0.25 * i for i in range(n - PROMPT)] for n in (8, 9)]
    group = make_group([1.0, 0.0], inference_logprobs=logprobs)
    options = dataclasses.replace(OPTIONS, layout=layout)
    micro_batch = make_batch([group], options).micro_batches[0]
    tokens = micro_batch.tokens_BT.flatten()
    positions = micro_batch.positions
    for place, original in ((0, 1), (1, 0)):  # longest first
        view = group.sequence(original)
        at = of_sequence(micro_batch.trained_N, micro_batch, place)
        assert tokens[at].tolist() == view.tokens[PROMPT - 1 : -1].tolist()
        assert of_sequence(positions.labels_N, micro_batch, place).tolist() == (
            view.tokens[PROMPT:].tolist()
        )
        assert (
            of_sequence(positions.sampled_logprobs_N, micro_batch, place).tolist()
            == (logprobs[original][PROMPT:])
        )
        advantage = of_sequence(positions.advantages_N, micro_batch, place)
        assert (advantage > 0.9).all() if original == 0 else (advantage < -0.9).all()
        start = int(at[0]) - (PROMPT - 1)
        cut = slice(start, start + len(view.tokens) - 1)
        assert micro_batch.position_ids_BT.flatten()[cut].tolist() == list(range(cut.stop - start))


def test_packed_rows_hold_whole_sequences_within_the_token_budget() -> None:
    groups = [make_group([1.0, 0.0, 0.0], seed=seed, length=6 + 5 * seed) for seed in range(4)]
    options = dataclasses.replace(OPTIONS, layout="packed", max_tokens=40, max_sequences=1)
    batch = make_batch(groups, options)
    lengths = [m.tokens_BT.shape for m in batch.micro_batches]
    assert all(rows == 1 and width <= 40 for rows, width in lengths)
    assert sum(m.positions.num_sequences for m in batch.micro_batches) == 12
    num_tokens = sum(len(row.tokens) for row in batch.rows)
    assert len(lengths) <= num_tokens // 40 + 2
    for m in batch.micro_batches:  # the filling is a sequence of its own
        starts = int((m.position_ids_BT == 0).sum())
        assert starts in (m.positions.num_sequences, m.positions.num_sequences + 1)


def test_advantages_are_divided_by_the_configured_standard_deviation() -> None:
    config = TrainerConfig(model_name="m", advantage_std="sample")
    batch = make_batch([make_group([1.0, 0.0, 0.0])], data_options(config))
    advantages = sorted(row.advantages[0] for row in batch.rows)
    assert advantages == pytest.approx([-0.577, -0.577, 1.155], abs=1e-3)


def test_a_response_beyond_the_soft_limit_loses_score() -> None:
    group = make_group([1.0, 1.0], length=8)  # 5 and 6 trained tokens
    options = dataclasses.replace(
        OPTIONS, overlong_max=6, overlong_buffer=2, scale_advantages=False
    )
    advantages = [row.advantages[0] for row in make_batch([group], options).rows]
    assert advantages == pytest.approx([0.25, -0.25])  # penalties 0.5 and 1


def test_a_teachers_proposals_are_aligned_with_the_tokens_they_stand_for() -> None:
    group = make_group(
        [1.0, 0.0],
        distill_token_ids=[[[]] + [[10 + t, 90][: 1 + t % 2] for t in range(1, n)] for n in (8, 9)],
        distill_logprobs=[
            [[]] + [[-float(t), -9.0][: 1 + t % 2] for t in range(1, n)] for n in (8, 9)
        ],
    )
    positions = make_batch([group], OPTIONS).micro_batches[0].positions
    ids, logprobs = positions.teacher_ids_NK, positions.teacher_logprobs_NK
    assert ids is not None
    assert logprobs is not None
    assert ids[:, 0].tolist() == [10 + t for n in (9, 8) for t in range(PROMPT, n)]
    assert logprobs[:, 0].tolist() == [-float(t) for n in (9, 8) for t in range(PROMPT, n)]
    assert logprobs[:2, 1].tolist() == [-9.0, -float("inf")]


def test_width_is_rounded_up() -> None:
    options = dataclasses.replace(OPTIONS, pad_to_multiple_of=64)
    assert make_batch([make_group([1.0, 0.0])], options).micro_batches[0].tokens_BT.shape == (2, 64)


def test_overrides_can_zero_a_sequence_and_a_zero_sequence_costs_nothing() -> None:
    group = make_group([1.0, 0.0], overrides=[{}, {"set_advantage_to_zero": True}])
    batch = make_batch([group], OPTIONS)
    assert batch.micro_batches[0].tokens_BT.shape[0] == 1
    assert batch.num_skipped("zero_advantage") == 1
    # The dropped sequence still counts in the mean: its 6 of 11 tokens weigh nothing.
    assert weight_of_tokens(batch) == pytest.approx(5 / 11)


def test_equal_scores_leave_nothing_to_train_although_their_mean_is_rounded() -> None:
    assert np.mean([0.1, 0.1, 0.1]) != 0.1
    for baseline in ("group", "rloo", "group_batch"):
        options = dataclasses.replace(OPTIONS, baseline=baseline, scale_advantages=False)  # type: ignore[arg-type]
        batch = make_batch([make_group([0.1, 0.1, 0.1])], options)
        assert (batch.micro_batches, batch.num_skipped("zero_advantage")) == ([], 3)


@pytest.mark.parametrize("baseline", ["batch", "group_batch"])
def test_no_normalisation_gives_a_silenced_sequence_an_advantage(baseline: str) -> None:
    groups = [
        make_group([5.0, 9.0], seed=1, overrides=[{}, {"set_advantage_to_zero": True}]),
        make_group([1.0, 0.0], seed=2),
    ]
    options = dataclasses.replace(OPTIONS, baseline=baseline)  # type: ignore[arg-type]
    batch = make_batch(groups, options)
    assert (batch.num_skipped("zero_advantage"), len(batch.rows)) == (1, 3)
    values = np.concatenate([row.advantages for row in batch.rows])
    mean = values.mean() if baseline == "batch" else 0.0
    assert mean == pytest.approx(0.0, abs=1e-12)
    assert np.sqrt(((values - values.mean()) ** 2).mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(("baseline", "wanted"), [("batch", 0.0), ("group_batch", 0.5)])
def test_a_batch_of_one_and_the_same_advantage_is_not_divided_by_rounding(
    baseline: str, wanted: float
) -> None:
    advantages = [[0.5] * 8, [0.5] * 9]
    group = make_group([1.0, 0.0], advantages=advantages)
    options = dataclasses.replace(OPTIONS, baseline=baseline, keep_zero_advantage=True)  # type: ignore[arg-type]
    for row in make_batch([group], options).rows:
        assert row.advantages.tolist() == [wanted] * len(row.trained)


def test_references_of_some_groups_are_kept_and_the_others_asked_for() -> None:
    given = [[-1.5] * 8, [-1.5] * 9]
    groups = [make_group([1.0, 0.0], seed=1, ref_logprobs=given), make_group([1.0, 0.0], seed=2)]
    options = dataclasses.replace(OPTIONS, max_sequences=1)
    batch = make_batch(groups, options)
    assert batch.lacks_reference
    assert not make_batch(groups[:1], options).lacks_reference
    found = [m.positions.ref_logprobs_N for m in batch.micro_batches]
    assert sum(values is None for values in found) == 2
    together = make_batch(groups, OPTIONS).micro_batches[0].positions.ref_logprobs_N
    assert together is not None
    assert sorted(together.isnan().tolist()) == [False] * 11 + [True] * 11
    assert together[~together.isnan()].tolist() == [-1.5] * 11


def test_the_shortest_sequences_are_one_token_after_one() -> None:
    group = make_group(
        [1.0, 0.0],
        tokens=[[5, 6], [5, 7, 8]],
        masks=[[-100, 6], [-100, 7, 8]],
        inference_logprobs=[[1.0, -0.5], [1.0, -0.5, -0.5]],
    )
    batch = make_batch([group], dataclasses.replace(OPTIONS, seq_len=2))
    assert (batch.num_skipped("too_long"), batch.num_trained_tokens) == (1, 1)
    positions = batch.micro_batches[0].positions
    assert (positions.labels_N.tolist(), batch.rows[0].trained.tolist()) == ([6], [0])
    assert positions.weights_N.tolist() == [1.0]


def test_a_teacher_of_some_sequences_proposes_nothing_for_the_others() -> None:
    with_teacher = make_group(
        [1.0, 0.0],
        seed=1,
        distill_token_ids=[[[]] * 8, [[]] * 3 + [[7, 9, 11]] * 6],
        distill_logprobs=[[[]] * 8, [[]] * 3 + [[-1.0, -2.0, -3.0]] * 6],
    )
    batch = make_batch([with_teacher, make_group([1.0, 0.0], seed=2)], OPTIONS)
    positions = batch.micro_batches[0].positions
    assert positions.teacher_logprobs_NK is not None
    assert positions.teacher_ids_NK is not None
    assert positions.teacher_ids_NK.shape == positions.teacher_logprobs_NK.shape == (22, 3)
    named = positions.teacher_logprobs_NK.isfinite().all(dim=1)
    assert int(named.sum()) == 6
    assert positions.teacher_ids_NK[named].tolist() == [[7, 9, 11]] * 6
    assert not positions.teacher_logprobs_NK[~named].isfinite().any()


def test_a_kl_term_keeps_sequences_without_an_advantage() -> None:
    options = dataclasses.replace(OPTIONS, keep_zero_advantage=True)
    assert make_batch([make_group([1.0, 1.0])], options).num_skipped("zero_advantage") == 0


def test_too_long_and_untrained_sequences_are_counted() -> None:
    group = make_group([1.0, 0.0, 0.5], length=8)  # 8, 9 and 10 tokens
    batch = make_batch([group], dataclasses.replace(OPTIONS, seq_len=9))
    assert (batch.num_skipped("too_long"), batch.num_sequences) == (1, 3)
    masks = [[-100] * 8, *[list(map(int, group.sequence(i).masks)) for i in (1, 2)]]
    assert (
        make_batch([make_group([1.0, 0, 0.5], masks=masks)], OPTIONS).num_skipped("untrained") == 1
    )


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
        for i, row in enumerate(micro_batch.rows):
            count = 12 * len(row.trained) if loss_mean == "sequence" else batch.num_trained_tokens
            weights = of_sequence(micro_batch.positions.weights_N, micro_batch, i)
            assert weights.tolist() == pytest.approx([1 / count] * len(row.trained))
    assert sum(len(m.tokens_BT) for m in batch.micro_batches) == 12


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
@pytest.mark.parametrize(("rollout_weight", "shares"), [("rollout", [1, 1 / 3]), ("token", [1, 1])])
def test_the_sequences_of_a_rollout_share_its_weight(
    loss_mean: LossMean, rollout_weight: RolloutWeight, shares: list[float]
) -> None:
    options = dataclasses.replace(OPTIONS, loss_mean=loss_mean, rollout_weight=rollout_weight)
    split = make_group([1.0, 0.0, 0.0, 0.0], rollout=[0, 1, 1, 1])
    batch = make_batch([split, make_group([1.0, 0.0], seed=1)], options)
    single = [row for row in batch.rows if row.rollout == 0]
    parts = [row for row in batch.rows if row.origin.group == 0 and row.rollout == 1]
    means = [len(row.trained) if loss_mean == "sequence" else 1 for row in (single[0], *parts)]
    weights = [row.weight * mean for row, mean in zip((single[0], *parts), means, strict=True)]
    assert [weight / weights[0] for weight in weights[1:]] == pytest.approx([shares[1]] * 3)
    if loss_mean != "constant":
        assert weight_of_tokens(batch) == pytest.approx(1.0)
    assert batch.scores.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
def test_rollouts_of_one_sequence_change_no_weight(loss_mean: LossMean) -> None:
    plain = [1.0, 0.0, 0.5]
    weights = [
        [row.weight for row in make_batch([group], options).rows]
        for group in (make_group(plain), make_group(plain, rollout=[4, 0, 2]))
        for rule in ("rollout", "token")
        for options in [dataclasses.replace(OPTIONS, loss_mean=loss_mean, rollout_weight=rule)]
    ]
    assert all(each == weights[0] for each in weights)


def test_tokens_that_the_model_does_not_know_are_named_with_their_environment() -> None:
    group = dataclasses.replace(make_group([1.0, 0.0]), env_id=7)
    highest = int(group.tokens.max())
    require_trainable(group, vocab_size=highest + 1)
    with pytest.raises(
        GroupError, match=f"tokens: id {highest} .* environment 7.* below {highest}"
    ):
        require_trainable(group, vocab_size=highest)


def test_temperature_counts_only_for_processed_logprobs_that_were_sampled() -> None:
    group = make_group(
        [1.0, 0.0, 0.5],
        overrides=[{"temperature": 0.5}, {}, {"sft": True}],
        generation_params={"temperature": 0.7},
        group_overrides={"temperature": 0.9},
    )
    for is_processed, (first, second) in ((False, (1.0, 1.0)), (True, (0.5, 0.7))):
        options = dataclasses.replace(OPTIONS, processed_logprobs=is_processed)
        found = make_batch([group], options).micro_batches[0].positions.temperature_N
        wanted = [1.0] * 7 + [second] * 6 + [first] * 5  # the longest is supervised
        torch.testing.assert_close(found, torch.tensor(wanted))


def test_tokens_of_a_too_old_policy_get_no_gradient_and_change_nothing_else() -> None:
    """Advantages are those of all scores, and each other token weighs what it weighs if none is too old."""
    spans = [
        [{"start": 0, "num_tokens": 5, "weight_version": "3"}]
        + [{"start": 5, "num_tokens": 3, "weight_version": version}]
        for version in ("6", "default", "4", "6")
    ]
    group = make_group([1.0, 0.0, 0.0, 0.3], length=8, policy_version=3, weight_versions=spans)
    every = {row.origin.sequence: row for row in make_batch([group], OPTIONS).rows}
    batch = make_batch([group], OPTIONS, oldest_version=5)
    for row in batch.rows:
        whole = every[row.origin.sequence]
        kept = np.isin(
            whole.trained + 1, (5, 6, 7)
        )  # what no span covers is of the group's version
        assert 0 < len(row.trained) < len(whole.trained)
        for name in ("trained", "labels", "sampled_logprobs", "advantages", "versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(whole, name)[kept])
        assert (row.weight, row.num_too_old) == (whole.weight, np.count_nonzero(~kept))
    assert sorted(row.origin.sequence for row in batch.rows) == [0, 1, 3]
    assert batch.skipped == {(0, 2): "too_old"}
    num_all = sum(len(row.trained) for row in every.values())
    assert batch.num_trained_tokens + sum(batch.num_too_old) == num_all
    assert describe_batch(batch, 6)["num_too_old_tokens"] == sum(batch.num_too_old)
    assert set(batch.versions) == {-1, 6}
    assert make_batch([group], OPTIONS, oldest_version=3).num_too_old == [0]


def test_a_group_without_a_usable_token_is_too_old() -> None:
    group = make_group([1.0, 0.0], policy_version=3)
    batch = make_batch([group], OPTIONS, oldest_version=4)
    assert (batch.fates, batch.num_too_old, batch.rows) == (["too_old"], [group.num_trained], [])
