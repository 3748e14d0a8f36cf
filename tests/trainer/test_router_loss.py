"""`--router_aux_coef`: the load-balancing loss of experts, beside an oracle that computes each sequence alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from atroposlib.errors import ConfigError
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.parallel import whole
from example_trainer.step import data_options, describe_result, losses, take_step
from tests.trainer.helpers_dry_run import config_for_dry_run
from tests.trainer.helpers_models import make_model
from tests.trainer.helpers_trainer import make_group, one_step

GROUPS = [make_group([1.0, 0.0, 0.3], seed=s, length=9 + 5 * s) for s in range(2)]


def balance_of(model_dir: Path) -> float:
    """Return E * sum(f * P): f is each expert's share of the choices times k, P its mean probability."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router
        router.register_forward_hook(lambda _, inputs, out: seen.append(out[0]))
    with torch.no_grad():
        for sequence in (
            each
            for group in GROUPS
            for each in np.split(group.tokens, np.cumsum(group.lengths)[:-1])
        ):
            model(torch.tensor(sequence[None, :-1]).long())
    probabilities = torch.cat(seen).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
    return float(4 * (chosen.mean(0) * probabilities.mean(0)).sum())


@pytest.mark.parametrize(
    ("kind", "packing"), [(Qwen3MoeConfig, "off"), (Qwen3MoeConfig, "on"), (GptOssConfig, "off")]
)
def test_it_is_that_of_all_tokens_without_the_padding(
    kind: Any, packing: str, tmp_path: Path
) -> None:
    model_dir = make_model(kind, tmp_path / "model")
    config = config_for_dry_run(model_dir, tmp_path, router_aux_coef=0.01, packing=packing)
    policy = load_policy(config)
    batch = make_batch(GROUPS, data_options(config, policy))
    (micro_batch,) = batch.micro_batches
    assert micro_batch.tokens_BT.numel() > batch.num_tokens
    gap, optimizer = LogprobGap(policy, limit=None), make_optimizer(policy, config)
    expected = balance_of(model_dir)
    result = take_step(policy, optimizer, batch, config, 0, gap)
    assert describe_result(result, batch)["router_loss"] == pytest.approx(expected, rel=1e-5)


def gradients(model_dir: Path, out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    config = config_for_dry_run(model_dir, out, **changes)
    policy = load_policy(config)
    for _ in losses(policy, make_batch(GROUPS, data_options(config, policy)), config, None):
        pass
    named = policy.model.named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def test_its_gradient_reaches_the_routers_also_under_checkpointing(tmp_path: Path) -> None:
    """A layer's second forward pass, which the backward pass makes, adds nothing."""
    model_dir = make_model(Qwen3MoeConfig, tmp_path / "model")
    without, with_it, recomputed = (
        gradients(model_dir, tmp_path, router_aux_coef=coef, gradient_checkpointing=checkpoints)
        for coef, checkpoints in ((0.0, False), (0.5, False), (0.5, True))
    )
    router = "model.layers.1.mlp.gate.weight"
    assert (with_it[router] - without[router]).norm() > 0.01
    assert torch.equal(with_it["lm_head.weight"], without["lm_head.weight"])
    for name, value in with_it.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-5, atol=1e-7)


def test_steps_on_it_alone_balance_the_experts(tmp_path: Path) -> None:
    model_dir = make_model(Qwen3MoeConfig, tmp_path / "model")
    settings = {"router_aux_coef": 1.0, "lr": 0.02, "lora": False, "max_microbatch_tokens": 64}
    config = config_for_dry_run(model_dir, tmp_path, **settings)
    policy = load_policy(config)
    optimizer = make_optimizer(policy, config)
    nothing = [make_group([1.0, 1.0 - 1e-6], seed=1, length=24)]
    values = [
        one_step(policy, config, nothing, optimizer=optimizer, version=step).sums["router_sum"]
        for step in range(8)
    ]
    assert 2.0 - 1e-6 <= values[-1] < values[0]  # k is the least: every expert is chosen equally


@pytest.mark.parametrize("kind", [Qwen3Config, DeepseekV3Config])
def test_a_model_without_one_is_refused(kind: Any, tmp_path: Path) -> None:
    model_dir = make_model(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match="^--router_aux_coef: .* has no load-balancing loss"):
        load_policy(config_for_dry_run(model_dir, tmp_path, router_aux_coef=0.01))
