"""One group of scored sequences: the dict that authors write and the checked form that all other code reads.

Only this module checks lengths and values of tokens, masks, logprobs, advantages, scores and distillation arrays:
`check_group` for dicts, `check_arrays` for packed groups without building them. There are three gates: the
environment's outbox and the trainer's client (`Strictness.MEANING`), and the hub (`MEANING` for packed groups,
`Strictness.WIRE` for JSON). In the checked form, every per-token array is flat, as long as `tokens`, and split by the
same `lengths`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from atroposlib.errors import GroupError
from atroposlib.utils.number_list import array_of

IGNORE_INDEX: Final = -100
"""Mask value of a position that is not trained (the label convention of torch's cross entropy)."""

MASKED_LOGPROB: Final = 1.0
"""`inference_logprobs` value at masked positions: an impossible log-probability, so it cannot be mistaken for one."""

UNKNOWN_VERSION: Final = -1
"""An unknown policy version in an array of integers."""

MAX_TOKEN_ID: Final = 2**31 - 1
MAX_GROUP_ID_CHARS: Final = 128

LOGPROB_TOLERANCE: Final = 1e-4
"""Largest accepted sampled log-probability: float32 log-softmax of a near-certain token may round above 0."""


class Level(enum.Enum):
    """What has one value of a field."""

    GROUP = "group"
    SEQUENCE = "sequence"
    TOKEN = "token"
    ENTRY = "token and entry"
    """Each token has a list of values."""


class Field(NamedTuple):
    """One field of a group: a key of the dicts and an attribute of `ScoredGroup`."""

    name: str
    level: Level
    kind: type
    """int, float, str; or list, dict, object: JSON of that kind, or any."""
    meaning: str
    """For `api/README.md`."""
    is_required: bool = False
    """False: null, the default, leaves it out; so does `[]` where there is one value per sequence or token."""
    is_original: bool = True
    """Whether the original's clients know it."""
    is_logprob: bool = False
    """Whether it is a log-probability, at most 0, wherever the token is trained."""
    may_be_per_sequence: bool = False
    """Whether one number per sequence may stand for one per token."""

    @property
    def is_numeric(self) -> bool:
        return self.kind in (int, float)


_VERSION_MEANING = "Oldest policy version that sampled one of the tokens."
_SPANS_MEANING = (
    "Which policy version sampled which tokens: `start`, `num_tokens` and `weight_version` of each span;"
    " sent where several versions sampled the group."
)
_ID_MEANING = "Chosen before the first attempt to send. Without one the hub makes it, and a repeat is stored again."

FIELDS: Final = (
    Field("tokens", Level.TOKEN, int, "Prompt and answer.", is_required=True),
    Field("masks", Level.TOKEN, int, "The token where it is trained, else -100.", is_required=True),
    Field("scores", Level.SEQUENCE, float, "The environment's reward.", is_required=True),
    Field(
        *("advantages", Level.TOKEN, float),
        "Replace those computed from the scores. One per sequence applies to each trained token.",
        may_be_per_sequence=True,
    ),
    Field(
        "ref_logprobs",
        Level.TOKEN,
        float,
        "Log-probability under the reference model.",
        is_logprob=True,
    ),
    Field("messages", Level.SEQUENCE, list, "The conversation."),
    Field("generation_params", Level.GROUP, dict, "How the tokens were sampled."),
    Field(
        *("inference_logprobs", Level.TOKEN, float),
        "Log-probability under the policy that sampled the token; 1.0 where masked.",
        is_logprob=True,
    ),
    Field("overrides", Level.SEQUENCE, dict, "Instructions to the trainer."),
    Field("group_overrides", Level.GROUP, dict, "Instructions to the trainer."),
    Field("images", Level.GROUP, object, "Images of the prompt."),
    Field("env_id", Level.GROUP, int, "From `POST /register-env`."),
    Field("distill_token_ids", Level.ENTRY, int, "Tokens that a teacher proposes."),
    Field(
        "distill_logprobs",
        Level.ENTRY,
        float,
        "The teacher's log-probability of each proposed token.",
    ),
    Field("group_id", Level.GROUP, str, _ID_MEANING, is_original=False),
    Field("policy_version", Level.GROUP, int, _VERSION_MEANING, is_original=False),
    Field(
        *("rollout", Level.SEQUENCE, int),
        "Sequences with the same number are one rollout; without it each sequence is one.",
        is_original=False,
    ),
    Field("weight_versions", Level.SEQUENCE, list, _SPANS_MEANING, is_original=False),
)
"""All fields of a group. Gates, encodings, rows of files and the viewer follow this table.

To add a field: a row here, its line in `ScoredDataGroup` (and `ScoredDataItem`, for one per sequence or token), its
attribute in `ScoredGroup`, its row in `api/README.md`; for texts or lists per sequence, also how `_per_sequence` reads
them. The order of the rows is that of keys and of digests.
"""

FIELD: Final = {field.name: field for field in FIELDS}
OPTIONAL: Final = {
    level: tuple(field for field in FIELDS if field.level is level and not field.is_required)
    for level in Level
}
"""The optional fields by what has one value of them."""
PER_TOKEN_FIELDS: Final = tuple(
    field.name for field in OPTIONAL[Level.TOKEN] if field.kind is float
)
LOGPROB_FIELDS: Final = tuple(field.name for field in FIELDS if field.is_logprob)
DISTILL_FIELDS: Final = tuple(field.name for field in OPTIONAL[Level.ENTRY])
OPTIONAL_ROWS: Final = tuple(
    field.name for field in FIELDS if field.level is not Level.GROUP and not field.is_required
)
"""Optional fields with one entry per sequence; `[]` is another way to leave one out."""
WIRE_KEYS: Final = tuple(field.name for field in FIELDS if field.is_original)
"""The keys of every group that the hub hands out as JSON, in this order."""
NATIVE_ROWS: Final = tuple(name for name in OPTIONAL_ROWS if not FIELD[name].is_original)
"""Keys that follow them in a group that has the field; native fields of a whole group stay inside."""

_SPAN_KEYS: Final = frozenset({"start", "num_tokens", "weight_version"})

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


class Ragged(NamedTuple):
    """Concatenated lists of numbers: list i is the next `lengths[i]` of the `values`."""

    values: NDArray[Any]
    """[sum(lengths)]"""
    lengths: NDArray[Any]
    """[num_lists] integers"""

    def to_lists(self) -> list[list[Any]]:
        """Return the lists as plain Python.

        >>> Ragged(np.array([1, 2, 3]), np.array([2, 0, 1])).to_lists()
        [[1, 2], [], [3]]
        """
        values = self.values.tolist()
        bounds = [0, *np.cumsum(self.lengths).tolist()]
        return [values[start:stop] for start, stop in pairwise(bounds)]


class RaggedPerToken(NamedTuple):
    """One list of numbers per token: `entries` holds the list of every token, `lengths` splits them into sequences."""

    entries: Ragged
    lengths: NDArray[Any]
    """[S] tokens per sequence"""


class ScoredDataGroup(TypedDict, total=False):
    """What an author returns: parallel lists, one entry per sequence. `tokens`, `masks`, `scores` are required."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | list[float] | None
    """One number per token, or one per sequence."""
    ref_logprobs: list[list[float]] | None
    messages: list[list[Any]] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[list[float]] | None
    overrides: list[dict[str, Any]] | None
    group_overrides: dict[str, Any] | None
    images: Any
    env_id: int | None
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    group_id: str
    policy_version: int | None
    rollout: list[int] | None
    weight_versions: list[list[dict[str, Any]]] | None


class ScoredDataItem(TypedDict, total=False):
    """One sequence of a group, as `collect_trajectory` returns it."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | float | None
    ref_logprobs: list[float] | None
    messages: list[Any] | None
    inference_logprobs: list[float] | None
    overrides: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None
    policy_version: int | None
    rollout: int | None
    weight_versions: list[dict[str, Any]] | None


class Strictness(enum.Enum):
    """What a gate checks."""

    WIRE = "wire"
    """Shapes, types, ranges and finiteness; groups that pass are forwarded unchanged (JSON at the hub)."""

    MEANING = "meaning"
    """Also: masks are labels and sampled logprobs are log-probabilities (our environments and trainer, packed groups at
    the hub)."""


class SequenceView(NamedTuple):
    """Views into one sequence of a `ScoredGroup`; every array is `[num_tokens]`."""

    tokens: IntArray
    masks: IntArray
    score: float
    inference_logprobs: FloatArray | None
    ref_logprobs: FloatArray | None
    advantages: FloatArray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """A group that passed `check_group`: S sequences with N tokens in total. Built only by the gate or `wire`."""

    lengths: IntArray
    """[S] tokens per sequence."""
    tokens: IntArray
    """[N] token ids, sequence after sequence."""
    masks: IntArray
    """[N] labels: the token itself where it is trained, `IGNORE_INDEX` elsewhere."""
    scores: FloatArray
    """[S]"""
    inference_logprobs: FloatArray | None = None
    """[N] log-probability of each token under the policy that sampled it; `MASKED_LOGPROB` where masked."""
    ref_logprobs: FloatArray | None = None
    """[N]"""
    advantages: FloatArray | None = None
    """[N] token-level advantages that replace those computed from scores."""
    sequence_advantages: FloatArray | None = None
    """[S] if the sender gave one advantage per sequence: `advantages` repeats it for each of its tokens."""
    distill_token_ids: Ragged | None = None
    """N lists: the ids a teacher proposes for each token."""
    distill_logprobs: Ragged | None = None
    """N lists: the teacher's log-probability of each proposed id."""
    messages: list[list[Any]] | None = None
    overrides: list[dict[str, Any]] | None = None
    generation_params: dict[str, Any] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    group_id: str | None = None
    """Chosen by the sender; the hub stores each group id only once."""
    policy_version: int | None = None
    """The oldest policy version that sampled a token of this group; None if unknown."""
    rollout: IntArray | None = None
    """[S] number of the rollout that the sequence is a part of; None: each sequence is a rollout."""
    weight_versions: list[list[dict[str, Any]]] | None = None
    """[S] spans of sampled tokens with the policy version of each; None: all are of `policy_version`."""
    empty_fields: frozenset[str] = frozenset()
    """Optional per-sequence fields that were sent as `[]` rather than null."""
    repairs: tuple[str, ...] = ()
    """What the gate reinterpreted, for the caller to count: `binary_masks`."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_rollouts(self) -> int:
        return self.num_sequences if self.rollout is None else len(np.unique(self.rollout))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        """Number of trained positions."""
        return int(np.count_nonzero(self.masks != IGNORE_INDEX))

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """[N] policy version of each token: its span's, else the group's; `UNKNOWN_VERSION` if unknown."""
        known = UNKNOWN_VERSION if self.policy_version is None else self.policy_version
        found = np.full(self.num_tokens, known, dtype=np.int64)
        starts = self.offsets.tolist()
        for first, spans in zip(starts, self.weight_versions or (), strict=False):
            for span in spans:
                start, version = first + span["start"], str(span["weight_version"])
                number = int(version) if version.isdecimal() else UNKNOWN_VERSION
                found[start : start + span["num_tokens"]] = number
        return found

    @property
    def newest_version(self) -> int | None:
        """The newest policy version that sampled a trained position; `policy_version` if one of theirs is unknown."""
        if self.weight_versions is None:
            return self.policy_version
        trained = self.token_versions[self.masks != IGNORE_INDEX]
        is_known = len(trained) and (trained != UNKNOWN_VERSION).all()
        return int(trained.max()) if is_known else self.policy_version

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[S + 1] start of each sequence in the flat arrays; the last entry is N."""
        out = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=out[1:])
        return out

    def sequence(self, index: int) -> SequenceView:
        """Return views (no copies) of one sequence."""
        start, stop = self.offsets[index : index + 2].tolist()

        def cut(flat: FloatArray | None) -> FloatArray | None:
            return None if flat is None else flat[start:stop]

        return SequenceView(
            tokens=self.tokens[start:stop],
            masks=self.masks[start:stop],
            score=float(self.scores[index]),
            inference_logprobs=cut(self.inference_logprobs),
            ref_logprobs=cut(self.ref_logprobs),
            advantages=cut(self.advantages),
        )

    def replace(self, **changes: Any) -> ScoredGroup:
        """Return a copy with some fields changed (ids, versions); arrays are shared."""
        return dataclasses.replace(self, **changes)

    def to_dict(self, names: Iterable[str] = WIRE_KEYS) -> ScoredDataGroup:
        """Return the fields with these names, in their order, as plain lists."""
        bounds = self.offsets.tolist()
        fields: dict[str, Any] = {}
        for name in names:
            value, field = getattr(self, name), FIELD[name]
            if value is None:
                value = [] if name in self.empty_fields else None
            elif name == "advantages" and self.sequence_advantages is not None:
                value = self.sequence_advantages.tolist()
            elif field.is_numeric and field.level is not Level.GROUP:
                value = value.to_lists() if isinstance(value, Ragged) else value.tolist()
                if field.level is not Level.SEQUENCE:
                    value = [value[start:stop] for start, stop in pairwise(bounds)]
            fields[name] = value
        return cast(ScoredDataGroup, fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What hub, store, policy and dead letters know of a group without its tokens."""

    env_id: int | None
    num_sequences: int
    num_tokens: int = 0
    policy_version: int | None = None
    """Newest policy version that sampled a trained position of the group; None: unknown."""
    group_id: str = ""
    """Unique in a run; empty if the sender chose none, until the hub makes one."""
    digest: bytes = b""
    """`wire.content_digest`; empty if the sender chose no id, as then the group cannot be sent again."""
    num_bytes: int = 0
    """Of the packed group."""
    number: int = -1
    """Arrival number, unique and increasing within a run; -1 until the hub assigns it."""
    arrival_step: int = 0
    """Policy version that the engines served when the group arrived."""

    @property
    def version(self) -> int:
        """The newest policy version of the group; if unknown, the one at its arrival."""
        return self.arrival_step if self.policy_version is None else self.policy_version


def check_group(
    group: Mapping[str, Any], *, strictness: Strictness, environment: str | None = None
) -> ScoredGroup:
    """Turn an author's or a client's dict into a `ScoredGroup`, or raise `GroupError` with the path of the fault.

    Per-token fields may be lists, numpy arrays, or already flat: `Ragged`, and `RaggedPerToken` for distillation.
    `advantages` may be one number per sequence. Unknown keys are ignored. Nothing is padded or cut to fit.
    Masks of 0 and 1 alone are read as "trained or not" under `Strictness.MEANING` and reported in `repairs`.

    >>> group = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0]}
    >>> check_group(group, strictness=Strictness.MEANING).num_trained
    1
    """
    try:
        checked = _check_shapes(group)
        return read_meaning(checked) if strictness is Strictness.MEANING else checked
    except GroupError as e:
        if environment is None:
            raise
        raise GroupError(f"{e} (environment {environment!r})") from e


def _check_shapes(group: Mapping[str, Any]) -> ScoredGroup:
    """Check a group under `Strictness.WIRE`."""
    if not isinstance(group, Mapping):
        raise _fault("group", f"expected a dict, got {_short(group)}")
    for name in ("tokens", "masks", "scores"):
        if group.get(name) is None:
            raise _fault(name, "required, but missing or null")

    tokens, lengths = _number_rows(group["tokens"], int, "tokens")
    num_sequences = len(lengths)
    masks, mask_lengths = _number_rows(group["masks"], int, "masks")
    _same_lengths(mask_lengths, lengths, "masks")
    flat = _first_outside(masks, -(2**31), MAX_TOKEN_ID)
    if flat is not None:
        raise _fault_at(lengths, flat, "masks", f"value {masks[flat]} does not fit 32 bits")
    scores = _number_row(group["scores"], float, "scores")

    sequence_advantages = _sequence_advantages(group, num_sequences)
    if sequence_advantages is not None:
        repeated = Ragged(np.repeat(sequence_advantages, lengths), lengths)
        group = {**group, "advantages": repeated}
    per_token = {
        field.name: values
        for field, rows in _given(group, Level.TOKEN)
        if (values := _per_token(rows, field, lengths)) is not None
    }
    _check_numbers(lengths=lengths, tokens=tokens, scores=scores, per_token=per_token)
    fields: dict[str, Any] = dict(per_token)
    if any(_given(group, Level.ENTRY)):
        fields |= _check_distillation(group, lengths)
    for field, rows in _given(group, Level.SEQUENCE):
        fields[field.name] = _per_sequence(rows, field, lengths)
    for field, value in _given(group, Level.GROUP):
        fields[field.name] = _per_group(value, field)

    empty = [name for name in OPTIONAL_ROWS if group.get(name) is not None and not len(group[name])]
    return ScoredGroup(
        lengths=lengths.astype(np.int32),
        tokens=tokens.astype(np.int32),
        masks=masks.astype(np.int32),
        scores=scores,
        sequence_advantages=sequence_advantages,
        empty_fields=frozenset(empty),
        **fields,
    )


def check_arrays(
    *,
    lengths: NDArray[Any],
    tokens: NDArray[Any],
    trained: NDArray[np.bool_],
    scores: NDArray[Any],
    per_token: Mapping[str, NDArray[Any]],
    origin: Mapping[str, Any],
) -> None:
    """Check the numbers of a group under `Strictness.MEANING` without building a `ScoredGroup`.

    `lengths` and `scores` are [S]; the caller has checked that the other arrays are [sum(lengths)]. `origin` has the
    sender, id and policy version. Raises the `GroupError` of `check_group`.
    """
    _check_numbers(lengths=lengths, tokens=tokens, scores=scores, per_token=per_token)
    for field, value in _given(origin, Level.GROUP):
        _per_group(value, field)
    _check_meaning(lengths=lengths, trained=trained, per_token=per_token)


def _fault(path: str, what: str) -> GroupError:
    return GroupError(f"{path}: {what}")


def _fault_at(lengths: NDArray[Any], flat: int | np.intp, name: str, what: str) -> GroupError:
    """Name the sequence and position of a flat index."""
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, flat, side="right"))
    position = int(flat) - (int(ends[row - 1]) if row else 0)
    return _fault(f"sequences[{row}].{name}[{position}]", what)


def _short(value: Any) -> str:
    text = repr(value)
    kind = type(value).__name__
    return f"{kind} {text}" if len(text) <= 60 else f"{kind} {text[:57]}..."


def _rows(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, np.ndarray):
        return list(value)
    if not isinstance(value, list | tuple):
        raise _fault(name, f"expected one list per sequence, got {_short(value)}")
    return value


_DTYPE: Final[dict[type, type[np.generic]]] = {int: np.int64, float: np.float64}
_KINDS: Final[dict[type, str]] = {int: "iu", float: "iuf"}
"""numpy's kinds of numbers that may stand for each."""


