"""Input that no honest client sends: what the hub answers, and that it works afterwards.

One table of requests against one hub in this process. Whatever a row says, no answer is a 5xx, and after the whole
table a good group still passes through and the account closes. Bombs and slow senders need a real process:
test_hub_attacks.py.
"""

from __future__ import annotations

import gzip
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import zstandard

from atroposlib.api.server import create_app
from atroposlib.scored_data import Strictness
from atroposlib.wire import CONTENT_TYPE_PACKED, split_packed, unpack_group
from tests.api.helpers_api import registration
from tests.builders.json_groups import BAD_BODIES, BAD_FIELDS, with_fields
from tests.builders.packed_groups import BAD_PACKED, IDS, SAMPLED, blob, f64, u32
from tests.faults.asgi_calls import Answer, Caller, Headers, hub_on_disk
from tests.faults.drivers import assert_balanced

BATCH_SIZE = 4
DETAILED = (404, 409, 422)
"""Statuses whose answers are JSON with a `detail`."""
JSON: Headers = (("Content-Type", "application/json"),)
PACKED: Headers = (("Content-Type", CONTENT_TYPE_PACKED),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request and the answer it gets."""

    target: str
    name: str = ""
    method: str = "POST"
    body: bytes = b""
    headers: Headers = JSON
    statuses: tuple[int, ...] = (422,)
    says: str = ""
    """Parts of the answer's text, separated by ": ": a place, and what is said of it."""


def a_group(**changes: Any) -> dict[str, Any]:
    group = {"tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [0.0, 1.0]}
    return group | changes


class Literal(str):
    """JSON text that `json.dumps` would not write."""


def to_json(value: Any) -> bytes:
    """Encode, with each `Literal` as it stands."""
    literals: list[str] = []

    def note(each: Any) -> Any:
        if isinstance(each, Literal):
            literals.append(str(each))
            return f"literal{len(literals) - 1}"
        if isinstance(each, dict):
            return {key: note(member) for key, member in each.items()}
        return [note(member) for member in each] if isinstance(each, list) else each

    text = json.dumps(note(value))
    for number, literal in enumerate(literals):
        text = text.replace(f'"literal{number}"', literal, 1)
    return text.encode()


HUGE = Literal("9" * 10_000)
LONE = Literal(r'"\ud800"')
NAN = Literal("NaN")


ODD_BUT_VALID: list[tuple[str, dict[str, Any]]] = [
    ("unknown environment", {"env_id": 999}),
    ("environment -1", {"env_id": -1}),
    ("one advantage per sequence", {"advantages": [0.5, -0.5]}),
    ("environment -999", {"env_id": -999}),
    ("least environment", {"env_id": -(2**63)}),
    ("largest environment", {"env_id": 2**63 - 1}),
    ("masks that are no labels", {"masks": [[0, 1], [-(2**31), 2**31 - 1]]}),
    ("largest token", {"tokens": [[0, 2**31 - 1], [0, 0]]}),
    ("minus zero token", {"tokens": [[Literal("-0"), 1], [0, 0]]}),
    ("no tokens at all", {"tokens": [[], []], "masks": [[], []]}),
    ("largest scores", {"scores": [1.7976931348623157e308, -1.7976931348623157e308]}),
    ("score that underflows", {"scores": [Literal("1e-400"), Literal("-0.0")]}),
    ("scores with 400 digits", {"scores": [Literal("0." + "3" * 400), Literal("1" * 300)]}),
    ("integers as scores", {"scores": [0, 2**63]}),
    ("integer of 70 bits as score", {"scores": [0, 2**70]}),
    ("empty optional lists", {"messages": [], "overrides": [], "advantages": []}),
    ("empty conversations", {"messages": [[], []]}),
    ("null byte in a message", {"messages": [[{"role": "\0", "content": "\0"}], []]}),
    ("content of any kind", {"messages": [[{"role": "u", "content": [1, None, {"a": 2}]}], []]}),
    ("large integer in a dict", {"generation_params": {"seed": 2**70}}),
    ("unknown keys", {"__proto__": {}, "tokens ": 1, "Tokens": 2, "": 3}),
    ("images of any kind", {"images": [[1, "x"], None]}),
    ("largest policy version", {"policy_version": 2**63 - 1}),
    ("negative policy version", {"policy_version": -5}),
    ("no ids to distill", {"distill_token_ids": [[[], []], [[], []]]}),
    ("group id of punctuation", {"group_id": "../../etc/passwd'; DROP TABLE groups;--\n\0"}),
    ("group id of 128 emoji", {"group_id": "\U0001f600" * 128}),
]

LIST_BODIES: list[tuple[str, bytes, str]] = [
    ("an object", to_json(a_group()), "expected array"),
    ("null", b"null", "expected array"),
    ("a list of null", b"[null]", "[0]"),
    ("a list of lists", b"[[]]", "[0]"),
    ("a list of empty objects", b"[{}]", "[0].tokens"),
    ("1025 groups", b"[" + b",".join([to_json(a_group())] * 1025) + b"]", "length <= 1024"),
    ("100k empty lists", b"[" + b",".join([b"[]"] * 100_000) + b"]", "[0]"),
    (
        "a group that is too large at the end",
        to_json([a_group()] * 3 + [a_group(scores=[])]),
        "[3]",
    ),
]


def group_cases() -> Iterator[Case]:
    """Groups in JSON."""
    for name, body, says in [*BAD_FIELDS, *BAD_BODIES]:
        yield Case(name=name, target="/scored_data", body=body, says=says)
    for name, body, _ in BAD_FIELDS:
        listed = b"[" + to_json(a_group()) + b"," + body + b"]"
        yield Case(name=f"second of a list: {name}", target="/scored_data_list", body=listed)
    for name, changes in ODD_BUT_VALID:
        body = to_json(a_group(**changes))
        yield Case(name=name, target="/scored_data", body=body, statuses=(200,))
    for body in CONTROL_BODIES:
        if body != b"[]":
            yield Case(name="no list", target="/scored_data_list", body=body)
    for name, body, says in LIST_BODIES:
        yield Case(name=f"list: {name}", target="/scored_data_list", body=body, says=says)
    yield Case(
        name="no sequences",
        target="/scored_data",
        body=to_json(a_group(tokens=[], masks=[], scores=[])),
    )
    five = to_json({"tokens": [[1]] * 5, "masks": [[1]] * 5, "scores": [0] * 5})
    yield Case(name="larger than a batch", target="/scored_data", body=five, says="tokens")
    many = to_json({"tokens": [[]] * 65537, "masks": [[]] * 65537, "scores": [0] * 65537})
    yield Case(name="65537 sequences", target="/scored_data", body=many, says="length <= 65536")
    yield Case(name="an empty list", target="/scored_data_list", body=b"[]", statuses=(200,))


def headed(
    name: str, body: bytes, header: str, value: str, *, target: str = "/scored_data", **answer: Any
) -> Case:
    headers = [(header, value)]
    return Case(name=f"coding: {name}", target=target, body=body, headers=headers, **answer)


def coding_cases() -> Iterator[Case]:
    """Bodies that are not what their headers say; more of them: tests/api/test_hub_limits.py."""
    good = to_json(a_group())
    packed = gzip.compress(good)
    raw = zlib.compressobj(9, zlib.DEFLATED, -15)
    rows: list[tuple[str, str, bytes, int, str]] = [
        ("gzip with a wrong size", "gzip", packed[:-4] + bytes(4), 400, ""),
        ("gzip head with reserved flags", "gzip", packed[:3] + b"\xff" + packed[4:], 400, ""),
        ("gzip of unknown method", "gzip", packed[:2] + b"\x07" + packed[3:], 400, ""),
        ("raw deflate", "gzip", raw.compress(good) + raw.flush(), 400, ""),
        ("unknown coding", "\xff", good, 415, "must be one of"),
        ("an endless name", "x" * 9999, good, 415, "must be one of"),
        ("gzip of no JSON", "gzip", gzip.compress(b"\xff"), 422, "not JSON"),
        ("a zstd frame of 4 EiB", "zstd", ZSTD_4_EIB, 413, ""),
        ("a zstd dictionary", "zstd", b"\x28\xb5\x2f\xfd\x21\x07\x02" + bytes(8), 400, ""),
    ]
    for name, coding, body, status, says in rows:
        yield headed(name, body, "Content-Encoding", coding, statuses=(status,), says=says)
    everywhere = [
        ("a stack of gzip", "gzip, gzip", gzip.compress(packed), (415,)),
        ("gzip of gzip", "gzip", gzip.compress(packed), (400, 422)),
        ("gzip of nothing", "gzip", gzip.compress(b""), (400, 422)),
        ("gzip of an empty key", "gzip", gzip.compress(b'{"tokens":' * 100_000), (400, 422)),
        ("a gzip bomb around a group", "gzip", gzip.compress(good + b" " * 10 * 2**20), (413,)),
        (
            "a zstd bomb around a group",
            "zstd",
            zstandard.compress(good + b" " * 10 * 2**20),
            (413,),
        ),
        ("a bomb of tokens", "gzip", gzip.compress(b'{"tokens":[[' + b"0," * 5 * 2**20), (413,)),
    ]
    for name, coding, body, statuses in everywhere:
        for target in ("/scored_data", "/scored_data_list", "/register"):
            yield headed(name, body, "Content-Encoding", coding, target=target, statuses=statuses)
    for encoding, whole in (("gzip", packed), ("zstd", zstandard.compress(good))):
        for end in range(1, len(whole), 5):
            name = f"{encoding} cut after {end} bytes"
            answer: dict[str, Any] = {"statuses": (400,), "says": f"Invalid {encoding}"}
            yield headed(name, whole[:end], "Content-Encoding", encoding, **answer)
    for target in ("/register", "/status-env", "/register-env", "/policy"):
        bomb = gzip.compress(b" " * (2 * 2**20))
        name = f"a bomb for {target}"
        yield headed(name, bomb, "Content-Encoding", "gzip", target=target, statuses=(413,))
        large = b" " * (2**20 + 1)
        yield Case(name=f"a large body for {target}", target=target, body=large, statuses=(413,))
    lengths = [("-1", (200, 400)), ("1e3", (200, 400)), ("9" * 30, (413,)), ("x", (200, 400))]
    for text, statuses in lengths:
        yield headed(f"length {text}", good, "Content-Length", text, statuses=statuses)
    types = ("text/plain", "application/xml", "multipart/form-data", "", "\xff", "x" * 9999)
    for kind in types:
        name = f"type {kind[:20]}"
        yield headed(name, good, "Content-Type", kind, statuses=(200,), says="received")


ZSTD_4_EIB = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62) + bytes(8)


def envelope(*blobs: bytes, **changes: Any) -> bytes:
    parts = {"version": 1, "meta": {}, "groups": list(blobs)} | changes
    return msgspec.msgpack.encode({k: v for k, v in parts.items() if v is not ...})


RICH = blob(
    arrays=SAMPLED,
    distill=IDS,
    tail={"messages": b'[[{"role":"user","content":"x"}],[]]', "images": b"null"},
    empty=["overrides"],
    env_id=999,
    policy_version=3,
)

NO_BATCH_HOLDS: list[tuple[dict[str, Any], str]] = [
    ({"lengths": u32(0, 0, 0, 2, 2), "scores": f64(0, 0, 0, 0, 0)}, "tokens: 5 sequences"),
    ({"lengths": bytes(4_000_000), "scores": bytes(8_000_000), "tokens": b"", "trained": b""}, ""),
    ({"lengths": b"", "scores": b"", "tokens": b"", "trained": b""}, ""),
]
"""Changes to a packed group that a trainer could read, and what the hub says."""
ENVELOPES: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "not a packed message"),
    ("JSON", to_json(a_group()), "not a packed message"),
    ("a group without its envelope", blob(), "not a packed message"),
    ("no groups", envelope(), "0 in the message"),
    ("two groups", envelope(blob(), blob()), "2 in the message"),
    ("version 0", envelope(blob(), version=0), "version"),
    ("version 2", envelope(blob(), version=2), "version"),
    ("version of 64 bits", envelope(blob(), version=2**64 - 1), "version"),
    ("version as text", envelope(blob(), version="1"), "version"),
    ("no version", envelope(blob(), version=...), "version"),
    ("no meta", envelope(blob(), meta=...), "meta"),
    ("meta as a list", envelope(blob(), meta=[]), "meta"),
    ("no groups key", envelope(groups=...), "groups"),
    ("groups as a map", envelope(groups={}), "groups"),
    ("groups as a binary", envelope(groups=blob()), "groups"),
    ("a group as a map", envelope(groups=[{"lengths": b""}]), "groups"),
    ("a group as a string", envelope(groups=["x"]), "groups"),
    ("an empty group", envelope(b""), "not a packed group"),
    ("a group of one byte", envelope(b"\xc1"), "not a packed group"),
    ("a group that is JSON", envelope(to_json(a_group())), "not a packed group"),
    ("a group of NaN", envelope(b"\xcb\x7f\xf8" + bytes(6)), "not a packed group"),
    ("a group with a tail", envelope(blob() + b"\0"), "not a packed group"),
    ("a message with a tail", envelope(blob()) + b"\0", "not a packed message"),
    ("two messages", envelope(blob()) * 2, "not a packed message"),
    ("an extension type", b"\xc7\xff\xff" + bytes(8), "not a packed message"),
    ("a reserved byte", b"\xc1", "not a packed message"),
    ("meta nested 100k", b"\x81\xa4meta" + b"\x91" * 100_000, "not a packed message"),
    ("meta nested 100k, in a map", b"\x81\xa4meta\x81\xa1a" + b"\x91" * 100_000, ""),
    ("a binary of 4 GiB announced", b"\x81\xa6groups\x91\xc6\xff\xff\xff\xff", ""),
    ("4 Gi groups announced", b"\x81\xa6groups\xdd\xff\xff\xff\xff", ""),
    ("a meta of 4 Gi keys announced", b"\x81\xa4meta\xdf\xff\xff\xff\xff", ""),
    ("4 Gi values in meta announced", b"\x81\xa4meta\x81\xa1a\xdd\xff\xff\xff\xff", ""),
    ("4 Gi keys announced", b"\xdf\xff\xff\xff\xff", ""),
    ("a string of 4 GiB announced", b"\x81\xdb\xff\xff\xff\xff", ""),
    ("an extension of 4 GiB announced", b"\x81\xa4meta\x81\xa1a\xc9\xff\xff\xff\xff\x05", ""),
    ("a timestamp out of range", b"\x81\xa4meta\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12, ""),
    ("4 Gi lengths announced", envelope(b"\x81\xa7lengths\xc6\xff\xff\xff\xff"), ""),
    ("4 Gi arrays announced", envelope(b"\x81\xa6arrays\xdf\xff\xff\xff\xff"), ""),
]


