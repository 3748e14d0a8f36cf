"""Manifests for Kubernetes (1.28 and later): a StatefulSet and a Service for each server, a Job for every other part.

The pods find each other by their services, and mount one volume for the run's directory; the hub has a volume of its
own for its data, which follows it to another node. A StatefulSet never runs two hubs at once; an indexed Job ends when
its instances have ended. One more Job ends the run with its trainer, or with a Job that has failed for good.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from atroposlib.cli.launch.parts import Part, servers, variables_in
from atroposlib.cli.launch.run_file import VARIABLE, RunFile
from atroposlib.errors import ConfigError

WAIT_IMAGE = "busybox:1.37"
END_OF_RUN = Path(__file__).with_name("kubernetes_end.yaml")
CHECK_PERIOD_S = 10
GRACE_S = 60
MARK = 'mkdir -p "$RUN_DIR/done" && touch "$RUN_DIR/done/$MARK"'


def render_kubernetes(run: RunFile, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return the manifests; ConfigError without an image."""
    found = [manifest for part in parts for manifest in _manifests(run, parts, part)]
    return [*found, *_end_of_run(run, parts)]


def secret_names(parts: Sequence[Part]) -> list[str]:
    """Return the keys that the run's Secret must have."""
    return list(dict.fromkeys(name for part in parts for name in part.secrets))


def _manifests(run: RunFile, parts: Sequence[Part], part: Part) -> list[dict[str, Any]]:
    section = part.section
    name = f"{run.name}-{part.host_name}"
    labels = {"app.kubernetes.io/part-of": run.name, "app.kubernetes.io/name": part.host_name}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    if run.kubernetes.namespace is not None:
        metadata["namespace"] = run.kubernetes.namespace
    pod = {"metadata": {"labels": labels}, "spec": _pod(run, parts, part)}
    if part.port is None:
        spec: dict[str, Any] = {
            "completions": section.count,
            "parallelism": section.count,
            "completionMode": "Indexed",
            "backoffLimit": 0
            if section.restart == "never"
            else section.max_restarts * section.count,
            "template": pod,
        }
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]
    service = {
        "clusterIP": "None",  # every instance has a name of its own
        "publishNotReadyAddresses": True,
        "selector": labels,
        "ports": [{"port": part.port}],
    }
    servers = {
        "serviceName": name,
        "replicas": section.count,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": pod,
    }
    if "DATA_DIR" in variables_in(part):
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": run.kubernetes.hub_storage}},
        }
        servers["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claim}]
        # Whatever user the image has may write to the volume.
        pod["spec"]["securityContext"] = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
        pod["spec"]["containers"][0]["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": servers},
    ]


def _end_of_run(run: RunFile, parts: Sequence[Part]) -> list[dict[str, Any]]:
    if any(part.host_name == "end" for part in parts):
        raise ConfigError("end: the Job that ends the run has this name")
    ends = ":Failed" + "".join(f"|^{part.host_name}:.*Complete" for part in parts if part.ends_run)
    text = END_OF_RUN.read_text(encoding="utf-8").replace("RUN", run.name).replace("ENDS", ends)
    found: list[dict[str, Any]] = list(yaml.safe_load_all(_literal(text)))
    if run.kubernetes.namespace is not None:
        for manifest in found:
            manifest["metadata"]["namespace"] = run.kubernetes.namespace
    return found


def _pod(run: RunFile, parts: Sequence[Part], part: Part) -> dict[str, Any]:
    section = part.section
    image = section.image or run.image
    if image is None:
        raise ConfigError(f"{part.name}.image: a value is required, here or as the run's image")
    mount = [{"name": "runs", "mountPath": "/runs"}]
    container: dict[str, Any] = {
        "name": part.host_name,
        "image": image,
        "command": list(map(_word, part.command)),
        "env": _environment(run, parts, part),
        "volumeMounts": [*mount],
    }
    if part.ready == "exit":
        container["command"] = ["sh", "-c", f'"$@" && {MARK}', "sh", *container["command"]]
    if part.port is not None:
        container |= {"ports": [{"containerPort": part.port}], **_probes(part)}
    memory = section.memory and f"{section.memory}i"
    limits = {"cpu": section.cpus, "memory": memory, "nvidia.com/gpu": section.gpus}
    if kept := {name: str(value) for name, value in limits.items() if value}:
        container["resources"] = {"requests": kept, "limits": kept}
    waits = [_wait(run, each) for each in part.needed(parts) if each.ready]
    pod: dict[str, Any] = {"containers": [container]}
    if waits:
        pod["initContainers"] = [{**wait, "volumeMounts": mount} for wait in waits]
    pod["volumes"] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": run.kubernetes.volume}}
    ]
    pod["terminationGracePeriodSeconds"] = GRACE_S
    if part.port is None:
        pod["restartPolicy"] = "Never" if section.restart == "never" else "OnFailure"
    return pod


