"""Sample one token per row from logits, with parameters per row, in a few tensor operations.

Logprobs are always those of the raw distribution (log-softmax of the unscaled logits in float32), like vLLM's default
`raw_logprobs`: a trainer can recompute them with a plain forward pass.

Shapes: B rows, V vocabulary, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy, as in vLLM (`SamplingParams`, `_SAMPLING_EPS`)."""

_HIGHEST_TEMPERATURE = 1e30
"""Higher ones act as this one: infinite in float32, they would make NaN of the scores of banned tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. `bodies.py` validates the values."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    """Completion `i` of a request uses `seed + i`; None uses the engine's generator."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; 0: of the sampled token; k: also of the k most likely tokens."""


class Sampled(NamedTuple):
    """The result of one step; `top` is None unless a row requested the most likely tokens."""

    tokens: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]] | None


class BatchSampler:
    """The sampling parameters of a batch's rows as tensors; rebuild it when the rows change."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        temperatures = [
            min(p.temperature, _HIGHEST_TEMPERATURE) if p.temperature >= GREEDY_BELOW else 0.0
            for p in params
        ]
        self._greedy = column(temperatures) == 0 if 0.0 in temperatures else None
        self._all_greedy = not any(temperatures)
        self._temperature = (
            column([t or 1.0 for t in temperatures]) if any(t != 1 for t in temperatures) else None
        )
        self._top_p = (
            column([p.top_p for p in params]) if any(p.top_p < 1 for p in params) else None
        )
        self._top_k = (
            torch.tensor([p.top_k or 2**31 for p in params], device=device)[:, None]
            if any(p.top_k for p in params)
            else None
        )
        self._min_p = column([p.min_p for p in params]) if any(p.min_p for p in params) else None
        self.has_generators = any(p.seed is not None for p in params)
        self.has_min_tokens = any(p.min_tokens for p in params)
        self._num_top = max((p.logprobs or 0 for p in params), default=0)

    def sample(
        self, logits_BV: torch.Tensor, uniforms_B: torch.Tensor, banned: Sequence[tuple[int, int]]
    ) -> Sampled:
        """Draw one token per row.

        `uniforms_B` are numbers in [0, 1), one per row (ignored for greedy rows); `banned` lists (row, token) pairs
        that must not be drawn. Temperature, filters and bans do not change the reported logprobs.
        """
        raw_BV = torch.log_softmax(logits_BV.float(), dim=-1)
        scores_BV = raw_BV
        if banned:
            rows, tokens = zip(*banned, strict=True)
            scores_BV = raw_BV.clone()
            scores_BV[list(rows), list(tokens)] = -torch.inf
        if self._all_greedy:
            chosen_B = scores_BV.argmax(-1)
        else:
            chosen_B = _draw(self._filtered(scores_BV, exact=not banned), uniforms_B)
            if self._greedy is not None:
                chosen_B = torch.where(self._greedy[:, 0], scores_BV.argmax(-1), chosen_B)
        logprobs_B = raw_BV.gather(1, chosen_B[:, None])[:, 0]
        return Sampled(chosen_B.tolist(), logprobs_B.tolist(), self._top(raw_BV))

    def _filtered(self, scores_BV: torch.Tensor, *, exact: bool) -> torch.Tensor:
        """Return unnormalised probabilities; `exact`: whether the scores are already a log-distribution."""
        if self._temperature is not None:
            probs_BV = torch.softmax(scores_BV / self._temperature, dim=-1)
        else:
            probs_BV = scores_BV.exp() if exact else torch.softmax(scores_BV, dim=-1)
        if self._min_p is not None:
            floor = self._min_p * probs_BV.amax(-1, keepdim=True)
            probs_BV = probs_BV.masked_fill(probs_BV < floor, 0)
        if self._top_k is None and self._top_p is None:
            return probs_BV
        # As in vLLM: top_k first, then the smallest set with a share of top_p of the remaining probability.
        sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
        if self._top_k is not None:
            ranks = torch.arange(sorted_BV.shape[1], device=sorted_BV.device)[None, :]
            sorted_BV = sorted_BV.masked_fill(ranks >= self._top_k, 0)
        if self._top_p is not None:
            sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
            before_BV = sorted_BV.cumsum(-1) - sorted_BV
            sorted_BV = torch.where((before_BV >= self._top_p) & (self._top_p < 1), 0, sorted_BV)
        return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV)

    def _top(self, raw_BV: torch.Tensor) -> list[list[tuple[int, float]]] | None:
        if not self._num_top:
            return None
        values_BK, indices_BK = raw_BV.topk(min(self._num_top, raw_BV.shape[1]), dim=-1)
        return [
            list(zip(ids, values, strict=True))
            for ids, values in zip(indices_BK.tolist(), values_BK.tolist(), strict=True)
        ]


def _draw(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution at one uniform number per row; a token of probability 0 is never drawn."""
    cumulative_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    targets_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    drawn_B1 = torch.searchsorted(cumulative_BV, targets_B1, right=True)
    drawn_B1 = drawn_B1.clamp(max=probs_BV.shape[1] - 1)
    # A parallel prefix sum (GPU) is not exactly monotonic: fall back on the mode rather than on a banned token.
    possible_B1 = probs_BV.gather(1, drawn_B1) > 0
    return torch.where(possible_B1, drawn_B1, probs_BV.argmax(-1, keepdim=True))[:, 0]
