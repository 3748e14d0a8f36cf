"""The compose file, as far as it can be checked without a Docker engine: its schema, its secrets, its metrics.

A drill runs the commands of its hubs, and Prometheus with its configuration, as processes of this machine.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from atroposlib.api.run.hub import Hub as Runs
from atroposlib.api.run.replica import Replica
from atroposlib.cli.run_api import RunApiConfig
from atroposlib.config import parse_flags
from tests.api.helpers_api import group, registration, running_hub
from tests.builders.programs import run_python, wait_until
from tests.processes import ROOT, free_port

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/hub.json").read_text())
HUBS = [name for name in COMPOSE["services"] if name.startswith("hub-")]


def test_the_compose_file_follows_the_compose_specification() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install 'atroposlib[dev]'")
    schema = ["--builtin-schema", "vendor.compose-spec"]
    run_python("-m", "check_jsonschema", *schema, DEPLOY / "compose.yaml")


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


def hub_command() -> list[str]:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    [command] = [line.removeprefix("CMD ") for line in lines if line.startswith("CMD ")]
    words: list[str] = json.loads(command)
    return words


def test_the_hubs_start_with_flags_that_run_api_has() -> None:
    flags = shlex.split(hub_command()[-1].partition("run-api ")[2])
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
        no_members: Any = SimpleNamespace(id=None, members={}, runs={})
        replica = Replica(Runs(), no_members, address="")
        replica.ownership = no_members
        hub.app.state.services.metrics.watch_replica(replica)
        text = (await hub.http.get("/metrics")).text
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            shown.setdefault(sample.name, {"instance"}).update(sample.labels)
    shown |= {
        "atropos_back_pressure_total": {"run", "outcome"},
        "atropos_forwarded_requests_total": {"outcome"},
        "atropos_store_free_bytes": {"run"},
        "atropos_certificate_expiry_timestamp_seconds": {"instance", "file"},
    }  # without a sample until something is counted; the last ones in a hub with a directory, and with TLS
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    for expression in expressions:
        for name, selected in re.findall(r"\b(atropos_\w+)(?:\{([^}]*)\})?", expression):
            assert name in shown, expression
            assert set(re.findall(r"(\w+)!?=", selected)) <= shown[name], expression


# The parts as processes


class Here:
    """What the containers call each other, and their secrets, on this machine."""

    def __init__(self, directory: Path, database: str) -> None:
        self.ports = {name: free_port() for name in (*HUBS, "prometheus")}
        self.secrets = directory / "secrets"
        self._places = {
            "/run/secrets": str(self.secrets),
            "postgresql://hub@postgres/hub": shlex.quote(database),
            **{f"{name}:8000": f"127.0.0.1:{self.ports[name]}" for name in HUBS},
        }
        self.environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.environ["PATH"] = f"{directory / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        program = directory / "bin" / "run-api"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\nexec python -m atroposlib.cli.run_api "$@"\n')
        program.chmod(0o755)
        self._make_secrets(directory)

    def _make_secrets(self, directory: Path) -> None:
        """By the commands at the head of the compose file."""
        head = (DEPLOY / "compose.yaml").read_text().split("docker compose")[0]
        lines = [line.removeprefix("#").strip() for line in head.splitlines() if "secrets" in line]
        script = "\n".join(["set -e", *lines])
        done = subprocess.run(
            ["sh", "-c", script], cwd=directory, env=self.environ, check=True, capture_output=True
        )
        self.client_token = done.stdout.decode().split()[-1]
        for name, secret in COMPOSE["secrets"].items():  # Docker names them so
            source = self.secrets / Path(secret["file"]).name
            if source != self.secrets / name:
                source.rename(self.secrets / name)

    def moved(self, text: str) -> str:
        """Replace the containers' names and paths by those on this machine."""
        for name, place in self._places.items():
            text = text.replace(name, place)
        return text

    @contextmanager
    def running(self, command: list[str], log: Path, **environ: str) -> Iterator[None]:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, env={**self.environ, **environ}, cwd=log.parent, stdout=file, stderr=file
            )
            try:
                yield
            finally:
                process.terminate()
                process.wait(20)


