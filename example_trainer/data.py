"""Groups from the hub -> micro-batches of tensors: advantages, shift, weights, padding.

Shapes: B sequences, T positions. Dropping a sequence whose advantages are all zero changes nothing but the cost:
every position's weight is its share of the mean over the whole batch, dropped sequences included. Called by
`training.py`; knows neither the model nor the hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup

UNKNOWN_VERSION = -1
"""Stands for `policy_version` None in an integer tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How groups become tensors; fields mean what the flags of the same names say."""

    scale_advantages: bool = True
    loss_mean: Literal["token", "sequence"] = "token"
    seq_len: int
    """Longest sequence trained, in tokens."""
    max_sequences: int
    """Sequences per micro-batch."""
    max_tokens: int
    """Positions per micro-batch, padding included; a single longer sequence still forms one."""
    pad_to_multiple_of: int = 8
    keep_zero_advantage: bool = False
    """True when a KL term gives a gradient to sequences without an advantage."""
    processed_logprobs: bool = False
    """True when engines report logprobs after temperature scaling (vLLM's `processed_logprobs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Right-padded sequences of one forward pass; position t predicts the token after it."""

    tokens_BT: Tensor
    """int64, padded with 0."""
    labels_BT: Tensor
    """int64, the next token where it is trained, else -100."""
    sampled_logprobs_BT: Tensor
    """float32, of the labels; 0 where the label is -100."""
    advantages_BT: Tensor
    """float32; 0 where the label is -100."""
    weights_BT: Tensor
    """float32 share of each position in the step's mean; 0 where the label is -100."""
    ref_logprobs_BT: Tensor | None
    """float32, given by the environment; None unless every group of the batch carries them."""
    temperature_B: Tensor
    """float32, by which logits are divided before they are compared with the sampled logprobs."""
    version_B: Tensor
    """int64 policy version that sampled the sequence; -1 when unknown."""

    def rows(self, index_B: Tensor) -> MicroBatch:
        """Return the sequences that an index or a mask selects."""
        return MicroBatch(
            **{
                name: value[index_B] if isinstance(value, Tensor) else value
                for name in self.__slots__
                for value in [getattr(self, name)]
            }
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch on `device`."""
        if device.type == "cpu":
            return self
        moved = {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name in self.__slots__
            for value in [getattr(self, name)]
        }
        return MicroBatch(**moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's data and what was left out of it."""

    micro_batches: list[MicroBatch]
    num_groups: int
    num_sequences: int
    """As received."""
    num_trained_tokens: int
    """In the micro-batches."""
    num_skipped_zero_advantage: int
    num_skipped_untrained: int
    """Sequences without a single trained position."""
    num_skipped_too_long: int
    scores: NDArray[np.float64]
    """Of every sequence received."""
    versions: NDArray[np.int64]
    """Per sequence received; -1 when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One sequence, shifted: arrays of `num_tokens - 1` entries."""

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    sampled_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    ref_logprobs: NDArray[np.float64] | None
    temperature: float
    version: int
    num_trained: int


def group_advantages(scores: NDArray[np.float64], *, scale: bool = True) -> NDArray[np.float64]:
    """Return `(score - mean) / (std + 1e-4)` with the population std; unscaled gives Dr. GRPO's (arXiv 2503.20783).

    A group of one has nothing to be compared with: its score is its advantage.

    >>> group_advantages(np.array([1.0, 0.0]), scale=False)
    array([ 0.5, -0.5])
    """
    if len(scores) == 1:
        return scores.astype(np.float64)
    centred: NDArray[np.float64] = scores - scores.mean()
    return centred / (scores.std() + 1e-4) if scale else centred


def make_batch(groups: Sequence[ScoredGroup], options: DataOptions) -> Batch:
    """Turn the groups of one step into micro-batches; raises GroupError for a group without sampled logprobs."""
    all_rows = [row for group in groups for row in _rows(group, options)]
    fitting = [row for row in all_rows if len(row.tokens) < options.seq_len]
    trained = [row for row in fitting if row.num_trained]
    kept = [row for row in trained if options.keep_zero_advantage or row.advantages.any()]
    with_reference = bool(kept) and all(row.ref_logprobs is not None for row in kept)
    num_trained = sum(row.num_trained for row in trained)
    return Batch(
        micro_batches=[
            _stack(rows, options, num_trained, len(trained), with_reference)
            for rows in _split(kept, options)
        ],
        num_groups=len(groups),
        num_sequences=len(all_rows),
        num_trained_tokens=sum(row.num_trained for row in kept),
        num_skipped_zero_advantage=len(trained) - len(kept),
        num_skipped_untrained=len(fitting) - len(trained),
        num_skipped_too_long=len(all_rows) - len(fitting),
        scores=np.concatenate([group.scores for group in groups] or [np.zeros(0)]),
        versions=np.array([row.version for row in all_rows], dtype=np.int64),
    )


def _rows(group: ScoredGroup, options: DataOptions) -> Iterator[_Row]:
    if group.inference_logprobs is None:
        raise GroupError(
            f"inference_logprobs is null in a group of environment {group.env_id}: the GRPO ratio needs the logprobs "
            "the tokens were sampled with. Sample through `self.server.managed_server(...)` with server_type vllm or "
            "sglang and put the nodes' logprobs into the group as `inference_logprobs`."
        )
    by_group = group_advantages(group.scores, scale=options.scale_advantages)
    for index in range(group.num_sequences):
        view = group.sequence(index)
        override = (group.overrides[index] if group.overrides else None) or {}
        labels = view.masks[1:]
        is_trained = labels != IGNORE_INDEX
        advantages = (
            view.advantages[1:]
            if view.advantages is not None
            else np.full(len(labels), by_group[index])
        )
        if override.get("set_advantage_to_zero"):
            advantages = np.zeros(len(labels))
        assert view.inference_logprobs is not None
        yield _Row(
            tokens=view.tokens[:-1],
            labels=labels,
            sampled_logprobs=np.where(is_trained, view.inference_logprobs[1:], 0.0),
            advantages=np.where(is_trained, advantages, 0.0),
            ref_logprobs=None if view.ref_logprobs is None else view.ref_logprobs[1:],
            temperature=_temperature(group, override) if options.processed_logprobs else 1.0,
            version=UNKNOWN_VERSION if group.policy_version is None else group.policy_version,
            num_trained=int(is_trained.sum()),
        )


def _temperature(group: ScoredGroup, override: dict[str, object]) -> float:
    """The first of the sequence's override, generation_params, group_overrides; 1 when absent or not above 0."""
    for source in (override, group.generation_params or {}, group.group_overrides or {}):
        value = source.get("temperature")
        if isinstance(value, int | float):
            return float(value) if value > 0 else 1.0
    return 1.0


def _split(rows: list[_Row], options: DataOptions) -> Iterator[list[_Row]]:
    """Cut rows, longest first, into micro-batches within both limits."""
    rows = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    while rows:
        width = _padded(len(rows[0].tokens), options)
        size = max(1, min(options.max_sequences, options.max_tokens // width))
        yield rows[:size]
        rows = rows[size:]


def _padded(length: int, options: DataOptions) -> int:
    return -(-length // options.pad_to_multiple_of) * options.pad_to_multiple_of


def _stack(
    rows: list[_Row],
    options: DataOptions,
    num_trained: int,
    num_sequences: int,
    with_reference: bool,
) -> MicroBatch:
    shape = (len(rows), _padded(len(rows[0].tokens), options))
    tokens = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    sampled, advantages, weights, reference = (np.zeros(shape, dtype=np.float32) for _ in range(4))
    for index, row in enumerate(rows):
        cut = (index, slice(len(row.tokens)))
        tokens[cut], labels[cut] = row.tokens, row.labels
        sampled[cut], advantages[cut] = row.sampled_logprobs, row.advantages
        per_token = options.loss_mean == "token"
        weight = 1 / num_trained if per_token else 1 / (num_sequences * row.num_trained)
        weights[cut] = np.where(row.labels != IGNORE_INDEX, weight, 0.0)
        if with_reference:
            reference[cut] = row.ref_logprobs
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens),
        labels_BT=torch.from_numpy(labels),
        sampled_logprobs_BT=torch.from_numpy(sampled),
        advantages_BT=torch.from_numpy(advantages),
        weights_BT=torch.from_numpy(weights),
        ref_logprobs_BT=torch.from_numpy(reference) if with_reference else None,
        temperature_B=torch.tensor([row.temperature for row in rows]),
        version_B=torch.tensor([row.version for row in rows]),
    )