def _lay_out(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Ragged:
    lengths = np.array([len(a) for a in arrays], dtype=np.int64)
    return Ragged(np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype), lengths)


def _first_outside(values: NDArray[Any], low: int, high: int) -> int | None:
    """Return the index of the first value that is not in low..high."""
    if not values.size:
        return None
    is_low = values.dtype.kind != "u" and int(values.min()) < low
    if not is_low and int(values.max()) <= high:
        return None
    return int(np.flatnonzero((values < low) | (values > high))[0])


def _first_not_finite(values: NDArray[Any]) -> int | None:
    is_finite = np.isfinite(values)
    return None if is_finite.all() else int(np.flatnonzero(~is_finite)[0])


def _not_finite(value: Any) -> str:
    return f"{value} is not finite; send a number or leave the group out"


def _number_row(row: Any, kind: type, path: str) -> NDArray[Any]:
    """Return a flat list of numbers as int64 or float64."""
    if not isinstance(row, list | tuple | np.ndarray):
        raise _fault(path, f"expected a list of numbers, got {_short(row)}")
    try:
        array = array_of(row)
    except (ValueError, OverflowError) as e:
        raise _fault(path, f"expected a flat list of numbers, got {_short(row)} ({e})") from e
    if array.ndim != 1:
        raise _fault(path, f"expected a flat list of numbers, got {_short(row)}")
    if array.size and array.dtype.kind not in _KINDS[kind]:
        numbers = int if kind is int else int | float
        wrong = [v for v in row if isinstance(v, bool) or not isinstance(v, numbers)]
        expected = "integers" if kind is int else "numbers"
        what = f"expected {expected}, got {_short(wrong[0])}" if wrong else "not all fit 64 bits"
        raise _fault(path, what)
    if kind is int and array.dtype == np.uint64 and array.size and array.max() > 2**63 - 1:
        raise _fault(path, f"value {array.max()} does not fit 64 bits")
    return array.astype(_DTYPE[kind], copy=False)