def packed(name: str, body: bytes, *, target: str = "/scored_data", **answer: Any) -> Case:
    return Case(name=f"packed: {name}", target=target, body=body, headers=PACKED, **answer)


def packed_cases() -> Iterator[Case]:
    """Groups in the packed encoding."""
    for changes, says in [*BAD_PACKED, *NO_BATCH_HOLDS]:
        yield packed(f"{str(changes)[:60]}", envelope(blob(**changes)), says=says)
    for name, body, says in ENVELOPES:
        yield packed(name, body, says=says)
    whole = envelope(RICH)
    yield packed("everything", whole, statuses=(200,))
    for end in range(1, len(whole), 3):
        yield packed(f"cut after {end} bytes", whole[:end], says="not a packed message")
    for end in range(1, len(RICH), 3):
        cut_off = envelope(RICH[:end])
        yield packed(f"group cut after {end} bytes", cut_off, says="not a packed group")
    # A flipped bit may make another valid group, such as one with another token; never a server error.
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        yield packed(f"byte {position} flipped", bytes(flipped), statuses=(200, 422))
    many = "/scored_data_list"
    yield packed("1025 groups", envelope(*[blob()] * 1025), target=many)
    second_is_bad = envelope(blob(), blob(scores=b""))
    yield packed("the second of two is bad", second_is_bad, target=many, says="[1].scores")
    yield packed("JSON said to be packed", to_json([a_group()]), target=many)


