"""Bodies in JSON that are no group that a trainer could use, and how each is refused."""

import gzip
import json
from typing import NamedTuple

import msgspec

from tests.builders.tables import table


class BadBody(NamedTuple):
    """A body, and what it is refused with: "where: what"."""

    name: str
    body: bytes
    says: str


GROUP = {"tokens": "[[1, 2], [3, 4]]", "masks": "[[-100, 2], [-100, 4]]", "scores": "[0.0, 1.0]"}
"""The least that a group has, field by field."""
WORDS = {
    "HUGE": "9" * 10_000,
    "LONG": "x" * 129,
    "NESTED": "[" * 900 + "]" * 900,
    "JUST_TOO_DEEP": "[" * 501 + "]" * 501,
    "BOTTOMLESS": "[" * 100_000 + "]" * 100_000,
    "OBJECTS": '{"a":' * 100_000 + "1" + "}" * 100_000,
}
"""What the words of the table stand for."""


def with_fields(**changes: str | None) -> bytes:
    """Return a group in JSON with these fields, each as it is to stand there; None leaves one out."""
    fields = {name: text for name, text in (GROUP | changes).items() if text is not None}
    text = ", ".join(f'"{name}": {text}' for name, text in fields.items())
    for word, meaning in WORDS.items():
        text = text.replace(word, meaning)
    return ("{" + text + "}").encode()


BAD_FIELDS = [
    BadBody(f"{name} {text}", with_fields(**{name: text}), says.replace("FIELD", name))
    for names, rows in table("bad_groups").items()
    for name in names.split()
    for text, says in rows
]
"""The rows of data/bad_groups.yaml."""

WHOLE = with_fields()
WITH_ID = with_fields(group_id='"@"')
BAD_BODIES = [
    BadBody("empty", b"", "body: not JSON: Input data was truncated; it ends early"),
    BadBody("a space", b" ", "body: not JSON"),
    BadBody("half an object", WHOLE[:1], "body: not JSON: Input data was truncated"),
    BadBody("half a row", b'{"tokens": [[1,2', "sequences[0].tokens[2]: not JSON: Input data was"),
    BadBody("null", b"null", "body: expected object, got null"),
    BadBody("a number", b"1", "body: expected object, got int"),
    BadBody("a string", b'"x"', "body: expected object, got str"),
    BadBody("a list", b"[]", "body: expected object, got array"),
    BadBody("a list of a group", b"[" + WHOLE + b"]", "body: expected object, got array"),
    BadBody("an empty object", b"{}", "tokens: required, but missing"),
    BadBody("masks alone", b'{"masks": [[1]]}', "tokens: required, but missing"),
    BadBody("a number of tokens", b'{"tokens": 1}', "tokens: expected array, got int"),
    BadBody("no JSON", b"tokens=1&masks=2", "body: not JSON"),
    BadBody("XML", b"<?xml version='1.0'?><!DOCTYPE x>", "body: not JSON"),
    BadBody("a group and a comma", WHOLE + b",", "body: not JSON: JSON is malformed: trailing"),
    BadBody("two groups", WHOLE * 2, "body: not JSON: JSON is malformed: trailing characters"),
    BadBody(
        "a group and a null byte", WHOLE + b"\0", "body: not JSON: JSON is malformed: trailing"
    ),
    BadBody("a byte order mark", b"\xef\xbb\xbf" + WHOLE, "body: not JSON"),
    BadBody("UTF-16", WHOLE.decode().encode("utf-16"), "body: not JSON"),
    BadBody("UTF-32", WHOLE.decode().encode("utf-32"), "body: not JSON"),
    BadBody("invalid UTF-8", b"\xff\xfe\xfd", "body: not JSON"),
    BadBody("invalid UTF-8 in a key", b'{"\xff": 1}', "tokens: required, but missing"),
    BadBody("invalid UTF-8 in an id", WITH_ID.replace(b"@", b"\xc3\x28"), "body: not JSON: "),
    BadBody("overlong UTF-8 in an id", WITH_ID.replace(b"@", b"\xc0\xaf"), "body: not JSON: "),
    BadBody(
        "invalid UTF-8 in images",
        with_fields(images='"@"').replace(b"@", b"\xff"),
        "images: ",
    ),
    BadBody("a control character", WITH_ID.replace(b"@", b"\x01"), "body: not JSON"),
    BadBody("a comment", b"/* */" + WHOLE, "body: not JSON"),
    BadBody("single quotes", WHOLE.replace(b'"', b"'"), "body: not JSON"),
    BadBody(
        "more logprobs than ids",
        with_fields(
            distill_token_ids="[[[1], []], [[], []]]", distill_logprobs="[[[1], [2]], [[], []]]"
        ),
        "sequences[0].distill_logprobs[1]: 1 values for 0 ids",
    ),
    BadBody("nesting of 900", b"[" * 900 + b"]" * 900, "body: expected object, got array"),
    BadBody("nesting of 900, no end", b"[" * 900, "body: expected object, got array"),
    BadBody("nesting of 100k", b"[" * 100_000 + b"]" * 100_000, "body: expected object"),
    BadBody("nesting of 100k, no end", b"[" * 100_000, "body: expected object"),
    BadBody("nesting of 100k objects", b'{"a":' * 100_000, "body: nested too deeply"),
    BadBody("an integer of 10k digits", b"9" * 10_000, "body: number out of range"),
    BadBody("a gzip body without its header", gzip.compress(WHOLE), "body: not JSON"),
    BadBody("a packed body", msgspec.msgpack.encode({"version": 1}), "body: not JSON"),
    BadBody("a mebibyte of null bytes", bytes(2**20), "body: not JSON"),
    BadBody("a mebibyte of quotes", b'"' * 2**20, "body: expected object, got str"),
    BadBody("a mebibyte of brackets", b"[" * 2**20, "body: expected object, got array"),
    BadBody(
        "100k keys", json.dumps({str(i): 1 for i in range(100_000)}).encode(), "tokens: required"
    ),
]
