"""A run that is stopped and goes on is the run that was never stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.errors import ConfigError
from example_trainer.checkpointing import Checkpoints
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.parallel import ALONE
from example_trainer.records import MetricsLog
from example_trainer.training import data_options, take_step, train
from example_trainer.weights import WeightsDirectory
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_reload import fake_engine, running_hub
from tests.trainer.helpers_trainer import make_group
from tests.trainer.test_trainer_loop import config_for, ledger_of, send

NUM_STEPS = 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def run(model_dir: Path, out: Path, *, stop_after: int | None, **changes: Any) -> TrainerConfig:
    """Train on ten groups; stopped by a signal after a step and resumed if `stop_after` is given."""
    groups = [make_group([1.0, 0.0], seed=seed) for seed in range(2 * NUM_STEPS)]
    with running_hub() as hub_url, fake_engine() as engine:
        send(hub_url, groups)
        settings = {"hub_url": hub_url, "engine_url": engine.url, "num_steps": NUM_STEPS}
        config = config_for(model_dir, out, **settings, checkpoint_interval=2, **changes)
        if stop_after is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MetricsLog, "write", signalling(MetricsLog.write, stop_after))
                train(config)
            saved = Checkpoints(save_path=config.save_path, world=ALONE).steps()
            assert saved[-1] == stop_after
            assert not (config.save_path / "final_model").exists()
            config = config.model_copy(update={"resume": True})
        train(config)
        assert ledger_of(hub_url) == {"trained": 2 * NUM_STEPS}
        assert engine.versions[-1] == str(NUM_STEPS)
        if stop_after is not None:
            assert (
                engine.versions.count(str(stop_after)) == 2
            )  # published, and again at the restart
    return config


def signalling(real: Any, step: int) -> Any:
    def write(self: MetricsLog, record: dict[str, Any]) -> None:
        real(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return write


def metrics_of(config: TrainerConfig) -> list[tuple[float, ...]]:
    lines = (config.save_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["ratio_mean"]) for r in records]


@pytest.mark.parametrize(
    ("stop_after", "changes"),
    [
        (3, {"warmup_steps": 4}),
        (2, {"dtype": "bfloat16"}),
        (2, {"optimizer": "adamw_8bit"}),
        (2, {"optimizer": "adafactor"}),
        (2, {"lora": True, "kl_coef": 0.1, "gradient_checkpointing": True}),
        (2, {"train_layer_indices": "1"}),
    ],
)
def test_a_stopped_run_resumes_to_the_same_weights_and_the_same_record(
    model_dir: Path, tmp_path: Path, stop_after: int, changes: dict[str, Any]
) -> None:
    whole = run(model_dir, tmp_path / "whole", stop_after=None, **changes)
    parts = run(model_dir, tmp_path / "parts", stop_after=stop_after, **changes)
    final = "final_adapter/adapter_model" if whole.lora else "final_model/model"
    expected = load_file(whole.save_path / f"{final}.safetensors")
    found = load_file(parts.save_path / f"{final}.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert metrics_of(parts) == metrics_of(whole)


def stepped(model_dir: Path, out: Path) -> tuple[Any, Any, TrainerConfig]:
    """Return policy and optimizer after one step."""
    config = config_for(model_dir, out)
    policy = load_policy(config)
    optimizer = make_optimizer(policy, config)
    options = data_options(config)
    with WeightsDirectory(config, policy) as weights:
        gap = LogprobGap(policy, weights, options, limit=None)
        batch = make_batch([make_group([1.0, 0.0])], options)
        take_step(policy, optimizer, batch, config, 0, gap)
    return policy, optimizer, config


def test_a_checkpoint_holds_masters_optimizer_and_random_states(
    model_dir: Path, tmp_path: Path
) -> None:
    policy, optimizer, config = stepped(model_dir, tmp_path)
    saved = Checkpoints(save_path=tmp_path / "saved", world=ALONE)
    path = saved.save(policy, optimizer, 1)
    draw = torch.rand(3)
    fresh = load_policy(config)
    fresh_optimizer = make_optimizer(fresh, config)
    assert saved.load(path, fresh, fresh_optimizer) == 1
    assert torch.equal(torch.rand(3), draw)
    for a, b in zip(policy.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == fresh_optimizer.state[b].keys() > set()
        for name, value in optimizer.state[a].items():
            assert torch.equal(value, fresh_optimizer.state[b][name])


def test_tied_embeddings_survive_a_checkpoint(tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    policy, optimizer, config = stepped(tied, tmp_path)
    path = Checkpoints(save_path=tmp_path / "saved", world=ALONE).save(policy, optimizer, 1)
    fresh = load_policy(config)
    Checkpoints(save_path=tmp_path / "saved", world=ALONE).load(
        path, fresh, make_optimizer(fresh, config)
    )
    assert torch.equal(fresh.model.lm_head.weight, policy.model.lm_head.weight)
    assert fresh.model.lm_head.weight is fresh.model.model.embed_tokens.weight


def test_only_the_last_checkpoints_are_kept(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer, _ = stepped(model_dir, tmp_path)
    saved = Checkpoints(save_path=tmp_path / "saved", world=ALONE, keep_last=2)
    for step in (1, 2, 10):
        saved.save(policy, optimizer, step)
    assert saved.steps() == [1, 2, 10]
    saved.remove_old()
    assert saved.steps() == [2, 10]


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer, _ = stepped(model_dir, tmp_path)
    path = Checkpoints(save_path=tmp_path / "saved", world=ALONE).save(policy, optimizer, 1)
    other_dir = make_tiny_model(tmp_path / "other", num_layers=3)
    other, other_optimizer, _ = stepped(other_dir, tmp_path)
    with pytest.raises(ConfigError, match="another model or optimizer"):
        Checkpoints(save_path=tmp_path, world=ALONE).load(path, other, other_optimizer)


def test_what_is_no_checkpoint_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path, resume_from=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="nothing cannot be resumed from"):
        train(config)


def test_a_half_written_checkpoint_is_not_resumed_from(model_dir: Path, tmp_path: Path) -> None:
    saved = Checkpoints(save_path=tmp_path, world=ALONE)
    (tmp_path / "step_7/training").mkdir(parents=True)
    (tmp_path / ".step_9-abc/training").mkdir(parents=True)
    (tmp_path / ".step_9-abc/training/state.json").write_text("{}")
    assert saved.steps() == []