def _number_rows(value: Any, kind: type, name: str) -> Ragged:
    """Return the rows of `value` concatenated, in a type that holds them."""
    if isinstance(value, Ragged):
        _check_kind(value.values, kind, name)
        return value
    rows = enumerate(_rows(value, name))
    arrays = [_number_row(row, kind, f"sequences[{i}].{name}") for i, row in rows]
    return _lay_out(arrays, _DTYPE[kind])


def _check_kind(values: NDArray[Any], kind: type, name: str) -> None:
    if values.size and values.dtype.kind not in _KINDS[kind]:
        expected = "integers" if kind is int else "numbers"
        raise _fault(name, f"expected {expected}, got {values.dtype} values")


def _per_token(rows: Any, field: Field, lengths: NDArray[Any]) -> NDArray[Any] | None:
    """Return one number per token; None for `[]`."""
    name = field.name
    if not isinstance(rows, Ragged) and _listed(rows, name, len(lengths)) is None:
        return None
    found = _number_rows(rows, field.kind, name)
    _same_lengths(found.lengths, lengths, name)
    values: NDArray[Any] = found.values.astype(_DTYPE[field.kind], copy=False)
    return values


def _per_sequence(rows: Any, field: Field, lengths: NDArray[Any]) -> Any:
    """Return one value per sequence; None for `[]`."""
    num_sequences = len(lengths)
    if field.is_numeric:
        values = _number_row(rows, field.kind, field.name)
        return _as_many(values, field.name, num_sequences) if len(values) else None
    listed = _listed(rows, field.name, num_sequences)
    if listed is None:
        return None
    if field.name == "messages":
        return _check_messages(listed)
    if field.name == "weight_versions":
        return [
            _check_spans(spans, int(length), f"sequences[{i}].{field.name}")
            for i, (spans, length) in enumerate(zip(listed, lengths, strict=True))
        ]
    for i, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            what = f"expected a dict, got {_short(entry)}"
            raise _fault(f"sequences[{i}].{field.name}", what)
    return listed


