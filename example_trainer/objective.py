"""The choices that make up a policy-gradient objective, and published objectives by name.

Imports no torch, because the configuration imports it; `loss.py` and `data.py` implement the choices.
"""

from __future__ import annotations

from typing import Any, Final, Literal

ObjectiveName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "ppo",
]
Baseline = Literal["group", "rloo", "batch", "group_batch", "none"]
LossMean = Literal["token", "sequence", "constant"]
RolloutWeight = Literal["rollout", "token"]
Surrogate = Literal["clip", "cispo", "reinforce"]
RatioLevel = Literal["token", "sequence"]
Correction = Literal["none", "tis", "mis", "icepop", "decoupled"]
KlEstimator = Literal["k2", "k3"]
DistillLoss = Literal["forward_kl", "reverse_kl"]

OBJECTIVES: Final[dict[ObjectiveName, dict[str, Any]]] = {
    "grpo": {},
    "dr_grpo": {"scale_advantages": False, "loss_mean": "constant"},
    "dapo": {"clip_eps_high": 0.28},
    "gspo": {
        "ratio_level": "sequence",
        "loss_mean": "sequence",
        "clip_eps": 0.03,
        "clip_eps_high": 0.04,
    },
    "cispo": {"surrogate": "cispo", "clip_eps": 1.0, "clip_eps_high": 4.0},
    "reinforce_pp": {"baseline": "batch"},
    "reinforce_pp_baseline": {"baseline": "group_batch", "kl_estimator": "k2"},
    "rloo": {"baseline": "rloo", "scale_advantages": False, "surrogate": "reinforce"},
    "ppo": {"baseline": "none", "scale_advantages": False},
}
"""Settings that each `--objective` stands for; a setting given explicitly overrides it.

GRPO: arXiv 2402.03300, but with the mean over all tokens of the batch (DAPO's; the paper's is `--loss_mean sequence`).
Dr. GRPO: 2503.20783. DAPO: 2503.14476 (`--overlong_max` adds its length penalty). GSPO: 2507.18071, with a hundred
times its clip of 3e-4 and 4e-4: the paper's ratio is to the trainer's logprobs, here it is to the engine's, with every
correction; their rounding differs by NOISE_OF_A_SEQUENCE.
CISPO: 2506.13585. REINFORCE++: 2501.03262. RLOO: 2402.14740. PPO: 1707.06347, with the environment's token-level
advantages.
"""

NOISE_OF_A_SEQUENCE = 0.01
"""Nats by which a sequence's mean logprob may differ between engine and trainer on equal weights: a standard deviation
of 0.05 per bfloat16 token (TRL #6789) is 0.01 for the mean of 25 tokens."""
