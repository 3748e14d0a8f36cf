"""Groups from the hub -> micro-batches of tensors: shift, weights, packing or padding.

Shapes: B rows of T positions, holding S sequences with N trained positions. The loss sees only the N trained positions,
so it is independent of the layout. Dropping a sequence whose advantages are all zero saves time and changes no result:
a position's weight is its share of the mean over the whole batch, dropped sequences included. `atroposlib.samples`
computes advantages. Called by `training.py`; knows neither the model nor the hub.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atroposlib import samples
from atroposlib.errors import GroupError
from atroposlib.scored_data import UNKNOWN_VERSION, Ragged, ScoredGroup
from example_trainer.objective import Baseline, LossMean, RolloutWeight

Layout = Literal["padded", "packed"]
SkipReason = Literal["too_long", "untrained", "too_old", "zero_advantage"]
"""Why a sequence is not computed; untrained: it has no trained position; too_old: all of those are too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """How groups become tensors; `TrainerConfig` documents the fields that are not documented here."""

    baseline: Baseline = "group"
    scale_advantages: bool = True
    advantage_std: samples.StandardDeviation = "population"
    loss_mean: LossMean = "token"
    loss_constant: float = 1.0
    rollout_weight: RolloutWeight = "rollout"
    overlong_max: int = 0
    overlong_buffer: int = 1
    seq_len: int
    max_sequences: int
    """Sequences per padded micro-batch."""
    max_tokens: int
    """Positions per micro-batch, padding included; a longer sequence forms a micro-batch alone."""
    layout: Layout = "padded"
    pad_to_multiple_of: int = 8
    keep_zero_advantage: bool = False
    """Whether a KL, distillation or entropy term gives sequences without an advantage a gradient."""
    processed_logprobs: bool = False
    """Whether engines report logprobs after temperature scaling (vLLM's `processed_logprobs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """The N trained positions of a micro-batch, sequence after sequence."""

    labels_N: Tensor
    """int64, the token that each position predicts."""
    sampled_logprobs_N: Tensor
    """float32, of the labels under the sampling policy; 0 for supervised positions."""
    advantages_N: Tensor
    """float32; 1 for supervised positions."""
    weights_N: Tensor
    """float32 share of each position in the step's mean."""
    temperature_N: Tensor
    """float32, divisor of the logits."""
    sequence_N: Tensor
    """int64 index of the sequence within the micro-batch, ascending."""
    num_sequences: int
    is_supervised_N: Tensor
    """bool, trained by maximum likelihood (`sft` override) instead of the policy gradient."""
    ref_logprobs_N: Tensor | None
    """float32, from the environment, NaN where it sent none; None if no sequence has any."""
    teacher_ids_NK: Tensor | None
    """int64, the teacher's most likely tokens; None if no sequence has any."""
    teacher_logprobs_NK: Tensor | None
    """float32, -inf beyond the tokens that the teacher listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The sequences of one forward pass; position t predicts the token after it."""

    tokens_BT: Tensor
    """int64, padded with 0."""
    position_ids_BT: Tensor
    """int64, starting at 0 in every sequence; the padding of a packed row counts as one more sequence."""
    borders: Tensor | None
    """int32 [S + 1, or S + 2 with padding]: starts of the sequences in a packed row, and the row's end; attention must
    not cross them. None if each sequence has its own row."""
    longest: int
    """Positions of the longest sequence or padding."""
    trained_N: Tensor
    """int64 index of each trained position in the flattened [B * T]."""
    positions: Positions
    version_N: Tensor
    """int64 policy version that sampled each label; -1 if unknown."""
    rows: Sequence[Row]
    """[S] the sequences, on the CPU."""
    is_filler: bool = False
    """Whether it only makes the processes' counts equal: its weights are 0 and metrics omit it."""

    @property
    def is_token_BT(self) -> Tensor:
        """Whether each position is of a sequence, and not padding; on the CPU."""
        lengths = torch.tensor([len(row.tokens) for row in self.rows])
        lengths = lengths if self.borders is None else lengths.sum(0, keepdim=True)
        return torch.arange(self.tokens_BT.shape[1]) < lengths[:, None]

    def to(self, device: torch.device) -> MicroBatch:
        return self if device.type == "cpu" else _moved(self, device)


