"""`inference-node-wandb-watcher`: what it logs, and what it outlives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atroposlib.cli import inference_node_wandb_watcher as watcher
from atroposlib.cli.inference_node_wandb_watcher import WatcherConfig
from atroposlib.errors import install_command


class Wandb:
    """Records what is logged; fails as often as it is told to."""

    class Error(Exception):
        """As wandb's."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, int]]] = []
        self.is_finished = False

    def init(self, **options: Any) -> Wandb:
        self._fail()
        self.started.append(options)
        return self

    def log(self, values: dict[str, int], *, step: int) -> None:
        self._fail()
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.Error("wandb is away")


class Peers:
    """A hub and inference servers behind one address each, scripted by fields."""

    def __init__(self) -> None:
        self.step = 0
        self.info: Any = {"group": "g", "project": "p"}
        self.hub_failures = 0
        self.health = {"/health_generate": 200, "/health": 200}
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path in self.health:
            return web.Response(status=self.health[request.path])
        if self.hub_failures:
            self.hub_failures -= 1
            return web.Response(status=503)
        if request.path == "/wandb_info":
            return web.json_response(self.info)
        return web.json_response({"current_step": self.step, "queue_size": 0})


@pytest.fixture
async def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watcher, "HUB_POLL_S", 0.001)
    peers = Peers()
    app = web.Application()
    app.router.add_get("/{path:.*}", peers.answer)
    async with TestServer(app) as server:
        peers.port = server.port  # type: ignore[attr-defined]
        yield peers


def config_for(peers: Any, **changes: Any) -> WatcherConfig:
    options = {"tp": 8, "node_num": 3, "first_port": peers.port, "interval_s": 0.001} | changes
    return WatcherConfig(api_addr=f"http://127.0.0.1:{peers.port}", **options)


async def watch_until(
    is_done: Callable[[], bool], config: WatcherConfig, wandb: Wandb, change: Any = None
) -> None:
    task = asyncio.create_task(watcher.watch(config, wandb))
    try:
        async with asyncio.timeout(10):
            while not is_done():
                if change is not None:
                    change()
                assert not task.done(), task.exception()
                await asyncio.sleep(0.002)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_every_step_is_logged_once_with_the_health_of_every_server(peers: Any) -> None:
    wandb = Wandb()

    def advance() -> None:
        peers.step = len(wandb.logged) + 1

    await watch_until(lambda: len(wandb.logged) >= 3, config_for(peers), wandb, advance)
    assert wandb.started == [{"project": "p", "group": "g", "name": "inf_node_3"}]
    assert wandb.logged[:3] == [(step, {"server/server_health_3_0": 1}) for step in (1, 2, 3)]
    assert wandb.is_finished


async def test_nothing_is_logged_while_the_step_stays(peers: Any) -> None:
    wandb = Wandb()
    peers.step = 5
    await watch_until(lambda: peers.asked.count("/status") > 5, config_for(peers), wandb)
    assert [step for step, _ in wandb.logged] == [5]


@pytest.mark.parametrize(
    ("health", "changes", "expected"),
    [
        ({"/health_generate": 200, "/health": 500}, {}, 1),
        ({"/health_generate": 503, "/health": 200}, {}, 0),
        ({"/health_generate": 404, "/health": 200}, {}, 1),
        ({"/health_generate": 404, "/health": 404}, {}, 0),
        ({}, {"first_port": 1}, 0),
    ],
)
async def test_servers_are_asked_to_generate_and_else_whether_they_are_up(
    peers: Any, health: dict[str, int], changes: dict[str, int], expected: int
) -> None:
    peers.health, peers.step = health, 1
    wandb = Wandb()
    await watch_until(lambda: bool(wandb.logged), config_for(peers, **changes), wandb)
    assert wandb.logged[0] == (1, {"server/server_health_3_0": expected})


async def test_health_is_told_when_it_changes(peers: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=watcher.__name__)

    def fall_ill() -> None:
        if peers.asked.count("/status") > 3:
            peers.health["/health_generate"] = 503

    await watch_until(
        lambda: peers.asked.count("/status") > 9, config_for(peers), Wandb(), fall_ill
    )
    told = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert told == ["healthy", "status 503"]


async def test_it_waits_for_a_trainer_with_wandb_and_outlives_all_the_others(peers: Any) -> None:
    peers.info = {"group": None, "project": None}
    peers.hub_failures = 3
    peers.step = 1
    wandb = Wandb(failures=2)

    def bring_up() -> None:
        if peers.asked.count("/wandb_info") > 6:
            peers.info = {"group": "g", "project": "p"}
        if wandb.logged and peers.step == 1:
            peers.step, peers.hub_failures, wandb.failures = 2, 2, 2

    await watch_until(lambda: len(wandb.logged) >= 2, config_for(peers), wandb, bring_up)
    assert [step for step, _ in wandb.logged] == [1, 2]


# The command.


@pytest.mark.parametrize(("tp", "num_servers"), [(1, 8), (2, 4), (3, 2), (8, 1)])
def test_a_node_has_a_server_for_every_tp_gpus(tp: int, num_servers: int) -> None:
    urls = WatcherConfig(api_addr="http://hub", tp=tp, node_num=0).urls
    assert urls == [f"http://localhost:{9000 + i}" for i in range(num_servers)]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--tp=1", "--node_num=0"], "--api_addr: a value is required"),
        (["--api_addr=http://h", "--tp=16", "--node_num=0"], "more than the 8 GPUs"),
        (["--api-addr=http://h", "--tp=0", "--node-num=0"], "--tp: got 0"),
    ],
)
def test_wrong_flags_are_refused(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watcher.main(argv) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_wandb_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    assert watcher.main(["--api_addr=http://h", "--tp=1", "--node_num=0"]) == 1
    assert install_command("wandb") in capsys.readouterr().err
