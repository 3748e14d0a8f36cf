"""Groups whose logprobs a given model really has, and steps on them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from atroposlib.scored_data import MASKED_LOGPROB, ScoredGroup, Strictness, check_group
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy
from example_trainer.optim import make_optimizer
from example_trainer.step import StepResult, data_options, take_step

PROMPT = 3


def make_group(
    scores: Sequence[float],
    *,
    seed: int = 0,
    length: int = 8,
    model: Any = None,
    policy_version: int | None = 0,
    **fields: Any,
) -> ScoredGroup:
    """Return sequences of `length`, `length + 1`, ... tokens, trained after a prompt of three.

    Logprobs are those of `model`, or -1 without one.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 256, length + i).tolist() for i in range(len(scores))]
    logprobs = [logprobs_of(model, sequence) for sequence in tokens]
    group = {
        "tokens": tokens,
        "masks": [[-100] * PROMPT + sequence[PROMPT:] for sequence in tokens],
        "scores": list(scores),
        "inference_logprobs": logprobs,
        **fields,
    }
    return check_group(group, strictness=Strictness.MEANING).replace(policy_version=policy_version)


def pairs(number: int, *, first_seed: int = 0, model: Any = None) -> list[ScoredGroup]:
    """Return groups of two sequences, of which the first is the better one."""
    seeds = range(first_seed, first_seed + number)
    return [make_group([1.0, 0.0], seed=seed, model=model) for seed in seeds]


def one_step(
    policy: Policy,
    config: TrainerConfig,
    groups: Sequence[ScoredGroup],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    reference: Any = None,
    version: int = 0,
) -> StepResult:
    """Take the step after `version` on the groups, with the configured optimizer unless one is given."""
    batch = make_batch(groups, data_options(config, policy))
    optimizer = optimizer or make_optimizer(policy, config)
    gap = LogprobGap(policy, limit=None)
    return take_step(policy, optimizer, batch, config, version, gap, reference)


def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    filler = [MASKED_LOGPROB] * PROMPT
    if model is None:
        return filler + [-1.0] * (len(tokens) - PROMPT)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    return filler + [float(table[t - 1, tokens[t]]) for t in range(PROMPT, len(tokens))]