TRAINER = registration(batch_size=BATCH_SIZE)
ENVIRONMENT = {"max_token_length": 64, "desired_name": "foo", "weight": 1.0, "group_size": 2}
LEASE_IDS = [..., None, 5, "x" * 129]
CONTROL: list[tuple[str, dict[str, Any], dict[str, list[Any]]]] = [
    (
        "/register",
        TRAINER,
        {
            "batch_size": [0, -8, 2**70, 16_385, 0.5, "many", None, [], NAN, HUGE],
            "max_token_len": [2**70, None],
            "starting_step": [2**63, "x", Literal("1e400")],
            "num_steps": [-(2**70)],
            "save_checkpoint_interval": [{}],
            "checkpoint_dir": [5, LONE],
            "wandb_group": [None],
            "wandb_project": [["p"]],
            "max_staleness": [-1, 2**62],
            "resume_step": [-1, 2**62, "x"],
            "resume": ["backwards", None],
        },
    ),
    (
        "/register-env",
        ENVIRONMENT,
        {
            "weight": [NAN, Literal("Infinity"), Literal("1e400"), "heavy", None, HUGE],
            "group_size": [0, -2, 2**31, 1.5, None, "x"],
            "max_token_length": [2**63, None],
            "desired_name": [5, LONE],
            "min_batch_allocation": [-0.1, NAN, 1e308, Literal("Infinity"), "half"],
            "env_uid": ["", "x" * 129, 5],
        },
    ),
    ("/policy", {"version": 3}, {"version": [-1, 2**63, "x", None, 1.5, NAN, ...]}),
    ("/disconnect-env", {"env_id": 0}, {"env_id": ["x", None, 2**63, -(2**70), [], ...]}),
    (
        "/status-env",
        {"env_id": 0},
        {
            "env_id": ["x", None, 2**63, 0.5, [], NAN, ...],
            "wait": [-1, NAN, Literal("Infinity"), "long"],
            "seen_step": [2**63, "x"],
            "seen_policy": [2**70],
            "env_uid": ["x" * 129, LONE],
        },
    ),
    (
        "/batches/0/ack",
        {"lease_id": "x"},
        {"lease_id": [*LEASE_IDS, [], LONE], "step": [-1, 2**63, "x", 1.5]},
    ),
    ("/batches/0/heartbeat", {"lease_id": "x"}, {"lease_id": LEASE_IDS}),
    ("/batches/0/release", {"lease_id": "x"}, {"lease_id": LEASE_IDS}),
    (
        "/checkpoints",
        {"step": 0},
        {"step": [..., None, -1, 2**63, "x", 0.5], "path": [5, "x" * 4097, []]},
    ),
    (
        "/dead/requeue",
        {"numbers": []},
        {"numbers": [..., None, 5, "x", ["x"], [0.5], [None], [0] * 100_001]},
    ),
]
"""Route, a good body, and values of its fields that are refused; `...`: left out."""
CONTROL_BODIES = [b"", b" ", b"null", b"[]", b"1", b'"x"', b"{", b"\xff", b"[" * 100_000, b"NaN"]


