"""A job group for SkyPilot (0.11 and later): all parts in parallel, on one infrastructure, ended by the trainer.

The tasks find each other by the names that SkyPilot gives them (on Kubernetes), and share a volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atroposlib.cli.launch.parts import Part, instance_names, variable_of
from atroposlib.cli.launch.run_file import VARIABLE, RunFile
from atroposlib.cli.launch.slurm import command_line

GROUP = "${SKYPILOT_JOBGROUP_NAME}"


def render_skypilot(run: RunFile, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the documents: the header and one task for each part."""
    header: dict[str, Any] = {"name": run.name, "execution": "parallel"}
    primary = [task_name(part) for part in parts if part.ends_run]
    if primary:
        header |= {"primary_tasks": primary, "termination_delay": "30s"}
    return [header, *(_task(run, parts, part) for part in parts)]


def task_name(part: Part) -> str:
    """Return a part's name as a host name."""
    return part.name.lower().replace("_", "-")


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
    task: dict[str, Any] = {"name": task_name(part), "num_nodes": section.count}
    task["resources"] = resources
    task["volumes"] = {"/runs": run.kubernetes.volume}
    plain = {name: value for name, value in part.env.items() if not VARIABLE.search(value)}
    secrets = [name for name in part.env if name not in plain]
    task["envs"] = {**plain, "PYTHONUNBUFFERED": "1", "RUN_DIR": f"/runs/{run.name}"}
    if secrets:
        task["secrets"] = dict.fromkeys(secrets)
    if run.setup:
        task["setup"] = run.setup
    task["run"] = _script(parts, part)
    return task


def _script(parts: Sequence[Part], part: Part) -> str:
    lines = ["set -e", "export INDEX=${SKYPILOT_NODE_RANK}"]
    if part.section.port is not None:
        own = f"http://{task_name(part)}-$INDEX.{GROUP}:{part.section.port}"
        lines.append(f"export HOST=0.0.0.0 PORT={part.section.port} {variable_of(part)}={own}")
    for each in parts:
        if each.name not in part.needs:
            continue
        if each.section.port is None:
            if each.ready == "exit":
                marks = [f"-e $RUN_DIR/done/{name}" for name in instance_names(each)]
                lines.append(f"until [ {' -a '.join(marks)} ]; do sleep 2; done")
            continue
        num = each.section.count
        hosts = [f"http://{task_name(each)}-{i}.{GROUP}:{each.section.port}" for i in range(num)]
        one = f"http://{task_name(each)}-$((INDEX % {num})).{GROUP}:{each.section.port}"
        variable = variable_of(each)
        lines.append(f"export {variable}={hosts[0] if num == 1 else one}")
        lines.append(f"export {variable}S={','.join(hosts)}")
        check = f"curl -fs -m 5 -o /dev/null $url{each.ready}"
        if each.ready == "port":
            check = "curl -s -m 5 -o /dev/null telnet://${url#http://} < /dev/null"
        lines.append(f"for url in ${{{variable}S//,/ }}; do until {check}; do sleep 2; done; done")
    command = command_line(part, indent="  ")
    if part.ready != "exit":
        return "\n".join([*lines, f"exec {command}"]) + "\n"
    name = part.name if part.section.count == 1 else f"{part.name}-$INDEX"
    return (
        "\n".join([*lines, command, "mkdir -p $RUN_DIR/done", f"touch $RUN_DIR/done/{name}"]) + "\n"
    )


def gigabytes(memory: str) -> float:
    """Return a size in gigabytes.

    >>> gigabytes("512M"), gigabytes("2T")
    (0.5, 2048.0)
    """
    return float(memory[:-1]) * {"M": 1 / 1024, "G": 1.0, "T": 1024.0}[memory[-1]]
