"""Requests at a replica that does not own the run, and runs that move from one replica to another."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest

from atroposlib.api.http import forwarding
from atroposlib.client import HubClient, TrainerClient
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from tests.api.helpers_api import environment, group, registration
from tests.api.helpers_replicas import ReplicaServer, two_replicas

Pair = tuple[ReplicaServer, ReplicaServer]


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[Pair]:
    """The owner of the default run, in which a trainer has registered, and another replica."""
    async with two_replicas(postgres_url) as (owner, other):
        (await other.http.post("/register", json=registration())).raise_for_status()
        yield owner, other


async def queued(hub: ReplicaServer, run: str = "") -> int:
    ledger = (await hub.http.get(f"{run}/ledger")).raise_for_status().json()
    return int(ledger["queued"])


def forwarded(hub: ReplicaServer, client: str) -> dict[str, str]:
    """The header of a request that another replica passes on to `hub`."""
    return {"atropos-forwarded": f"{hub.replica.owners.secret} {client}"}


async def test_a_run_looks_the_same_from_every_replica(pair: Pair) -> None:
    owner, other = pair
    assert (await other.http.post("/scored_data", json=group(2))).json() == {"status": "received"}
    for hub in pair:
        assert (await hub.http.get("/info")).json()["batch_size"] == 4
        assert await queued(hub) == 1
    status = (await other.http.get("/status")).json()
    assert status["queue_size"] == 1
    assert sorted(status["replicas"], key=lambda each: len(each["runs"])) == [
        {"address": other.address, "runs": [], "is_alive": True},
        {"address": owner.address, "runs": ["default"], "is_alive": True},
    ]
    assert (
        'atropos_forwarded_requests_total{outcome="answered"}'
        in (await other.http.get("/metrics")).text
    )


async def test_a_long_poll_is_answered_when_the_batch_is_complete(pair: Pair) -> None:
    owner, other = pair
    polling = asyncio.create_task(other.http.get("/batch", params={"wait": 10}))
    for hub in pair:
        await asyncio.sleep(0.1)
        assert not polling.done()
        await hub.http.post("/scored_data", json=group(2))
    assert len((await polling).json()["batch"]) == 2


async def test_a_client_that_leaves_a_forwarded_long_poll_takes_no_batch(pair: Pair) -> None:
    owner, other = pair
    with pytest.raises(httpx.ReadTimeout):
        await other.http.get("/batch", params={"wait": 10}, timeout=0.2)
    await asyncio.sleep(0.1)
    for _ in range(2):
        await owner.http.post("/scored_data", json=group(2))
    await asyncio.sleep(0.1)
    assert await queued(owner) == 2


async def test_a_body_is_passed_on_while_it_arrives(pair: Pair) -> None:
    """The owner refuses a body by its announced size, of which the client has sent the first piece only."""
    _, other = pair
    reader, writer = await asyncio.open_connection("127.0.0.1", other.port)
    head = f"POST /scored_data HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**30}\r\n\r\n"
    writer.write(head.encode() + b"[" * 100_000)
    async with asyncio.timeout(30):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_large_bodies_and_batches_pass_unchanged(pair: Pair) -> None:
    owner, other = pair
    long = [list(range(100_000)), list(range(100_000, 200_000))]
    sent = group(2, tokens=long, masks=long)
    for _ in range(2):
        (await other.http.post("/scored_data", json=sent)).raise_for_status()
    batch = (await other.http.get("/batch", headers={"Accept-Encoding": "gzip"})).json()["batch"]
    assert [each["tokens"] for each in batch] == [long, long]


async def test_rights_depend_on_the_client_and_not_on_the_replica_between(pair: Pair) -> None:
    owner, other = pair
    assert (await other.http.get("/reset_data")).text == "Reset successful"
    far = await owner.http.get("/reset_data", headers=forwarded(owner, "10.0.0.9"))
    assert far.status_code == 403


async def test_a_header_with_a_wrong_secret_gets_nothing(pair: Pair) -> None:
    owner, other = pair
    for secret in ("", "guess 127.0.0.1", forwarded(other, "127.0.0.1")["atropos-forwarded"]):
        reply = await owner.http.get("/ledger", headers={"atropos-forwarded": secret})
        assert (reply.status_code, reply.headers["atropos-not-owner"]) == (503, "1")


async def test_a_request_is_forwarded_once_at_most(pair: Pair) -> None:
    _, other = pair
    reply = await other.http.get("/ledger", headers=forwarded(other, "127.0.0.1"))
    assert (reply.status_code, reply.headers["atropos-not-owner"]) == (503, "1")


async def test_new_runs_go_to_the_replica_with_the_fewest(pair: Pair) -> None:
    owner, other = pair
    for number in range(4):
        run = f"/runs/r{number}"
        assert (await owner.http.get(f"{run}/info")).json()["batch_size"] == -1
        assert (await owner.http.post(f"{run}/scored_data", json=group())).status_code == 404
        (await owner.http.post(f"{run}/register", json=registration())).raise_for_status()
        assert (await other.http.get(f"{run}/info")).json()["batch_size"] == 4
    assert sorted(len(hub.replica.hub.runs) for hub in pair) == [2, 3]


async def test_requests_survive_that_their_run_is_given_away(pair: Pair) -> None:
    owner, other = pair
    (await owner.http.get("/batch")).raise_for_status()
    (await owner.http.post("/register-env", json=environment())).raise_for_status()
    is_moving = True
    statuses: list[int] = []

    async def send(hub: ReplicaServer) -> None:
        while is_moving:
            sent = group(2, env_id=0)
            statuses.append((await hub.http.post("/scored_data", json=sent)).status_code)

    sending = [asyncio.create_task(send(hub)) for hub in pair]
    poll = asyncio.create_task(other.http.get("/status-env?env_id=0&wait=20&seen_step=0"))
    try:
        async with asyncio.timeout(60):
            await asyncio.sleep(0.1)
            while "default" not in other.replica.hub.runs:
                if "default" in owner.replica.hub.runs:  # also if it adopted the run again
                    await owner.replica.give_away("default")
                await asyncio.sleep(0.02)
                await other.replica.renew()
            assert (await poll).status_code == 200
            await asyncio.sleep(0.1)
    finally:
        is_moving = False
    await asyncio.gather(*sending)
    assert set(statuses) == {200}
    assert await queued(owner) == len(statuses)


async def test_a_replica_that_lost_its_term_forwards_to_the_new_owner(pair: Pair) -> None:
    owner, other = pair
    await other.replica.owners.claim("default", by_force=True)
    lost = await owner.http.post("/scored_data", json=group(2))
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "2")
    await other.replica.renew()
    reply = await owner.http.post("/scored_data", json=group(2))
    assert reply.json() == {"status": "received"}
    assert "default" not in owner.replica.hub.runs
    assert await queued(owner) == 1


async def test_a_replica_without_its_database_serves_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _ = pair
    monkeypatch.setattr(forwarding, "FIND_OWNER_S", 0.05)
    monkeypatch.setattr(type(owner.replica), "is_trusted", property(lambda replica: False))
    for path in ("/readyz", "/ledger"):
        assert (await owner.http.get(path)).status_code == 503
    monkeypatch.undo()
    for path in ("/readyz", "/ledger"):
        assert (await owner.http.get(path)).status_code == 200


async def test_native_clients_go_to_the_owner_of_their_run_and_after_it_when_it_moves(
    pair: Pair,
) -> None:
    owner, other = pair
    async with HubClient(other.address) as env:
        with TrainerClient(other.address) as trainer:

            async def call_everything() -> None:
                assert (await env.info()).batch_size == 4
                await env.send([scored()])
                await asyncio.to_thread(trainer.status)
                batch = await asyncio.to_thread(trainer.lease_batch)
                assert batch is not None
                await asyncio.to_thread(trainer.ack, batch)

            def scored() -> ScoredGroup:
                checked = check_group(group(4), strictness=Strictness.MEANING)
                return checked.replace(group_id=uuid.uuid4().hex)

            await call_everything()  # told who the owner is, by the first answer of each
            for serving, moved_from in ((owner, None), (other, owner)):
                if moved_from is not None:
                    while "default" not in serving.replica.hub.runs:
                        if "default" in moved_from.replica.hub.runs:  # or it has adopted it again
                            await moved_from.replica.give_away("default")
                        await serving.replica.renew()
                        await asyncio.sleep(0.02)
                    await call_everything()
                before = [await num_forwarded(hub) for hub in pair]
                await call_everything()
                assert [await num_forwarded(hub) for hub in pair] == before
                assert env._address.url == f"{serving.address}/runs/default"


async def num_forwarded(hub: ReplicaServer) -> float:
    text = (await hub.http.get("/metrics")).text
    found = re.findall(r'atropos_forwarded_requests_total\{outcome="answered"\} (\S+)', text)
    return sum(map(float, found))


async def test_only_native_clients_are_told_who_serves_the_run(pair: Pair) -> None:
    owner, other = pair
    native = {"Atropos-Client": "x"}
    named = f"{owner.replica.id} {owner.address}/runs/default"
    for hub, headers, told in ((other, native, named), (other, {}, None), (owner, native, None)):
        answer = await hub.http.get("/info", headers=headers)
        assert answer.headers.get("atropos-replica") == told
    for path in ("/healthz", "/runs/other/healthz"):
        assert (await owner.http.get(path)).headers["atropos-replica"] == str(owner.replica.id)


async def test_an_idle_run_stays_closed_until_it_is_asked_for(pair: Pair) -> None:
    (await pair[0].http.post("/runs/math/register", json=registration())).raise_for_status()
    owner, other = sorted(pair, key=lambda each: "math" not in each.replica.hub.runs)
    hub = owner.replica.hub
    hub.runs["math"].used_at -= 2 * hub.policy.idle_run_s
    await hub.close_idle()
    for _ in range(3):
        for each in (owner, other):
            await each.replica.renew()
            await each.replica.sweep()
            assert "math" not in each.replica.hub.runs
    for each in (other, owner):
        status = (await each.http.get("/runs/math/info")).raise_for_status().json()
        assert status["batch_size"] == 4
    assert "math" in hub.runs
