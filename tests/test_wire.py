"""Both encodings hand back what was sent, and the gate refuses every misalignment."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib import wire
from atroposlib.errors import GroupError
from atroposlib.scored_data import WIRE_KEYS, Strictness, check_group, recheck_meaning

floats = st.floats(allow_nan=False, allow_infinity=False, width=64)
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | floats | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    """A group in JSON form, with label masks and every optional field null, empty or full."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    tokens = [draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)) for n in lengths]
    trained = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    masks = [
        [t if keep else -100 for t, keep in zip(row, keeps, strict=True)]
        for row, keeps in zip(tokens, trained, strict=True)
    ]

    def optional(full: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.just([]) | full)

    def per_token(values: st.SearchStrategy[Any]) -> Any:
        return optional(
            st.tuples(*[st.lists(values, min_size=n, max_size=n) for n in lengths]).map(list)
        )

    def per_sequence(values: st.SearchStrategy[Any]) -> Any:
        return optional(st.lists(values, min_size=len(lengths), max_size=len(lengths)))

    logprobs = st.floats(-50, 0, allow_nan=False, width=64)
    message = st.fixed_dictionaries(
        {"role": text, "content": json_values}, optional={"reward": floats}
    )
    distill = draw(st.booleans())
    return {
        "tokens": tokens,
        "masks": masks,
        "scores": draw(st.lists(floats, min_size=len(lengths), max_size=len(lengths))),
        "advantages": per_token(floats),
        "ref_logprobs": per_token(logprobs),
        "messages": per_sequence(st.lists(message, max_size=2)),
        "generation_params": draw(st.none() | st.dictionaries(text, json_values, max_size=2)),
        "inference_logprobs": per_token(logprobs),
        "overrides": per_sequence(st.dictionaries(text, json_values, max_size=2)),
        "group_overrides": draw(st.none() | st.dictionaries(text, json_values, max_size=2)),
        "images": draw(json_values),
        "env_id": draw(st.none() | st.integers(0, 100)),
        "distill_token_ids": [[[1, 2]] * n for n in lengths] if distill else None,
        "distill_logprobs": [[[-0.5, -1.5]] * n for n in lengths] if distill else None,
    }


@given(groups())
@settings(max_examples=150, deadline=None)
def test_both_encodings_hand_back_what_was_sent(sent: dict[str, Any]) -> None:
    [group] = wire.decode_json_groups(json.dumps(sent).encode(), many=False)
    assert json.loads(wire.encode_json(group)) == sent
    assert tuple(json.loads(wire.encode_json(group))) == WIRE_KEYS
    again = wire.unpack_group(wire.pack_group(group), strictness=Strictness.MEANING)
    assert again.to_dict() == sent


@given(groups(), st.integers(0, 10_000), st.sampled_from(["drop", "add"]), st.data())
@settings(max_examples=150, deadline=None)
def test_every_misalignment_is_refused_by_name(
    sent: dict[str, Any], pick: int, change: str, data: st.DataObject
) -> None:
    names = ["masks", "scores"]
    names += [n for n in ("advantages", "inference_logprobs", "ref_logprobs") if sent[n]]
    names += [n for n in ("messages", "overrides", "distill_token_ids") if sent[n]]
    name = data.draw(st.sampled_from(names))
    per_token = name not in ("scores", "messages", "overrides")
    target = sent[name]
    if per_token and data.draw(st.booleans()):
        target = target[pick % len(target)]
    else:
        target = sent[name]
    if change == "drop" and len(target) > (1 if target is sent[name] else 0):
        target.pop()
    elif target:
        target.append(target[0])
    else:
        target.append([0] if name.startswith("distill") else 0)
    with pytest.raises(GroupError, match=name):
        wire.decode_json_groups(json.dumps(sent).encode(), many=False)


