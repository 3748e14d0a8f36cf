"""Find the inference servers of a SLURM job: on the nodes after those that train."""

from __future__ import annotations

import os
import subprocess

from atroposlib.errors import ConfigError

FIRST_PORT = 9000
GPUS_PER_NODE = 8


def list_hostnames() -> list[str]:
    """Return the hosts of the current job; empty outside of one."""
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
    """Return the base URLs of the servers on the nodes that do not train.

    `NUM_TRAINING_NODES` nodes come first; `INFER_TP` GPUs form one server (1 where unset).
    """
    num_training = _read_int("NUM_TRAINING_NODES", default=None)
    servers_per_node = max(1, GPUS_PER_NODE // _read_int("INFER_TP", default=1))
    return [
        f"http://{host}:{FIRST_PORT + i}/v1"
        for host in hostnames[num_training:]
        for i in range(servers_per_node)
    ]


def _read_int(name: str, *, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} must be set in a SLURM job: how many nodes train?")
        return default
    try:
        value = int(text)
    except ValueError as e:
        raise ConfigError(f"{name}={text!r} is not a whole number") from e
    if value < 1:
        raise ConfigError(f"{name}={text!r} must be at least 1")
    return value
