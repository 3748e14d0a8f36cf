"""Generated requests: no answer is a 5xx, no request exceeds the rights of its token, and the ledger always adds up.

schemathesis makes requests from the hub's own OpenAPI document, valid and invalid, and every one is sent as each of
nine roles. Random conversations then call the routes in any order, several at once, on disk. Both are seeded: a run
repeats. More of the same: ATROPOS_FUZZ_SCALE=10 pytest tests/faults/test_hub_fuzz.py -s
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
import random
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from starlette.types import ASGIApp

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.limits import HubLimits
from atroposlib.api.http.security import Scope, Token, TokenSet
from atroposlib.api.server import create_app
from atroposlib.wire import CONTENT_TYPE_PACKED
from tests.api.helpers_api import registration
from tests.api.helpers_replicas import two_replicas
from tests.faults.asgi_calls import Answer, Caller, hub_on_disk
from tests.faults.drivers import assert_balanced

SCALE = int(os.environ.get("ATROPOS_FUZZ_SCALE", "1"))
NUM_EXAMPLES = 8
"""Per operation and mode; in two dresses and nine roles, some 4,000 requests."""
NUM_DRESSES = 2
"""Runs and headers that each generated request is sent with."""
LIMITS = HubLimits(max_wait_s=0.002, hold_s=0.002)

RIGHTS = {
    endpoint: rights
    for rights, endpoints in {
        "anyone": "GET /|GET /healthz|GET /readyz",
        "produce consume read": "GET /info|GET /wandb_info|GET /status",
        "produce": "POST /scored_data|POST /scored_data_list|POST /register-env|POST /disconnect-env"
        "|GET /status-env|POST /status-env",
        "consume": "GET /batch|POST /register|POST /policy|POST /checkpoints"
        "|POST /batches/{batch_id}/heartbeat|POST /batches/{batch_id}/ack"
        "|POST /batches/{batch_id}/release|POST /batches/{batch_id}/reject",
        "read": "GET /ledger|GET /explain|GET /latest_example|GET /dead|GET /metrics",
        "admin": "GET /reset_data|POST /dead/requeue|DELETE /runs/{run}",
    }.items()
    for endpoint in endpoints.split("|")
}
"""Written down a second time, on purpose: a slip in the hub's own table must not pass."""
DOCUMENTATION = ("openapi.json", "docs", "docs/oauth2-redirect", "redoc")
DESTRUCTIVE = ("GET /reset_data", "POST /dead/requeue", "DELETE /runs/{run}")
BODY_FAULTS = {400, 413, 415, 422}
NEEDS_A_KNOWN_ID = {name for name in RIGHTS if "{" in name}
"""Random ids meet no batch and no run; the conversations know some."""
MORE_STATUSES = {
    **dict.fromkeys(("GET /status-env", "POST /status-env", "POST /dead/requeue"), {404}),
    "DELETE /runs/{run}": {404},
    **{f"POST /batches/{{batch_id}}/{what}": {404, 409} for what in ["heartbeat", "ack", "release", "reject"]},
    # 404: the run has not started
    **dict.fromkeys(("POST /checkpoints", "POST /policy", "POST /scored_data", "POST /scored_data_list"), {404, 409}),
    **dict.fromkeys(("GET /batch", "POST /register"), {409}),
}  # fmt: skip


_ROW = {"type": "array", "maxItems": 3, "items": {"type": "integer"}}
GROUP_SCHEMA = {
    "type": "object",
    "required": ["tokens", "masks", "scores"],
    "properties": {
        "tokens": {"type": "array", "maxItems": 4, "items": _ROW},
        "masks": {"type": "array", "maxItems": 4, "items": _ROW},
        "scores": {"type": "array", "maxItems": 4, "items": {"type": "number"}},
        "env_id": {"type": ["integer", "null"]},
        "group_id": {"type": ["string", "null"]},
        "policy_version": {"type": ["integer", "null"]},
        "messages": {"type": ["array", "null"], "items": {"type": "array"}},
        "generation_params": {"type": ["object", "null"]},
        "advantages": {"type": ["array", "null"], "items": {"type": "array"}},
    },
}
"""The document leaves groups open, for their checks are no JSON schema; generated ones should come near to a group."""