def control_cases() -> Iterator[Case]:
    """Everything but groups."""
    for target, good, changes in CONTROL:
        for field, value in [(key, value) for key in changes for value in changes[key]]:
            given = {k: v for k, v in (good | {field: value}).items() if v is not ...}
            statuses = (400, 422) if value is HUGE else (422,)
            yield Case(target=target, body=to_json(given), statuses=statuses, says="detail")
        for body in CONTROL_BODIES:
            yield Case(target=target, body=body, statuses=(400, 422))
    known_form = ("0", "-1", "999", str(2**63), str(2**70), "9" * 4000)
    no_numbers = ("9" * 5000, "x", "1.5", "0x1", "%00", "NaN", "%F0%9F%98%80")
    for batch_id in known_form + no_numbers:
        statuses = (404,) if batch_id in known_form else (422,)
        for what in ("ack", "heartbeat", "release"):
            target = f"/batches/{batch_id}/{what}"
            yield Case(target=target, body=b'{"lease_id": "x"}', statuses=statuses)
    queries = [
        *("lease=maybe", "lease=", "lease=1&request_id=", "lease=1&request_id=" + "x" * 129),
        *(f"lease=1&ttl={ttl}" for ttl in ("0", "-1", "NaN", "inf", "1e400", "86401", "x")),
        *(f"wait={wait}" for wait in ("-1", "NaN", "inf", "x", "")),
    ]
    for query in queries:
        yield Case(target=f"/batch?{query}", method="GET")
    unknown = [f"env_id={env_id}" for env_id in (999, -1, -999, 2**63 - 1)]
    wrong = [f"env_id={env_id}" for env_id in (2**63, 2**70, "9" * 5000, "", "x", "1.5", "NaN")]
    wrong += ["env_id=%FF", "env_id=%00", ""]
    wrong += [f"env_id=999&{more}" for more in ("wait=1e400", "wait=-1", "seen_step=x", "env_id=x")]
    for query in unknown + wrong:
        target, statuses = f"/status-env?{query}", (404,) if query in unknown else (422,)
        for method in ("GET", "POST"):
            yield Case(target=target, method=method, statuses=statuses, says="detail")
    for env_id in (999, -1, -999, 2**63 - 1, -(2**63)):
        body = to_json({"env_id": env_id})
        yield Case(target="/disconnect-env", body=body, statuses=(200,), says='"failure"')
    wrong_methods = ("GET /scored_data", "PUT /scored_data", "DELETE /batch", "POST /batch")
    wrong_methods += ("OPTIONS /scored_data", "TRACE /status", "FOO /status")
    run_names = ("..%2f..%2fetc", "..", "", "%00", ".hidden", "x" * 65, "a%20b", quote("\u00e4"))
    no_routes = [
        *("GET /nowhere", "GET //status", "GET /status/../ledger", "GET /STATUS"),
        *("GET /%2e%2e/%2e%2e/etc/passwd", "GET /runs/default/runs/default/status"),
        *("DELETE /runs/..", "DELETE /runs/never-opened", "GET /" + "x" * 60_000),
        *(f"GET /runs/{name}/status" for name in run_names),
    ]
    for line in [*wrong_methods, *no_routes]:
        method, _, target = line.partition(" ")
        statuses = (405,) if line in wrong_methods else (404,)
        yield Case(target=target, method=method, statuses=statuses, says="detail")


