"""What the training forward computed for some groups of each step is kept, token by token."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup
from example_trainer import trained_groups
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy, load_policy
from example_trainer.optim import make_optimizer
from example_trainer.parallel import ALONE
from example_trainer.step import data_options, take_step
from example_trainer.trained_groups import TrainedGroups
from example_trainer.training import train
from tests.builders.rows import rows_in, tokens_by_fate
from tests.trainer import helpers_trainer
from tests.trainer.helpers_run import Configure, config_for, ledger_of, send
from tests.trainer.helpers_trainer import PROMPT, logprobs_of


def make_group(scores: list[float], **fields: Any) -> ScoredGroup:
    return helpers_trainer.make_group(scores, **fields).replace(group_id="g")


def pairs(number: int) -> list[ScoredGroup]:
    groups = helpers_trainer.pairs(number)
    return [group.replace(group_id=f"g{i}") for i, group in enumerate(groups)]


def num_sampled(group: ScoredGroup) -> int:
    return int(np.count_nonzero(group.masks != IGNORE_INDEX))


def lines_of(config: TrainerConfig) -> list[dict[str, Any]]:
    return rows_in(config.save_path / "trained_groups.jsonl")


def train_on(
    policy: Policy, config: TrainerConfig, groups: list[ScoredGroup], *, start: int = 0, steps: int
) -> None:
    """Take the steps `start + 1` to `steps` on the same groups."""
    optimizer = make_optimizer(policy, config)
    with TrainedGroups(config, ALONE, start=start) as log:
        for step in range(start, steps):
            batch = make_batch(groups, data_options(config, policy))
            trace = log.begin(groups, batch, step=step + 1)
            gap = LogprobGap(policy, limit=None)
            result = take_step(policy, optimizer, batch, config, step, gap, trace=trace)
            log.write(trace, groups, batch, result.peak.group_shares, step=step + 1)


@pytest.mark.parametrize("packing", ["on", "off"])
def test_the_values_are_those_of_the_training_forward(
    model_dir: Path, tmp_path: Path, packing: str
) -> None:
    config = config_for(
        model_dir, tmp_path, packing=packing, batch_size=2, max_microbatch_tokens=24
    )
    policy = load_policy(config)
    groups = [
        make_group([1.0, 0.0, 0.3], seed=seed, length=6 + seed).replace(group_id=f"g{seed}")
        for seed in range(3)
    ]
    expected = [
        [logprobs_of(policy.model, group.sequence(i).tokens.tolist())[PROMPT:] for i in range(3)]
        for group in groups
    ]
    with torch.no_grad():
        tokens = torch.tensor([groups[0].sequence(1).tokens.tolist()])
        table = policy.model(tokens).logits[0].double().log_softmax(-1)
    entropies = -(table.exp() * table).sum(-1)[PROMPT - 1 : -1]
    train_on(policy, config, groups, steps=1)

    lines = lines_of(config)
    assert [line["group_id"] for line in lines] == ["g0", "g1", "g2"]
    assert lines[0]["sequences"][1]["entropies"] == pytest.approx(entropies.tolist(), abs=1e-5)
    for line, group, own in zip(lines, groups, expected, strict=True):
        assert (line["step"], line["policy_version"], line["env_id"]) == (1, 0, None)
        assert [sequence["index"] for sequence in line["sequences"]] == [0, 1, 2]
        scores = group.scores
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for found, logprobs, advantage in zip(line["sequences"], own, advantages, strict=True):
            assert found["at"] == list(range(PROMPT, PROMPT + len(logprobs)))
            assert found["logprobs"] == pytest.approx(logprobs, abs=1e-5)
            assert found["sampled"] == [-1.0] * len(logprobs)
            assert found["advantages"] == pytest.approx(advantage, abs=1e-6)
            # The tiny model gives each token a logprob near -5.5, the groups say -1: the ratio is far below the clip.
            assert found["clipped"] == [int(advantage < 0)] * len(logprobs)
            assert found["clip_fraction"] == float(advantage < 0)
            gap = np.abs(np.array(logprobs) + 1.0).mean()
            assert found["logprob_gap"] == pytest.approx(gap, abs=1e-5)


def test_sequences_that_were_not_computed_are_there_with_the_reason(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, seq_len=12)
    tokens = [list(range(1, 9)), list(range(1, 20)), list(range(1, 9)), list(range(1, 9))]
    masks = [[-100, *row[1:]] for row in tokens]
    masks[2] = [-100] * 8
    given = {"tokens": tokens, "masks": masks, "advantages": [1.0, 1.0, 1.0, 0.0]}
    logprobs = [[1.0] + [-1.0] * (len(row) - 1) for row in tokens]
    group = make_group([1.0, 0.0, 1.0, 0.0], **given, inference_logprobs=logprobs)
    supervised = make_group([1.0, 0.0], group_overrides={"sft": True})
    train_on(load_policy(config), config, [group, supervised], steps=1)
    mixed, examples = lines_of(config)
    assert [sequence.get("skipped") for sequence in mixed["sequences"]] == [
        None,
        "too_long",
        "untrained",
        "zero_advantage",
    ]
    assert mixed["sequences"][0]["advantages"] == 1.0
    for sequence in examples["sequences"]:
        assert (sequence["sampled"], sequence["logprob_gap"]) == (None, None)
        assert sequence["clip_fraction"] == 0


def test_each_step_draws_other_groups_and_a_resumed_run_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, trace_groups=2)
    policy = load_policy(config)
    groups = pairs(8)
    train_on(policy, config, groups, steps=4)
    drawn = [(line["step"], line["group_id"]) for line in lines_of(config)]
    assert [step for step, _ in drawn] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len({frozenset(g for s, g in drawn if s == step) for step in range(1, 5)}) > 1
    train_on(policy, config, groups, start=2, steps=3)
    assert [(line["step"], line["group_id"]) for line in lines_of(config)] == drawn[:6]


def test_a_step_has_a_limit_of_tokens_but_always_a_group(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model_dir, tmp_path, trace_groups=3)
    groups = pairs(3)  # of 11 trained tokens
    options = data_options(config)
    batch = make_batch(groups, options)
    for limit, expected in ((33, 3), (32, 2), (1, 1)):
        monkeypatch.setattr(trained_groups, "MAX_STEP_TOKENS", limit)
        with TrainedGroups(config, ALONE) as log:
            trace = log.begin(groups, batch, step=1)
            assert trace is not None
            log.write(trace, groups, batch, [0.0] * 3, step=1)
        assert len(lines_of(config)) == expected


def test_a_full_file_is_left_as_it_is(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_for(model_dir, tmp_path, trace_groups=1)
    policy = load_policy(config)
    train_on(policy, config, pairs(1), steps=1)
    size = (config.save_path / "trained_groups.jsonl").stat().st_size
    monkeypatch.setattr(trained_groups, "MAX_FILE_BYTES", int(2.5 * size))
    with caplog.at_level(logging.WARNING):
        train_on(policy, config, pairs(1), steps=5)
    assert [line["step"] for line in lines_of(config)] == [1, 2]
    assert [r.message for r in caplog.records if "full" in r.message] == [
        f"{config.save_path / 'trained_groups.jsonl'} is full (0 MiB): later steps are left out"
    ]


def test_a_run_records_the_ids_that_the_hub_delivered_unless_it_is_off(
    configure: Configure, hub_url: str
) -> None:
    send(hub_url, pairs(4))
    config = configure(num_steps=1)
    train(config)
    assert [line["group_id"] for line in lines_of(config)] == ["g0", "g1"]
    config = configure(num_steps=2, resume=True, trace_groups=0)
    train(config)
    assert [line["step"] for line in lines_of(config)] == [1, 1]


def test_groups_without_an_id_are_left_out(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path)
    groups = [pairs(1)[0].replace(group_id=None), *pairs(1)]
    train_on(load_policy(config), config, groups, steps=1)
    train_on(load_policy(config), config, groups[:1], start=1, steps=2)
    assert [(line["step"], line["group_id"]) for line in lines_of(config)] == [(1, "g0")]


def fates_of(config: TrainerConfig) -> list[dict[str, Any]]:
    return rows_in(config.save_path / "group_fates.jsonl")


def test_every_group_has_a_fate_and_its_share_of_the_loss(model_dir: Path, tmp_path: Path) -> None:
    """Groups with the same scores and lengths push equally."""
    config = config_for(model_dir, tmp_path, seq_len=30, trace_groups=1, max_microbatch_tokens=40)
    equal, wide = make_group([1.0, 1.0]), make_group([1.0, 0.0], length=6)
    long = make_group([1.0, 0.0], length=40)
    named = [each.replace(group_id=f"g{i}") for i, each in enumerate((equal, wide, long, wide))]
    train_on(load_policy(config), config, named, steps=1)
    found = fates_of(config)
    assert [(row["group"], row["step"], row["fate"]) for row in found] == [
        ("g0", 1, "zero_advantage"),
        ("g1", 1, "trained"),
        ("g2", 1, "too_long"),
        ("g3", 1, "trained"),
    ]
    assert [row["loss_share"] for row in found] == [0, 0.5, 0, 0.5]
    assert len(lines_of(config)) == 1


def test_fates_are_recorded_without_tokens_and_a_step_that_is_done_again_replaces_them(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, trace_groups=0)
    policy, groups = load_policy(config), pairs(3)
    train_on(policy, config, groups, steps=4)
    path = config.save_path / "group_fates.jsonl"
    path.write_bytes(path.read_bytes() + b'{"group": "cut')
    train_on(policy, config, groups, start=2, steps=3)
    assert [(row["step"], row["group"]) for row in fates_of(config)] == [
        (step, f"g{i}") for step in (1, 2, 3) for i in range(3)
    ]
    assert not (config.save_path / "trained_groups.jsonl").exists()


def test_the_fates_are_the_ledgers_sums_with_the_groups_that_were_given_back(
    configure: Configure, hub_url: str
) -> None:
    groups = [*pairs(3), make_group([1.0, 1.0])]
    masks = np.where(groups[0].masks >= 0, groups[0].masks + 1000, IGNORE_INDEX)
    bad = groups[0].replace(tokens=groups[0].tokens + 1000, masks=masks)
    send(hub_url, [bad, *groups])
    config = configure(num_steps=2)
    train(config)
    counts = Counter(row["fate"] for row in fates_of(config))
    assert counts == {"trained": 3, "zero_advantage": 1, "untrainable": 1}
    assert ledger_of(hub_url) == {"trained": 4, "dead": 1}
    by_step = Counter(row["step"] for row in fates_of(config) if row["fate"] != "untrainable")
    metrics = rows_in(config.save_path / "metrics.jsonl")
    assert by_step == {step["step"]: step["num_groups"] for step in metrics}
    assert tokens_by_fate(metrics) == {
        "trained": sum(map(num_sampled, groups[:3])),
        "zero_advantage": num_sampled(groups[3]),
    }
