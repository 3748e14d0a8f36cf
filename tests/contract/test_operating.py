"""OPERATING.md: its commands run, its alerts, log lines and unit file are those of this version."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from atroposlib.cli.run_api import RunApiConfig
from atroposlib.config import parse_flags
from tests.postgres import Cluster
from tests.processes import ROOT, free_port

TEXT = (ROOT / "OPERATING.md").read_text()
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


def test_the_page_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_hub_is_started_looked_at_stored_and_restored(tmp_path: Path) -> None:
    *first, backup, restore = [block for block in blocks("bash") if "createdb" not in block]
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
    [text] = blocks("ini")
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
    for path in re.findall(r"`((?:atroposlib|deploy|benchmarks)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path