def _per_group(value: Any, field: Field) -> Any:
    if field.kind is object:
        return value
    if field.kind is dict:
        if not isinstance(value, Mapping):
            raise _fault(field.name, f"expected a dict or null, got {_short(value)}")
        return dict(value)
    if field.kind is int:
        return _int(value, field.name)
    if isinstance(value, str) and 0 < len(value) <= MAX_GROUP_ID_CHARS:
        return value
    what = f"expected 1 to {MAX_GROUP_ID_CHARS} characters or null, got {_short(value)}"
    raise _fault(field.name, what)


def _sequence_advantages(group: Mapping[str, Any], num_sequences: int) -> FloatArray | None:
    """Return `advantages` if they are one number per sequence, else None."""
    rows = group.get("advantages")
    if not isinstance(rows, list | tuple | np.ndarray) or isinstance(rows, Ragged) or not len(rows):
        return None
    if isinstance(rows[0], list | tuple | np.ndarray):
        return None
    return _as_many(_number_row(rows, float, "advantages"), "advantages", num_sequences)


def _as_many(values: NDArray[Any], name: str, num_sequences: int) -> NDArray[Any]:
    """Return `values` if they are finite and one per sequence."""
    if len(values) != num_sequences:
        raise _fault(name, f"{len(values)} entries for {num_sequences} sequences")
    flat = _first_not_finite(values)
    if flat is not None:
        raise _fault(f"{name}[{flat}]", _not_finite(values[flat]))
    return values