JSON_TYPE = ("Content-Type", "application/json")


# Generated from the document


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One request, without what a role adds."""

    operation: str
    """Method and template."""
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Who sends a request, and to which application."""

    name: str
    secret: str | None = None
    has_tokens: bool = True
    """Of the hub that is called."""
    peer: str = "10.0.0.7"


ROLES = [
    Role(name="no tokens, same machine", has_tokens=False, peer="127.0.0.1"),
    Role(name="no tokens, other machine", has_tokens=False),
    Role(name="no token"),
    Role(name="wrong token", secret="unknown-secret"),
    Role(name="elsewhere", secret="secret-of-elsewhere"),
    *(Role(name=scope.value, secret=f"secret-of-{scope.value}") for scope in Scope),
]


def token(name: str, scopes: list[Scope], runs: frozenset[str] | None = None) -> Token:
    digest = hashlib.sha256(f"secret-of-{name}".encode()).hexdigest()
    return Token(name=name, sha256=digest, scopes=frozenset(scopes), runs=runs)


TOKENS = TokenSet(
    [
        *(token(scope.value, [scope]) for scope in Scope),
        token("elsewhere", list(Scope), frozenset(["elsewhere"])),
    ]
)


def document() -> dict[str, Any]:
    described: dict[str, Any] = create_app().openapi()
    one = described["paths"]["/scored_data"]["post"]["requestBody"]["content"]
    many = described["paths"]["/scored_data_list"]["post"]["requestBody"]["content"]
    one["application/json"]["schema"] = GROUP_SCHEMA
    many["application/json"]["schema"] = {"type": "array", "maxItems": 3, "items": GROUP_SCHEMA}
    return described


def generate(num_examples: int) -> Iterator[Generated]:
    """Make requests for every operation: such as the document allows, and such as it does not."""
    schema = schemathesis.openapi.from_dict(document())
    rng = random.Random(7)
    for result in schema.get_all_operations():
        operation = result.ok()
        name = f"{operation.method.upper()} {operation.path}"
        assert name in RIGHTS, f"{name} is not in this test's table of rights"
        takes_input = bool(operation.body) or any(operation.iter_parameters())
        modes = [GenerationMode.POSITIVE]
        if takes_input and name != "DELETE /runs/{run}":  # any text is a valid name there
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)
            for case in sample(strategy, num_examples if takes_input else 1):
                for _ in range(NUM_DRESSES if takes_input else 8):
                    yield request_of(case, name, rng)
    for _ in range(num_examples):  # the document does not say what makes a group of its lists
        body = to_json(Talk(rng).group())
        yield dressed("POST /scored_data", "/scored_data", body, "application/json", rng)
        listed = b"[" + body + b"]"
        yield dressed(
            "POST /scored_data_list", "/scored_data_list", listed, "application/json", rng
        )


def sample(strategy: Any, num_examples: int) -> list[schemathesis.Case]:
    cases: list[schemathesis.Case] = []

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: schemathesis.Case) -> None:
        cases.append(case)

    collect()
    return cases


def request_of(case: schemathesis.Case, operation: str, rng: random.Random) -> Generated:
    """Write a case out as bytes."""
    known = ("method", "url", "headers", "params", "data", "json")
    arguments = case.as_transport_kwargs(base_url="http://hub")
    prepared = requests.Request(
        **{key: value for key, value in arguments.items() if key in known}
    ).prepare()
    body = prepared.body or b""
    body = body.encode() if isinstance(body, str) else bytes(body)
    content_type = prepared.headers.get("Content-Type", "application/json")
    return dressed(operation, prepared.path_url, body, content_type, rng)


