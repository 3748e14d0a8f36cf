"""`run-api`: start, refusals, what it keeps, tokens, TLS, stop. What is not about the process is served in a thread."""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import json
import logging
import re
import resource
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from pydantic import ValidationError

from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.stores.disk import DiskStore
from atroposlib.api.stores.runs import DirectoryRuns, MemoryRuns, stored_runs
from atroposlib.cli import run_api
from atroposlib.cli.atropos import main as main_of_atropos
from atroposlib.cli.hub_settings import certificate_end
from atroposlib.cli.run_api import RunApiConfig, _stores, erase, main, policy_of
from atroposlib.client import TrainerClient, TrainerRegistration
from atroposlib.errors import ConfigError
from tests.api.helpers_api import registration
from tests.fake_packages import register

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a-secret-for-this-test"
TRAINER = TrainerRegistration(**registration())


def address_in(line: str) -> str:
    match = re.fullmatch(r"atropos hub listening on (https?://\S+)\n?", line)
    assert match, line
    return match[1].replace("//0.0.0.0:", "//127.0.0.1:")


class Hub:
    """A hub that runs for the length of a block, and what it said once it has ended."""

    url: str
    output = ""
    """What it printed after the line with its address."""
    errors = ""

    def post_group(self, **group: Any) -> httpx.Response:
        body = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]} | group
        return httpx.post(f"{self.url}/scored_data", json=body, timeout=30)  # until it is on disk

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}").raise_for_status().json()


class HubProcess(Hub):
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.url = address_in(process.stdout.readline())

    def end(self, sig: signal.Signals | None = signal.SIGTERM) -> int:
        if sig is not None:
            self.process.send_signal(sig)
        self.output, self.errors = self.process.communicate(timeout=20)
        return self.process.returncode


@contextmanager
def running(cwd: Path, *flags: str, **variables: str) -> Iterator[HubProcess]:
    with subprocess.Popen(
        [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **variables},
    ) as process:
        try:
            yield HubProcess(process)
        finally:
            if process.poll() is None:
                process.kill()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


class HubThread(Hub):
    """`run-api` in a thread of this process."""

    def __init__(
        self, flags: Sequence[str], hubs: dict[int, HubThread], log: pytest.LogCaptureFixture
    ) -> None:
        """`hubs` are those that run, by the id of their thread."""
        self.stop: Any = lambda *_: None
        """Its handler of signals."""
        self.said: dict[bool, str] = {True: "", False: ""}
        """What it printed, as an error or not."""
        self.code = -1
        self.is_listening = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(flags,))
        self._hubs = hubs
        self._log = log
        self.thread.start()

    def _serve(self, flags: Sequence[str]) -> None:
        self._hubs[threading.get_ident()] = self
        self.code = main(["--port", "0", *flags])
        self.is_listening.set()

    def print(self, text: str, *, is_error: bool) -> None:
        self.said[is_error] += f"{text}\n"
        if not is_error:
            self.url = address_in(text)
            self.is_listening.set()

    def end(self) -> int:
        if self.thread.is_alive():
            self.stop(signal.SIGTERM, None)
        self.thread.join(20)
        self.errors = self.said[True] + self._log.text
        return self.code


