"""Groups in the packed encoding: one that is whole, and every way in which one can be refused."""

import struct
from typing import Any

import msgspec


def u32(*values: int) -> bytes:
    """Return the values as they stand in a packed group: little-endian, 4 bytes each."""
    return struct.pack(f"<{len(values)}I", *values)


def f32(*values: float) -> bytes:
    """Return the values as they stand in an array of width "f4"."""
    return struct.pack(f"<{len(values)}f", *values)


def f64(*values: float) -> bytes:
    """Return the values as they stand in the scores, or in an array of width "f8"."""
    return struct.pack(f"<{len(values)}d", *values)


def blob(**changes: Any) -> bytes:
    """Make a packed group of two sequences of two tokens; `...` leaves a field out."""
    lengths, tokens, scores = u32(2, 2), u32(1, 2, 3, 4), f64(0.0, 1.0)
    parts = {"lengths": lengths, "tokens": tokens, "scores": scores, "trained": b"\x50"} | changes
    return msgspec.msgpack.encode({key: value for key, value in parts.items() if value is not ...})


IDS = {"distill_token_ids": (u32(1, 0, 2, 1), "i4", struct.pack("<4i", 1, 2, 3, 4))}
LOGPROBS = {"distill_logprobs": (u32(1, 0, 0, 0), "f4", f32(-1.0))}
SAMPLED = {"inference_logprobs": ("f4", f32(1, -1, 1, -2))}