def _same_lengths(
    found: NDArray[Any], lengths: NDArray[Any], name: str, *, of: str = "values"
) -> None:
    if found is lengths:
        return
    if len(found) != len(lengths):
        raise _fault(name, f"{len(found)} entries for {len(lengths)} sequences")
    wrong = np.flatnonzero(found != lengths)
    if wrong.size:
        i = int(wrong[0])
        raise _fault(f"sequences[{i}].{name}", f"{found[i]} {of} for {lengths[i]} tokens")


def _given(group: Mapping[str, Any], level: Level) -> Iterator[tuple[Field, Any]]:
    """Yield the optional fields of a level that are not null, and their values."""
    for field in OPTIONAL[level]:
        value = group.get(field.name)
        if value is not None:
            yield field, value


def _listed(value: Any, name: str, num_sequences: int) -> list[Any] | None:
    """Return the entries of an optional field, one per sequence; None for `[]`."""
    rows = list(_rows(value, name))
    if not rows:
        return None
    if len(rows) != num_sequences:
        raise _fault(name, f"{len(rows)} entries for {num_sequences} sequences")
    return rows


def _int(value: Any, name: str) -> int:
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_int or not -(2**63) <= int(value) < 2**63:
        raise _fault(name, f"expected a 64-bit integer or null, got {_short(value)}")
    return int(value)