def problem(case: Case, answer: Answer) -> str | None:
    """Say what is wrong with an answer; None for nothing."""
    if answer.status not in case.statuses:
        return f"{answer.status}, expected {case.statuses}: {answer.text()[-300:]}"
    if answer.status in DETAILED and not answer.json()["detail"]:
        return "no detail"
    if answer.status >= 400 and len(answer.body) > 5000:
        return f"an answer of {len(answer.body)} bytes"
    if not answer.body:
        return "an empty answer"
    if not all(part in answer.text() for part in case.says.split(": ")):
        return f"{answer.status} without {case.says!r}: {answer.text()[:300]}"
    return None


@pytest.mark.timeout(60)
async def test_hostile_input_gets_the_answer_of_the_table_and_harms_no_other_client(
    tmp_path: Path,
) -> None:
    # Made here: it would take half a second of every process that collects tests.
    cases = [*group_cases(), *coding_cases(), *packed_cases(), *control_cases()]
    assert len(cases) > 1400
    app = create_app(hub_on_disk(tmp_path))
    call = Caller(app)
    async with app.router.lifespan_context(app):
        assert (await call("POST", "/register", to_json(TRAINER), headers=JSON)).status == 200
        assert (await call("GET", "/batch")).json() == {"batch": None}
        assert (await call("POST", "/register-env", to_json(ENVIRONMENT), headers=JSON)).json()[
            "env_id"
        ] == 0
        problems = []
        for case in cases:
            answer = await call(case.method, case.target, case.body, headers=case.headers)
            wrong = problem(case, answer)
            if wrong is not None:
                sent = f"{case.method} {case.target[:80]} {case.body[:80]!r} ({case.name})"
                problems.append(f"{sent}: {wrong}")
        assert not problems, f"{len(problems)} of {len(cases)}\n" + "\n".join(problems)
        assert (await call("GET", "/status-env?env_id=0")).status == 200
        num_drained = await drain(call)
        good = to_json(a_group(group_id="good", env_id=0, generation_params={"last": True}))
        for number in range(2):
            body = good.replace(b'"good"', b'"good-%d"' % number)
            assert (await call("POST", "/scored_data", body)).json() == {"status": "received"}
        batch = (await call("GET", "/batch")).json()["batch"]
        assert [group["generation_params"] for group in batch[-2:]] == [{"last": True}] * 2
        ledger = (await call("GET", "/ledger")).json()
        assert_balanced(ledger)
        assert ledger["queued"] == ledger["leased"] == ledger["dead"] == 0
        assert ledger["trained"] == num_drained + len(batch)


