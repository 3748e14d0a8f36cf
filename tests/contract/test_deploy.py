"""The compose file, as far as it can be checked without a Docker engine: its schema, its secrets, its metrics."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.replica import Replica
from atroposlib.cli.run_api import RunApiConfig
from atroposlib.config import parse_flags
from tests.api.helpers_api import group, running_hub

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/hub.json").read_text())
HUBS = [name for name in COMPOSE["services"] if name.startswith("hub-")]


def test_the_compose_file_follows_the_compose_specification() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install 'atroposlib[dev]'")
    command = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [sys.executable, *command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_and_secret_that_a_service_names_exists() -> None:
    declared = COMPOSE["secrets"]
    for name, service in COMPOSE["services"].items():
        assert set(service.get("secrets", ())) <= set(declared), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            is_there = source in COMPOSE["volumes"] or (DEPLOY / source).is_file()
            assert is_there, (name, volume)
    for secret in declared.values():  # outside of the repository: git ignores the directory
        assert Path(secret["file"]).parts[:2] == ("..", "secrets")
    assert "secrets/" in (ROOT / ".gitignore").read_text().split()


def test_no_password_is_written_down() -> None:
    for name, service in COMPOSE["services"].items():
        for variable, value in service.get("environment", {}).items():
            if "PASSWORD" in variable:
                assert re.fullmatch(r"/run/secrets/\w+", value), (name, variable)
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not re.search(r"://[^/\s:]+:[^/\s@]+@", path.read_text()), path


def test_the_hubs_start_with_flags_that_run_api_has() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    [command] = [line.removeprefix("CMD ") for line in lines if line.startswith("CMD ")]
    script = json.loads(command)[-1]
    flags = shlex.split(script.partition("run-api ")[2])
    config = parse_flags(RunApiConfig, flags, prog="run-api", description="")
    assert (config.host, config.database) == ("0.0.0.0", "postgresql://hub@postgres/hub")
    assert config.tokens is not None  # without tokens it would refuse to listen
    for name in HUBS:
        assert COMPOSE["services"][name]["environment"] == {"ADVERTISE": f"http://{name}:8000"}


def test_prometheus_reads_every_hub_with_a_token() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:8000" for name in HUBS]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/prometheus_token"


async def test_every_metric_and_label_of_dashboard_and_alerts_is_in_the_hubs_metrics() -> None:
    async with running_hub() as hub:
        await hub.start()
        await hub.post("/policy", {"version": 1})
        await hub.post("/scored_data_list", [group(2), group(2), group(2)])
        await hub.get("/batch")
        no_members: Any = None
        hub.app.state.services.metrics.watch_replica(Replica(Runs(), no_members, address=""))
        text = (await hub.http.get("/metrics")).text
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            shown.setdefault(sample.name, {"instance"}).update(sample.labels)
    shown |= {
        "atropos_back_pressure_total": {"run", "outcome"},
        "atropos_forwarded_requests_total": {"outcome"},
        "atropos_store_free_bytes": {"run"},
    }  # without a sample until something is counted; the last one in a hub with a directory
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    for expression in expressions:
        for name, selected in re.findall(r"\b(atropos_\w+)(?:\{([^}]*)\})?", expression):
            assert name in shown, expression
            assert set(re.findall(r"(\w+)!?=", selected)) <= shown[name], expression