def _moved(value: Any, device: torch.device) -> Any:
    changes = {
        field.name: _moved(part, device)
        if isinstance(part, Positions)
        else part.to(device, non_blocking=True)
        for field in dataclasses.fields(value)
        for part in [getattr(value, field.name)]
        if isinstance(part, Tensor | Positions)
    }
    return dataclasses.replace(value, **changes)


class SequenceOrigin(NamedTuple):
    """Where a sequence stands among the groups of its step."""

    group: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence, shifted by one, with its trained positions."""

    origin: SequenceOrigin
    tokens: NDArray[np.int32]
    """[num_tokens - 1]"""
    trained: NDArray[np.int64]
    """[N] positions whose label is trained, ascending."""
    labels: NDArray[np.int32]
    """[N], like all arrays below."""
    sampled_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    ref_logprobs: NDArray[np.float64] | None
    teacher: Teacher | None
    is_supervised: bool
    is_silenced: bool
    """Whether the environment set its advantage to zero, which normalisation must not change."""
    temperature: float
    """Of the distribution whose logprobs are trained; 1 for supervised sequences."""
    versions: NDArray[np.int64]
    """Policy version that sampled each token; UNKNOWN_VERSION if unknown."""
    rollout: int
    """Number of its rollout in the group."""
    num_too_old: int = 0
    """Positions left out of the arrays because an older policy than allowed sampled their label."""
    weight: float = 0.0
    """Share of each trained position in the step's mean."""


class Teacher(NamedTuple):
    """A teacher's most likely tokens at each trained position; both [N, K]."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step's data, and counts of what was left out."""

    micro_batches: list[MicroBatch]
    rows: list[Row]
    """The sequences in the micro-batches."""
    lacks_reference: bool
    """Whether any sequence of the batch has no `ref_logprobs`; the same in every process."""
    num_groups: int
    num_sequences: int
    """Received."""
    num_tokens: int
    """In the micro-batches, prompts included, padding not."""
    num_trained_tokens: int
    """In the micro-batches."""
    skipped: dict[SequenceOrigin, SkipReason]
    """The sequences received that are not in the micro-batches."""
    num_skipped_tokens: Mapping[SkipReason, int]
    """Their trained positions, but for those of "too_old". With `num_trained_tokens` and `num_too_old`, all that
    were received."""
    num_too_old: list[int]
    """[num_groups] trained positions received that have no gradient because they are too old; without those of
    sequences that are skipped for another reason."""
    scores: NDArray[np.float64]
    """Per rollout received."""
    versions: NDArray[np.int64]
    """Per trained position received that is not too old; -1 if unknown."""

    def num_skipped(self, reason: SkipReason) -> int:
        return list(self.skipped.values()).count(reason)

    @property
    def fates(self) -> list[str]:
        """[num_groups] "trained" if any of its sequences is, else the reason of most of them."""
        reasons: list[Counter[str]] = [Counter() for _ in range(self.num_groups)]
        for origin, reason in self.skipped.items():
            reasons[origin.group][reason] += 1
        for row in self.rows:
            reasons[row.origin.group] = Counter(["trained"])
        return [counts.most_common(1)[0][0] for counts in reasons]


def overlong_penalty(
    num_tokens: NDArray[np.int64], *, longest: int, buffer: int
) -> NDArray[np.float64]:
    """Return the penalty of each response: 0 up to `longest - buffer` tokens, rising linearly to 1 at `longest`.

    Source: soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).

    >>> overlong_penalty(np.array([80, 90, 100, 150]), longest=100, buffer=20).tolist()
    [0.0, 0.5, 1.0, 1.0]
    """
    return np.clip((num_tokens - (longest - buffer)) / buffer, 0.0, 1.0)


def require_trainable(group: ScoredGroup, *, vocab_size: int) -> None:
    """Raise GroupError for token ids outside the model's vocabulary, and as `samples.require_logprobs` does."""
    samples.require_logprobs(group)
    for name, ids in (("tokens", group.tokens), ("masks", group.masks)):
        if len(ids) and (highest := int(ids.max())) >= vocab_size:
            raise GroupError(
                f"{name}: id {highest} in a group of environment {group.env_id}, and the model knows the ids below "
                f"{vocab_size}: give the environment the tokenizer of the model that is trained"
            )


