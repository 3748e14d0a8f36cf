"""A job group for SkyPilot (0.11 and later): all parts in parallel, on one infrastructure, ended by the trainer.

The tasks find each other by the names that SkyPilot gives them (on Kubernetes), and share a volume.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from atroposlib.cli.launch.parts import Part, variables_in
from atroposlib.cli.launch.run_file import RunFile
from atroposlib.cli.launch.slurm import command_line

GROUP = "${SKYPILOT_JOBGROUP_NAME}"


def render_skypilot(run: RunFile, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the documents: the header and one task for each part."""
    header: dict[str, Any] = {"name": run.name, "execution": "parallel"}
    primary = [part.host_name for part in parts if part.ends_run]
    if primary:
        header |= {"primary_tasks": primary, "termination_delay": "30s"}
    return [header, *(_task(run, parts, part) for part in parts)]


def _task(run: RunFile, parts: Sequence[Part], part: Part) -> dict[str, Any]:
    section = part.section
    resources: dict[str, Any] = {}
    if section.gpus:
        resources["accelerators"] = f"{section.gpu_type}:{section.gpus}"
    if section.cpus is not None:
        resources["cpus"] = f"{section.cpus}+"
    if section.memory is not None:
        resources["memory"] = f"{gigabytes(section.memory):g}+"
    image = section.image or run.image
    if image is not None:
        resources["image_id"] = f"docker:{image}"
    if section.restart != "never":
        resources["job_recovery"] = {"max_restarts_on_errors": section.max_restarts}
    task: dict[str, Any] = {"name": part.host_name, "num_nodes": section.count}
    task["resources"] = resources
    task["volumes"] = {"/runs": run.kubernetes.volume}
    plain = {name: value for name, value in part.env.items() if name not in part.secrets}
    task["envs"] = {**plain, "PYTHONUNBUFFERED": "1", "RUN_DIR": f"/runs/{run.name}"}
    if "DATA_DIR" in variables_in(part):
        task["envs"]["DATA_DIR"] = f"/var/tmp/atropos/{run.name}"
    if part.secrets:
        task["secrets"] = dict.fromkeys(part.secrets)
    if run.setup:
        task["setup"] = run.setup
    task["run"] = _script(parts, part)
    return task


def _script(parts: Sequence[Part], part: Part) -> str:
    lines = ["set -e", "export INDEX=${SKYPILOT_NODE_RANK}"]
    if part.port is not None:
        own = f"{part.scheme}://{part.host_name}-$INDEX.{GROUP}:{part.port}"
        lines.append(f"export HOST=0.0.0.0 PORT={part.port} {part.variable}={own}")
    for each in part.needed(parts):
        if each.port is None:
            if each.ready == "exit":
                marks = [f"-e $RUN_DIR/done/{name}" for name in each.instances]
                lines.append(f"until [ {' -a '.join(marks)} ]; do sleep 2; done")
            continue
        num = each.section.count
        hosts = [f"{each.scheme}://{each.host_name}-{i}.{GROUP}:{each.port}" for i in range(num)]
        one = f"{each.scheme}://{each.host_name}-$((INDEX % {num})).{GROUP}:{each.port}"
        variable = each.variable
        lines.append(f"export {variable}={hosts[0] if num == 1 else one}")
        lines.append(f"export {variable}S={','.join(hosts)}")
        check = f"curl -fs -m 5 -o /dev/null $url{shlex.quote(each.ready or '')}"
        if each.ready == "port":
            check = "curl -s -m 5 -o /dev/null telnet://${url#*://} < /dev/null"
        lines.append(f"for url in ${{{variable}S//,/ }}; do until {check}; do sleep 2; done; done")
    command = command_line(part, indent="  ")
    if part.ready != "exit":
        return "\n".join([*lines, f"exec {command}"]) + "\n"
    mark = f"touch $RUN_DIR/done/{part.instance('$INDEX')}"
    return "\n".join([*lines, command, "mkdir -p $RUN_DIR/done", mark]) + "\n"


def gigabytes(memory: str) -> float:
    """Return a size in gigabytes.

    >>> gigabytes("512M"), gigabytes("2T")
    (0.5, 2048.0)
    """
    return float(memory[:-1]) * {"M": 1 / 1024, "G": 1.0, "T": 1024.0}[memory[-1]]
