"""A hub or an engine that is away for a minute and comes back costs no group (real processes, real sockets)."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from atroposlib.api.schemas import Registration
from atroposlib.client import TrainerClient
from tests.processes import ROOT, Process, answers, free_port, running, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

AWAY_S = 60.0
BATCH_SIZE = 16


class Link:
    """A TCP relay that can be cut: open connections break and new ones are refused until it is mended."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = free_port()
        self._sockets: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.mend()

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        listener, self._listener = self._listener, None
        for sock in [*([listener] if listener else []), *self._sockets]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its peer has already gone
            sock.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            self._sockets |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass  # cut
        for sock in (source, sink):
            self._sockets.discard(sock)
            sock.close()


class Consumer(threading.Thread):
    """A trainer that takes batches as fast as they come, until told to stop."""

    def __init__(self, hub_url: str) -> None:
        super().__init__(daemon=True)
        self.num_groups = 0
        self.num_batches = 0
        self.failure: BaseException | None = None
        self.must_stop = threading.Event()
        self._hub_url = hub_url

    def run(self) -> None:
        try:
            with TrainerClient(self._hub_url) as hub:
                hub.register(
                    Registration(
                        wandb_group="",
                        wandb_project="",
                        batch_size=BATCH_SIZE,
                        max_token_len=64,
                        checkpoint_dir="",
                        save_checkpoint_interval=0,
                        starting_step=0,
                        num_steps=1_000_000,
                    )
                )
                while not self.must_stop.is_set():
                    groups = hub.batch(wait_s=0.5)
                    if groups is not None:
                        self.num_groups += len(groups)
                        self.num_batches += 1
                    time.sleep(0.05)
        except BaseException as e:  # noqa: BLE001 - the thread's failure belongs to the test
            self.failure = e


def counts(environment: Process) -> tuple[int, int, int]:
    """Groups accepted, stored and held, from the environment's closing line."""
    found = re.findall(
        r"(\d+) groups accepted, (\d+) stored by the hub, (\d+) held", environment.log()
    )
    assert found, environment.log()[-4000:]
    accepted, stored, held = map(int, found[-1])
    return accepted, stored, held


@pytest.mark.parametrize("peer", ["hub", "engine"])
def test_a_peer_that_is_away_for_a_minute_costs_no_group(peer: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    hub_port, engine_port = free_port(), free_port()
    hub_url = f"http://127.0.0.1:{hub_port}"
    with (
        running(
            "hub",
            ["-m", "atroposlib.cli.run_api", "--port", str(hub_port)],
            log_path=tmp_path / "hub.log",
        ) as hub,
        running(
            "engine",
            ["-m", "atroposlib.engine.server", "--model", str(model), "--port", str(engine_port)],
            log_path=tmp_path / "engine.log",
        ) as engine,
    ):
        wait_for(lambda: answers(f"{hub_url}/"), timeout_s=30, process=hub)
        wait_for(
            lambda: answers(f"http://127.0.0.1:{engine_port}/health"), timeout_s=60, process=engine
        )
        link = Link(hub_port if peer == "hub" else engine_port)
        ports = {"hub": hub_port, "engine": engine_port, peer: link.port}
        consumer = Consumer(hub_url)
        consumer.start()
        with running(
            "environment",
            [
                str(ROOT / "tests" / "e2e" / "parity_env.py"),
                "serve",
                f"--env.rollout_server_url=http://127.0.0.1:{ports['hub']}",
                f"--env.tokenizer_name={model}",
                "--env.total_steps=1000000",
                f"--openai.base_url=http://127.0.0.1:{ports['engine']}/v1",
                f"--openai.model_name={model}",
            ],
            log_path=tmp_path / "environment.log",
        ) as environment:
            wait_for(lambda: consumer.num_batches >= 5, timeout_s=60, process=environment)
            link.cut()
            time.sleep(AWAY_S)
            assert environment.popen.poll() is None, environment.log()[-4000:]
            during = consumer.num_batches
            link.mend()
            wait_for(lambda: consumer.num_batches >= during + 5, timeout_s=90, process=environment)
            assert environment.stop() == 0, environment.log()[-4000:]
        link.cut()
        consumer.must_stop.set()
        consumer.join(10)
        assert consumer.failure is None, consumer.failure
        with urllib.request.urlopen(f"{hub_url}/ledger", timeout=5) as response:
            ledger = json.load(response)

    accepted, stored, held = counts(environment)
    assert (stored, held) == (accepted, 0), environment.log()[-4000:]
    assert ledger["produced"] == accepted
    assert ledger["trained"] == consumer.num_groups
    assert ledger["produced"] == ledger["trained"] + ledger["queued"] + ledger["buffered"]
