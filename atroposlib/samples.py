"""Groups from the hub -> one record per sequence, for any trainer. The only code that computes advantages.

Numpy only; the arrays of a record are views into arrays of its group. `atroposlib.client` exports `samples`;
`example_trainer/data.py` makes its tensors from the same records. Loss and batch layout are the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from atroposlib.errors import GroupError
from atroposlib.scored_data import IGNORE_INDEX, FloatArray, IntArray, ScoredGroup

GroupBaseline = Literal["group", "rloo", "none"]
"""Baseline of a score: the group's mean, the mean of the others, none."""

StandardDeviation = Literal["population", "sample"]
"""The mean of the squares over n, or over n - 1."""

LEAST_LOGPROB = math.log(2.0**-149)
"""-103 nats: the probability of anything lower is 0 in float32."""


class HasGroups(Protocol):
    """A `LeasedBatch`."""

    @property
    def groups(self) -> list[ScoredGroup]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence of T tokens. Position t of every array describes token t, which position t - 1 predicts."""

    input_ids: IntArray
    """[T]"""
    completion_mask: NDArray[np.bool_]
    """[T] True where the token is trained. Never at position 0, which no position predicts."""
    sampled_logprobs: FloatArray
    """[T] logprob of each trained token under the policy that sampled it; undefined elsewhere."""
    advantages: FloatArray
    """[T] 0 where not trained; 1 where trained if the sequence is supervised."""
    policy_version: int | None
    """The oldest policy version that sampled a token; None if unknown."""
    token_versions: NDArray[np.int64]
    """[T] policy version that sampled each token; `UNKNOWN_VERSION` (-1) if unknown."""
    score: float
    """The environment's score, unchanged."""
    is_supervised: bool
    """Whether to train by maximum likelihood (override `sft`): the tokens were not sampled, so there is no ratio."""
    is_silenced: bool
    """Whether the override `set_advantage_to_zero` is set: later normalisation must keep the advantage at zero."""
    group: int
    """Position of its group in the batch."""
    rollout: int
    """Number of its rollout in the group; the sequence's position if the group does not give rollouts."""


def samples(batch: HasGroups | Iterable[ScoredGroup]) -> list[Sample]:
    """Return the sequences of a `LeasedBatch`, or of groups, in order, with GRPO's advantages.

    Sequences without a trained position are included, so `len(samples(batch))` is the number sent. Raises GroupError
    for a group without sampled logprobs, unless all its sequences are supervised.

    Examples:
        >>> from atroposlib.scored_data import Strictness, check_group
        >>> group = {"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [1.0, 0.0]}
        >>> checked = check_group(group | {"inference_logprobs": [[1.0, -0.5]] * 2}, strictness=Strictness.MEANING)
        >>> [sample.advantages.round(2).tolist() for sample in samples([checked])]
        [[0.0, 1.0], [0.0, -1.0]]
    """
    found: list[Sample] = []
    for number, group in enumerate(batch if isinstance(batch, Iterable) else batch.groups):
        require_logprobs(group)
        found += group_samples(group, number=number)
    return found


def group_samples(
    group: ScoredGroup,
    *,
    number: int = 0,
    scores: FloatArray | None = None,
    baseline: GroupBaseline = "group",
    scale: bool = True,
    std: StandardDeviation = "population",
) -> Iterator[Sample]:
    """Yield the sequences of a group that has passed `require_logprobs`; `scores` None: the group's own.

    Token-level advantages of the group replace those computed from scores. Supervised sequences and sequences without
    a trained position (an answer without a score) are excluded from the baseline.
    """
    overrides = group.overrides or [{}] * group.num_sequences
    silenced = np.array([bool((o or {}).get("set_advantage_to_zero")) for o in overrides], bool)
    supervised = are_supervised(group)
    bounds = group.offsets.tolist()
    mask = completion_mask(group)
    versions = group.token_versions
    logprobs = group.inference_logprobs
    if logprobs is None:
        logprobs = np.zeros(group.num_tokens)

    compared = ~supervised & (num_trained(group, mask) > 0)
    by_sequence = np.ones(group.num_sequences)
    given = group.scores if scores is None else scores
    rollout = np.arange(group.num_sequences) if group.rollout is None else group.rollout
    by_sequence[compared] = group_advantages(
        given[compared], rollout[compared], baseline=baseline, scale=scale, std=std
    )
    by_sequence[silenced] = 0.0
    by_token = np.repeat(by_sequence, group.lengths)
    if group.advantages is not None:
        is_given = np.repeat(~supervised & ~silenced, group.lengths)
        by_token = np.where(is_given, group.advantages, by_token)
    by_token[~mask] = 0.0

    for i, score in enumerate(group.scores.tolist()):
        cut = slice(bounds[i], bounds[i + 1])
        yield Sample(
            input_ids=group.tokens[cut],
            completion_mask=mask[cut],
            sampled_logprobs=logprobs[cut],
            advantages=by_token[cut],
            policy_version=group.policy_version,
            token_versions=versions[cut],
            score=score,
            is_supervised=bool(supervised[i]),
            is_silenced=bool(silenced[i]),
            group=number,
            rollout=int(rollout[i]),
        )