def make_batch(
    groups: Sequence[ScoredGroup], options: DataOptions, *, oldest_version: int | None = None
) -> Batch:
    """Turn the groups of one step, which have passed `require_trainable`, into micro-batches.

    Positions that an older policy than `oldest_version` sampled get no gradient; advantages and weights are computed
    before they are left out, from all positions and scores.
    """
    all_rows = [row for i, group in enumerate(groups) for row in _rows(group, i, options)]
    if options.baseline in ("batch", "group_batch"):
        all_rows = _normalise_over_batch(all_rows, centre=options.baseline == "batch")
    if oldest_version is not None:
        all_rows = [_without_old(row, oldest_version) for row in all_rows]
    reasons = {row.origin: _reason_to_skip(row, options) for row in all_rows}
    trained = [row for row in all_rows if reasons[row.origin] not in ("too_long", "untrained")]
    num_skipped_tokens = Counter[SkipReason]()
    num_too_old = [0] * len(groups)
    for row in all_rows:
        reason = reasons[row.origin]
        if reason is None or reason == "too_old":
            num_too_old[row.origin.group] += row.num_too_old
        else:
            num_skipped_tokens[reason] += len(row.trained) + row.num_too_old
    kept = [
        dataclasses.replace(row, weight=weight)
        for row, weight in zip(trained, _weights(trained, options), strict=True)
        if reasons[row.origin] is None
    ]
    return Batch(
        micro_batches=[collate(rows, options) for rows in _split(kept, options)],
        rows=kept,
        lacks_reference=any(row.ref_logprobs is None for row in kept),
        num_groups=len(groups),
        num_sequences=len(all_rows),
        num_tokens=sum(len(row.tokens) for row in kept),
        num_trained_tokens=sum(len(row.trained) for row in kept),
        skipped={origin: reason for origin, reason in reasons.items() if reason is not None},
        num_skipped_tokens=num_skipped_tokens,
        num_too_old=num_too_old,
        scores=np.concatenate(
            [samples.rollout_scores(group.scores, group.rollout)[0] for group in groups]
            or [np.zeros(0)]
        ),
        versions=np.concatenate([row.versions for row in all_rows] or [np.zeros(0, np.int64)]),
    )


