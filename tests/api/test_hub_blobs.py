"""The hub's check of packed groups finds what the trainer's gate finds, whichever way it goes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.errors import GroupError
from atroposlib.scored_data import Strictness, check_group
from atroposlib.wire import check_blob, header_of, pack_group, packed, unpack_group
from atroposlib.wire.packed import PackedDistillation
from tests.builders import packed_groups
from tests.builders.packed_groups import BAD_PACKED

F4 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def packed_with(**changes: Any) -> bytes:
    """Two sequences of five tokens in all, as our clients send them."""
    fields: dict[str, Any] = {
        "lengths": np.array([2, 3], "<u4").tobytes(),
        "tokens": np.array([5, 6, 7, 8, 9], "<u4").tobytes(),
        "scores": np.array([1.0, -0.0], "<f8").tobytes(),
        "trained": np.packbits(np.array([0, 1, 0, 1, 1], bool)).tobytes(),
        "arrays": {"inference_logprobs": ("f4", np.array([1, -2, 1, -3, 0], "<f4").tobytes())},
        "group_id": "g",
        "env_id": 3,
        "policy_version": 4,
    }
    return msgspec.msgpack.encode({k: v for k, v in (fields | changes).items() if v is not None})


def is_ordinary(blob: bytes) -> bool:
    return packed._is_ordinary(packed.open_blob(blob))


def outcome(check: Any, blob: bytes) -> Any:
    try:
        return check(blob)
    except GroupError as e:
        return str(e)


def gate(blob: bytes) -> Any:
    """Return the header of what was sent if a trainer can use it."""
    unpack_group(blob, strictness=Strictness.MEANING)
    return header_of(unpack_group(blob, strictness=Strictness.WIRE))


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=draw(st.integers(0, 1)), max_size=3))

    def rows(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(values, min_size=n, max_size=n)) for n in lengths]

    tokens = rows(st.integers(0, 2**31 - 1))
    labels = [st.booleans(), st.integers(0, 1), st.integers(-(2**31), 2**31 - 1)]
    label = labels[draw(st.sampled_from([0, 0, 1, 2]))]
    masks = [
        [(t if m is True else -100 if m is False else m) for t, m in zip(*each, strict=True)]
        for each in zip(tokens, rows(label), strict=True)
    ]
    width = draw(st.sampled_from([32, 64]))
    highest = draw(st.sampled_from([None, 0.0]))
    number = st.floats(max_value=highest, width=width, allow_nan=False, allow_infinity=False)
    group = {"tokens": tokens, "masks": masks, "scores": [draw(F4) for _ in lengths]}
    for name in ("inference_logprobs", "ref_logprobs", "advantages"):
        if draw(st.booleans()):
            group[name] = rows(number)
    if draw(st.booleans()):
        group["group_id"] = draw(st.text("abc", min_size=1, max_size=4))
    if draw(st.integers(0, 3)) == 0:
        group["messages"] = draw(st.sampled_from([[], [[] for _ in lengths]]))
    if draw(st.integers(0, 3)) == 0:
        group["advantages"] = [draw(F4) for _ in lengths]
    return group


@settings(max_examples=150, deadline=None)
@given(groups())
def test_any_group_gets_the_header_the_digest_or_the_refusal_of_the_gate(
    group: dict[str, Any],
) -> None:
    blob = pack_group(check_group(group, strictness=Strictness.WIRE))
    assert outcome(check_blob, blob) == outcome(gate, blob)


def array(width: str, *values: float) -> tuple[str, bytes]:
    return width, np.array(values, f"<{width}").tobytes()


IMPOSSIBLE = array("f4", 1, 0.5, 1, -3, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"arrays": {"inference_logprobs": IMPOSSIBLE}},
            r"sequences\[0\].inference_logprobs\[1\]: 0.5 at a trained position",
        ),
        (
            {"arrays": {"ref_logprobs": IMPOSSIBLE}, "tail": {"images": b"1"}},
            r"sequences\[0\].ref_logprobs\[1\]: 0.5 at a trained position",
        ),
        (
            {"masks": np.array([5, 7, 7, 8, 9], "<i4").tobytes(), "trained": None},
            r"sequences\[0\].masks\[1\]: 7 is neither -100 nor the token 6",
        ),
        (
            {"lengths": b"", "tokens": b"", "scores": b"", "trained": b"", "arrays": {}},
            "the group has no sequences",
        ),
    ],
)
def test_a_packed_group_that_no_trainer_can_use_is_refused_by_the_hub(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GroupError, match=message):
        check_blob(packed_with(**changes))


def test_masks_of_zero_and_one_pass_and_keep_the_digest_of_what_was_sent() -> None:
    masks = np.array([0, 1, 0, 1, 1], "<i4").tobytes()
    header = check_blob(packed_with(masks=masks, trained=None))
    assert header.digest == gate(packed_with(masks=masks, trained=None)).digest
    assert header.digest != check_blob(packed_with()).digest


def test_an_ordinary_group_is_checked_where_it_lies() -> None:
    assert is_ordinary(packed_with())
    assert is_ordinary(packed_with(tail=b""))
    assert is_ordinary(packed_with(arrays={}, group_id=None, env_id=None, policy_version=None))
    assert check_blob(packed_with()) == gate(packed_with())
    assert check_blob(packed_with(group_id=None)).digest == b""


UNUSUAL: dict[str, dict[str, Any]] = {
    "bits of no token": {"trained": b"\x5f"},
    "wide floats that are narrow": {"arrays": {"advantages": array("f8", 0, 1, 0.5, 1, 2)}},
    "a score for each of the advantages": {
        "arrays": {"sequence_advantages": array("f4", 1, 2), "advantages": array("f4", *range(5))}
    },
    "too many advantages": {"arrays": {"sequence_advantages": array("f4", 1, 2, 3)}},
    "distillation": {
        "distill": {"distill_logprobs": PackedDistillation(bytes(20), "f4", b"")}  # type: ignore[arg-type]
    },
}
"""What no group that `pack_group` makes has; the others are drawn above."""


@pytest.mark.parametrize("changes", UNUSUAL.values(), ids=UNUSUAL)
def test_whatever_is_unusual_gets_the_answer_of_the_gate(changes: dict[str, Any]) -> None:
    blob = packed_with(**changes)
    assert outcome(check_blob, blob) == outcome(gate, blob)


@pytest.mark.parametrize("changes", [changes for changes, _ in BAD_PACKED])
def test_a_bad_group_gets_the_refusal_of_the_gate(changes: dict[str, Any]) -> None:
    blob = packed_groups.blob(**changes)
    assert outcome(check_blob, blob) == outcome(gate, blob)


@pytest.mark.parametrize("offset", range(4))
def test_a_blob_may_lie_anywhere(offset: int) -> None:
    blob = packed_with()
    shifted = memoryview(bytes(offset) + blob)[offset:]
    assert check_blob(shifted) == gate(blob)
