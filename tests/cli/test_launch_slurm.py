"""The demo's run file on a one-node Slurm cluster that the test starts in a temporary directory."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.builders.programs import wait_until
from tests.builders.rows import rows_in
from tests.cli.helpers_launch import (
    atropos,
    check_end,
    environment,
    make_model,
    short_demo,
    write_run,
)
from tests.processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "curl")
_PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [each for each in PROGRAMS if shutil.which(each, path=_PATH) is None]

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"needs slurm-wlm and munge; missing: {MISSING}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=20
MinJobAge=300
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 CoresPerSocket=16 RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables with which Slurm's commands speak to a cluster of this machine alone."""
    directory = tmp_path / "slurm"
    (directory / "state").mkdir(parents=True)
    (directory / "spool").mkdir()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    host = subprocess.run(["hostname", "-s"], check=True, capture_output=True, text=True).stdout
    config = directory / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=host.strip(),
            directory=directory,
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    variables = environment(
        SLURM_CONF=str(config),
        PATH=f"{Path(sys.executable).parent}:{_PATH}",
        ATROPOS_HUB_TOKEN="a-secret-of-this-test",
    )
    munged = ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket"]
    munged += [f"--key-file={key}", f"--pid-file={directory}/munged.pid"]
    munged += [f"--log-file={directory}/munged.log", f"--seed-file={directory}/munged.seed"]
    daemons = [munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host.strip()]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in daemons:
            with (directory / f"{command[0]}.out").open("wb") as log:
                started.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            time.sleep(0.5)
        wait_for(lambda: "idle" in run(variables, "sinfo", "-h", "-o", "%t"), what="a node")
        yield variables
    finally:
        run(variables, "scancel", "--user=root")
        jobs_end = time.monotonic() + 30
        while time.monotonic() < jobs_end and run(variables, "squeue", "-h"):
            time.sleep(0.5)
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.mark.parametrize("num_hubs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_ends_on_slurm_with_one_job_queued_again(
    slurm: dict[str, str], tmp_path: Path, num_hubs: int, request: pytest.FixtureRequest
) -> None:
    make_model(tmp_path / "runs" / "short" / "model")
    (local_disk := tmp_path / "disk").mkdir()
    run_file = short_demo(tmp_path, setup=f"export LOCAL_DISK={local_disk}")
    if num_hubs > 1:
        changed = yaml.safe_load(run_file.read_text())
        flags = {"database": request.getfixturevalue("postgres_url")}
        changed["hub"] |= {"count": num_hubs, "flags": flags}
        write_run(run_file, changed)
    subprocess.run(
        atropos("render", run_file, "--for", "slurm", "--out", "jobs"),
        cwd=tmp_path,
        env=slurm,
        check=True,
    )
    assert "a-secret" not in "".join(each.read_text() for each in (tmp_path / "jobs").iterdir())
    subprocess.run([tmp_path / "jobs" / "submit.sh"], env=slurm, check=True)
    run_dir = tmp_path / "runs" / "short"
    jobs = (run_dir / "jobs").read_text().split()
    assert len(jobs) == 6

    wait_for(
        lambda: len(rows_in(run_dir / "metrics.jsonl")) >= 3, what="three steps", run_dir=run_dir
    )
    hub = next(
        job for job in jobs if "short-hub" in run(slurm, "squeue", "-h", "-j", job, "-o", "%j")
    )
    hub += "" if num_hubs == 1 else "_0"
    run(slurm, "scontrol", "requeue", hub)
    wait_for((run_dir / "done" / "trainer").exists, what="the trainer's end", run_dir=run_dir)
    wait_for(lambda: not run(slurm, "squeue", "-h"), what="the jobs' end", run_dir=run_dir)
    assert "Restarts=1" in run(slurm, "scontrol", "show", "job", hub)
    check_end(run_dir)
    if num_hubs == 1:  # its data were on the node's own disk
        assert (run_dir / "hub" / "default" / "run.db").exists()
        assert not (run_dir / "hub_node").exists()
        assert not [*local_disk.iterdir()]


SERVER = {"command": ["python", "-m", "http.server", "${PORT}"], "ready": "/"}


@pytest.mark.parametrize(
    "how", ["cancelled", "hub killed", pytest.param("time", marks=pytest.mark.slow)]
)
def test_no_job_of_a_run_is_left_when_one_ends(
    slurm: dict[str, str], tmp_path: Path, how: str
) -> None:
    """Also: a second `submit.sh` while jobs live is refused, and a trainer that is queued again ends nothing.

    `test_launch_ends.py` has the other ways to end.
    """
    program = ["bash", "-c", "echo >> ${RUN_DIR}/starts; sleep 1000"]
    trainer = {"command": program, "time": "00:01:00"}
    hub, engine = ({**SERVER, "port": free_port()} for _ in range(2))
    run_file = write_run(
        tmp_path / "run.yaml",
        {"name": "short", "model": "m", "hub": hub, "engine": engine, "trainer": trainer},
    )
    rendered = atropos("render", run_file, "--for", "slurm", "--out", "jobs")
    subprocess.run(rendered, cwd=tmp_path, env=slurm, check=True)
    submit = tmp_path / "jobs" / "submit.sh"
    subprocess.run([submit], env=slurm, check=True)
    run_dir = tmp_path / "runs" / "short"
    names = ("hub", "engine", "trainer", "clean-up")
    jobs = dict(zip(names, (run_dir / "jobs").read_text().split(), strict=True))
    wait_for((run_dir / "starts").exists, what="the trainer", run_dir=run_dir)
    again = subprocess.run([submit], env=slurm, capture_output=True, text=True)
    assert (again.returncode, "has jobs already" in again.stderr) == (1, True)
    assert (run_dir / "jobs").read_text().split() == list(jobs.values())
    if how == "cancelled":
        run(slurm, "scontrol", "requeue", jobs["trainer"])
        wait_for(
            lambda: (run_dir / "starts").read_text() == "\n\n",
            what="the trainer again",
            run_dir=run_dir,
        )
        assert len(run(slurm, "squeue", "-h").splitlines()) == 4
        run(slurm, "scancel", jobs["trainer"])
    if how == "hub killed":
        run(slurm, "scancel", "--full", "--signal=KILL", jobs["hub"])
    wait_for(lambda: not run(slurm, "squeue", "-h"), what="the jobs' end", run_dir=run_dir)


def run(variables: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def wait_for(is_true: Callable[[], object], *, what: str, run_dir: Path | None = None) -> None:
    def said() -> str:
        logs = sorted(run_dir.glob("*.log")) if run_dir is not None else []
        ends = [f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return f"{what} did not come\n" + "\n".join(ends)

    wait_until(is_true, timeout_s=300, said=said)