def _probes(part: Part) -> dict[str, Any]:
    port = part.port
    check: dict[str, Any] = {"tcpSocket": {"port": port}}
    if part.ready not in (None, "port"):
        get = {"path": part.ready, "port": port}
        check = {"httpGet": get | ({"scheme": "HTTPS"} if part.scheme == "https" else {})}
    check |= {"periodSeconds": CHECK_PERIOD_S, "timeoutSeconds": 5}
    patient = {**check, "failureThreshold": max(1, round(part.section.timeout / CHECK_PERIOD_S))}
    return {"startupProbe": patient, "readinessProbe": check, "livenessProbe": patient}


def _wait(run: RunFile, needed: Part) -> dict[str, Any]:
    if needed.ready == "exit":
        marks = [f"-e /runs/{run.name}/done/{name}" for name in needed.instances]
        check = f"[ {' -a '.join(marks)} ]"
    else:
        checks = []
        for host in _hosts(run, needed):
            if needed.ready == "port":
                checks.append(f"nc -z {host} {needed.port}")
            else:
                url = f"{needed.scheme}://{host}:{needed.port}{needed.ready}"
                checks.append(f"wget -q -T 5 -O /dev/null {shlex.quote(url)}")
        check = " && ".join(checks)
    command = ["sh", "-c", _literal(f"until {check}; do sleep 2; done")]
    return {"name": f"wait-for-{needed.host_name}", "image": WAIT_IMAGE, "command": command}


def _environment(run: RunFile, parts: Sequence[Part], part: Part) -> list[dict[str, Any]]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    if part.port is not None:
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
    values: dict[str, str] = {"RUN_DIR": f"/runs/{run.name}"}
    if "DATA_DIR" in variables_in(part):
        values["DATA_DIR"] = "/data/hub"
    if part.port is not None:
        service = f"{run.name}-{part.host_name}"
        own = f"{part.scheme}://{service}-$(INDEX).{service}:{part.port}"
        values |= {"HOST": "0.0.0.0", "PORT": str(part.port), part.variable: own}
    for server in servers(part.needed(parts)):
        hosts = _hosts(run, server)
        urls = [f"{server.scheme}://{host}:{server.port}" for host in hosts]
        # Several instances: the service's name stands for all of them.
        service = f"{server.scheme}://{run.name}-{server.host_name}:{server.port}"
        values[server.variable] = urls[0] if len(urls) == 1 else service
        values[f"{server.variable}S"] = ",".join(urls)
    secrets = part.secrets
    values |= {name: _literal(text) for name, text in part.env.items() if name not in secrets}
    values["PYTHONUNBUFFERED"] = "1"
    found: list[dict[str, Any]] = [
        {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        *({"name": name, "value": value} for name, value in values.items()),
    ]
    if part.ready == "exit":
        found.append({"name": "MARK", "value": part.instance("$(INDEX)")})
    for name in secrets:
        reference = {"secretKeyRef": {"name": f"{run.name}-secrets", "key": name}}
        found.append({"name": name, "valueFrom": reference})
    return found


def _word(word: str) -> str:
    pieces = VARIABLE.split(word)  # text, name, text, ...
    return "".join(f"$({piece})" if i % 2 else _literal(piece) for i, piece in enumerate(pieces))


def _literal(text: str) -> str:
    return text.replace("$", "$$")


def _hosts(run: RunFile, part: Part) -> list[str]:
    service = f"{run.name}-{part.host_name}"
    return [f"{service}-{i}.{service}" for i in range(part.section.count)]
