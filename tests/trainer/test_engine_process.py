"""`example_trainer/vllm_process.py` with Python's file server: it starts, notices death, and kills only its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.errors import ConfigError, EngineError
from example_trainer.vllm_process import EngineProcess, vllm_environment
from tests.builders.programs import is_running, wait_until
from tests.processes import ROOT, answers, free_port

DEAF = "trap '' TERM; "


@pytest.fixture
def port() -> int:
    return free_port()


def command(port: int, directory: Path, *, first: str = "") -> list[str]:
    """Return the command of a server that is healthy if the directory has a file `health`; `first`: run in a shell."""
    server = [sys.executable, "-m", "http.server", str(port), "--bind=127.0.0.1"]
    return ["sh", "-c", f'{first} exec "$@"', "sh", *server, f"--directory={directory}"]


@pytest.fixture
def make_engine(port: int, tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    made: list[EngineProcess] = []
    (tmp_path / "health").touch()

    def make(first: str = "", *, directory: Path = tmp_path, **settings: float) -> EngineProcess:
        engine = EngineProcess(
            command(port, directory, first=first),
            url=f"http://127.0.0.1:{port}",
            log_path=tmp_path / "logs" / "engine.log",
            **settings,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop()


def with_child(directory: Path) -> str:
    return f"sleep 60 & echo $! > {directory}/child; "


def kill(pid: int) -> None:
    """Kill a child and wait until all its threads have ended."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def wait_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid), said=lambda: f"process {pid} still runs")


def test_engine_answers_inside_each_block_and_is_gone_after_it(
    make_engine: Callable[..., EngineProcess],
) -> None:
    engine = make_engine()
    for _ in range(2):
        with engine:
            assert httpx.get(f"{engine.url}/health").status_code == 200
            assert engine.poll() is None
            pid = engine.pid
            assert pid is not None
        assert engine.pid is None
        assert not is_running(pid)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{engine.url}/health")


def test_early_death_is_reported_with_status_command_and_the_reason_from_the_log_of_this_run(
    make_engine: Callable[..., EngineProcess],
) -> None:
    with pytest.raises(EngineError), make_engine("echo first run; exit 3;"):
        pass
    reason = "ValueError: head size 16 is not supported"
    engine = make_engine(f"echo {reason}; seq 40; exit 3;")
    with pytest.raises(EngineError, match="exited with status 3") as caught, engine:
        pass
    assert f"\n  {reason}\n" in str(caught.value)
    assert "-m http.server" in str(caught.value)
    assert engine.poll() == 3
    assert "first run" not in engine.log_tail()


def test_death_by_signal_is_named(make_engine: Callable[..., EngineProcess]) -> None:
    with make_engine() as engine:
        assert engine.pid is not None
        kill(engine.pid)
        with pytest.raises(EngineError, match="ended by SIGKILL"):
            engine.check_alive()


