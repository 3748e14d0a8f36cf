"""OPERATING.md: its commands run, its alerts and log lines are those of this version; its files in `deploy/` work."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from atroposlib.cli.run_api import RunApiConfig
from atroposlib.config import parse_flags
from tests.builders.programs import wait_until
from tests.postgres import Cluster
from tests.processes import ROOT, free_port, running

TEXT = (ROOT / "OPERATING.md").read_text()
LANGUAGES = re.findall(r"^```(\w*)\n.*?^```", TEXT, re.S | re.M)
SEND_A_GROUP = """
python - <<'EOF'
from atroposlib.client import TrainerClient, TrainerRegistration
import httpx, os, ssl
with TrainerClient("https://localhost:8000") as trainer:
    more = {"save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 4}
    trainer.register(TrainerRegistration(batch_size=2, max_token_len=9, checkpoint_dir="c", **more))
httpx.post(
    "https://localhost:8000/scored_data",
    json={"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [1.0, 0.0]},
    headers={"Authorization": "Bearer " + os.environ["ATROPOS_HUB_TOKEN"]},
    verify=ssl.create_default_context(),
).raise_for_status()
EOF
hub /ledger > before
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.S | re.M)


def run(script: str, folder: Path, **variables: str) -> str:
    """Run lines of bash as a reader would, with a free port in place of 8000; return what they print."""
    port = free_port()
    script = script.replace("8000", str(port)).replace(
        "run-api --data", f"run-api --port {port} --data"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; trap 'kill $(jobs -p) || true' EXIT\n{script}"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    logged = (folder / "hub.log").read_text() if (folder / "hub.log").exists() else ""
    assert done.returncode == 0, (done.stdout, done.stderr, logged)
    return done.stdout


def test_the_page_is_short_and_its_blocks_are_those_that_run_below() -> None:
    assert len(TEXT.splitlines()) <= 200
    assert {*LANGUAGES} == {"bash", "sh"}


# What each program of the system may be asked, in the commands that only its owner may run.
SYSTEM = {
    "useradd": r"--system atropos",
    "systemctl": r"(enable --now|stop|start) atropos-hub",
}


@pytest.mark.drill
@pytest.mark.timeout(120)
def test_a_hub_is_installed_as_a_service_and_upgraded(tmp_path: Path) -> None:
    for name, allowed in SYSTEM.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "{name} $*" | grep -Ex "{name} {allowed}"\n')
        program.chmod(0o755)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    script = "\n".join(blocks("sh")).replace("--owner atropos", f"--owner {os.getuid()}")
    script = re.sub(r"(?<= )/(?=opt|var|etc)|^/(?=opt)", f"{tmp_path}/", script, flags=re.M)
    script = script.replace("install .", f"install {ROOT}").replace("deploy/", f"{ROOT}/deploy/")
    for name in ("tokens.json", "hub.crt", "hub.key"):
        (tmp_path / name).touch()
    data = tmp_path / "var/lib/atropos/data"
    script = script.replace("systemctl enable", f"mkdir {data}; systemctl enable")
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    said = run(
        script,
        tmp_path,
        PATH=f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        PYTHONPATH=os.pathsep.join(packages),  # what builds the wheel; no index is asked
        PIP_NO_BUILD_ISOLATION="0",
        PIP_NO_COMPILE="1",
        PIP_NO_DEPS="1",
        PIP_NO_INDEX="1",
    )
    asked = [line for line in said.splitlines() if line.startswith(tuple(SYSTEM))]
    assert asked == [
        *("useradd --system atropos", "systemctl enable --now atropos-hub"),
        *("systemctl stop atropos-hub", "systemctl start atropos-hub"),
    ]
    assert (tmp_path / "opt/atropos/bin/run-api").exists()
    assert (tmp_path / "etc/systemd/system/atropos-hub.service").exists()
    assert (data.parent / "before-upgrade.tar").exists()
    assert (data.parent / "hub.key").stat().st_mode & 0o077 == 0


@pytest.mark.drill
@pytest.mark.timeout(60)
@pytest.mark.skipif(
    shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="NOT TESTED: Debian: apt install nginx",
)
def test_the_configuration_of_nginx_serves_a_hub(tmp_path: Path) -> None:
    hub, proxy = free_port(), free_port()
    location = (ROOT / "deploy/nginx.conf").read_text().replace(":8000", f":{hub}")
    temporary = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/nginx.log; events {{}}\n"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{proxy};\n{location} }} }}\n"
    )
    variables = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    command: list[str | Path] = [
        "nginx",
        "-c",
        tmp_path / "nginx.conf",
        "-p",
        tmp_path,
        "-e",
        tmp_path / "nginx.log",
    ]
    served = ["-m", "atroposlib.cli.run_api", "--memory", f"--port={hub}"]
    with (
        running("hub", served, log_path=tmp_path / "hub.log") as process,
        subprocess.Popen(command, env=variables) as nginx,
        httpx.Client(base_url=f"http://127.0.0.1:{proxy}") as client,
    ):

        def is_ready() -> bool:
            try:
                return client.get("/readyz").status_code == 200
            except httpx.ConnectError:
                return False

        try:
            wait_until(is_ready, said=process.log)
            large = b" " * (63 << 20)
            assert client.post("/scored_data", content=large).status_code == 422
            assert client.post("/scored_data", content=large + large).status_code == 413
            assert client.get("/reset_data").status_code == 403  # not from this machine itself
        finally:
            nginx.terminate()


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_hub_is_started_looked_at_stored_and_restored(tmp_path: Path) -> None:
    *first, backup, restore = [block for block in blocks("bash") if "createdb" not in block]
    assert len(first) == 4
    said = run("\n".join([*first, SEND_A_GROUP, backup, restore, "hub /ledger > after"]), tmp_path)
    assert '"status":"ready"' in said
    assert "no trainer has registered" in said
    after = (tmp_path / "after").read_text()
    assert '"queued":1' in after
    assert after == (tmp_path / "before").read_text()
    assert (tmp_path / "operator.token").stat().st_mode & 0o077 == 0


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_database_is_dumped_and_restored(postgres: Cluster, tmp_path: Path) -> None:
    [block] = [block for block in blocks("bash") if "createdb" in block]
    said = run(block, tmp_path, PGHOST="localhost", PGPORT=str(postgres.port), PGUSER="hub")
    assert '"status":"ready"' in said
    assert re.search(r"default .* MiB", said)


def test_the_unit_file_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "deploy/atropos-hub.service").read_text()
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(text)
    program, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert parse_flags(RunApiConfig, flags, prog="run-api").tokens == Path("tokens.json")
    if shutil.which("systemd-analyze") is not None:
        path = tmp_path / "atropos-hub.service"
        path.write_text(text.replace(program, sys.executable))
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert path.name not in done.stderr, done.stderr