def minimal(**changes: Any) -> dict[str, Any]:
    return {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0]} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [float("nan")]}, r"scores\[0\]: nan is not finite"),
        ({"scores": ["1"]}, "scores: expected numbers, got str '1'"),
        ({"tokens": [[1, -5, 3]]}, r"sequences\[0\].tokens\[1\]: token id -5"),
        ({"tokens": [[1, 2**31, 3]]}, r"sequences\[0\].tokens\[1\]: token id 2147483648"),
        ({"tokens": [[1, 2.5, 3]]}, r"sequences\[0\].tokens: expected integers, got float 2.5"),
        ({"tokens": None}, "tokens: required"),
        ({"tokens": [[1, [2], 3]]}, r"sequences\[0\].tokens: expected a flat list"),
        (
            {"masks": [[-100, 7, 3]]},
            r"sequences\[0\].masks\[1\]: 7 is neither -100 nor the token 2",
        ),
        ({"inference_logprobs": [[1.0, 1.0, -0.5]]}, r"inference_logprobs\[1\]: 1.0 at a trained"),
        (
            {"inference_logprobs": [[1.0, -0.5]]},
            r"sequences\[0\].inference_logprobs: 2 values for 3",
        ),
        ({"messages": [[{"role": "user"}]]}, r"sequences\[0\].messages\[0\].content: required"),
        ({"overrides": [None]}, r"sequences\[0\].overrides: expected a dict"),
        ({"env_id": "0"}, "env_id: expected a 64-bit integer"),
        ({"group_id": ""}, "group_id: expected 1 to 128"),
        ({"tokens": [], "masks": [], "scores": []}, "tokens: the group has no sequences"),
    ],
)
def test_a_malformed_group_is_refused_with_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupError, match=message) as e:
        check_group(minimal(**changes), strictness=Strictness.MEANING, environment="gsm8k")
    assert "(environment 'gsm8k')" in str(e.value)


def test_zero_one_masks_are_read_as_trained_or_not_and_reported() -> None:
    group = check_group(minimal(masks=[[0, 1, 1]]), strictness=Strictness.MEANING)
    assert group.masks.tolist() == [-100, 2, 3]
    assert group.repairs == ("binary_masks",)


def test_the_hub_hands_out_foreign_masks_exactly_as_they_came() -> None:
    sent = minimal(masks=[[0, 1, 1]])
    group = check_group(sent, strictness=Strictness.WIRE)
    stored = wire.unpack_group(wire.pack_group(group), strictness=Strictness.WIRE)
    assert stored.to_dict()["masks"] == [[0, 1, 1]]
    assert recheck_meaning(stored).masks.tolist() == [-100, 2, 3]


def test_numpy_arrays_are_accepted_and_sent() -> None:
    group = check_group(
        minimal(
            tokens=[np.array([1, 2, 3])],
            inference_logprobs=[np.array([1.0, -0.5, -0.1], dtype=np.float32)],
            overrides=[{"weight": np.float32(0.5)}],
        ),
        strictness=Strictness.MEANING,
    )
    assert json.loads(wire.encode_json(group))["overrides"] == [{"weight": 0.5}]


def test_a_nan_in_a_list_body_is_named_with_its_index() -> None:
    body = json.dumps([minimal(), minimal(scores=[float("nan")])]).encode()
    with pytest.raises(GroupError, match=r"\[1\].scores\[0\]: nan is not finite"):
        wire.decode_json_groups(body, many=True)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"tokens": 1}'])
def test_a_body_that_is_no_group_is_a_group_error(body: bytes) -> None:
    with pytest.raises(GroupError):
        wire.decode_json_groups(body, many=False)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_packed_group_never_crashes_the_decoder(data: st.DataObject) -> None:
    blob = bytearray(
        wire.pack_group(
            check_group(
                minimal(inference_logprobs=[[1.0, -0.25, -0.1]], group_id="g", env_id=0),
                strictness=Strictness.WIRE,
            )
        )
    )
    position = data.draw(st.integers(0, len(blob) - 1))
    blob[position] = data.draw(st.integers(0, 255))
    try:
        wire.unpack_group(bytes(blob), strictness=Strictness.WIRE)
    except GroupError:
        pass


def test_a_packed_message_carries_blobs_unparsed() -> None:
    blobs = [b"one", b"two"]
    envelope = wire.split_packed(wire.join_packed(blobs, {"step": 3}))
    assert envelope.blobs == blobs
    assert envelope.meta == {"step": 3}
    with pytest.raises(GroupError, match="not a packed message"):
        wire.split_packed(b"{}")