def _check_messages(rows: list[Any]) -> list[list[Any]]:
    for i, conversation in enumerate(rows):
        if not isinstance(conversation, list | tuple):
            what = f"expected a list of messages, got {_short(conversation)}"
            raise _fault(f"sequences[{i}].messages", what)
        for j, message in enumerate(conversation):
            path = f"sequences[{i}].messages[{j}]"
            if not isinstance(message, Mapping):
                raise _fault(path, f"expected a dict, got {_short(message)}")
            for key in ("role", "content"):
                if key not in message:
                    raise _fault(f"{path}.{key}", "required, but missing")
            if not isinstance(message["role"], str):
                raise _fault(f"{path}.role", f"expected a string, got {_short(message['role'])}")
    return [list(conversation) for conversation in rows]


def _check_spans(spans: Any, num_tokens: int, path: str) -> list[dict[str, Any]]:
    """Return spans of sampled tokens, which lie in a sequence of `num_tokens` one behind the other."""
    end = 0
    for j, span in enumerate(_rows(spans, path)):
        place = f"{path}[{j}]"
        if not isinstance(span, Mapping) or not span.keys() >= _SPAN_KEYS:
            raise _fault(place, f"expected {', '.join(sorted(_SPAN_KEYS))}, got {_short(span)}")
        start, count = (_int(span[key], f"{place}.{key}") for key in ("start", "num_tokens"))
        if start < end or count < 0 or start + count > num_tokens:
            what = f"{count} tokens from {start} are not within {end}..{num_tokens}"
            raise _fault(place, what)
        end = start + count
        version = span["weight_version"]
        if isinstance(version, str) and version.isdecimal():
            version = int(version) if len(version) < 20 else 1 << 63  # int() refuses 4,301 digits
        if not isinstance(version, str):
            _int(version, f"{place}.weight_version")
    return list(map(dict, spans))


