"""Start, watch and stop an inference engine that this process owns.

Owns one rule: nothing is ever signalled that was not started here. The engine runs in a process group
of its own; stopping it touches that group alone. A port that somebody else listens on is refused before
anything starts, and an engine that dies is reported with the end of its log.

The engine may live in another virtual environment (vLLM pins its own torch and transformers): it is
started by that environment's Python and spoken to over HTTP only. Called by `bridges/restart.py`, the
demo and the tests; it does not know what the engine serves.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import httpx

from atroposlib.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
HEALTH_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15

# Linux only: asks the kernel to send SIGTERM to the engine when its parent dies, then becomes the engine.
# A child process does this instead of Popen's preexec_fn, which forks a multi-threaded torch process
# and runs Python in the copy (deprecated since Python 3.12). Arguments: parent's pid, then the command.
_TIED_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that asked for this engine is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class EngineProcess:
    """One engine, from its command line to its end.

    `url` is where it will answer (`http://127.0.0.1:9001`); `GET {url}/health` answering 200 means ready.
    `env` is the whole environment (None: inherit). Output goes to the end of `log_path`.

    As a context manager it is healthy inside the block and gone after it. Without the block, whoever
    calls `start()` calls `stop()` in a `finally`. On Linux the engine also ends when the starting
    *thread* ends without either, for instance by SIGKILL: start it from a thread that lives as long as
    the engine should.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        url: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 300.0,
        stop_grace_s: float = 5.0,
    ) -> None:
        if not argv:
            raise ConfigError("argv: empty; expected the engine's command line")
        self.argv = [str(part) for part in argv]
        self.url = url.rstrip("/")
        self.log_path = Path(log_path)
        self._env = None if env is None else dict(env)
        self._startup_timeout_s = startup_timeout_s
        self._stop_grace_s = stop_grace_s
        self._address = _address_of(self.url)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_status: int | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id, which is also its process group; None when it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the engine and return at once; `wait_healthy` waits for it.

        Raises `ConfigError` if the program does not exist, `EngineError` if something already listens on
        the engine's port.
        """
        assert self._process is None, "start() called twice without stop()"
        if shutil.which(self.argv[0]) is None:
            raise ConfigError(
                f"engine command {self.argv[0]!r}: no such program; "
                "give the path of the Python whose environment holds the engine"
            )
        _refuse_taken_port(self._address, self.url)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"\n--- {time.strftime('%F %T')} {' '.join(self.argv)}\n".encode())
            log.flush()
            self._exit_status = None
            self._process = subprocess.Popen(
                _tied_to_this_process(self.argv),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info("engine at %s started as process %d", self.url, self._process.pid)

    def wait_healthy(self) -> None:
        """Return when `/health` answers 200; raise `EngineError` if the engine dies or takes too long."""
        started = time.monotonic()
        deadline = started + self._startup_timeout_s
        with httpx.Client(trust_env=False, timeout=HEALTH_TIMEOUT_S) as http:
            while True:
                # Asked in this order: an answer counts only if our own engine is alive after it.
                healthy = _is_healthy(http, self.url)
                self.check_alive()
                if healthy:
                    break
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"engine at {self.url}: not healthy after {self._startup_timeout_s:.0f} s; "
                        f"raise its startup timeout or see its log.\n{self.log_tail()}"
                    )
                time.sleep(POLL_INTERVAL_S)
        logger.info("engine at %s healthy after %.1f s", self.url, time.monotonic() - started)

    def poll(self) -> int | None:
        """The exit status, or None while the engine runs or has not been started.

        Processes that a dead engine left behind in its group are killed the moment its death is seen,
        before its process id can be given to anybody else.
        """
        if self._process is not None:
            status = self._process.poll()
            if status is not None:
                self._bury(status)
        return self._exit_status

    def check_alive(self) -> None:
        """Raise `EngineError` with the end of the log if the engine is not running."""
        status = self.poll()
        if status is not None:
            raise EngineError(
                f"engine at {self.url} {_describe_exit(status)}; command: {' '.join(self.argv)}\n"
                f"{self.log_tail()}"
            )
        if self._process is None:
            raise EngineError(f"engine at {self.url} was not started")

    def stop(self) -> None:
        """Ask the engine to end, wait, then kill what is left of its group. Harmless when not running."""
        if self._process is None or self.poll() is not None:
            return
        process = self._process
        # The leader alone is asked: vLLM's workers end by its order, and complain when signalled themselves.
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(self._stop_grace_s)
        except subprocess.TimeoutExpired:
            logger.warning(
                "engine at %s ignored SIGTERM for %.0f s and is killed",
                self.url,
                self._stop_grace_s,
            )
            process.kill()
            status = process.wait()
        self._bury(status)
        logger.info("engine at %s stopped", self.url)

    def log_tail(self) -> str:
        """The last lines that speak of an error, then the last lines, of this run's log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(no log at {self.log_path})"
        starts = [i for i, line in enumerate(lines) if line.startswith("--- ")]
        lines = lines[starts[-1] :] if starts else lines
        tail = lines[-LOG_TAIL_LINES:]
        # vLLM ends with pages of shutdown noise; the reason stands further up.
        errors = [line for line in lines[:-LOG_TAIL_LINES] if "Error" in line or "ERROR" in line]
        shown = [*errors[-LOG_TAIL_LINES:], "...", *tail] if errors else tail
        return "\n".join([f"end of {self.log_path}:", *(f"  {line[:500]}" for line in shown)])

    def __enter__(self) -> EngineProcess:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _bury(self, status: int) -> None:
        """Record the leader's end and kill what remains of its group."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nobody was left
        self._process = None
        self._exit_status = status


def vllm_command(
    *,
    python: str | Path,
    model: str | Path,
    port: int,
    host: str = "127.0.0.1",
    served_model_name: str | None = None,
    max_model_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    dtype: str = "auto",
    enforce_eager: bool = False,
    cpu: bool = False,
    seed: int | None = None,
    extra_args: Sequence[str] = (),
) -> list[str]:
    """Return the command line of vLLM's OpenAI server, run by `python`.

    `served_model_name` keeps the name that clients ask for while `model` moves from checkpoint to
    checkpoint. None leaves a choice to vLLM. `cpu` is for the CPU build: it implies `enforce_eager`,
    runs the model in the engine core's own process (starts in 30 s instead of 39 s on two cores) and
    ignores `gpu_memory_utilization`. `python -m` works for both distributions: the console script
    `vllm` of the CPU rebuild looks for the metadata of a distribution of another name, and dies.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", host, "--port", str(port), "--dtype", dtype]
    if served_model_name is not None:
        command += ["--served-model-name", served_model_name]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if gpu_memory_utilization is not None and not cpu:
        command += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
    if cpu:
        command += ["--distributed-executor-backend", "uni"]
    if enforce_eager or cpu:
        command.append("--enforce-eager")
    if seed is not None:
        command += ["--seed", str(seed)]
    return [*command, *extra_args]