def test_startup_timeout_stops_the_engine(
    make_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    engine = make_engine(directory=tmp_path / "empty", startup_timeout_s=0.5)
    with pytest.raises(EngineError, match="not healthy after"), engine:
        pass
    assert engine.pid is None


def test_taken_port_is_refused_and_its_owner_left_alone(
    make_engine: Callable[..., EngineProcess], port: int
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        engine = make_engine()
        with pytest.raises(EngineError, match=f"cannot listen on port {port}.*left alone"):
            engine.start()
        assert engine.pid is None
        socket.create_connection(("127.0.0.1", port)).close()  # it still listens


def test_engine_that_ignores_sigterm_is_killed(make_engine: Callable[..., EngineProcess]) -> None:
    with make_engine(DEAF, stop_grace_s=0.2) as engine:
        pid = engine.pid
        assert pid is not None
    assert not is_running(pid)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_children_of_the_engine_end_with_it_and_strangers_do_not(
    make_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with make_engine(with_child(tmp_path)):
            child = int((tmp_path / "child").read_text())
            assert is_running(child)
        wait_gone(child)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_children_of_an_engine_that_died_are_killed_when_its_death_is_seen(
    make_engine: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    with make_engine(with_child(tmp_path)) as engine:
        child = int((tmp_path / "child").read_text())
        assert engine.pid is not None
        kill(engine.pid)
        assert engine.poll() == -signal.SIGKILL
        wait_gone(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl and pidfd_open")
@pytest.mark.parametrize("is_deaf", [False, True], ids=["engine", "deaf engine"])
def test_an_engine_and_its_children_end_when_its_parent_is_killed(
    port: int, tmp_path: Path, is_deaf: bool
) -> None:
    """vLLM ignores SIGTERM while it starts."""
    (tmp_path / "health").touch()
    first = DEAF + with_child(tmp_path) if is_deaf else ""
    # Of the base class, which owns the process: `EngineProcess` imports torch, for three seconds of CPU.
    program = (
        "import sys, time; from pathlib import Path\n"
        "from atroposlib.utils.owned_process import OwnedProcess\n"
        f"engine = OwnedProcess({command(port, tmp_path, first=first)!r}, stop_grace_s=0.2,"
        f" name='engine', log_path=Path({str(tmp_path / 'log')!r}))\n"
        "engine.start(); print(engine.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        health = f"http://127.0.0.1:{port}/health"
        wait_until(lambda: answers(health), said=(tmp_path / "log").read_text)
        assert is_running(pid)
    finally:
        parent.kill()
        parent.communicate()
    wait_gone(pid)
    if is_deaf:
        wait_gone(int((tmp_path / "child").read_text()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
def test_the_first_process_of_a_container_is_left_no_zombies(tmp_path: Path) -> None:
    """Orphans become its children, here by PR_SET_CHILD_SUBREAPER."""
    program = (
        "import ctypes, os, time; from pathlib import Path\n"
        "from atroposlib.utils.owned_process import OwnedProcess\n"
        f"ctypes.CDLL(None).prctl(36, 1); log = Path({str(tmp_path / 'log')!r})\n"
        "with OwnedProcess(['sh', '-c', 'echo ready; sleep 60'], name='part', log_path=log):\n"
        "    while '\\nready' not in log.read_text(): time.sleep(0.02)\n"
        "os.waitpid(-1, os.WNOHANG)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "ChildProcessError" in done.stderr


def test_missing_program_is_a_configuration_error(tmp_path: Path) -> None:
    engine = EngineProcess(
        ["/no/such/python"], url="http://127.0.0.1:9001", log_path=tmp_path / "log"
    )
    with pytest.raises(ConfigError, match="/no/such/python.*no such program"):
        engine.start()


@pytest.mark.parametrize("url", ["127.0.0.1:9001", "http://127.0.0.1", "https://host:1"])
def test_url_without_host_or_port_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        EngineProcess(["python"], url=url, log_path=tmp_path / "log")


def test_vllm_environment_hides_this_process_s_packages_and_opens_the_development_routes() -> None:
    base = {
        "PYTHONPATH": "/here",
        "VIRTUAL_ENV": "/venv",
        "HOME": "/home/a",
        "OMP_NUM_THREADS": "4",
    }
    environment = vllm_environment(base=base, cpu=True, gpus=[1])
    assert "PYTHONPATH" not in environment
    assert "VIRTUAL_ENV" not in environment
    assert environment["HOME"] == "/home/a"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment
    assert vllm_environment(takes_handles=True)["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(base=base)


def test_vllm_is_no_part_of_what_torchrun_started() -> None:
    """With its variables vLLM waits for ever for a store that only the trainer's processes have."""
    of_torchrun = [
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    ]
    base = dict.fromkeys([*of_torchrun, "LOCAL_DISK", "RANKING"], "1")
    found = vllm_environment(base=base)
    assert not found.keys() & set(of_torchrun)
    assert found["LOCAL_DISK"] == found["RANKING"] == "1"


def test_the_engines_gpu_is_one_of_those_that_the_trainer_sees() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4,GPU-b7c"}
    for gpus, expected in (([0], "4"), ([1], "GPU-b7c"), ([1, 0], "GPU-b7c,4"), ([], "4,GPU-b7c")):
        assert vllm_environment(base=base, gpus=gpus)["CUDA_VISIBLE_DEVICES"] == expected
    with pytest.raises(ConfigError, match="--vllm_gpu 2: CUDA_VISIBLE_DEVICES is '4,GPU-b7c'"):
        vllm_environment(base=base, gpus=[0, 2])