async def drain(call: Callable[..., Any]) -> int:
    """Take everything that was let in, as JSON and packed in turn: each batch must be readable. Return the groups."""
    num_groups = 0
    for turn in range(10_000):
        headers = [("Accept", CONTENT_TYPE_PACKED)] if turn % 2 else []
        answer = await call("GET", "/batch", headers=headers)
        assert answer.status == 200, answer.text()
        if answer.headers["content-type"].startswith(CONTENT_TYPE_PACKED):
            groups = split_packed(answer.body).blobs
            for each in groups:
                unpack_group(each, strictness=Strictness.WIRE)
            num_groups += len(groups)
            continue
        batch = answer.json()["batch"]
        if batch is not None:
            num_groups += len(batch)
            continue
        explained = (await call("GET", "/explain")).json()
        if explained["queued_groups"] == 0:
            return num_groups
        filler = to_json({"tokens": [[1]], "masks": [[1]], "scores": [0]})
        assert (await call("POST", "/scored_data", filler)).status == 200
    raise AssertionError("the queue does not end")


COSTLY: dict[str, tuple[str, bytes]] = {
    "a string of escaped quotes that does not end": ("/scored_data", b'{"tokens": "' + b'\\"' * 30_000 + b"\x01"),
    "a key of escaped quotes that does not end": ("/scored_data", b'{"' + b'\\"' * 30_000 + b"\x01"),
    "backslashes": ("/scored_data", b'{"a": "' + b"\\" * 60_001 + b"\x01"),
    "empty strings and a NaN": ("/scored_data", b'{"a": [' + b'"",' * 20_000 + b"NaN]}"),
    "a megabyte of escaped quotes": ("/scored_data", b'{"tokens": "' + b'\\"' * 500_000 + b"\\x"),
    "a megabyte of digits": ("/scored_data", with_fields(scores="[" + "9" * 2**20 + ", 0]")),
    "numbers and a boolean": ("/scored_data", with_fields(tokens="[[" + "1," * 30_000 + "true], []]")),
    "distilled lists and a float": ("/scored_data", with_fields(distill_token_ids=f"[[{'[1],' * 900}[1.5]], []]")),
    "100k wrong numbers": ("/dead/requeue", b'{"numbers": [' + b'"x",' * 99_000 + b'"x"]}'),
    "330k objects in an unknown field": ("/policy", b'{"version": -1, "x": [' + b"{}," * 330_000 + b"{}]}"),
    "95k unknown keys": ("/status-env", b"{" + b",".join(b'"%d":1' % i for i in range(95_000)) + b"}"),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
async def test_refusing_a_body_takes_little_time(name: str) -> None:
    target, body = COSTLY[name]
    app = create_app()
    call = Caller(app)
    async with app.router.lifespan_context(app):
        began = time.process_time()  # of all threads: a neighbour on the machine adds nothing
        answer = await call("POST", target, body, headers=JSON)
        spent_s = time.process_time() - began
    assert answer.status == 422
    assert len(answer.body) < 1000
    assert spent_s < 0.5
