"""The password of a URL is in no message, log line or figure."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from atroposlib import errors
from atroposlib.client import HubClient, TrainerClient
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.http_peer import HttpPeer
from atroposlib.runtime import progress
from atroposlib.runtime.progress import Progress, RunStatus
from atroposlib.runtime.spool import Origin, _reason_to_skip
from tests.inference.helpers_peer import Peer

PASSWORD = "pa@ss"
NOWHERE = f"http://me:{PASSWORD}@127.0.0.1:9"
SHOWN = "http://***@127.0.0.1:9"


def manager_of(*urls: str, kind: Any = "vllm") -> ServerManager:
    return ServerManager(
        [
            APIServerConfig(
                base_url=f"{url}/v1", health_wait_s=0.1, server_type=kind, model_name="m"
            )
            for url in urls
        ]
    )


async def message(call: Awaitable[Any]) -> str:
    with pytest.raises(errors.AtroposError) as caught:
        await call
    return str(caught.value)


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "trl"])
async def test_engines_that_are_down_are_named_without_passwords(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for urls in ([NOWHERE], [NOWHERE, NOWHERE.replace(":9", ":19")]):
        manager = manager_of(*urls, kind=kind)
        said = await message(manager.completion(prompt="x"))
        status = progress.with_servers(RunStatus(num_made=0), manager)
        table = Progress(0.0).table(1.0, status)
        await manager.close()
        for text in (said, table, caplog.text, *status.engines_down):
            assert "http://***@127.0.0.1" in text
            assert "pa@" not in text
            assert "ss@" not in text


async def test_refusals_and_odd_answers_name_the_engine_without_its_password() -> None:
    async with Peer({"choices": 1}) as peer:
        url = str(peer.server.make_url("")).rstrip("/").replace("://", f"://me:{PASSWORD}@")
        manager, engine = manager_of(url, kind="openai"), HttpPeer(url, api_key=None)
        for call in (
            manager.completion(prompt="x"),
            engine.post("/x", {}, timeout_s=1, read=msgspec.json.Decoder(int).decode),
        ):
            said = await message(call)
            assert "***@127.0.0.1" in said
            assert "ss@" not in said
        await manager.close()
        await engine.close()


async def test_a_hub_that_is_down_is_named_without_its_password() -> None:
    async with HubClient(NOWHERE) as hub:
        said = await message(hub.info())
    assert SHOWN in said
    assert "ss@" not in said
    trainer = TrainerClient(NOWHERE, retry_for_s=0.0)
    with pytest.raises(errors.HubUnavailable) as caught:
        trainer.status()
    trainer.close()
    assert SHOWN in str(caught.value)
    reason = _reason_to_skip({"hub_url": NOWHERE}, Origin("http://other", "env", None, 0))
    assert reason == f"its groups are for the hub at {SHOWN}"