Serve = Callable[..., AbstractContextManager[HubThread]]


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Serve:
    """A function that serves a hub in `tmp_path` from a thread, with these flags."""
    hubs: dict[int, HubThread] = {}
    set_handler = signal.signal

    def note_handler(sig: Any, handler: Any) -> Any:
        hub = hubs.get(threading.get_ident())
        if hub is None:
            return set_handler(sig, handler)
        if sig != signal.SIGHUP:
            hub.stop = handler
        return None

    def say(text: str, *, file: Any = None, flush: bool = False) -> None:
        hub = hubs.get(threading.get_ident())
        if hub is None:
            builtins.print(text, file=file, flush=flush)
        else:
            hub.print(text, is_error=file is not None)

    @contextmanager
    def serve(*flags: str) -> Iterator[HubThread]:
        hub = HubThread(flags, hubs, caplog)
        try:
            assert hub.is_listening.wait(20)
            yield hub
        finally:
            hub.end()

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATROPOS_HUB_TOKEN", raising=False)
    monkeypatch.setattr(signal, "signal", note_handler)
    monkeypatch.setattr(run_api, "print", say, raising=False)
    monkeypatch.setattr(run_api, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    caplog.set_level(logging.INFO)
    return serve


class Command:
    """`run-api` in this process, for what ends before anything is served."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def said(self, *flags: str, code: int) -> str:
        """What it says of flags that are wrong."""
        assert main(flags) == code
        output, errors = self._capsys.readouterr()
        assert output == ""
        return errors


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATROPOS_HUB_TOKEN", raising=False)
    return Command(capsys)


def wait_until_asked_for_a_batch(url: str) -> None:
    """Environments are let in from the trainer's first request on."""
    body = {"max_token_length": 9, "desired_name": "e", "weight": 1.0, "group_size": 1}
    for _ in range(200):
        reply = httpx.post(f"{url}/register-env", json=body, timeout=10).json()
        if reply["status"] == "success":
            return
        time.sleep(0.05)
    raise AssertionError("no client asked for a batch")


def test_waiting_trainer_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    """Nor do files written beside the hub restart it, as the original's `--reload` does."""
    with running(tmp_path) as hub:
        (tmp_path / "step_1").mkdir()
        (tmp_path / "step_1" / "model.py").write_text("x = 1\n")
        with TrainerClient(hub.url) as trainer, ThreadPoolExecutor(1) as pool:
            trainer.register(TRAINER)
            waiting = pool.submit(trainer.batch, 30.0)
            wait_until_asked_for_a_batch(hub.url)
            time.sleep(0.5)
            hub.process.terminate()
            assert waiting.result(timeout=20) is None
        assert hub.end(None) == 0
    assert hub.output == ""
    for word in ("Traceback", "exceeded", "warning"):
        assert word not in hub.errors


def test_held_client_is_answered_when_the_hub_stops(tmp_path: Path) -> None:
    with running(tmp_path, "--memory", "--max-queued-sequences", "1") as hub:
        assert hub.get("/readyz") == {"status": "ready", "durability": "memory"}
        soft, hard = resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard
        statuses = [hub.post_group().status_code for _ in range(2)]
        assert statuses == [200, 200]  # twice the bound, as there is no batch that could be taken
        ours = {"Atropos-Client": "atroposlib/1"}
        assert httpx.post(f"{hub.url}/scored_data", headers=ours).status_code == 429
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hub.post_group)
            deadline = time.monotonic() + 10
            while "atropos_held_requests 1.0" not in httpx.get(f"{hub.url}/metrics").text:
                assert time.monotonic() < deadline
            assert hub.end(signal.SIGINT) == 0
            assert held.result(timeout=10).status_code == 503
    assert hub.output == ""
    assert "Traceback" not in hub.errors
    assert list(tmp_path.iterdir()) == []