def _check_distillation(group: Mapping[str, Any], lengths: NDArray[Any]) -> dict[str, Ragged]:
    found: dict[str, Ragged] = {}
    for field, value in _given(group, Level.ENTRY):
        name = field.name
        if not isinstance(value, RaggedPerToken):
            rows = _listed(value, name, len(lengths))
            if rows is None:
                continue
            value = _distill_rows(rows, name, lengths)
        _same_lengths(value.lengths, lengths, name, of="positions")
        found[name] = value.entries
    ids, logprobs = found.get("distill_token_ids"), found.get("distill_logprobs")
    if ids is not None:
        _check_kind(ids.values, int, "distill_token_ids")
    if logprobs is not None:
        found["distill_logprobs"] = logprobs = _finite_entries(logprobs, lengths)
    if ids is not None and logprobs is not None:
        wrong = np.flatnonzero(ids.lengths != logprobs.lengths)
        if wrong.size:
            i = int(wrong[0])
            what = f"{logprobs.lengths[i]} values for {ids.lengths[i]} ids"
            raise _fault_at(lengths, i, "distill_logprobs", what)
    return found


def _finite_entries(logprobs: Ragged, lengths: NDArray[Any]) -> Ragged:
    values = logprobs.values
    _check_kind(values, float, "distill_logprobs")
    bad = _first_not_finite(values)
    if bad is not None:
        position = int(np.searchsorted(np.cumsum(logprobs.lengths), bad, side="right"))
        raise _fault_at(lengths, position, "distill_logprobs", _not_finite(values[bad]))
    return logprobs._replace(values=values.astype(np.float64, copy=False))


