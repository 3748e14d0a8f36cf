"""Hostile neighbours of a run: without a token, with a produce token, and with an admin token, both of another run.

Each sends its table of requests to a real hub process, over and over and all at once, while the run's trainer
acknowledges and a supervisor asks for health. Every answer is the table's, the run's account is the same to the last
group, the hub's memory does not grow, and other requests are answered in time.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.security import Scope
from atroposlib.cli.hub_settings import add_token
from tests.api.helpers_api import registration
from tests.faults.asking import asking, assert_prompt
from tests.faults.drivers import (
    HubProcess,
    assert_balanced,
    children,
    forget_peak,
    hub_process,
    peak_rss_bytes,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MIB = 2**20
ROUNDS_S = 4.0
"""How long the tables are sent over and over."""
TRAINER = registration(batch_size=2)
VICTIM, OTHER = "/runs/victim", "/runs/other"
GROUP = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [0.0, 1.0]}
ENVIRONMENT = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
BOMB = gzip.compress(b'{"tokens": [[' + b"0, " * (10 * MIB))
LEASE = {"lease_id": "0" * 32}

STRANGER, PRODUCER, ADMIN = (
    "client without a token",
    "producer of another run",
    "admin of another run",
)


class Case(NamedTuple):
    """A request, and the answer it gets."""

    client: str
    method: str
    path: str
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...]


def case(client: str, line: str, status: int, body: Any = None, **headers: str) -> Case:
    """Write a row; a `line` is a method and a path, `body` bytes as they are or anything as JSON."""
    method, _, path = line.partition(" ")
    if not isinstance(body, bytes):
        body = b"" if body is None else json.dumps(body).encode()
    more = ((name.replace("_", "-"), value) for name, value in headers.items())
    return Case(client, method, path, status, body, (("Content-Type", "application/json"), *more))


CALLS = [
    f"{route.method} {VICTIM}{route.template.replace('{batch_id}', '0')}"
    for route in ROUTES
    if route.scopes and "{run}" not in route.template
] + [f"GET {VICTIM}/nowhere"]
"""All that a client may ask of a run; each is refused before a body is read."""


def cases() -> Iterator[Case]:
    for client, status in [(STRANGER, 401), (PRODUCER, 403), (ADMIN, 403)]:
        for line in (
            *CALLS,
            f"DELETE {VICTIM}",
            "DELETE /runs/default",
            "GET /reset_data",
            "GET /ledger",
        ):
            yield case(client, line, status)
        for path in ("/", "/healthz", "/readyz"):
            yield case(client, f"GET {path}", 200)
        for path in ("/runs//status", "/runs/.x/status", "/runs/a%20b/status", "/runs/..%2fvictim"):
            yield case(client, f"GET {path}", 404)
        for path in (f"{OTHER}{VICTIM}", f"{OTHER}/%72uns/victim", f"{OTHER}%2fruns%2fvictim"):
            yield case(client, f"DELETE {path}", 404)
            yield case(client, f"GET {path}/ledger", 404)
    yield case(STRANGER, f"GET {VICTIM}/ledger", 401, Authorization="bearer " + "x" * 4000)
    yield case(STRANGER, f"GET {VICTIM}/ledger?token=secret", 401)
    yield case(STRANGER, f"POST {VICTIM}/scored_data", 401, BOMB, Content_Encoding="gzip")
    yield case(STRANGER, f"POST {VICTIM}/scored_data", 401, b"[" * MIB)
    yield case(STRANGER, "GET /healthz", 200, X_Original_URL="/reset_data")
    yield case(STRANGER, "POST /healthz", 401, X_HTTP_Method_Override="GET")

    send = f"POST {OTHER}/scored_data"
    yield case(PRODUCER, send, 200, GROUP | {"group_id": "the same every time"})
    yield case(PRODUCER, send, 422, GROUP | {"group_id": "the same every time", "scores": [1, 1]})
    yield case(PRODUCER, send, 422, b"[" * 100_000)
    yield case(PRODUCER, send, 413, BOMB, Content_Encoding="gzip")
    yield case(PRODUCER, f"GET {OTHER}/batch", 403)
    yield case(PRODUCER, f"DELETE {OTHER}", 403)

    for path in (f"{OTHER}/../victim/ledger", f"{OTHER}/..%2fvictim/ledger", f"{OTHER}//ledger"):
        yield case(ADMIN, f"GET {path}", 404)
    yield case(ADMIN, f"POST {OTHER}/batches/0/ack", 404, LEASE)
    yield case(ADMIN, f"POST {OTHER}/dead/requeue", 422, {"numbers": [0] * 100_001})
    yield case(ADMIN, f"POST {OTHER}/register", 413, b" " * (2 * MIB))
    yield case(ADMIN, f"GET {OTHER}/metrics", 200)
    yield case(ADMIN, f"GET {OTHER}/status", 200)
    yield case(ADMIN, "POST /runs/new/register", 403, TRAINER)


CASES = list(cases())


def send(hub: HubProcess, row: Case, secret: str | None) -> int:
    """Send one request on a connection of its own and return the status."""
    with closing(http.client.HTTPConnection("127.0.0.1", hub.port, timeout=30)) as connection:
        connection.putrequest(row.method, row.path, skip_accept_encoding=True)
        for name, value in row.headers:
            connection.putheader(name, value)
        if secret is not None:
            connection.putheader("Authorization", f"Bearer {secret}")
        connection.putheader("Content-Length", str(len(row.body)))
        try:
            connection.endheaders(row.body)
        except ConnectionError:
            pass  # answered and closed while the body was on its way
        response = connection.getresponse()
        response.read()
        return response.status


def test_hostile_neighbours_touch_nothing_of_a_run_and_delay_no_other_request(
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "tokens.yaml"
    keeper = add_token(tokens, name="keeper", scopes=[Scope.ADMIN], runs=None)
    as_keeper = {"Authorization": f"Bearer {keeper}", "Content-Type": "application/json"}
    secrets: dict[str, str | None] = {
        STRANGER: None,
        PRODUCER: add_token(tokens, name="p", scopes=[Scope.PRODUCE], runs=["other"]),
        ADMIN: add_token(tokens, name="a", scopes=[Scope.ADMIN], runs=["other"]),
    }
    with hub_process(tmp_path, "--tokens", str(tokens)) as hub:

        def kept(line: str, body: Any = None) -> Any:
            method, _, path = line.partition(" ")
            content = json.dumps(body) if body else None
            with closing(
                http.client.HTTPConnection("127.0.0.1", hub.port, timeout=30)
            ) as connection:
                connection.request(method, path, content, as_keeper)
                response = connection.getresponse()
                answer = response.read()
            assert response.status == 200, answer
            return json.loads(answer)

        def facts() -> dict[str, Any]:
            paths = ("ledger", "status", "info", "wandb_info", "dead", "latest_example")
            found = {path: kept(f"GET {VICTIM}/{path}") for path in paths}
            return found | {"default": kept("GET /ledger")}

        for run in (VICTIM, OTHER):
            kept(f"POST {run}/register", TRAINER)
            kept(f"GET {run}/batch")
            kept(f"POST {run}/register-env", ENVIRONMENT)
        for _ in range(3):
            kept(f"POST {VICTIM}/scored_data", GROUP)
        leased = kept(f"GET {VICTIM}/batch?lease=1&ttl=3600")
        lease = json.dumps({"lease_id": leased["lease_id"], "step": 1}).encode()
        ack = f"{VICTIM}/batches/{leased['batch_id']}/ack"
        kept(f"POST {ack}", json.loads(lease))
        held = kept(f"GET {VICTIM}/batch?lease=1&ttl=3600")
        for row in CASES:  # once before memory is measured: buffers grow to their size
            send(hub, row, secrets[row.client])
        before = facts()
        forget_peak(hub.pid)
        rss_before = peak_rss_bytes(hub.pid, *children(hub.pid))
        wrong: list[str] = []

        def attack(client: str) -> None:
            rows = [row for row in CASES if row.client == client]
            idle: list[socket.socket] = []
            end = time.monotonic() + ROUNDS_S
            while time.monotonic() < end:
                for row in rows:
                    status = send(hub, row, secrets[client])
                    if status != row.status:
                        wrong.append(f"{client}: {row} got {status}")
                idle += [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(20)]
            for each in idle:
                each.close()

        with (
            asking(hub, "/healthz") as health_s,
            asking(hub, ack, method="POST", body=lease, headers=as_keeper) as acks_s,
            ThreadPoolExecutor(len(secrets)) as pool,
        ):
            list(pool.map(attack, secrets))
        grown = peak_rss_bytes(hub.pid, *children(hub.pid)) - rss_before

        # What an admin may do to its own run ends there.
        admin = secrets[ADMIN]
        assert send(hub, case(ADMIN, f"GET {OTHER}/reset_data", 200), admin) == 200
        assert send(hub, case(ADMIN, f"DELETE {OTHER}", 200), admin) == 200
        assert send(hub, case(ADMIN, f"POST {OTHER}/scored_data", 404, GROUP), admin) == 404
        after = facts()
        assert not wrong, f"{len(wrong)} wrong answers, such as\n" + "\n".join(wrong[:10])
        assert after == before
        assert_balanced(after["ledger"])
        kept(f"POST {VICTIM}/batches/{held['batch_id']}/ack", {"lease_id": held["lease_id"]})
        assert kept(f"GET {VICTIM}/ledger")["trained"] == before["ledger"]["trained"] + 1
        assert grown <= 64 * MIB
        assert_prompt(health_s)
        assert_prompt(acks_s)
