"""Groups whose logprobs a given model really has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from atroposlib.scored_data import MASKED_LOGPROB, ScoredGroup, Strictness, check_group

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


def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    filler = [MASKED_LOGPROB] * PROMPT
    if model is None:
        return filler + [-1.0] * (len(tokens) - PROMPT)
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)
    return filler + [float(table[t - 1, tokens[t]]) for t in range(PROMPT, len(tokens))]
