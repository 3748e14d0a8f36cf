"""Find the inference servers of a SLURM job: they run on the nodes after the training nodes."""

from __future__ import annotations

import os
import subprocess

from atroposlib.errors import ConfigError

FIRST_PORT = 9000
GPUS_PER_NODE = 8


def list_hostnames() -> list[str]:
    """Return the hosts of the current job; empty outside a job."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        return []
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as e:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodelist!r} but its hosts cannot be listed: {e}"
        ) from e
    return answer.stdout.split()


def inference_urls(hostnames: list[str]) -> list[str]:
    """Return the base URLs of the servers on the inference nodes.

    The first `NUM_TRAINING_NODES` nodes train; each server uses `INFER_TP` GPUs (default 1). Raises ConfigError when
    no node is left for inference.
    """
    num_training = _read_int("NUM_TRAINING_NODES", at_least=0)
    gpus_per_server = _read_int("INFER_TP", at_least=1, default="1")
    if gpus_per_server > GPUS_PER_NODE:
        raise ConfigError(
            f"INFER_TP={gpus_per_server} is more than the {GPUS_PER_NODE} GPUs of a node; list the servers by hand"
        )
    serving = hostnames[num_training:]
    if not serving:
        raise ConfigError(
            f"NUM_TRAINING_NODES={num_training} leaves none of the job's {len(hostnames)} nodes for inference"
        )
    return [
        f"http://{host}:{FIRST_PORT + i}/v1"
        for host in serving
        for i in range(GPUS_PER_NODE // gpus_per_server)
    ]


def _read_int(name: str, *, at_least: int, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise ConfigError(f"{name} must be set in a SLURM job")
    try:
        value = int(text)
    except ValueError as e:
        raise ConfigError(f"{name}={text!r} is not a whole number") from e
    if value < at_least:
        raise ConfigError(f"{name}={text!r} must be at least {at_least}")
    return value