def until_true(check: Callable[[], object], *, what: str, logs: Path) -> None:
    def said() -> str:
        return "\n".join(
            [what, *(log.read_text(errors="replace")[-2000:] for log in logs.glob("*.log"))]
        )

    wait_until(check, timeout_s=60, said=said)


@pytest.mark.drill
@pytest.mark.timeout(240)
@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NOT TESTED: Debian: apt install prometheus"
)
def test_the_parts_of_the_compose_file_work_together_as_processes(
    tmp_path: Path, postgres_url: str
) -> None:
    here = Here(tmp_path, postgres_url)
    urls = [f"http://127.0.0.1:{here.ports[name]}" for name in HUBS]
    prometheus = f"127.0.0.1:{here.ports['prometheus']}"
    config = tmp_path / "prometheus.yml"
    for volume in COMPOSE["services"]["prometheus"]["volumes"]:
        source, target = volume.split(":")[:2]
        if source.startswith("./"):
            text = here.moved((DEPLOY / source).read_text())
            text = text.replace("scrape_interval: 10s", "scrape_interval: 1s")
            (tmp_path / Path(target).name).write_text(text)
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    check = COMPOSE["x-hub"]["healthcheck"]["test"]
    assert check[:1] == ["CMD"]

    def is_healthy(name: str) -> bool:
        command = [word.replace(":8000", f":{here.ports[name]}") for word in check[1:]]
        done = subprocess.run(command, env=here.environ, capture_output=True)
        return done.returncode == 0

    def query(expression: str) -> list[Any]:
        answer = httpx.get(f"http://{prometheus}/api/v1/query", params={"query": expression})
        found: list[Any] = answer.raise_for_status().json()["data"]["result"]
        return found

    with ExitStack() as stack:
        for name in HUBS:
            *shell, script = hub_command()
            command = [*shell, here.moved(f"{script} --port {here.ports[name]}")]
            advertise = here.moved(COMPOSE["services"][name]["environment"]["ADVERTISE"])
            running = here.running(command, tmp_path / f"{name}.log", ADVERTISE=advertise)
            stack.enter_context(running)
            until_true(lambda name=name: is_healthy(name), what=name, logs=tmp_path)
        client = {"Authorization": f"Bearer {here.client_token}"}
        assert httpx.get(f"{urls[0]}/ledger").status_code == 401
        httpx.post(f"{urls[1]}/register", json=registration(), headers=client).raise_for_status()
        for url in (*urls, *urls):
            httpx.post(f"{url}/scored_data", json=group(2), headers=client).raise_for_status()
        assert len(httpx.get(f"{urls[1]}/batch", headers=client).json()["batch"]) == 2

        def are_both_known() -> bool:
            status = httpx.get(f"{urls[1]}/status", headers=client).json()
            known = {each["address"]: each["runs"] for each in status["replicas"]}
            return known == {urls[0]: ["default"], urls[1]: []}

        until_true(are_both_known, what="both hubs in the status", logs=tmp_path)
        command = ["prometheus", f"--config.file={config}", f"--web.listen-address={prometheus}"]
        command.append(f"--storage.tsdb.path={tmp_path / 'tsdb'}")
        stack.enter_context(here.running(command, tmp_path / "prometheus.log"))

        def is_scraped() -> bool:
            try:
                return [each["value"][1] for each in query("up")] == ["1", "1"]
            except httpx.HTTPError:
                return False

        until_true(is_scraped, what="both hubs scraped", logs=tmp_path)
        panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
        none = (
            "sum by (outcome) (rate(atropos_back_pressure_total[5m]))"  # no request was turned away
        )

        def is_shown() -> bool:  # rates need two scrapes
            return [each for each in panels if not query(each.replace("$run", ".*"))] == [none]

        until_true(is_shown, what="every panel of the dashboard", logs=tmp_path)
