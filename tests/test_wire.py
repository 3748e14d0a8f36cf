"""Both encodings hand back what was sent, the gate refuses every misalignment, and no body is worse than refused."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib import wire
from atroposlib.errors import GroupError
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from atroposlib.wire import json_decoding, json_encoding
from atroposlib.wire.packed import MAX_GROUPS, MAX_SEQUENCES
from tests.builders.json_groups import BAD_BODIES, BAD_FIELDS
from tests.builders.packed_groups import BAD_PACKED, blob

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
    counts = [draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in lengths]

    def per_token_entry(values: st.SearchStrategy[Any]) -> Any:
        entries = [[st.lists(values, min_size=k, max_size=k) for k in row] for row in counts]
        return optional(st.tuples(*[st.tuples(*row).map(list) for row in entries]).map(list))

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
        "distill_token_ids": per_token_entry(st.integers(-1, 2**40)),
        "distill_logprobs": per_token_entry(logprobs),
    }


PARSERS = {"quick": 2**20, "thorough": -1}
"""`_QUICK_BYTES` for which each is used."""


@given(groups(), st.integers(1, 9), st.integers(1, 3), st.sampled_from(list(PARSERS)))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_both_encodings_hand_back_what_was_sent_with_one_digest_for_every_parser_and_chunk(
    monkeypatch: pytest.MonkeyPatch,
    sent: dict[str, Any],
    num_bytes: int,
    num_values: int,
    parser: str,
) -> None:
    monkeypatch.setattr(json_encoding, "_CHUNK_BYTES", num_bytes)
    monkeypatch.setattr(json_encoding, "_CHUNK_VALUES", num_values)
    # A bracket in a bare string is left to the thorough parser.
    is_bracketed = isinstance(sent["images"], str) and "[" in sent["images"]
    for body in (json.dumps(sent).encode(), json.dumps(sent, indent=1).encode()):
        listed = b"[" + body + b"," + body + b"]"
        assert is_bracketed or json_decoding._quick_fields(body) is not None
        with monkeypatch.context() as patch:
            patch.setattr(json_decoding, "_QUICK_BYTES", PARSERS[parser])
            [group] = decoded(body)
            for each in (group, *decoded(listed, many=True)):
                assert list(json.loads(wire.encode_json(each)).items()) == list(sent.items())
            again = wire.unpack_group(wire.pack_group(group), strictness=Strictness.MEANING)
            assert again.to_dict() == sent
            [reordered] = decoded(json.dumps(sent, sort_keys=True))
            blob = wire.pack_group(group.replace(env_id=77, group_id="other", policy_version=3))
            assert len({wire.content_digest(each) for each in (group, reordered, blob)}) == 1


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_every_float64_survives_both_encodings_to_the_bit(patterns: list[int]) -> None:
    floats = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in patterns]
    values = [v for v in floats if np.isfinite(v)] + [5e-324, -0.0, 1.7976931348623157e308]
    row = list(range(len(values)))
    sent = minimal(tokens=[row], masks=[row], ref_logprobs=[values], scores=[values[0]])
    [group] = decoded(json.dumps(sent))
    back = json.loads(wire.encode_json(group))["ref_logprobs"][0]
    assert np.array(back).tobytes() == np.array(values).tobytes()


@given(groups(), st.integers(0, 10_000), st.sampled_from(["drop", "add"]), st.data())
@settings(max_examples=60, deadline=None)
def test_every_misalignment_is_refused_by_name(
    sent: dict[str, Any], pick: int, change: str, data: st.DataObject
) -> None:
    names = ["masks", "scores"]
    names += [n for n in ("advantages", "inference_logprobs", "ref_logprobs") if sent[n]]
    names += [n for n in ("messages", "overrides", "distill_token_ids") if sent[n]]
    sent["distill_logprobs"] = None  # of the two, the one that differs from its tokens is named
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
        decoded(json.dumps(sent))


def decoded(body: str | bytes, *, many: bool = False) -> list[ScoredGroup]:
    text = body.encode() if isinstance(body, str) else body
    return list(wire.iter_json_groups(text, many=many))


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
        ({"masks": [[-100, 7, 3]]}, r"sequences\[0\].masks\[1\]: 7 is neither -100 nor the token 2"),
        ({"inference_logprobs": [[1.0, 1.0, -0.5]]}, r"inference_logprobs\[1\]: 1.0 at a trained"),
        ({"inference_logprobs": [[1.0, -0.5]]}, r"sequences\[0\].inference_logprobs: 2 values for 3"),
        ({"messages": [[{"role": "user"}]]}, r"sequences\[0\].messages\[0\].content: required"),
        ({"overrides": [None]}, r"sequences\[0\].overrides: expected a dict"),
        ({"env_id": "0"}, "env_id: expected a 64-bit integer"),
        ({"group_id": ""}, "group_id: expected 1 to 128"),
        ({"tokens": [], "masks": [], "scores": []}, "tokens: the group has no sequences"),
    ],
)  # fmt: skip
def test_a_malformed_group_is_refused_with_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GroupError, match=message) as e:
        check_group(minimal(**changes), strictness=Strictness.MEANING, environment="gsm8k")
    assert "(environment 'gsm8k')" in str(e.value)


def test_the_hub_hands_out_masks_of_0_and_1_as_they_came_and_a_trainer_reads_labels() -> None:
    sent = minimal(masks=[[0, 1, 1]])
    group = check_group(sent, strictness=Strictness.WIRE)
    stored = wire.unpack_group(wire.pack_group(group), strictness=Strictness.WIRE)
    assert stored.to_dict()["masks"] == [[0, 1, 1]]
    read = wire.unpack_group(wire.pack_group(stored), strictness=Strictness.MEANING)
    assert read.masks.tolist() == [-100, 2, 3]
    assert read.repairs == ("binary_masks",)


@pytest.mark.parametrize("advantages", [[0.5, -2], [3, 4], np.array([0.5, 0.1])])
def test_advantages_may_be_one_number_per_sequence_and_are_handed_out_as_such(
    advantages: Any,
) -> None:
    sent = {"tokens": [[1, 2, 3], [4]], "masks": [[-100, 2, 3], [4]], "scores": [1.0, 0.0]}
    group = check_group(sent | {"advantages": advantages}, strictness=Strictness.MEANING)
    first, second = map(float, advantages)
    assert group.advantages is not None
    assert group.advantages.tolist() == [first, first, first, second]
    blob = wire.pack_group(group)
    for back in (
        group.to_dict(),
        json.loads(b"".join(wire.json_pieces(blob))),
        wire.unpack_group(blob, strictness=Strictness.MEANING).to_dict(),
    ):
        assert back["advantages"] == [first, second]
    in_json = json.dumps(sent | {"advantages": list(map(float, advantages))}).encode()
    [read] = decoded(in_json)
    assert read.to_dict()["advantages"] == [first, second]
    assert wire.content_digest(read) == wire.content_digest(blob)
    per_token = sent | {"advantages": [[first] * 3, [second]]}
    other = check_group(per_token, strictness=Strictness.MEANING)
    assert other.to_dict()["advantages"] == [[first] * 3, [second]]
    assert wire.content_digest(other) != wire.content_digest(blob)


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([1.0, 2.0], "advantages: 2 entries for 1 sequences"),
        ([float("nan")], r"advantages\[0\]: nan is not finite"),
        (["1"], "advantages: expected numbers, got str '1'"),
        ([True], "advantages: expected numbers, got bool True"),
        ([1.0, [2.0]], "advantages: expected a flat list of numbers"),
    ],
)
def test_advantages_that_are_neither_per_token_nor_per_sequence_are_refused(
    advantages: Any, message: str
) -> None:
    with pytest.raises(GroupError, match=message):
        check_group(minimal(advantages=advantages), strictness=Strictness.WIRE)


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


BODY = json.dumps(minimal()).encode()


def with_field(text: bytes) -> bytes:
    return BODY[:-1] + b"," + text + b"}"


@pytest.mark.parametrize(
    ("body", "says"),
    [pytest.param(body, says, id=name) for name, body, says in [*BAD_FIELDS, *BAD_BODIES]],
)
def test_a_body_that_is_no_group_is_a_group_error_with_its_place(body: bytes, says: str) -> None:
    with pytest.raises(GroupError, match=re.escape(says)):
        decoded(body)
    in_a_list = b"[" + BODY + b"," + body + b"]"
    with pytest.raises(GroupError):
        decoded(in_a_list, many=True)


def test_a_fault_is_named_by_its_place_in_a_list_and_in_a_row() -> None:
    row = [*range(100), "x"]
    body = json.dumps([minimal(), minimal(tokens=[row], masks=[row])]).encode()
    with pytest.raises(GroupError, match=r"^\[1\].sequences\[0\].tokens\[100\]: .* got str"):
        decoded(body, many=True)
    with pytest.raises(GroupError, match=r"^\[1\].scores\[0\]: nan is not finite"):
        decoded(json.dumps([minimal(), minimal(scores=[float("nan")])]), many=True)


def test_of_a_repeated_key_the_last_one_counts_as_in_every_json_parser() -> None:
    [group] = decoded(with_field(b'"scores":[2.0]'))
    assert group.scores.tolist() == [2.0]


def test_integers_too_large_for_64_bits_pass_where_floats_or_anything_may_be() -> None:
    sent = minimal(inference_logprobs=[[2**64, 1, -1]], generation_params={"seed": 2**70})
    [group] = decoded(json.dumps(sent))
    back = json.loads(wire.encode_json(group))
    assert back["inference_logprobs"] == [[2.0**64, 1.0, -1.0]]
    assert back["generation_params"] == {"seed": 2**70}


def test_more_groups_or_sequences_than_a_request_may_hold_are_refused() -> None:
    one = b'{"tokens":[],"masks":[],"scores":[]}'
    assert len(decoded(b"[" + b",".join([one] * MAX_GROUPS) + b"]", many=True))
    with pytest.raises(GroupError, match="body: expected array of length <= 1024"):
        decoded(b"[" + b",".join([one] * (MAX_GROUPS + 1)) + b"]", many=True)
    with pytest.raises(GroupError, match="not a packed message: .*length <= 1024"):
        wire.split_packed(wire.join_packed([b""] * (MAX_GROUPS + 1)))
    rows = b",".join([b"[]"] * (MAX_SEQUENCES + 1))
    body = b'{"tokens":[' + rows + b'],"masks":[],"scores":[]}'
    with pytest.raises(GroupError, match="tokens: expected array of length <= 65536"):
        decoded(body)


def rich() -> dict[str, Any]:
    return minimal(
        inference_logprobs=[[1.0, -0.25, -0.1]],
        distill_token_ids=[[[5, 6], [], [7]]],
        distill_logprobs=[[[-0.5, -1.1], [], [-2.0]]],
        messages=[[{"role": "user", "content": "hi"}]],
        overrides=[{"b": 1, "a": [1.5, None]}],
        group_id="g",
        env_id=0,
    )


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_packed_group_never_crashes_the_decoder(data: st.DataObject) -> None:
    blob = bytearray(wire.pack_group(check_group(rich(), strictness=Strictness.WIRE)))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(blob) - 1))
        blob[position] = data.draw(st.integers(0, 255))
    try:
        group = wire.unpack_group(bytes(blob), strictness=Strictness.WIRE)
    except GroupError:
        return
    assert json.loads(b"".join(wire.json_pieces(bytes(blob)))) == group.to_dict()


SNIPPETS = rb'[ ] { } , : " null 1e999 - NaN \ud83d'.split() + [b"\xff"]
ONLY_ROWS = ("tokens", "masks", "scores", "inference_logprobs")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_json_group_never_crashes_the_decoder(data: st.DataObject) -> None:
    names = data.draw(st.sampled_from([tuple(rich()), (*ONLY_ROWS, "messages", "env_id")]))
    body = bytearray(json.dumps({name: rich()[name] for name in names}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(body) - 1))
        width = data.draw(st.integers(0, 3))
        body[start : start + width] = data.draw(st.sampled_from(SNIPPETS) | st.binary(max_size=2))
    try:
        [group] = decoded(bytes(body))
    except GroupError:
        with pytest.raises(GroupError):
            decoded(b"[" + bytes(body) + b"]", many=True)
        return
    assert json.loads(wire.encode_json(group)) == group.to_dict()
    [thorough] = decoded(b"[" + bytes(body) + b"]", many=True)
    assert thorough.to_dict() == group.to_dict()


def outcome(body: bytes, *, many: bool) -> dict[str, Any] | str:
    """Return the one group in `body`, or what is wrong with it."""
    try:
        [group] = decoded(body, many=many)
    except GroupError as e:
        return str(e)
    return group.to_dict()


@pytest.mark.parametrize(
    ("changes", "is_ordinary"),
    [
        ({}, True),
        ({"messages": [[{"role": "user", "content": "[1] [2"}]]}, True),
        ({"group_overrides": {"nested": [[1], [2.5]]}, "env_id": 3, "group_id": "a"}, True),
        ({"distill_token_ids": [[[1], [2], [3]]]}, True),
        ({"advantages": [], "messages": [], "distill_logprobs": []}, True),
        ({"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}, True),
        ({"advantages": [1.0]}, False),
        ({"distill_logprobs": "x"}, False),
        ({"distill_logprobs": [[1, 2, 3]]}, False),
        ({"distill_logprobs": [[[1], [[2]], [3]]]}, False),
        ({"messages": "x"}, True),
        ({"overrides": 5, "images": True}, True),
        ({"env_id": True}, False),
        ({"tokens": [[1, [2], 3]]}, False),
        ({"tokens": [[[1, 2, 3]]]}, False),
        ({"scores": [[1.0]]}, False),
        ({"unknown": [1]}, False),
        # A bracket that is spelled out in the body must not make up for a list within a row.
        ({"tokens": [[1, [2], 3]], "generation_params": {"[": 1}}, False),
    ],
)
def test_all_parsers_read_the_same_and_faults_are_left_to_the_thorough_one(
    changes: dict[str, Any], is_ordinary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {name: rich()[name] for name in ONLY_ROWS} | changes
    body = json.dumps(sent).replace('"[":', '"\\u005b":').encode()
    assert (json_decoding._quick_fields(body) is not None) is is_ordinary
    for each, many in ((body, False), (b"[" + body + b"]", True)):
        outcomes = []
        for num_bytes in PARSERS.values():
            with monkeypatch.context() as patch:
                patch.setattr(json_decoding, "_QUICK_BYTES", num_bytes)
                outcomes.append(outcome(each, many=many))
        assert outcomes[0] == outcomes[1]


def packed(**changes: Any) -> bytes:
    blob = wire.pack_group(check_group(rich(), strictness=Strictness.WIRE))
    return msgspec.msgpack.encode(msgspec.msgpack.decode(blob) | changes)


@pytest.mark.parametrize(("changes", "message"), BAD_PACKED)
def test_a_packed_group_that_lies_is_refused_with_its_path(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(GroupError, match=re.escape(message)):
        wire.unpack_group(blob(**changes), strictness=Strictness.WIRE)


def test_a_tail_in_one_piece_is_read_too() -> None:
    names = ("messages", "overrides", "distill_token_ids", "distill_logprobs")
    blob = packed(distill={}, tail=json.dumps({name: rich()[name] for name in names}).encode())
    group = wire.unpack_group(blob, strictness=Strictness.WIRE)
    whole = wire.unpack_group(packed(), strictness=Strictness.WIRE)
    assert group.to_dict() == whole.to_dict()
    assert json.loads(b"".join(wire.json_pieces(blob))) == whole.to_dict()
    assert wire.content_digest(blob) == wire.content_digest(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [[1, 2, 4]]},
        {"masks": [[-100, -100, 3]]},
        {"masks": [[0, 2, 3]]},
        {"scores": [2.0]},
        {"inference_logprobs": [[1.0, -0.25, -0.2]]},
        {"inference_logprobs": None, "ref_logprobs": [[1.0, -0.25, -0.1]]},
        {"inference_logprobs": []},
        {"inference_logprobs": None},
        {"distill_token_ids": [[[5], [6], [7]]], "distill_logprobs": None},
        {"distill_logprobs": None},
        {"overrides": [{"b": 1, "a": [1.5, 0]}]},
        {"images": "x"},
    ],
)
def test_another_content_has_another_digest(changes: dict[str, Any]) -> None:
    group = check_group(rich(), strictness=Strictness.WIRE)
    changed = check_group(rich() | changes, strictness=Strictness.WIRE)
    assert len(wire.content_digest(group)) == 16
    assert wire.content_digest(group) != wire.content_digest(changed)


def test_a_packed_message_carries_blobs_unparsed() -> None:
    blobs = [b"one", b"two" * 100_000]
    body = wire.join_packed(blobs, {"step": 3})
    assert msgspec.msgpack.decode(body) == {"version": 1, "meta": {"step": 3}, "groups": blobs}
    envelope = wire.split_packed(body)
    assert list(map(bytes, envelope.blobs)) == blobs
    assert envelope.meta == {"step": 3}
    for broken in (b"{}", b"", b"\x80", body[:-1]):
        with pytest.raises(GroupError, match="not a packed message"):
            wire.split_packed(broken)
    with pytest.raises(GroupError, match="version: packed format 2, expected 1"):
        wire.split_packed(body.replace(b"version\x01", b"version\x02"))


def test_a_checked_group_owns_its_arrays() -> None:
    blob = bytearray(packed(arrays={"advantages": ["f8", struct.pack("<3d", 0.1, 0.2, 0.3)]}))
    group = wire.unpack_group(memoryview(blob), strictness=Strictness.WIRE)
    before = group.to_dict()
    blob[:] = bytes(len(blob))
    assert group.to_dict() == before
    assert group.tokens.flags.writeable
    assert group.masks.flags.writeable