def vllm_environment(
    *,
    gpu: int | str | None = None,
    cpu: bool = False,
    cache_dir: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment to start vLLM in: `base` (default: this process's) with what it needs.

    `gpu` is the device it may see; `cpu` keeps the CPU build from taking every core and 40 % of the memory,
    where `base` does not say otherwise; `cache_dir` is where compiled code is kept between starts.

    Switches on vLLM's development routes (`/collective_rpc`, `/pause`, `/update_weight_version`): they
    ask for no password, so the engine belongs on loopback or a private network.
    """
    environment = dict(os.environ if base is None else base)
    # They name this process's packages, which are not the engine's.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    if cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Pinned or spinning OpenMP threads starve the trainer on a small machine.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setdefault("OMP_NUM_THREADS", "1")
    if cache_dir is not None:
        environment["VLLM_CACHE_ROOT"] = str(cache_dir)
    return environment


def local_engine_command(
    *,
    model: str | Path,
    port: int,
    python: str | Path = sys.executable,
    host: str = "127.0.0.1",
    served_model_name: str | None = None,
    device: str = "auto",
    dtype: str = "float32",
    threads: int = 1,
    seed: int = 0,
    extra_args: Sequence[str] = (),
) -> list[str]:
    """Return the command line of this project's own engine (`atropos-engine`)."""
    command = [str(python), "-m", "atroposlib.engine.server"]
    command += ["--model", str(model), "--host", host, "--port", str(port)]
    command += ["--device", device, "--dtype", dtype]
    command += ["--threads", str(threads), "--seed", str(seed)]
    if served_model_name is not None:
        command += ["--served_model_name", served_model_name]
    return [*command, *extra_args]


def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise ConfigError(f"engine url {url!r}: expected http://HOST:PORT")
    return parts.hostname, parts.port


def _refuse_taken_port(address: tuple[str, int], url: str) -> None:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an engine that has just gone do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise EngineError(
                f"engine at {url}: cannot listen on port {port} of {host} ({e.strerror}). If another "
                "process uses it, stop that process or choose another port; it was left alone"
            ) from e


def _tied_to_this_process(argv: list[str]) -> list[str]:
    if not sys.platform.startswith("linux"):
        return argv
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *argv]


def _is_healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