def dressed(
    operation: str, target: str, body: bytes, content_type: str, rng: random.Random
) -> Generated:
    """Add a run to the path, and headers that clients of any kind might send."""
    if not operation.endswith("{run}"):
        target = rng.choice(["", "", "/runs/default", "/runs/other"]) + target
    encoding = rng.choice([None] * 12 + ["gzip", "gzip", "zstd", "br", "identity"])
    if encoding == "gzip" and rng.random() < 0.7:
        body = gzip.compress(body)
    headers = []
    for key, value in {
        "Content-Type": rng.choice(
            [content_type] * 8 + [CONTENT_TYPE_PACKED, "text/plain", "\xff"]
        ),
        "Content-Encoding": encoding,
        "Accept": rng.choice([None, "*/*", CONTENT_TYPE_PACKED, "text/html"]),
        "Accept-Encoding": rng.choice([None, "gzip", "zstd", "gzip;q=x, zstd;q=0", "*"]),
        "Atropos-Client": rng.choice([None, "atroposlib/2", ""]),
    }.items():
        if value is not None:
            headers.append((key, value))
    return Generated(
        operation=operation, method=operation.split()[0], target=target, headers=headers, body=body
    )


def faults_of(sent: Generated, role: Role, answer: Answer) -> Iterator[str]:
    """Say what is wrong with an answer."""
    status = answer.status
    rights = RIGHTS[sent.operation].split()
    if b'{"type":"overloaded"' in answer.body and "/scored_data" in sent.target:
        # By then rights were checked. Clients that do not say that they know 429 get 503.
        knows_429 = any(name == "Atropos-Client" for name, _ in sent.headers)
        if status != (429 if knows_429 else 503):
            yield "the wrong answer to load"
        if role.has_tokens and role.name not in ("produce", "admin"):
            yield "load was told to one who may not ask"
        return
    if status >= 500:
        yield "a server error"
        return
    template = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(sent.operation.split()[1]))
    path = re.sub(r"^/runs/(default|other)(?=/)", "", unquote(sent.target.split("?")[0]))
    is_addressed = re.fullmatch(template, path) is not None
    is_refused = status in (401, 403)
    is_impossible_run = status == 404 and answer.text() == '{"detail":"not the name of a run"}'
    if is_impossible_run:
        if sent.operation != "DELETE /runs/{run}":
            yield "the run exists"
    elif rights == ["anyone"]:
        if is_refused:
            yield "everyone may"
    elif not role.has_tokens:
        is_near = role.peer == "127.0.0.1"
        if is_addressed and is_refused != (sent.operation in DESTRUCTIVE and not is_near):
            yield "destroying is for this machine, all else for everyone"
    elif role.name in ("no token", "wrong token"):
        if status != 401:
            yield "expected 401"
    elif role.name not in (*rights, "admin"):
        has_metrics = role.name == "elsewhere" and sent.target.partition("?")[0] == "/metrics"
        if status != (200 if has_metrics else 403):  # those of its own runs
            yield "expected 403"
    elif is_addressed and is_refused:
        yield "the scope suffices"
    if not is_refused and not is_impossible_run and is_addressed:
        documented = {200} | BODY_FAULTS | MORE_STATUSES.get(sent.operation, set())
        if status not in documented:
            yield "not a documented status"
        if not answer.is_whole:
            if "ttl=" not in sent.target:  # a lease may be over before its batch is sent
                yield "cut off"
        elif status == 200 and answer.headers["content-type"] == "application/json":
            answer.json()


@asynccontextmanager
async def alone(*, tokens: TokenSet | None) -> AsyncIterator[ASGIApp]:
    app = create_app(limits=LIMITS, tokens=tokens)
    async with app.router.lifespan_context(app):
        yield app