def test_port_in_use_names_the_port_and_the_cure(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = command.said("--port", str(port), code=2)
    assert f"--port {port}: already in use" in said
    assert "choose another port" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prot", "1"], "did you mean --port"),
        (["--port", "seventy"], "--port"),
        (["--port", "70000"], "--port"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--database", "postgresql://hub:geheim@localhost/x"], "PGPASSFILE"),
        (["--database", "postgresql://hub@localhost/x?password=geheim"], "PGPASSFILE"),
        (["--database", "postgresql://hub@localhost/x", "--memory"], "--database and --memory"),
        (["--database", "mysql://localhost/x"], "--database: not a URL like"),
        (["--list", "--database", "postgresql://hub@127.0.0.1:1/x"], "cannot be reached"),
        (["--token", SECRET, "--tokens", "f"], "give one of them"),
        (["--token", "short"], "at least 8"),
        (["--tokens", "absent.yaml"], "absent.yaml"),
        (["--add-token", "a", "--scopes", "read"], "--tokens FILE"),
        (["--add-token", "a", "--tokens", "f"], "--scopes"),
        (["--add-token", "a", "--tokens", "f", "--scopes", "write"], "--scopes"),
        (["--scopes", "read"], "--add-token"),
        (["--memory", "--fresh"], "--fresh is for runs on disk or in a database"),
        (["--store", "memory", "--list"], "--list is for runs on disk or in a database"),
        (["--max-memory-bytes", "1"], "--max-memory-bytes bounds a hub with --memory"),
        (["--max-database-bytes", "1"], "a disk has --min-free-bytes"),
        (["--max-token-runs", "1"], "need --tokens"),
        (["--store", "memroy"], "did you mean memory? valid: disk, memory"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--ssl-certfile", "absent.pem"], "absent.pem"),
    ],
)
def test_wrong_flags_are_refused_in_one_clear_line(
    tmp_path: Path, command: Command, flags: list[str], message: str
) -> None:
    said = command.said(*flags, code=2)
    assert message in said
    assert said.count("\n") == 1
    assert SECRET not in said
    assert "geheim" not in said
    assert list(tmp_path.iterdir()) == []


def test_flags_reach_the_policy_of_runs() -> None:
    default = RunPolicy(max_queued_bytes=64 * 2**30)
    assert policy_of(RunApiConfig()) == default
    assert policy_of(RunApiConfig(memory=True)).max_queued_bytes == 4 * 2**30
    assert policy_of(RunApiConfig(store="memory")).max_queued_bytes == 4 * 2**30
    chosen = {"lease_ttl_s": 1.5, "env_timeout_s": 2.5, "max_staleness": 0, "max_deliveries": 7}
    chosen |= {"max_queued_bytes": 8, "max_queued_sequences": 9, "max_runs": 3, "idle_run_s": 9.5}
    chosen |= {"keep_set_aside": 0, "keep_set_aside_days": 1.5}
    given = RunApiConfig(keep_acked_batches=0, **chosen)  # type: ignore[arg-type]
    assert policy_of(given) == RunPolicy(keep_trained_batches=0, **chosen)  # type: ignore[arg-type]


async def test_runs_share_one_ballast(tmp_path: Path) -> None:
    hub = Runs(_stores(RunApiConfig(data_dir=tmp_path, min_free_bytes=0), pytest.fail))
    await hub.open()
    for name in ("a", "b"):
        await hub.run(name)
    assert (tmp_path / "ballast").exists()
    assert not any((tmp_path / name / "ballast").exists() for name in ("default", "a", "b"))
    await hub.close()


def test_a_full_disk_is_reported_by_hub_status_and_refusal(
    served: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    native = {"Atropos-Client": "test"}
    group = {"tokens": [[1]], "masks": [[1]], "scores": [1.0]}
    with served("--min-free-bytes", "0") as hub:
        assert httpx.post(f"{hub.url}/scored_data", json=group, headers=native).status_code == 200
        assert hub.get("/explain")["refusal"] is None
    with served("--min-free-bytes", str(2**60)) as hub:
        refused = httpx.post(f"{hub.url}/scored_data", json=group, headers=native)
        assert main_of_atropos(["status", hub.url]) == 0
        assert hub.end() == 0
    assert refused.status_code == 507
    status = " ".join(capsys.readouterr().out.split())
    for text in (refused.json()["detail"]["msg"], hub.errors, status):
        assert re.search(r"[1-9]\d+ MiB are missing", text)
        assert f"--min-free-bytes (now {2**60})" in text


def test_head_without_end_is_refused(served: Serve) -> None:
    with served("--memory", "--reload") as hub:
        address = ("127.0.0.1", int(hub.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 20_000)
            assert connection.recv(12) == b"HTTP/1.1 431"
        assert hub.end() == 0
    assert "--reload does nothing" in hub.errors  # a flag of the original's documentation


# A database


def test_the_database_keeps_runs_that_other_hubs_leave_alone(
    tmp_path: Path,
    postgres_url: str,
    served: Serve,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ATROPOS_DATABASE", postgres_url)
    with served() as hub:
        assert hub.post_group(group_id="g1").json() == {"status": "received"}
        forget = ("--forget", "default", "--database", postgres_url)
        assert hub.url in command.said(*forget, code=2)
        assert hub.end() == 0
    monkeypatch.delenv("ATROPOS_DATABASE")
    with served("--database", postgres_url) as hub:
        assert hub.post_group(group_id="g1").json() == {"status": "duplicate"}
        assert hub.end() == 0
    shown = postgres_url.partition("?")[0]
    assert f"resuming the runs in {shown}; --fresh erases them" in hub.errors
    assert f"as {hub.url}; runs by hub: {hub.url} has 1\n" in hub.errors
    assert list(tmp_path.iterdir()) == []
    capsys.readouterr()
    assert main(["--list", "--database", postgres_url]) == 0
    assert capsys.readouterr().out.startswith("default ")
    assert main(["--forget", "default", "--database", postgres_url]) == 0
    assert "erased 1 run (default)" in capsys.readouterr().out
    assert main(["--list", "--database", postgres_url]) == 0
    assert capsys.readouterr().out == f"{shown} holds no run\n"


def test_a_package_registers_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_store.py").write_text(
        "from atroposlib.api.stores.runs import MemoryRuns\n"
        "class OwnRuns(MemoryRuns):\n"
        "    def __init__(self, settings):\n"
        "        super().__init__()\n"
        "        self.settings = settings\n"
    )
    points = {"own": "own_store:OwnRuns", "disk": "own_store:OwnRuns"}
    register(tmp_path, monkeypatch, group="atroposlib.stores", points=points)
    own: Any = _stores(RunApiConfig(store="own", data_dir=tmp_path / "runs"), pytest.fail)
    assert type(own).__name__ == "OwnRuns"
    assert own.settings.data_dir == tmp_path / "runs"
    assert isinstance(_stores(RunApiConfig(data_dir=tmp_path / "runs"), pytest.fail), DirectoryRuns)
    assert isinstance(_stores(RunApiConfig(memory=True), pytest.fail), MemoryRuns)
    with pytest.raises(ValidationError, match="--memory and --store own"):
        RunApiConfig(memory=True, store="own")


def test_a_password_in_the_variable_is_never_shown(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_DATABASE", "postgresql://hub:geheim@127.0.0.1:1/x")
    assert "geheim" not in command.said("--list", code=2)


# What is kept


def test_hub_goes_on_where_it_was_killed(tmp_path: Path, served: Serve) -> None:
    with running(tmp_path) as hub:
        assert hub.post_group(group_id="g1").json() == {"status": "received"}
        hub.end(signal.SIGKILL)
    with served() as hub:
        assert hub.get("/status")["queue_size"] == 1
        assert hub.post_group(group_id="g1").json() == {"status": "duplicate"}
        assert hub.end() == 0
    assert "run 'default': step 0, 1 groups queued" in hub.errors
    assert "resuming the runs in atropos-data; --fresh erases them" in hub.errors
    assert "Traceback" not in hub.errors


def test_fresh_erases_what_is_stored_and_says_how_much(served: Serve) -> None:
    with served("--durability", "process") as hub:
        hub.post_group()
    with served("--fresh") as hub:
        assert hub.get("/status")["queue_size"] == 0
    assert re.search(r"--fresh: erased 1 run \(default\), \d+\.\d MiB, in atropos-data", hub.errors)


def test_two_hubs_never_share_a_data_directory(served: Serve, command: Command) -> None:
    with served() as hub:
        assert "another hub uses atropos-data" in command.said("--port", "0", code=2)
        assert "a hub uses atropos-data" in command.said("--port", "0", "--fresh", code=2)
        assert hub.get("/readyz")["durability"] == "power"


def test_erase_touches_only_what_a_store_made(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "lock").touch()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    DirectoryRuns(tmp_path, DiskStore).store("math")
    (tmp_path / "math" / "0000000000.seg").write_bytes(bytes(3 * 2**20))
    with (tmp_path / "math" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="a hub uses"):
            erase(tmp_path)
    assert erase(tmp_path) == f"erased 1 run (math), 3.0 MiB, in {tmp_path}"
    assert erase(tmp_path) == f"erased 0 runs (none), 0.0 MiB, in {tmp_path}"
    assert erase(tmp_path / "absent").startswith("erased 0 runs")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lock", "precious", "thesis.tex"]


def test_kept_runs_are_listed_and_forgotten_by_name(
    tmp_path: Path, served: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as hub, TrainerClient(hub.url) as trainer:
        trainer.register(TRAINER, experiment="first")
        hub.post_group()
        assert trainer.register(TRAINER, experiment="second").set_aside == "default.1"
    [line] = [line for line in hub.errors.splitlines() if "set aside" in line]
    assert "'default.1'" in line
    assert "run-api --forget default.1" in line
    assert main(["--list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"default +\d+\.\d MiB  changed \d{4}-\d\d-\d\d \d\d:\d\d", first)
    assert second.endswith("set aside: run default at step 0")
    assert main(["--forget", "default.1"]) == 0
    assert capsys.readouterr().out.startswith("erased 1 run (default.1)")
    assert main(["--forget", "default.1"]) == 2
    assert "no such run in" in capsys.readouterr().err
    assert [run.name for run in stored_runs(tmp_path / "atropos-data")] == ["default"]


def test_a_backup_of_a_served_run_is_a_run_of_its_own(
    tmp_path: Path, served: Serve, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.db"
    with served() as hub:
        for number in range(3):
            hub.post_group(group_id=f"g{number}")
        assert main(["--backup", str(copy)]) == 0
        hub.post_group(group_id="g3")
    assert re.fullmatch(
        rf"copied run default to {copy}, \d+\.\d MiB, in \d+\.\d s\n", capsys.readouterr().out
    )
    assert [path.name for path in tmp_path.glob("copy*")] == ["copy.db"]
    assert copy.stat().st_mode & 0o077 == 0
    before = copy.read_bytes()
    for flags, message in (
        (["--backup", str(copy)], "exists already"),
        (["--backup", str(tmp_path / "other"), "--run", "absent"], "no such run"),
        (["--backup", str(tmp_path / "absent" / "other")], "No such file"),
        (["--backup", str(tmp_path / "other"), "--memory"], "--backup copies a run on the disk"),
        (["--run", "default"], "it needs --backup"),
    ):
        assert main(flags) != 0
        assert message in capsys.readouterr().err
    assert copy.read_bytes() == before
    restored = tmp_path / "restored" / "default"
    restored.mkdir(parents=True)
    shutil.copy(copy, restored / "run.db")
    with served("--data-dir", "restored") as hub:
        assert hub.get("/status")["queue_size"] == 3


def test_store_that_breaks_ends_the_hub_with_one_clear_line(tmp_path: Path, served: Serve) -> None:
    with running(tmp_path) as hub:
        assert hub.post_group(group_id="g1").status_code == 200
        # From here on the disk takes nothing: writes fail although there is space.
        resource.prlimit(hub.process.pid, resource.RLIMIT_FSIZE, (100, 100))
        assert hub.post_group(group_id="g2").status_code == 503
        assert hub.end(None) == 1
    # Before it the store has logged what happened, with its traceback; the stop itself adds none.
    request, last = hub.errors.splitlines()[-2:]
    assert "request method=POST path=/scored_data" in request
    assert last.startswith("error: the store broke: ")
    assert "start the hub again" in last
    with served() as hub:
        assert hub.get("/status")["queue_size"] == 1


def test_data_directory_that_cannot_be_used_is_named(
    tmp_path: Path, served: Serve, command: Command
) -> None:
    (tmp_path / "file").touch()
    said = command.said("--port", "0", "--data-dir", "file", code=2)
    assert said.startswith("error: --data-dir file: ")


# Tokens


def test_open_address_without_a_token_is_refused_with_both_cures(
    tmp_path: Path, command: Command
) -> None:
    said = command.said("--host", "0.0.0.0", "--port", "0", code=2)
    assert "--host 0.0.0.0 is reachable from other machines" in said
    assert "--token" in said
    assert "127.0.0.1" in said
    assert list(tmp_path.iterdir()) == []


def test_insecure_is_obeyed_with_a_warning(served: Serve) -> None:
    with served("--host", "0.0.0.0", "--insecure", "--memory") as hub:
        assert hub.get("/status")["current_step"] == 0
    assert "warning: --insecure" in hub.errors


@pytest.mark.parametrize("place", ["flag", "variable"])
def test_token_is_wanted_from_everybody_and_never_shown(
    served: Serve, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    flags = ("--token", SECRET) if place == "flag" else ()
    if place == "variable":
        monkeypatch.setenv("ATROPOS_HUB_TOKEN", SECRET)
    with served("--host", "0.0.0.0", "--memory", *flags) as hub:
        assert hub.post_group().status_code == 401
        assert httpx.get(f"{hub.url}/healthz").status_code == 200
        sent = {"Authorization": f"Bearer {SECRET}"}
        assert httpx.get(f"{hub.url}/reset_data", headers=sent).text == "Reset successful"
        assert httpx.get(f"{hub.url}/nothing", headers=sent).status_code == 404
        assert hub.end() == 0
    assert "unencrypted" in hub.errors
    assert "status=401" in hub.errors
    assert SECRET not in hub.errors


def test_added_token_opens_what_it_was_made_for(
    tmp_path: Path, served: Serve, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokens", "tokens.yaml", "--add-token", "env", "--scopes", "produce,read"]
    assert main([*flags, "--runs", "math"]) == 0
    secret, errors = capsys.readouterr()
    secret = secret.removesuffix("\n")
    assert secret not in errors
    assert stat.S_IMODE((tmp_path / "tokens.yaml").stat().st_mode) == 0o600
    assert "'env' is taken" in command.said(*flags, code=2)
    with served("--tokens", "tokens.yaml", "--memory") as hub:
        sent = {"Authorization": f"Bearer {secret}"}
        paths = ["/runs/math/ledger", "/ledger", "/runs/math/batch"]
        statuses = [httpx.get(hub.url + path, headers=sent).status_code for path in paths]
        assert statuses == [200, 403, 403]
        assert hub.end() == 0
    assert secret not in hub.errors


# TLS


class Certificate(NamedTuple):
    """Files of a certificate and its key."""

    cert: Path
    key: Path

    @property
    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.cert), "--ssl-keyfile", str(self.key)]


def certificate(
    directory: Path,
    name: str,
    *,
    address: str = "127.0.0.1",
    authority: Certificate | None = None,
    days: int = 2,
) -> Certificate:
    """A certificate for an address: self-signed, or by an authority, which is such a certificate itself."""
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    command += f" -days {days} -subj /CN={name} -addext subjectAltName=IP:{address}"
    files = ["-out", made.cert, "-keyout", made.key]
    if authority is not None:
        command += " -addext basicConstraints=critical,CA:FALSE"
        files += ["-CA", authority.cert, "-CAkey", authority.key]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return made


@pytest.mark.parametrize("days", [1, 300, 20_000])
def test_end_of_a_certificate_is_that_which_openssl_shows(tmp_path: Path, days: int) -> None:
    """In both forms of a date: from 2050 on, the year has four digits."""
    authority = certificate(tmp_path, "authority")
    path = certificate(tmp_path, "hub", authority=authority, days=days).cert
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(path)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    path.write_text(f"hub\n{path.read_text()}{authority.cert.read_text()}")  # a chain
    assert certificate_end(path) == ssl.cert_time_to_seconds(
        shown.strip().removeprefix("notAfter=")
    )
    with pytest.raises(ValueError, match="substring not found"):
        certificate_end(authority.key)


def test_tokens_and_certificate_are_read_again_on_sighup(tmp_path: Path) -> None:
    certified, other = certificate(tmp_path, "hub"), certificate(tmp_path, "other", days=9)
    flags = ["--tokens", "tokens.yaml", "--memory", *certified.flags]
    tokens = tmp_path / "tokens.yaml"

    def written(secret: str, **fields: str) -> None:
        digest = hashlib.sha256(secret.encode()).hexdigest()
        tokens.write_text(
            json.dumps([{"name": "t", "sha256": digest, "scopes": ["read"], **fields}])
        )

    written("first-secret")
    with running(tmp_path, *flags) as hub:

        def statuses(authority: Certificate) -> list[int]:
            verify = ssl.create_default_context(cafile=authority.cert)
            return [
                httpx.get(
                    f"{hub.url}/ledger",
                    headers={"Authorization": f"Bearer {secret}"},
                    verify=verify,
                ).status_code
                for secret in ("first-secret", "second-secret")
            ]

        def read_again(line: str) -> None:
            hub.process.send_signal(signal.SIGHUP)
            assert hub.process.stderr is not None
            while line not in hub.process.stderr.readline():
                assert hub.process.poll() is None

        def shown_end(authority: Certificate, secret: str) -> float:
            verify = ssl.create_default_context(cafile=authority.cert)
            headers = {"Authorization": f"Bearer {secret}"}
            text = httpx.get(f"{hub.url}/metrics", headers=headers, verify=verify).text
            [value] = re.findall(r"(?m)^atropos_certificate_expiry\S+ (\S+)$", text)
            return float(value)

        assert statuses(certified) == [200, 401]
        assert shown_end(certified, "first-secret") == certificate_end(certified.cert)
        written("second-secret")
        shutil.copy(other.cert, certified.cert)
        shutil.copy(other.key, certified.key)
        read_again("new connections get the certificate")
        assert statuses(other) == [401, 200]
        assert shown_end(other, "second-secret") == certificate_end(other.cert)
        shutil.copy(certificate(tmp_path, "third").cert, certified.cert)
        read_again("the certificate stays as it was")
        assert statuses(other) == [401, 200]
        assert shown_end(other, "second-secret") == certificate_end(other.cert)
        tokens.write_text("[")
        read_again("the tokens stay as they were")
        assert statuses(other) == [401, 200]
        written("second-secret", expires="2020-01-01")
        tokens.write_text(
            yaml.safe_dump(json.loads(tokens.read_text())).replace("'2020-01-01'", "2020-01-01")
        )
        read_again("tokens.yaml are in force")
        assert statuses(other) == [401, 401]
        assert hub.end() == 0


def test_tls_is_spoken_and_client_certificates_are_asked_for(
    tmp_path: Path, served: Serve, command: Command
) -> None:
    certified = certificate(tmp_path, "hub")
    client_cert, client_key = certificate(tmp_path, "trainer")
    context = ssl.create_default_context(cafile=certified.cert)
    flags = ["--memory", *certified.flags]
    with served(*flags) as hub:
        assert hub.url.startswith("https://")
        assert httpx.get(f"{hub.url}/healthz", verify=context).json() == {"status": "ok"}
        assert hub.end() == 0
    with served(*flags, "--ssl-ca-certs", str(client_cert)) as hub:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{hub.url}/healthz", verify=context)
        context.load_cert_chain(client_cert, client_key)
        assert httpx.get(f"{hub.url}/healthz", verify=context).json() == {"status": "ok"}
        assert hub.end() == 0
    said = command.said(*Certificate(certified.cert, client_key).flags, code=2)
    assert f"--ssl-certfile {certified.cert}: cannot be loaded with its key" in said


def test_hubs_and_clients_trust_a_private_authority(
    tmp_path: Path,
    postgres_url: str,
    served: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = certificate(tmp_path, "authority")
    first, second = (certificate(tmp_path, name, authority=authority) for name in ("one", "two"))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
    monkeypatch.setenv("ATROPOS_DATABASE", postgres_url)
    with served(*first.flags) as owner, served(*second.flags) as other:
        with TrainerClient(other.url) as trainer:
            trainer.register(TRAINER)
        said, deadline = "", time.monotonic() + 20
        # The owner reads once a second who is there.
        while other.url not in said.partition("hub ")[2]:
            assert time.monotonic() < deadline, said
            # A process, since aiohttp reads SSL_CERT_FILE when it is imported.
            command = [sys.executable, "-m", "atroposlib.cli.atropos", "status", other.url]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        assert "batch: 4 sequences" in said
        assert [line.split() for line in said.splitlines() if "alive" in line] == [
            [url, "alive", runs]
            for url, runs in sorted([(owner.url, "default"), (other.url, "none")])
        ]
        assert other.end() == 0
    owned = ", ".join(f"{url} has {num}" for url, num in sorted([(owner.url, 1), (other.url, 0)]))
    assert f"as {other.url}; runs by hub: {owned}\n" in other.errors


def test_hubs_show_each_other_their_certificates(
    tmp_path: Path, postgres_url: str, served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = certificate(tmp_path, "authority")
    certified = certificate(tmp_path, "hub", authority=authority)
    flags = [*certified.flags, "--ssl-ca-certs", str(authority.cert)]
    context = ssl.create_default_context(cafile=authority.cert)
    context.load_cert_chain(*certified)
    monkeypatch.setenv("ATROPOS_DATABASE", postgres_url)
    with served(*flags), served(*flags) as other:
        assert httpx.get(f"{other.url}/info", verify=context).status_code == 200


@pytest.mark.parametrize(
    ("is_trusted", "address", "reason"),
    [(False, "127.0.0.1", "unable to get local issuer"), (True, "10.0.0.1", "address mismatch")],
)
def test_a_hub_that_does_not_trust_another_says_why_at_once(
    tmp_path: Path,
    postgres_url: str,
    served: Serve,
    monkeypatch: pytest.MonkeyPatch,
    is_trusted: bool,
    address: str,
    reason: str,
) -> None:
    authority = certificate(tmp_path, "authority")
    flags = certificate(tmp_path, "hub", address=address, authority=authority).flags
    url = {"ATROPOS_DATABASE": postgres_url}
    monkeypatch.setenv(*next(iter(url.items())))
    trust = {"SSL_CERT_FILE": str(authority.cert)} if is_trusted else {}
    # As a process, since aiohttp reads SSL_CERT_FILE when it is imported.
    with served(*flags) as owner, running(tmp_path, **url, **trust) as other:
        answer = httpx.get(f"{other.url}/info")
        assert answer.status_code == 502
        said = answer.json()["detail"]["msg"]
        assert said.startswith(f"no TLS connection to the replica at {owner.url}")
        assert reason in said
        assert "SSL_CERT_FILE" in said
        assert other.end() == 0
    assert reason in other.errors
    assert "Traceback" not in other.errors