def require_logprobs(group: ScoredGroup) -> None:
    """Raise GroupError if a sequence that is not supervised has no sampled logprobs, or impossible ones."""
    supervised = are_supervised(group)
    if supervised.all():
        return
    if group.inference_logprobs is None:
        raise GroupError(
            f"inference_logprobs is null in a group of environment {group.env_id}: the GRPO ratio needs the logprobs "
            "the tokens were sampled with. Sample through `self.server.managed_server(...)` with server_type vllm or "
            "sglang and put the nodes' logprobs into the group as `inference_logprobs`."
        )
    is_sampled = completion_mask(group) & np.repeat(~supervised, group.lengths)
    lowest = group.inference_logprobs.min(where=is_sampled, initial=0.0)
    if lowest < LEAST_LOGPROB:
        raise GroupError(
            f"inference_logprobs: logprob {lowest:g} of a trained token: its probability is 0, so the engine cannot "
            "have sampled it (vLLM's JSON has -9999 for minus infinity)"
        )


def are_supervised(group: ScoredGroup) -> NDArray[np.bool_]:
    """Return [S]: whether each sequence is trained by maximum likelihood (override `sft`)."""
    overrides = group.overrides or [{}] * group.num_sequences
    for_all = (group.group_overrides or {}).get("sft")
    return np.array([bool((each or {}).get("sft", for_all)) for each in overrides], bool)


def completion_mask(group: ScoredGroup) -> NDArray[np.bool_]:
    """Return [N]: whether each token of the group is trained; the first of a sequence never is."""
    mask: NDArray[np.bool_] = group.masks != IGNORE_INDEX
    mask[group.offsets[:-1][group.lengths > 0]] = False
    return mask


def num_trained(group: ScoredGroup, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return [S]: the number of trained tokens of each sequence."""
    before = np.concatenate([[0], np.cumsum(mask)])
    return np.diff(before[group.offsets])


def rollout_scores(
    scores: FloatArray, rollout: NDArray[Any] | None
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Return [R] the score of each rollout, the mean over its sequences, and [S] each sequence's place among them.

    `rollout` holds the number of each sequence's rollout; None: each sequence is one.

    >>> rollout_scores(np.array([1.0, 0.5, 0.0]), np.array([4, 4, 2]))
    (array([0.  , 0.75]), array([1, 1, 0]))
    """
    if rollout is None:
        return scores, np.arange(len(scores))
    _, first, place = np.unique(rollout, return_index=True, return_inverse=True)
    # Differences to one of the scores: the mean of equal scores is exact.
    above = np.bincount(place, weights=scores - scores[first][place])
    return scores[first] + above / np.bincount(place), place


def group_advantages(
    scores: FloatArray,
    rollout: NDArray[Any] | None = None,
    *,
    baseline: GroupBaseline = "group",
    scale: bool = True,
    std: StandardDeviation = "population",
) -> FloatArray:
    """Return [S] advantages: a rollout's score minus a baseline, with `scale` divided by the standard deviation.

    Baseline and deviation are over rollouts, however many sequences each has; see `rollout_scores`. "group": the mean,
    and the standard deviation + 1e-4 (GRPO, arXiv 2402.03300; unscaled: Dr. GRPO, arXiv 2503.20783). "rloo": the mean
    of the others (arXiv 2402.14740). "none": the scores, unscaled. In a group of one, the score is the advantage.

    >>> group_advantages(np.array([1.0, 0.0, 0.5]), scale=False)
    array([ 0.5, -0.5,  0. ])
    >>> group_advantages(np.array([1.0, 0.0, 0.5]), baseline="rloo", scale=False)
    array([ 0.75, -0.75,  0.  ])
    >>> group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), np.array([0, 1, 1, 1]), scale=False)
    array([ 0.5, -0.5, -0.5, -0.5])
    """
    scores, place = rollout_scores(scores, rollout)
    if len(scores) <= 1 or baseline == "none":
        return scores.astype(np.float64)[place]
    if scores.min() == scores.max():
        return np.zeros(len(place))  # exact zeros: the mean is rounded
    centred: FloatArray = scores - scores.mean()
    if baseline == "rloo":
        centred = centred * (len(scores) / (len(scores) - 1))
    divisor = scores.std(ddof=int(std == "sample")) + 1e-4 if scale else 1.0
    return (centred / divisor)[place]