def _distill_rows(rows: Sequence[Any], name: str, lengths: NDArray[Any]) -> RaggedPerToken:
    """Lay out nested lists `[num_sequences][num_tokens][k]`."""
    for i, row in enumerate(rows):
        path = f"sequences[{i}].{name}"
        if not isinstance(row, list | tuple | np.ndarray):
            raise _fault(path, f"expected [num_tokens][k] numbers, got {_short(row)}")
        if len(row) != lengths[i]:
            raise _fault(path, f"{len(row)} positions for {lengths[i]} tokens")
    kind = FIELD[name].kind
    entries = list(chain.from_iterable(rows))
    counts = np.zeros(len(entries), dtype=np.int64)
    values: NDArray[Any] = np.zeros(0, dtype=_DTYPE[kind])
    if all(isinstance(entry, list | tuple | np.ndarray) for entry in entries):
        try:
            counts[:] = [len(entry) for entry in entries]
            flat = list(chain.from_iterable(entries))
            values = np.asarray(flat) if flat else values
            is_plain = values.ndim == 1 and values.dtype.kind in ("i" if kind is int else "iuf")
        except (ValueError, OverflowError, TypeError):
            is_plain = False
        if is_plain:
            return RaggedPerToken(Ragged(values, counts), lengths)
    arrays: list[NDArray[Any]] = []
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            path = f"sequences[{i}].{name}[{j}]"
            arrays.append(_number_row(entry, kind, path))
    return RaggedPerToken(_lay_out(arrays, _DTYPE[kind]), lengths)


def _check_numbers(
    *,
    lengths: NDArray[Any],
    tokens: NDArray[Any],
    scores: NDArray[Any],
    per_token: Mapping[str, NDArray[Any]],
) -> None:
    """Check the values of arrays whose lengths agree, as every gate does.

    `lengths` is [S], `scores` one number per sequence, `tokens` and each of `per_token` are [sum(lengths)].
    """
    flat = _first_outside(tokens, 0, MAX_TOKEN_ID)
    if flat is not None:
        what = f"token id {tokens[flat]} is not in 0..{MAX_TOKEN_ID}"
        raise _fault_at(lengths, flat, "tokens", what)
    if len(scores) != len(lengths):
        raise _fault("scores", f"{len(scores)} entries for {len(lengths)} sequences")
    flat = _first_not_finite(scores)
    if flat is not None:
        raise _fault(f"scores[{flat}]", _not_finite(scores[flat]))
    for name, values in per_token.items():
        flat = _first_not_finite(values)
        if flat is not None:
            raise _fault_at(lengths, flat, name, _not_finite(values[flat]))


def _check_meaning(
    *,
    lengths: NDArray[Any],
    trained: NDArray[np.bool_],
    per_token: Mapping[str, NDArray[Any]],
) -> None:
    """Check what `Strictness.MEANING` requires besides masks; `trained` and each of `per_token` are [N]."""
    if not len(lengths):
        raise _fault("tokens", "the group has no sequences")
    for name in LOGPROB_FIELDS:
        if name not in per_token:
            continue
        is_bad = trained & (per_token[name] > LOGPROB_TOLERANCE)
        if is_bad.any():
            flat = np.flatnonzero(is_bad)[0]
            value = float(per_token[name][flat])
            what = f"{value} at a trained position; a log-probability is at most 0"
            raise _fault_at(lengths, flat, name, what)


def read_meaning(group: ScoredGroup) -> ScoredGroup:
    """Apply `Strictness.MEANING` to a group that passed `Strictness.WIRE`, or raise `GroupError`.

    Masks of 0 and 1 become labels.
    """
    tokens, masks = group.tokens, group.masks
    is_label = (masks == IGNORE_INDEX) | (masks == tokens)
    if not is_label.all():
        if not ((masks == 0) | (masks == 1)).all():
            flat = np.flatnonzero(~is_label)[0]
            what = f"{masks[flat]} is neither {IGNORE_INDEX} nor the token {tokens[flat]}; masks are labels"
            raise _fault_at(group.lengths, flat, "masks", what)
        labels = np.where(masks == 1, tokens, IGNORE_INDEX).astype(np.int32)
        group = group.replace(masks=labels, repairs=("binary_masks",))
    fields = {name: getattr(group, name) for name in LOGPROB_FIELDS}
    _check_meaning(
        lengths=group.lengths,
        trained=group.masks != IGNORE_INDEX,
        per_token={name: values for name, values in fields.items() if values is not None},
    )
    return group
