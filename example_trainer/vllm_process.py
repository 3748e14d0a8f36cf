"""An inference engine (or another server) that this process owns: command line, environment, port and health.

A port on which another process listens is refused before the start. The engine may be in another virtual environment
(vLLM pins its own torch and transformers): it is started with that environment's Python and used over HTTP only.
Called by `bridges/`, `run.py` and the tests.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import torch

from atroposlib.errors import ConfigError, EngineError
from atroposlib.utils.model_choice import torch_device
from atroposlib.utils.owned_process import POLL_INTERVAL_S, OwnedProcess, check_port_is_free
from example_trainer.config import TrainerConfig
from example_trainer.model import adapter_rank, choose_dtype

logger = logging.getLogger(__name__)

_OF_TORCHRUN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|(GROUP|ROLE|TORCHELASTIC)_"
)
"""With these variables vLLM's processes would try to join the trainer's process group, and hang."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as --max-lora-rank (0.32)."""

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model in the engine core's process: a start takes 20 s of CPU time instead of 29, and 0.6 GB less. On the CPU
vLLM (0.32) takes "uni" for "mp", so that it can bind OpenMP threads, which `vllm_environment` does not want."""


class EngineProcess(OwnedProcess):
    """One engine process, ready when `GET {url}{health_route}` answers 200 (`url`: `http://127.0.0.1:9001`).

    As a context manager it is healthy inside the block and stopped after it. `what` is its name in messages.
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
        name = f"{what} at {self.url}"
        super().__init__(argv, name=name, log_path=log_path, env=env, stop_grace_s=stop_grace_s)
        parts = urlsplit(self.url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ConfigError(f"engine url {url!r}: expected http://HOST:PORT")
        self._address = (parts.hostname, parts.port)
        self._startup_timeout_s = startup_timeout_s
        self._health_url = f"{self.url}{health_route}"

    def start(self) -> None:
        """Start the engine without waiting for it.

        Raises `ConfigError` if the program does not exist, `EngineError` if the port is in use.
        """
        check_port_is_free(*self._address, user=self.name)
        super().start()

    def wait_ready(self, *, is_ending: Callable[[], bool] = lambda: False) -> None:
        """Return when the health route answers 200; raise `EngineError` on death, timeout or the end of the run."""
        started = time.monotonic()
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while True:
                healthy = False
                with suppress(httpx.TransportError):
                    healthy = http.get(self._health_url).status_code == httpx.codes.OK
                self.check_alive()  # after the request: another process may have answered it
                if healthy:
                    break
                if is_ending():
                    raise EngineError(f"{self.name}: not waited for, because the run ends")
                if time.monotonic() > started + self._startup_timeout_s:
                    raise EngineError(
                        f"{self.name}: not healthy after {self._startup_timeout_s:.0f} s; "
                        f"raise its startup timeout or see its log.\n{self.log_tail()}"
                    )
                time.sleep(POLL_INTERVAL_S)
        logger.info("%s healthy after %.1f s", self.name, time.monotonic() - started)


def make_engine(
    config: TrainerConfig, model: str | Path, *, extra_args: Sequence[str] = ()
) -> EngineProcess:
    """Return the configured engine for `model`, not yet started.

    It computes in the dtype of the published weights: vLLM's default for float32 weights is a 16-bit dtype.
    """
    device = torch_device(config.device)
    dtype = str(choose_dtype(config, device)).removeprefix("torch.")
    flags: dict[str, str | int | float | None] = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": config.vllm_port,
        "--dtype": dtype,
    }
    env = None
    if config.engine == "local":
        if config.vllm_gpu:
            env = dict(os.environ) | visible_devices(config.vllm_gpu, os.environ)
        program = [sys.executable, "-m", "atroposlib.engine"]
        flags |= {"--served_model_name": config.model_name, "--device": device.type}
        flags |= {"--threads": config.num_threads or 1, "--seed": config.seed}
    else:
        # Not the console script `vllm`: in the CPU build it looks for a distribution of another name and fails.
        program = [config.vllm_python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        flags |= {"--served-model-name": config.model_name, "--max-model-len": config.max_model_len}
        if device.type == "cpu":
            flags |= {"--distributed-executor-backend": UNIPROC, "--enforce-eager": None}
        else:
            flags["--gpu-memory-utilization"] = config.gpu_memory_utilization
        if config.reports_processed:
            flags["--logprobs-mode"] = "processed_logprobs"
        if config.bridge == "lora":
            # One at a time: vLLM (0.32) crashes on a batch with two versions of an adapter.
            flags |= {"--enable-lora": None, "--max-lora-rank": _allowed_rank(adapter_rank(config))}
            flags |= {"--max-loras": 1, "--max-cpu-loras": 8}
        backend = ""
        if config.bridge == "transfer":
            backend = transfer_backend(config, num_gpus=torch.cuda.device_count())
            flags["--weight-transfer-config"] = json.dumps({"backend": backend})
        env = vllm_environment(
            gpus=config.vllm_gpu or (), cpu=device.type == "cpu", takes_handles=backend == "ipc"
        )
    words = [str(word) for flag in flags.items() for word in flag if word is not None]
    return EngineProcess(
        [*program, *words, *shlex.split(config.engine_args), *extra_args],
        env=env,
        url=f"http://127.0.0.1:{config.vllm_port}",
        log_path=config.log_dir / "engine.log",
        startup_timeout_s=config.engine_timeout_s,
    )


def require_gpu_for_engine(config: TrainerConfig) -> None:
    """Raise ConfigError if an engine would be started on a GPU of torchrun's processes only because none is named."""
    num_own = len(_own_gpus(config))
    if config.starts_engine and config.vllm_gpu is None and num_own > 1:
        raise ConfigError(
            f"--vllm_gpu: the engine would take GPU 0, and torchrun's processes have GPUs 0 to {num_own - 1}; start "
            "fewer processes (--nproc_per_node) and name GPUs that they leave, such as --vllm_gpu 7"
        )


def shares_gpu(config: TrainerConfig, *, num_gpus: int) -> bool:
    """Whether the engine runs on a GPU of the trainer's processes, judged by the configuration and by torchrun's.

    An engine that someone else started on this machine is expected on another GPU if there is one.
    """
    if any(urlsplit(url).hostname not in ("localhost", "127.0.0.1") for url in config.engine_urls):
        return False
    own = _own_gpus(config)
    if config.vllm_gpu is None and not config.starts_engine:
        return num_gpus == len(own)
    return not own.isdisjoint(config.vllm_gpu or [0])


def _own_gpus(config: TrainerConfig) -> set[int]:
    """Return the CUDA devices of the trainer's processes on this machine."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_processes > 1:
        return set(range(num_processes))
    return {int(config.device.partition(":")[2] or 0)}


def transfer_backend(config: TrainerConfig, *, num_gpus: int) -> str:
    """Return the configured backend, else ipc on a shared GPU, where NCCL cannot work, and nccl otherwise."""
    shared = "ipc" if shares_gpu(config, num_gpus=num_gpus) else "nccl"
    return config.transfer_backend or shared


def vllm_environment(
    *,
    gpus: Sequence[int] = (),
    cpu: bool = False,
    takes_handles: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables for vLLM: `base` (default: this process's) with changes.

    `gpus` are the visible devices, in this process's numbering (empty: unchanged); `cpu` keeps the CPU build from
    taking every core and 40 % of the memory, unless `base` sets that. Enables vLLM's development routes
    (`/collective_rpc`, `/pause`) and loading of adapters, which need no authentication: run the engine on loopback or a
    private network only. `takes_handles` lets it unpickle GPU memory handles from requests, which can execute arbitrary
    code.
    """
    # The Python variables point to this process's packages, not the engine's.
    strange = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    found = {
        name: value
        for name, value in (os.environ if base is None else base).items()
        if name not in strange and not _OF_TORCHRUN.match(name)
    }
    found |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if takes_handles:
        found["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    found |= visible_devices(gpus, found)
    if cpu:  # pinned or spinning OpenMP threads starve the trainer on a small machine
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return defaults | found


def visible_devices(gpus: Sequence[int], base: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for devices numbered as a process with the variables `base` sees them."""
    visible = base.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if names and (missing := [gpu for gpu in gpus if gpu >= len(names)]):
        raise ConfigError(f"--vllm_gpu {missing[0]}: CUDA_VISIBLE_DEVICES is {visible!r} here")
    chosen = ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
    return {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}


def _allowed_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` that allows `rank`; raise ConfigError if there is none."""
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"--lora_r makes adapters of rank {rank} here, and vLLM serves rank {LORA_RANKS[-1]} at most"
        )
    return min(allowed for allowed in LORA_RANKS if rank <= allowed)