BAD_PACKED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": ...}, "not a packed group: Object missing required field `lengths`"),
    ({"tokens": ...}, "not a packed group: Object missing required field `tokens`"),
    ({"scores": ...}, "not a packed group: Object missing required field `scores`"),
    ({"trained": ...}, "masks: required, but neither `trained` nor `masks` is present"),
    ({"lengths": bytes(7)}, "lengths: 7 bytes, expected a multiple of 4"),
    ({"lengths": u32(2)}, "tokens: 16 bytes, expected 2 x 4"),
    ({"lengths": u32(2, 3)}, "tokens: 16 bytes, expected 5 x 4"),
    ({"lengths": u32(2**32 - 1, 5)}, "tokens: 16 bytes, expected 4294967300 x 4"),  # no overflow of 32 bits
    ({"lengths": u32(*[2**32 - 1] * 4)}, "tokens: 16 bytes, expected 17179869180 x 4"),
    ({"lengths": struct.pack("<2Q", 2, 2)}, "scores: 16 bytes, expected 4 x 8"),
    ({"lengths": struct.pack(">2I", 2, 2)}, "tokens: 16 bytes, expected 67108864 x 4"),
    ({"lengths": [2, 2]}, "not a packed group: Expected `bytes`, got `array` - at `$.lengths`"),
    ({"lengths": "\2\0\0\0"}, "not a packed group: Expected `bytes`, got `str` - at `$.lengths`"),
    ({"lengths": None}, "not a packed group: Expected `bytes`, got `None` - at `$.lengths`"),
    ({"tokens": bytes(15)}, "tokens: 15 bytes, expected 4 x 4"),
    ({"tokens": struct.pack("<4H", 1, 2, 3, 4)}, "tokens: 8 bytes, expected 4 x 4"),
    ({"tokens": struct.pack("<4Q", 1, 2, 3, 4)}, "tokens: 32 bytes, expected 4 x 4"),
    ({"tokens": u32(1, 2, 3, 2**32 - 1)}, "sequences[1].tokens[1]: token id 4294967295 is not in 0..2147483647"),
    ({"tokens": u32(1, 2, 3, 2**31)}, "sequences[1].tokens[1]: token id 2147483648 is not in 0..2147483647"),
    ({"tokens": {}}, "not a packed group: Expected `bytes`, got `object` - at `$.tokens`"),
    ({"scores": b""}, "scores: 0 bytes, expected 2 x 8"),
    ({"scores": f32(0, 1)}, "scores: 8 bytes, expected 2 x 8"),
    ({"scores": bytes(15)}, "scores: 15 bytes, expected 2 x 8"),
    ({"scores": f64(0, 1, 2)}, "scores: 24 bytes, expected 2 x 8"),
    ({"scores": f64(0, float("nan"))}, "scores[1]: nan is not finite"),
    ({"scores": f64(float("-inf"), 0)}, "scores[0]: -inf is not finite"),
    ({"trained": b""}, "trained: 0 bytes, expected 1 x 1"),
    ({"trained": b"\x50\x00"}, "trained: 2 bytes, expected 1 x 1"),
    ({"trained": 80}, "not a packed group: Expected `bytes | null`, got `int` - at `$.trained`"),
    ({"trained": ..., "masks": u32(1, 2, 3)}, "masks: 12 bytes, expected 4 x 4"),
    ({"trained": ..., "masks": u32(1, 2, 3, 4, 5)}, "masks: 20 bytes, expected 4 x 4"),
    ({"arrays": {"x": ("f4", bytes(16))}}, "arrays.x: unknown array or width 'f4'"),
    ({"arrays": {"advantages": ("f2", bytes(8))}}, "arrays.advantages: unknown array or width 'f2'"),
    ({"arrays": {"advantages": ("O", bytes(32))}}, "arrays.advantages: unknown array or width 'O'"),
    ({"arrays": {"advantages": ("i4", bytes(16))}}, "arrays.advantages: unknown array or width 'i4'"),
    ({"arrays": {"advantages": ("f4", bytes(12))}}, "advantages: 12 bytes, expected 4 x 4"),
    ({"arrays": {"advantages": ("f4", bytes(32))}}, "advantages: 32 bytes, expected 4 x 4"),
    ({"arrays": {"advantages": ("f8", bytes(16))}}, "advantages: 16 bytes, expected 4 x 8"),
    ({"arrays": {"advantages": [bytes(16)]}}, "not a packed group: Expected `array` of length 2, got 1"),
    ({"arrays": {"advantages": ("f4", b"\xff" * 16)}}, "sequences[0].advantages[0]: nan is not finite"),
    ({"arrays": {"advantages": ("f4", f32(0, 0, float("inf"), 0))}}, "sequences[1].advantages[0]: inf is not finite"),
    ({"arrays": {"advantages": ("f4", f32(float("-inf"), 0, 0, 0))}}, "sequences[0].advantages[0]: -inf is not"),
    ({"arrays": []}, "not a packed group: Expected `object`, got `array` - at `$.arrays`"),
    ({"arrays": {str(i): ("f4", b"") for i in range(33)}}, "not a packed group: Expected `object` of length <= 32"),
    ({"arrays": {b"advantages": ("f4", bytes(16))}}, "not a packed group: Expected `str`, got `bytes` - at `key`"),
    ({"distill": {"x": (u32(0, 0, 0, 0), "i4", b"")}}, "distill.x: unknown array or width 'i4'"),
    ({"distill": {"distill_token_ids": (u32(1, 0, 0, 0), "f4", bytes(4))}}, "distill.distill_token_ids: unknown array"),
    ({"distill": {"distill_logprobs": (bytes(16), "i4", b"")}}, "distill.distill_logprobs: unknown array or width"),
    ({"distill": {"distill_token_ids": (u32(*[2**32 - 1] * 4), "i4", bytes(16))}}, "distill_token_ids: 16 bytes"),
    ({"distill": {"distill_token_ids": (b"", "i4", b"")}}, "distill_token_ids.lengths: 0 bytes, expected 4 x 4"),
    ({"distill": {"distill_token_ids": (u32(1, 1, 1), "i4", bytes(12))}}, "distill_token_ids.lengths: 12 bytes"),
    ({"distill": {"distill_token_ids": (u32(1, 1, 1, 1), "i4", bytes(12))}}, "distill_token_ids: 12 bytes, expected 4"),
    ({"distill": {"distill_logprobs": (u32(1, 0, 0, 0), "f4", b"")}}, "distill_logprobs: 0 bytes, expected 1 x 4"),
    ({"distill": {"distill_logprobs": (u32(1, 0, 0, 0), "f4", b"\xff" * 4)}}, "distill_logprobs[0]: nan is not finite"),
    ({"tail": b"x"}, "tail: expected a JSON object: JSON is malformed"),
    ({"tail": b"[]"}, "tail: expected a JSON object: Expected `object`, got `array`"),
    ({"tail": b"[" * 100_000}, "tail: expected a JSON object"),
    ({"tail": b'{"x":1}'}, "tail: unknown field 'x'"),
    ({"tail": {"notes": b"1"}}, "tail: unknown field 'notes'"),
    ({"tail": b'{"tokens":[[1]]}'}, "tail: unknown field 'tokens'"),
    ({"tail": {"tokens": b"[[1]]"}}, "tail: unknown field 'tokens'"),
    ({"tail": {"generation_params": b'{"a":NaN}'}}, "generation_params: JSON is malformed"),
    ({"tail": {"images": b"[" * 100_000}}, "images: nested more than 500 levels deep"),
    ({"tail": {"images": b"[" * 100_000 + b"]" * 100_000}}, "images: nested more than 500 levels deep"),
    ({"tail": {"images": rb'"\ud800"'}}, "images: Input data was truncated"),
    ({"tail": {"images": b'"\xff"'}}, "images: "),
    ({"tail": {"images": b""}}, "images: Input data was truncated"),
    ({"tail": {"images": b"1 2"}}, "images: JSON is malformed: trailing characters"),
    ({"tail": {"messages": b"[1]"}}, "messages: 1 entries for 2 sequences"),
    ({"tail": {"messages": b"[1,[]]"}}, "sequences[0].messages: expected a list of messages"),
    ({"tail": {"messages": b"[[{]]"}}, "messages: JSON is malformed: object keys must be strings"),
    ({"tail": {"messages": b"5"}, "empty": ["messages"]}, "messages: given twice"),
    ({"tail": {"overrides": b"5"}, "empty": ["overrides"]}, "overrides: given twice"),
    ({"tail": b'{"messages":5}', "empty": ["messages"]}, "messages: given twice"),
    ({"distill": IDS, "empty": ["distill_token_ids"]}, "distill_token_ids: given twice"),
    ({"distill": LOGPROBS, "tail": {"distill_logprobs": b"[[[],[]],[[],[]]]"}}, "distill_logprobs: given twice"),
    ({"arrays": SAMPLED, "empty": ["inference_logprobs"]}, "inference_logprobs: given twice"),
    ({"empty": ["ref_logprobs", "ref_logprobs"]}, "ref_logprobs: given twice"),
    ({"tail": 1}, "not a packed group: Expected `bytes | object`, got `int` - at `$.tail`"),
    ({"empty": ["images"]}, "empty: unknown field 'images'"),
    ({"empty": ["tokens"]}, "empty: unknown field 'tokens'"),
    ({"empty": ["notes"]}, "empty: unknown field 'notes'"),
    ({"empty": [1]}, "not a packed group: Expected `str`, got `int` - at `$.empty[0]`"),
    ({"empty": ["overrides"] * 33}, "not a packed group: Expected `array` of length <= 32 - at `$.empty`"),
    ({"env_id": "0"}, "not a packed group: Expected `int | null`, got `str` - at `$.env_id`"),
    ({"env_id": 2**63}, "env_id: expected a 64-bit integer"),
    ({"env_id": 0.5}, "not a packed group: Expected `int | null`, got `float` - at `$.env_id`"),
    ({"group_id": b"x"}, "not a packed group: Expected `str | null`, got `bytes` - at `$.group_id`"),
    ({"group_id": ""}, "group_id: expected 1 to 128 characters or null, got str ''"),
    ({"group_id": "x" * 129}, "group_id: expected 1 to 128 characters or null, got str 'xxx"),
    ({"policy_version": 2**64 - 1}, "policy_version: expected a 64-bit integer or null"),
]  # fmt: skip
"""Changes to `blob`, and how the refusal begins: "where: what"; a trainer and the hub refuse the same."""