@asynccontextmanager
async def forwarding(
    *, tokens: TokenSet | None, request: pytest.FixtureRequest
) -> AsyncIterator[ASGIApp]:
    """A replica that passes every request of run `default` on to another, which owns it."""
    schema = request.getfixturevalue("postgres").create_schema(f"fuzz_{uuid.uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        # A request for a run without an owner waits this long, so that concurrent requests share one query.
        patch.setattr("atroposlib.api.run.replica.LOOK_S", 0.0)
        async with two_replicas(schema, limits=LIMITS, tokens=tokens) as (_, other):
            yield other.app


@pytest.mark.timeout(480 * SCALE)
async def test_no_generated_request_is_a_server_error_or_gets_past_the_rights() -> None:
    await send_generated(alone, NUM_EXAMPLES)


@pytest.mark.timeout(480 * SCALE)
async def test_the_same_holds_at_a_replica_that_does_not_own_the_run(
    request: pytest.FixtureRequest,
) -> None:
    await send_generated(partial(forwarding, request=request), NUM_EXAMPLES // 3)


async def send_generated(
    running: Callable[..., AbstractAsyncContextManager[ASGIApp]], num_examples: int
) -> None:
    """Send every generated request in every role to an application that `running` makes."""
    own = {f"{r.method} {r.template}": " ".join(sorted(r.scopes)) or "anyone" for r in ROUTES}
    for name, scopes in RIGHTS.items():
        assert sorted(own[name].split()) == sorted(scopes.split()), name
    unlisted = {name for name in own if name not in RIGHTS}
    assert unlisted == {f"GET /{name}" for name in DOCUMENTATION}

    generated = list(generate(num_examples * SCALE))
    assert {each.operation for each in generated} == set(RIGHTS)
    random.Random(11).shuffle(generated)  # reset and DELETE among all the others
    faults: list[str] = []
    done: set[str] = set()
    async with AsyncExitStack() as stack:
        callers = {}
        for role in ROLES:
            key = (role.has_tokens, role.peer)
            if role.has_tokens not in {has_tokens for has_tokens, _ in callers}:
                tokens = TOKENS if role.has_tokens else None
                app = await stack.enter_async_context(running(tokens=tokens))
            callers.setdefault(key, Caller(app, client=role.peer))
        for number, each in enumerate(generated):
            if number % 50 == 0:
                for caller in callers.values():
                    await prepare(caller)
            for role in ROLES:
                headers = list(each.headers)
                if role.secret is not None:
                    headers.append(("Authorization", f"Bearer {role.secret}"))
                answer = await callers[role.has_tokens, role.peer](
                    each.method, each.target, each.body, headers=headers
                )
                if answer.status == 200:
                    done.add(each.operation)
                faults += [
                    f"{role.name}: {fault}: {each} got {answer.status} {answer.text()[-400:]}"
                    for fault in faults_of(each, role, answer)
                ]
        for caller in callers.values():
            await assert_sound(caller)
    assert not faults, f"{len(faults)} faults, such as\n" + "\n".join(faults[:20])
    assert len(generated) * len(ROLES) >= 400 * num_examples * SCALE
    assert set(RIGHTS) - done <= NEEDS_A_KNOWN_ID, "never answered 200: what was tested?"


async def prepare(call: Caller) -> None:
    """Bring a run to where most routes have something to do."""
    admin = [JSON_TYPE, ("Authorization", "Bearer secret-of-admin")]
    await call("POST", "/register", to_json(registration()), headers=admin)
    await call("GET", "/batch", headers=admin)
    environment = {"max_token_length": 64, "desired_name": "e", "weight": 1, "group_size": 2}
    await call("POST", "/register-env", to_json(environment), headers=admin)
    for _ in range(3):
        body = to_json({"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0, 1]})
        await call("POST", "/scored_data", body, headers=admin)
    await call("GET", "/batch?lease=1", headers=admin)


async def assert_sound(call: Caller) -> None:
    """The hub answers, and every run's account closes."""
    admin = [JSON_TYPE, ("Authorization", "Bearer secret-of-admin")]
    assert (await call("GET", "/readyz", headers=admin)).status == 200
    for run in ("default", "other"):
        assert_balanced((await call("GET", f"/runs/{run}/ledger", headers=admin)).json())


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# Random conversations


@dataclass(slots=True)
class Talk:
    """What one or several random clients know of the hub, and what they say next."""

    rng: random.Random
    env_ids: list[int] = field(default_factory=lambda: [0])
    leases: list[tuple[int, str]] = field(default_factory=list)
    group_ids: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=lambda: [0])
    num_said: Counter[str] = field(default_factory=Counter)

    def often(self, known: list[Any], other: Any) -> Any:
        return self.rng.choice(known) if known and self.rng.random() < 0.8 else other

    def number(self) -> int:
        return self.rng.choice([0, 1, 2, 3, -1, 10**6, 2**31, 2**62 - 1, 2**63 - 1])

    def env_id(self) -> int:
        return int(self.often(self.env_ids, self.number()))

    def group(self) -> dict[str, Any]:
        size = self.rng.choice([1, 1, 2, 2, 3, 4, 5, 0])
        rows = [[self.rng.randrange(9) for _ in range(self.rng.randrange(4))] for _ in range(size)]
        group: dict[str, Any] = {"tokens": rows, "masks": rows, "scores": [0.5] * size}
        if self.rng.random() < 0.7:
            group["env_id"] = self.env_id()
        if self.rng.random() < 0.5:
            self.group_ids.append(f"g{self.rng.randrange(10**9)}")
            group["group_id"] = self.often(self.group_ids, self.group_ids[-1])
        if self.rng.random() < 0.3:
            group["policy_version"] = self.number()
        return group

    def lease(self) -> tuple[int, str]:
        found: tuple[int, str] = self.often(self.leases, (self.number(), "x"))
        return found

    def say(self) -> tuple[str, str, Any]:
        """Return method, target and body of the next request."""
        rng, step = self.rng, self.often(self.steps, self.number())
        batch_id, lease_id = self.lease()
        environment = {
            "max_token_length": rng.choice([64, 0, -5, 2**63 - 1]),
            "desired_name": rng.choice(["a", "b", ""]),
            "weight": rng.choice([1.0, 0.0, -1.0, 1e308]),
            "group_size": rng.choice([1, 2, 4, 2**31 - 1]),
            "min_batch_allocation": rng.choice([None, None, 0.0, 0.3, 1.0, 5.0, 1000.0]),
            "env_uid": rng.choice([None, "u", "v"]),
        }
        batch_size = rng.choice([4] * 9 + [1, 8, 16_384])
        trainer = registration(starting_step=step, batch_size=batch_size)
        resumed = trainer | {"resume_step": max(0, min(step, 2**62 - 1))}
        resumed |= {"resume": rng.choice(["replay", "requeue", "discard"])}
        resumed |= {"max_staleness": rng.choice([None, 0, 1, 2**62 - 1])}
        says: list[tuple[int, str, str, Any]] = [
            (30, "POST", "/scored_data", self.group()),
            (10, "POST", "/scored_data_list", [self.group() for _ in range(rng.randrange(4))]),
            (3, "GET", "/batch", None),
            (20, "GET", f"/batch?lease=1&ttl={rng.choice(['0.001', '60', '60', '86400'])}", None),
            (4, "GET", f"/batch?lease=1&request_id=r{rng.randrange(3)}", None),
            (3, "GET", "/batch?wait=1", None),
            (12, "POST", f"/batches/{batch_id}/ack", {"lease_id": lease_id}),
            (4, "POST", f"/batches/{batch_id}/ack", {"lease_id": lease_id, "step": max(0, step)}),
            (4, "POST", f"/batches/{batch_id}/heartbeat", {"lease_id": lease_id}),
            (4, "POST", f"/batches/{batch_id}/release", {"lease_id": lease_id}),
            (4, "POST", "/checkpoints", {"step": max(0, step)}),
            (4, "POST", "/policy", {"version": max(0, self.number())}),
            (4, "POST", "/register", trainer),
            (1, "POST", "/register", resumed),
            (6, "POST", "/register-env", environment),
            (3, "POST", "/disconnect-env", {"env_id": self.env_id()}),
            (5, "GET", f"/status-env?env_id={self.env_id()}", None),
            (2, "GET", f"/status-env?env_id={self.env_id()}&wait=1&seen_step={step}", None),
            (3, "POST", "/dead/requeue", {"numbers": [self.number(), rng.randrange(50)]}),
            (2, "GET", "/dead", None),
            (2, "GET", "/explain", None),
            (2, "GET", "/latest_example", None),
            (2, "GET", "/ledger", None),
            (1, "GET", "/status", None),
            (1, "GET", "/info", None),
            (1, "GET", "/metrics", None),
            (1, "GET", "/readyz", None),
        ]
        [(_, method, target, body)] = rng.choices(says, [weight for weight, *_ in says])
        if rng.random() < 0.004:
            method, target, body = "GET", "/reset_data", None
        if rng.random() < 0.1:
            target = f"/runs/other{target}"
        if rng.random() < 0.004:
            method, target, body = "DELETE", f"/runs/{rng.choice(['other', 'default'])}", None
        return method, target, body

    def hear(self, target: str, answer: Answer) -> None:
        """Remember what may be asked about."""
        self.num_said[target.split("?")[0].split("/")[-1]] += answer.status == 200
        if answer.status != 200 or answer.headers["content-type"] != "application/json":
            return
        told = answer.json()
        if "lease_id" in told:
            self.leases = [*self.leases[-5:], (told["batch_id"], told["lease_id"])]
        if "env_id" in told and "wandb_name" in told:
            self.env_ids = [*self.env_ids[-5:], told["env_id"]]
        if "current_step" in told:
            self.steps = [*self.steps[-5:], told["current_step"]]


async def converse(call: Callable[..., Any], talk: Talk, num_requests: int) -> list[str]:
    """Say random things; return what was wrong with the answers."""
    faults = []
    for _ in range(num_requests):
        method, target, body = talk.say()
        content = b"" if body is None else to_json(body)
        headers = [JSON_TYPE] + [("Atropos-Client", "x")] * talk.rng.randrange(2)
        answer = await call(method, target, content, headers=headers)
        is_overloaded = answer.status in (429, 503) and b'"overloaded"' in answer.body
        if not is_overloaded and (answer.status >= 500 or answer.status in (400, 401, 403, 405)):
            said = content.decode()[:300]
            faults.append(f"{method} {target} {said}: {answer.status} {answer.text()[-600:]}")
        elif target.endswith("/ledger") and answer.status == 200:
            assert_balanced(answer.json())
        if answer.is_whole:
            talk.hear(target, answer)
        # A lease over before its batch is sent cuts it off, and so does a run that is reset before a plain batch's end.
        elif "ttl=0.001" not in target and not ("/batch" in target and "lease" not in target):
            faults.append(f"{method} {target}: cut off")
    return faults


@pytest.mark.timeout(120 * SCALE)
async def test_random_conversations_are_answered_and_survive_a_restart(tmp_path: Path) -> None:
    num_clients = 8
    num_requests = 2000 * SCALE // num_clients
    talk = Talk(random.Random(8))
    ledgers = []
    for turn in range(2):  # the second hub starts from what the first one stored
        app = create_app(hub_on_disk(tmp_path), limits=LIMITS)
        call = Caller(app)
        async with app.router.lifespan_context(app):
            if turn:
                assert places((await call("GET", "/ledger")).json()) == places(ledgers[0])
            results = await asyncio.gather(
                *(converse(call, talk, num_requests // 2) for _ in range(num_clients))
            )
            faults = [fault for result in results for fault in result]
            assert not faults, f"{len(faults)} faults, such as\n" + "\n\n".join(faults[:5])
            for run in ("default", "other"):
                assert_balanced((await call("GET", f"/runs/{run}/ledger")).json())
            ledgers.append((await call("GET", "/ledger")).json())
    assert talk.num_said["batch"] > 50
    assert talk.num_said["ack"] > 10
    assert talk.num_said["reset_data"] < talk.num_said["ack"]


def places(ledger: dict[str, Any]) -> dict[str, int]:
    """What a restart must not change.

    Refusals are saved with the next change only, and a buffered group may turn out to have its environment's size now.
    """
    found = {name: ledger[name] for name in ("leased", "trained", "expired", "dead", "discarded")}
    return found | {"waiting": ledger["queued"] + ledger["buffered"]}
