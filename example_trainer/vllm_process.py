"""An inference engine (or another server) that this process owns: its command line, its port, when it is healthy.

A port that another process listens on is refused before anything starts. The engine may live in another virtual
environment (vLLM pins its own torch and transformers): it is started by that environment's Python and spoken to over
HTTP only. Called by `bridges/`, `run.py`, the demo and the tests; it does not know what the engine serves.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from atroposlib.errors import ConfigError, EngineError
from atroposlib.utils.owned_process import POLL_INTERVAL_S, OwnedProcess

logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 5.0

_OF_TORCHRUN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|(GROUP|ROLE|TORCHELASTIC)_"
)
"""By these vLLM's processes would join the trainer's group, and wait for its store for ever."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as --max-lora-rank (0.32)."""


class EngineProcess(OwnedProcess):
    """One engine, from its command line to its end.

    `url` is where it will answer (`http://127.0.0.1:9001`); `GET {url}{health_route}` answering 200 means ready.
    As a context manager it is healthy inside the block and gone after it. `what` is what messages call it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        url: str,
        log_path: Path,
        what: str = "engine",
        health_route: str = "/health",
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 300.0,
        stop_grace_s: float = 5.0,
    ) -> None:
        self.url = url.rstrip("/")
        super().__init__(
            argv,
            name=f"{what} at {self.url}",
            log_path=log_path,
            env=env,
            stop_grace_s=stop_grace_s,
        )
        self._startup_timeout_s = startup_timeout_s
        self._address = _address_of(self.url)
        self._health_url = f"{self.url}{health_route}"

    def start(self) -> None:
        """Start the engine and return at once; `wait_ready` waits for it.

        Raises `ConfigError` if the program does not exist, `EngineError` if something already listens on
        the engine's port.
        """
        self.check_program()
        _refuse_taken_port(self._address, self.name)
        super().start()

    def wait_ready(self) -> None:
        """Return when `/health` answers 200; raise `EngineError` if the engine dies or takes too long."""
        started = time.monotonic()
        deadline = started + self._startup_timeout_s
        with httpx.Client(trust_env=False, timeout=HEALTH_TIMEOUT_S) as http:
            while True:
                # Asked in this order: an answer counts only if our own engine is alive after it.
                healthy = _is_healthy(http, self._health_url)
                self.check_alive()
                if healthy:
                    break
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{self.name}: not healthy after {self._startup_timeout_s:.0f} s; "
                        f"raise its startup timeout or see its log.\n{self.log_tail()}"
                    )
                time.sleep(POLL_INTERVAL_S)
        logger.info("%s healthy after %.1f s", self.name, time.monotonic() - started)


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
    lora_rank: int | None = None,
    processed_logprobs: bool = False,
    extra_args: Sequence[str] = (),
) -> list[str]:
    """Return the command line of vLLM's OpenAI server, run by `python`.

    `served_model_name` keeps the name that clients ask for while `model` moves from checkpoint to
    checkpoint. None leaves a choice to vLLM. `cpu` is for the CPU build: it implies `enforce_eager`,
    runs the model in the engine core's own process (starts in 30 s instead of 39 s on two cores) and
    ignores `gpu_memory_utilization`. `python -m` works for both distributions: the console script
    `vllm` of the CPU rebuild looks for the metadata of a distribution of another name, and dies.

    `lora_rank` makes it serve adapters of up to that rank: one at a time, because vLLM (0.32) dies of a batch with two
    versions of an adapter, and more in memory, so that none is read again from disk. After a swap new requests wait for
    those in flight under the previous adapter.
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
    if processed_logprobs:
        command += ["--logprobs-mode", "processed_logprobs"]
    if lora_rank is not None:
        command += ["--enable-lora", "--max-lora-rank", str(_allowed_rank(lora_rank))]
        command += ["--max-loras", "1", "--max-cpu-loras", "8"]
    return [*command, *extra_args]


def vllm_environment(
    *,
    gpu: int | str | None = None,
    cpu: bool = False,
    cache_dir: Path | None = None,
    takes_handles: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment to start vLLM in: `base` (default: this process's) with what it needs.

    `gpu` is the device it may see; `cpu` keeps the CPU build from taking every core and 40 % of the memory,
    where `base` does not say otherwise; `cache_dir` is where compiled code is kept between starts.

    Switches on vLLM's development routes (`/collective_rpc`, `/pause`, `/update_weight_version`) and the
    swapping of adapters: they ask for no password, so the engine belongs on loopback or a private network.
    `takes_handles` lets it unpickle handles of GPU memory from a request, which is to run whatever code one sends.
    """
    environment = dict(os.environ if base is None else base)
    for name in [each for each in environment if _OF_TORCHRUN.match(each)]:
        del environment[name]
    # They name this process's packages, which are not the engine's.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if takes_handles:
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = _visible(gpu, environment.get("CUDA_VISIBLE_DEVICES"))
    if cpu:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # Pinned or spinning OpenMP threads starve the trainer on a small machine.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setdefault("OMP_NUM_THREADS", "1")
    if cache_dir is not None:
        environment["VLLM_CACHE_ROOT"] = str(cache_dir)
    return environment


def _visible(gpu: int | str, inherited: str | None) -> str:
    """Return the device that this process calls `gpu`: it may see only some itself.

    >>> _visible(1, "4,5"), _visible(1, None)
    ('5', '1')
    """
    names = [name.strip() for name in (inherited or "").split(",") if name.strip()]
    if not names or isinstance(gpu, str):
        return str(gpu)
    if gpu >= len(names):
        raise ConfigError(f"--vllm_gpu {gpu}: CUDA_VISIBLE_DEVICES is {inherited!r} here")
    return names[gpu]


def _allowed_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can be started for and that holds `rank`."""
    for allowed in LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise ConfigError(f"--lora_r {rank}: vLLM serves adapters of rank {LORA_RANKS[-1]} at most")


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


def _refuse_taken_port(address: tuple[str, int], name: str) -> None:
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an engine that has just gone do not count, a listener does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            raise EngineError(
                f"{name}: cannot listen on port {port} of {host} ({e.strerror}). If another "
                "process uses it, stop that process or choose another port; it was left alone"
            ) from e


def _is_healthy(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
