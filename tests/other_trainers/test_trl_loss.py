"""Losses and gradients of every objective that TRL also has are TRL's, by its own `_compute_loss`."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atroposlib.scored_data import Strictness, check_group
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.model import load_policy
from example_trainer.step import data_options, losses
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_trainer import PROMPT, logprobs_of

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(300)]
pytest.importorskip(
    "trl",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)

LONGEST = 16
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token mean": ({}, {}),
    "no dual clip": ({"dual_clip": float("inf")}, {"delta": None}),
    "dual clip at 1.5": ({"dual_clip": 1.5}, {"delta": 1.5}),
    "dapo": ({"objective": "dapo"}, {"epsilon_high": 0.28}),
    "sequence mean": ({"loss_mean": "sequence"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"objective": "dr_grpo", "loss_constant": LONGEST}, {"loss_type": "dr_grpo"}),
    "gspo": ({"objective": "gspo"}, GSPO | {"epsilon_low": 0.03, "epsilon_high": 0.04}),
    "gspo, paper's clip": (
        {"objective": "gspo", "clip_eps": 3e-4, "clip_eps_high": 4e-4},
        GSPO | {"epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"objective": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "kl": ({"kl_coef": 0.1}, {"beta": 0.1}),
    # TRL's correction is of logprobs at equal weights, to which it applies no clip.
    "tis": (
        {"correction": "tis", "clip_eps": 1.0, "clip_eps_high": 1e6, "dual_clip": float("inf")},
        {"is_corrected": True, "delta": None},
    ),
}
"""Settings here, and TRL's. TRL's CISPO limits the ratio itself, not its distance from 1."""


def make_groups(model: Any) -> list[Any]:
    """Return groups whose sampled logprobs are off by 0.3 nats, and by 2 at one token in eight."""
    rng = np.random.default_rng(0)
    groups = []
    for scores in ([1.0, 0.0, 0.2], [0.4, 0.9]):
        tokens = [rng.integers(0, 256, PROMPT + 6 + 2 * i).tolist() for i in range(len(scores))]
        sampled, reference = [], []
        for sequence in tokens:
            own = np.array(logprobs_of(model, sequence)[PROMPT:])
            off = rng.normal(0, 0.3, len(own)) + 2.0 * (rng.random(len(own)) < 1 / 8)
            sampled.append([1.0] * PROMPT + np.minimum(own - off, -0.01).tolist())
            reference.append([0.0] * PROMPT + (own + rng.normal(0, 0.5, len(own))).tolist())
        group = {
            "tokens": tokens,
            "masks": [[-100] * PROMPT + sequence[PROMPT:] for sequence in tokens],
            "scores": scores,
            "inference_logprobs": sampled,
            "ref_logprobs": reference,
        }
        groups.append(check_group(group, strictness=Strictness.MEANING).replace(policy_version=0))
    return groups


def padded(rows: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)


def of_trl(model: Any, rows: list[Any], changes: dict[str, Any]) -> torch.Tensor:
    """Return the loss that TRL's `_compute_loss` gives the sequences, in one batch without accumulation."""
    from accelerate import Accelerator
    from trl import GRPOTrainer

    settings = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "loss_type": "dapo"}
    settings |= {"delta": 3.0, "importance_sampling_level": "token", "is_corrected": False}
    settings |= changes
    trainer: Any = SimpleNamespace(
        **settings,
        args=SimpleNamespace(delta=settings["delta"], use_bias_correction_kl=True),
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=False),
        use_vllm=settings["is_corrected"],
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
        temperature=1.0,
    )

    def own_logprobs(model: Any, ids: Any, mask: Any, num_kept: int, **_: Any) -> Any:
        logits = model(ids, attention_mask=mask).logits[:, -num_kept - 1 : -1]
        table = logits.log_softmax(-1)
        own = table.gather(2, ids[:, -num_kept:, None])[..., 0]
        return own, -(table.exp() * table).sum(-1), None

    trainer._get_per_token_logps_and_entropies = own_logprobs
    mask = padded([np.ones(len(row.labels), np.int64) for row in rows])
    sampled = padded([row.sampled_logprobs for row in rows]).float()
    inputs = {
        "prompt_ids": torch.stack([torch.as_tensor(row.tokens[:PROMPT]).long() for row in rows]),
        "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.int64),
        "completion_ids": padded([row.labels.astype(np.int64) for row in rows]),
        "completion_mask": mask,
        "advantages": torch.tensor([row.advantages[0] for row in rows], dtype=torch.float32),
        "old_per_token_logps": sampled,
        "ref_per_token_logps": padded([row.ref_logprobs for row in rows]).float(),
        "num_items_in_batch": mask.sum(),
    }
    if settings["is_corrected"]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        with torch.no_grad():
            own = own_logprobs(model, ids, torch.ones_like(ids), mask.shape[1])[0]
        del inputs["old_per_token_logps"]  # TRL then takes its own
        inputs["importance_sampling_ratio"] = (own - sampled).exp().clamp(max=2.0)
    loss: torch.Tensor = GRPOTrainer._compute_loss(trainer, model, inputs)
    return loss


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_trls(name: str, tmp_path: Path) -> None:
    ours, theirs = VARIANTS[name]
    model_dir = make_tiny_model(tmp_path / "model")
    config = TrainerConfig(model_name=str(model_dir), device="cpu", threads=1, **ours)
    policy = load_policy(config)
    policy.model.eval()
    batch = make_batch(make_groups(policy.model), data_options(config))
    share = sum(
        float(loss.share.loss.detach()) for _, _, loss in losses(policy, batch, config, None)
    )
    gradient = gradient_of(policy.model)
    expected = of_trl(policy.model, list(batch.rows), theirs)
    expected.backward()
    assert share == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, gradient_of(policy.model), rtol=1e-4, atol=1e-6)


def gradient_of(model: Any) -> torch.Tensor:
    """Return the gradient of all weights, and clear it."""
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient
