"""Reward for similarity to the solution: cosine of sentence embeddings (extra `trainer`: torch, transformers).

Each embedding model is loaded once per process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction, spread
from atroposlib.errors import require

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MAX_TOKENS = 512


@registry.register(name="cosine_scaled")
class CosineScaledReward(RewardFunction):
    """1 - scale_factor * (1 - cosine), clipped to [min_reward, max_reward]; `default_reward` without a solution."""

    def __init__(
        self,
        model_name: str = DEFAULT_MODEL,
        scale_factor: float = 1.0,
        min_reward: float = -1.0,
        max_reward: float = 1.0,
        default_reward: float = 0.0,
        weight: float = 1.0,
        **config: Any,
    ) -> None:
        super().__init__(weight=weight, **config)
        self.model_name = model_name
        self.scale_factor = scale_factor
        self.min_reward = min_reward
        self.max_reward = max_reward
        self.default_reward = default_reward

    def compute(
        self, completions: Sequence[Any], solution: Any = None, **kwargs: Any
    ) -> list[float]:
        golds = spread(solution, len(completions), name="solution")
        texts = [self.get_content(completion) for completion in completions]
        values = [self.default_reward] * len(texts)
        judged = [i for i, gold in enumerate(golds) if gold and texts[i].strip()]
        if judged:
            left = embed([texts[i] for i in judged], model_name=self.model_name)
            right = embed([self.get_content(golds[i]) for i in judged], model_name=self.model_name)
            scaled = 1.0 - self.scale_factor * (1.0 - (left * right).sum(axis=1))
            for i, value in zip(judged, scaled.tolist(), strict=True):
                values[i] = min(max(value, self.min_reward), self.max_reward)
        return values


def embed(texts: Sequence[str], *, model_name: str) -> NDArray[np.float64]:
    """Return unit vectors [num_texts][width]: the mean of the model's last hidden states, padding excluded."""
    torch = require("torch", extra="trainer")
    tokenizer, model = _load(model_name)
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    vectors = ((hidden * mask).sum(dim=1) / mask.sum(dim=1)).double().numpy()
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[np.float64] = vectors / np.maximum(lengths, 1e-12)
    return unit


@functools.cache
def _load(model_name: str) -> tuple[Any, Any]:
    transformers = require("transformers", extra="trainer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    return tokenizer, transformers.AutoModel.from_pretrained(model_name).eval()


def cosine_scaled_reward(
    completions: Sequence[Any], solution: Any = None, **kwargs: Any
) -> list[float]:
    """Judge with the default settings of `CosineScaledReward`."""
    return CosineScaledReward()(completions, solution=solution, **kwargs)