def without_weight(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with all weights 0, so that it adds nothing to the gradient."""
    weights_N = torch.zeros_like(micro_batch.positions.weights_N)
    positions = dataclasses.replace(micro_batch.positions, weights_N=weights_N)
    return dataclasses.replace(micro_batch, positions=positions, is_filler=True)


def _reason_to_skip(row: Row, options: DataOptions) -> SkipReason | None:
    if len(row.tokens) >= options.seq_len:
        return "too_long"
    if not len(row.trained):
        return "too_old" if row.num_too_old else "untrained"
    return None if options.keep_zero_advantage or row.advantages.any() else "zero_advantage"


def _rows(group: ScoredGroup, number: int, options: DataOptions) -> Iterator[Row]:
    """Yield the sequences of `group`, which is number `number` of its step."""
    overrides = group.overrides or [{}] * group.num_sequences
    scores = group.scores
    if options.overlong_max:
        scores = scores - overlong_penalty(
            samples.num_trained(group, samples.completion_mask(group)),
            longest=options.overlong_max,
            buffer=options.overlong_buffer,
        )
    within: samples.GroupBaseline = "rloo" if options.baseline == "rloo" else "group"
    if options.baseline in ("batch", "none"):  # "batch" and "group_batch" are normalised afterwards
        within = "none"
    sequences = samples.group_samples(
        group,
        scores=scores,
        baseline=within,
        scale=options.scale_advantages and options.baseline != "group_batch",
        std=options.advantage_std,
    )
    starts = group.offsets[:-1]
    for i, (start, sequence, override) in enumerate(zip(starts, sequences, overrides, strict=True)):
        at = np.flatnonzero(sequence.completion_mask[1:])
        flat = start + 1 + at
        sampled = sequence.sampled_logprobs[1:][at]
        yield Row(
            origin=SequenceOrigin(number, i),
            tokens=sequence.input_ids[:-1],
            trained=at,
            labels=group.masks[flat],
            sampled_logprobs=np.zeros(len(at)) if sequence.is_supervised else sampled,
            advantages=sequence.advantages[1:][at],
            ref_logprobs=None if group.ref_logprobs is None else group.ref_logprobs[flat],
            teacher=None if group.distill_logprobs is None else _teacher(group, flat),
            is_supervised=sequence.is_supervised,
            is_silenced=sequence.is_silenced,
            temperature=_temperature(group, override or {})
            if options.processed_logprobs and not sequence.is_supervised
            else 1.0,
            versions=sequence.token_versions[1:][at],
            rollout=sequence.rollout,
        )


def _without_old(row: Row, oldest: int) -> Row:
    """Return the row without the positions that an older policy than `oldest` sampled; unknown versions stay.

    So do supervised positions, which no ratio compares with the policy that sampled them. What remains is corrected by
    its own sampled logprobs; a ratio, correction or rejection at the sequence level is that of the remaining positions.
    """
    is_usable_N = (row.versions >= oldest) | (row.versions == UNKNOWN_VERSION)
    if row.is_supervised or is_usable_N.all():
        return row
    names = ["trained", "labels", "sampled_logprobs", "advantages", "ref_logprobs", "versions"]
    kept: dict[str, Any] = {
        name: None if values is None else values[is_usable_N]
        for name in names
        for values in [getattr(row, name)]
    }
    if row.teacher is not None:
        kept["teacher"] = Teacher(*(values[is_usable_N] for values in row.teacher))
    return dataclasses.replace(row, **kept, num_too_old=int(np.count_nonzero(~is_usable_N)))


def _teacher(group: ScoredGroup, tokens: NDArray[np.int64]) -> Teacher | None:
    """Return the teacher's tokens at some positions of the group, given as indices of its flat arrays."""
    ids, logprobs = group.distill_token_ids, group.distill_logprobs
    if ids is None or logprobs is None:
        return None
    starts = np.concatenate([[0], np.cumsum(ids.lengths)])[:-1][tokens]
    lengths = np.asarray(ids.lengths)[tokens]
    columns = np.arange(max(1, int(lengths.max(initial=0))))
    exists = columns < lengths[:, None]
    at = np.where(exists, starts[:, None] + columns, 0)

    def pick(ragged: Ragged, filler: float) -> NDArray[Any]:
        values = ragged.values if len(ragged.values) else np.zeros(1)
        return np.where(exists, values[at], filler)

    return Teacher(pick(ids, 0).astype(np.int64), pick(logprobs, -np.inf).astype(np.float32))


def _temperature(group: ScoredGroup, override: dict[str, object]) -> float:
    """Return the first of override, generation_params and group_overrides; 1 if absent or not above 0."""
    for source in (override, group.generation_params or {}, group.group_overrides or {}):
        value = source.get("temperature")
        if isinstance(value, int | float):
            return float(value) if value > 0 else 1.0
    return 1.0


def _normalise_over_batch(rows: list[Row], *, centre: bool) -> list[Row]:
    """Divide advantages by their std over all policy-gradient tokens of the batch (REINFORCE++, arXiv 2501.03262).

    Sequences silenced by their environment stay 0 and do not count.
    """

    def counts(row: Row) -> bool:
        return not row.is_supervised and not row.is_silenced

    values = np.concatenate([np.zeros(0), *(row.advantages for row in rows if counts(row))])
    if not len(values):
        return rows
    is_constant = values.min() == values.max()  # mean and std would be rounding errors
    mean = 0.0 if not centre else values[0] if is_constant else values.mean()
    std = 1.0 if is_constant else values.std() + 1e-8
    return [
        dataclasses.replace(row, advantages=(row.advantages - mean) / std) if counts(row) else row
        for row in rows
    ]


def _weights(rows: Sequence[Row], options: DataOptions) -> list[float]:
    """Return the weight of each trained position of each row, given all rows that are trained.

    Positions that are too old count in every mean, as those do that the correction rejects and those without an
    advantage: the gradient is the fresh one without their terms. Divided by the usable positions alone, the last ten
    tokens of a long answer would weigh as much as another answer, and so would its variance.
    """
    num_parts = Counter((row.origin.group, row.rollout) for row in rows)
    is_shared = options.rollout_weight == "rollout"
    shares = [1 / num_parts[row.origin.group, row.rollout] if is_shared else 1.0 for row in rows]
    lengths = [len(row.trained) + row.num_too_old for row in rows]
    if options.loss_mean == "token":
        num_tokens = math.fsum(map(operator.mul, shares, lengths))
        return [share / num_tokens for share in shares]
    num_sequences = math.fsum(shares)
    if options.loss_mean == "sequence":
        divisors = [num_sequences * length for length in lengths]
    else:
        divisors = [num_sequences * options.loss_constant] * len(rows)
    return list(map(operator.truediv, shares, divisors))


def _split(rows: list[Row], options: DataOptions) -> Iterator[list[Row]]:
    """Divide rows, longest first, into micro-batches within the limits."""
    rows = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
    if options.layout == "packed":
        yield from _pack(rows, options.max_tokens)
        return
    while rows:
        width = _padded(len(rows[0].tokens), options)
        size = max(1, min(options.max_sequences, options.max_tokens // width))
        yield rows[:size]
        rows = rows[size:]


def _pack(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Put each row into the first micro-batch that has room for it (first-fit decreasing)."""
    packs: list[list[Row]] = []
    room: list[int] = []
    for row in rows:
        length = len(row.tokens)
        at = next((i for i, free in enumerate(room) if length <= free), len(packs))
        if at == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[at].append(row)
        room[at] -= length
    return packs


def _padded(length: int, options: DataOptions) -> int:
    return -(-length // options.pad_to_multiple_of) * options.pad_to_multiple_of


def collate(rows: Sequence[Row], options: DataOptions) -> MicroBatch:
    """Make one micro-batch of sequences: one row each, or all in one row if packed."""
    lengths = np.array([len(row.tokens) for row in rows])
    is_packed = options.layout == "packed"
    if is_packed:
        shape = (1, _padded(int(lengths.sum()), options))
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    else:
        shape = (len(rows), _padded(int(lengths.max()), options))
        starts = np.arange(len(rows)) * shape[1]
    tokens = np.zeros(shape[0] * shape[1], dtype=np.int64)
    for start, length, row in zip(starts, lengths, rows, strict=True):
        tokens[start : start + length] = row.tokens
    borders = np.arange(0, len(tokens) + 1, shape[1], dtype=np.int32)
    if is_packed:
        borders = np.unique([*starts, lengths.sum(), len(tokens)]).astype(np.int32)
    sizes = np.diff(borders)
    position_ids = np.arange(len(tokens)) - np.repeat(borders[:-1], sizes)
    num_trained = np.array([len(row.trained) for row in rows])

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).to(dtype)

    def repeated(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), num_trained)).to(dtype)

    teacher = _join_teachers(rows) if any(row.teacher for row in rows) else None
    own = [row.ref_logprobs for row in rows]
    reference = None
    if any(values is not None for values in own):
        pairs = zip(own, num_trained, strict=True)
        filled = [np.full(num, np.nan) if values is None else values for values, num in pairs]
        reference = torch.from_numpy(np.concatenate(filled)).float()
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens.reshape(shape)),
        position_ids_BT=torch.from_numpy(position_ids.reshape(shape)),
        borders=torch.from_numpy(borders) if is_packed else None,
        longest=int(sizes.max()),
        trained_N=torch.from_numpy(
            np.concatenate([start + row.trained for start, row in zip(starts, rows, strict=True)])
        ),
        positions=Positions(
            labels_N=joined("labels", torch.int64),
            sampled_logprobs_N=joined("sampled_logprobs", torch.float32),
            advantages_N=joined("advantages", torch.float32),
            weights_N=repeated([row.weight for row in rows], torch.float32),
            temperature_N=repeated([row.temperature for row in rows], torch.float32),
            sequence_N=repeated(list(range(len(rows))), torch.int64),
            num_sequences=len(rows),
            is_supervised_N=repeated([row.is_supervised for row in rows], torch.bool),
            ref_logprobs_N=reference,
            teacher_ids_NK=None if teacher is None else torch.from_numpy(teacher.ids),
            teacher_logprobs_NK=None if teacher is None else torch.from_numpy(teacher.logprobs),
        ),
        version_N=joined("versions", torch.int64),
        rows=rows,
    )


def _join_teachers(rows: Sequence[Row]) -> Teacher:
    """Stack the teachers' tokens, padded to the widest; sequences without a teacher are all padding."""
    width = max(row.teacher.ids.shape[1] for row in rows if row.teacher is not None)
    ends = np.cumsum([len(row.trained) for row in rows])
    ids = np.zeros((ends[-1], width), dtype=np.int64)
    logprobs = np.full((ends[-1], width), -np.inf, dtype=np.float32)
    for row, end in zip(rows, ends, strict=True):
        if row.teacher is not None:
            at = np.s_[end - len(row.trained) : end, : row.teacher.ids.shape[1]]
            ids[at], logprobs[at] = row.teacher
    return Teacher(ids, logprobs)