def quoted_in(table: str) -> list[str]:
    """Return what stands between backticks in the first column of the table with this head."""
    rows = TEXT.split(f"| {table} |")[1].split("\n\n")[0].splitlines()[2:]
    return re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in rows))


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    assert sorted(rule["alert"] for rule in rules) == sorted(quoted_in("alert"))
    assert all(rule["annotations"]["summary"] for rule in rules)


def test_every_line_of_the_log_is_one_that_the_hub_writes() -> None:
    files = [*(ROOT / "atroposlib/api").rglob("*.py"), ROOT / "atroposlib/cli/run_api.py"]
    source = "\n".join(path.read_text() for path in files)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts on several lines
    assert len(quoted_in("line")) > 10
    for line in quoted_in("line"):
        assert re.sub(r"=\d+", "=%d", line) in source, line


def test_files_and_flags_that_the_page_names_exist() -> None:
    flags = {name.replace("_", "-") for name in RunApiConfig.model_fields}
    named = re.findall(r"`--([a-z-]+)[ `]", TEXT.replace("`--engine_retry_s`", ""))
    for flag in named:
        assert flag in flags | {"list", "resume"}, flag
    for path in re.findall(r"`((?:atroposlib|deploy|benchmarks)/[\w./-]+)`", TEXT):
        assert (ROOT / path).exists(), path
