"""Which ends of a job end a rendered Slurm run: with `fake_slurm` in place of a cluster."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atroposlib.cli.launch.render import render
from atroposlib.cli.launch.slurm import FUNCTIONS
from tests.builders.programs import wait_until
from tests.cli.helpers_launch import write_run

pytestmark = pytest.mark.drill

WAITS = ["tail", "-f", "/dev/null"]
SERVER = {"command": WAITS, "ready": "/", "restart": "never"}
RUN = {
    "name": "short",
    "model": "m",
    "slurm": {"options": {"partition": "gpu", "exclusive": True}},
    "hub": {**SERVER, "port": 7000},
    "engine": {**SERVER, "port": 7001, "count": 2},
    "trainer": {
        "command": [
            "bash",
            "-c",
            "until [ -e ${RUN_DIR}/end ]; do sleep 1; done; . ${RUN_DIR}/end",
        ],
        "restart": "never",
    },
    "parts": {
        "fetch": {"command": ["true"], "ready": "exit"},
        "judge": {"command": WAITS, "restart": "never", "needs": ["fetch"]},
    },
}
FAKE = Path(__file__).with_name("fake_slurm.py")
PARTS = ["hub", "engine", "fetch", "trainer", "judge", "clean-up"]


class Cluster:
    """The run's jobs; every program that waits does so for a tenth of a second."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "runs" / "short"
        self._jobs, self._submit = folder / "slurm", folder / "jobs" / "submit.sh"
        (folder / "bin").mkdir()
        self._jobs.mkdir()
        programs = dict.fromkeys(
            ("sbatch", "scancel", "squeue", "scontrol"),
            f"#!{sys.executable} -S\n{FAKE.read_text()}",
        )
        programs |= {"sleep": "#!/bin/sh\nexec /bin/sleep 0.1\n", "curl": "#!/bin/sh\n"}
        for name, text in programs.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self._environ = {**os.environ, "PATH": path, "FAKE_SLURM": str(self._jobs)}
        self._environ["ATROPOS_HUB_TOKEN"] = "a-token-of-this-test"
        write_run(folder / "run.yaml", RUN)
        render(
            folder / "run.yaml",
            target="slurm",
            out=folder / "jobs",
            directory=self.run_dir.parent,
        )

    def submit(self, **environ: str | None) -> subprocess.CompletedProcess[str]:
        given = {**self._environ, **environ}
        return subprocess.run(
            [self._submit],
            env={name: value for name, value in given.items() if value is not None},
            capture_output=True,
            text=True,
        )

    def start(self) -> None:
        done = self.submit()
        assert (done.returncode, done.stderr) == (0, "")
        running = {name: ["RUNNING"] for name in PARTS}
        running |= {"engine": ["RUNNING"] * 2, "fetch": ["COMPLETED"], "clean-up": ["PENDING"]}
        self.wait_for(running)

    def cancel(self, *words: str) -> None:
        subprocess.run(["scancel", *words], env=self._environ, check=True)

    @property
    def numbers(self) -> dict[str, str]:
        return dict(zip(PARTS, (self.run_dir / "jobs").read_text().split(), strict=True))

    def states(self) -> dict[str, list[str]]:
        return {
            name: [
                json.loads(task.read_text())["state"]
                for task in sorted(self._jobs.glob(f"{number}_*"))
            ]
            for name, number in self.numbers.items()
        }

    def wait_for(self, wanted: dict[str, list[str]]) -> None:
        def said() -> str:
            logs = [f"{log.name}:\n{log.read_text()}" for log in self.run_dir.glob("*.log")]
            return f"{self.states()}\n" + "\n".join(logs)

        wait_until(lambda: self.states() == wanted, said=said)

    def num_living(self) -> int:
        states = [json.loads(task.read_text())["state"] for task in self._jobs.glob("[0-9]*_*")]
        return states.count("PENDING") + states.count("RUNNING")

    def wait_for_the_end(self) -> None:
        wait_until(lambda: self.num_living() == 0, said=lambda: str(self.states()))

    def end(self) -> None:
        """Cancel what still runs: without its folder it would run for ever."""
        self.cancel(*{each.name.split("_")[0] for each in self._jobs.glob("[0-9]*_*")})
        self.wait_for_the_end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


@pytest.mark.parametrize("end", ["exit 0", "kill -KILL $$"])
def test_a_run_ends_with_its_trainer(cluster: Cluster, end: str) -> None:
    cluster.start()
    (cluster.run_dir / "end").write_text(end)
    cluster.wait_for_the_end()
    states = cluster.states()
    assert (states["trainer"] == ["COMPLETED"]) == (end == "exit 0")
    assert states["hub"] + states["engine"] == ["CANCELLED"] * 3


@pytest.mark.parametrize(
    ("part", "signal"), [("hub", "KILL"), ("engine", "KILL"), ("judge", "TERM")]
)
def test_a_run_ends_with_a_job_that_is_cancelled_or_killed(
    cluster: Cluster, part: str, signal: str
) -> None:
    cluster.start()
    job = cluster.numbers[part] + ("_1" if part == "engine" else "")
    cluster.cancel(*(["--signal=KILL", "--full"] if signal == "KILL" else []), job)
    cluster.wait_for_the_end()


def test_a_run_ends_with_a_job_whose_script_does_not_begin(cluster: Cluster) -> None:
    assert cluster.submit(ATROPOS_HUB_TOKEN=None).returncode == 0
    cluster.wait_for_the_end()
    assert cluster.states()["hub"] == ["FAILED"]
    assert "set it before submit.sh" in (cluster.run_dir / "hub.log").read_text()


def test_a_run_is_submitted_once_at_a_time(cluster: Cluster) -> None:
    cluster.start()
    jobs = cluster.numbers
    again = cluster.submit()
    assert again.returncode == 1
    assert (
        f"end them first: scancel {' '.join(sorted({*jobs.values()} - {jobs['fetch']}))}\n"
        in again.stderr
    )
    assert cluster.numbers == jobs
    cluster.cancel(*jobs.values())
    cluster.wait_for_the_end()
    cluster.start()
    assert not {*cluster.numbers.values()} & {*jobs.values()}


def test_of_two_submissions_at_once_one_begins(cluster: Cluster) -> None:
    with ThreadPoolExecutor(2) as threads:
        one, other = sorted(
            threads.map(lambda _: cluster.submit(), range(2)), key=lambda done: done.returncode
        )
    assert (one.returncode, other.returncode) == (0, 1)
    assert "another submit.sh submits this run" in other.stderr or "has jobs" in other.stderr
    assert not (cluster.run_dir / "submitting").exists()


def test_nothing_is_left_of_a_submission_that_is_refused(cluster: Cluster) -> None:
    script = cluster.run_dir.parents[1] / "jobs" / "trainer.sbatch"
    script.write_text(script.read_text().replace("--exclusive", "--exlusive"))
    refused = cluster.submit()
    assert refused.returncode != 0
    assert "unrecognized option" in refused.stderr
    assert len((cluster.run_dir / "jobs").read_text().split()) == 3
    cluster.wait_for_the_end()


def test_the_hubs_data_are_on_the_disk_of_the_node_that_has_its_job(tmp_path: Path) -> None:
    run_dir, disk = tmp_path / "runs" / "my run", tmp_path / "disk"
    run_dir.mkdir(parents=True)

    def job(node: str, end: str) -> tuple[list[str], str]:
        """Let a hub's job on a node add a line to its data and end; return the lines, and what it said."""
        (disk / node).mkdir(parents=True, exist_ok=True)
        script = f"""
            hostname() {{ echo {node}; }}
            source {FUNCTIONS}
            take_data
            mkdir -p "$DATA_DIR"
            hostname >> "$DATA_DIR/lines"
            cat "$DATA_DIR/lines"
            {end}
        """
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={**os.environ, "RUN_DIR": str(run_dir), "LOCAL_DISK": str(disk / node)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split(), done.stderr

    killed, ends = "exit", "save_data"
    assert job("a", killed) == (["a"], "")
    assert job("a", ends) == (["a", "a"], "")
    assert not [*(disk / "a").iterdir()]
    assert job("b", killed) == (["a", "a", "b"], "")
    lines, said = job("c", ends)  # b is lost, or cannot be reached
    assert lines == ["a", "a", "c"]
    assert said.startswith(f"the hub's newest data stay in b:{disk}")
    assert job("b", killed) == (["a", "a", "c", "b"], "")  # not what b had before
    late = job("b", f'echo a > "{run_dir}/hub_node"; save_data')  # another hub serves meanwhile
    assert late == (["a", "a", "c", "b", "b"], "")
    assert (run_dir / "hub" / "lines").read_text().split() == ["a", "a", "c"]
    (run_dir / "hub").rename(run_dir / "hub.new")  # killed between the two renames of save_data
    (run_dir / "hub.old").mkdir()
    assert job("d", ends)[0] == ["a", "a", "c", "d"]
    assert sorted(path.name for path in run_dir.iterdir()) == ["hub"]


@pytest.mark.parametrize("how", ["moved", "cancelled"])
def test_a_program_that_ignores_term_is_killed(tmp_path: Path, how: str) -> None:
    script = f"""
        source {FUNCTIONS}
        CONNECT() {{ :; }}
        address() {{ if [ {how} = moved ]; then date +%s; fi; }}
        PROGRAM() {{ echo start; trap '' TERM; while true; do sleep 0.1; done; }}
        USES=hub END_S=1
        run_part env exit 600 never 0
    """
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "RUN_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        try:
            assert job.stdout.readline() == b"start\n"
            if how == "moved":
                assert job.stdout.readline() == b"start\n"
            job.terminate()
            assert job.wait(timeout=10) == 143
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(("reads", "num_starts"), [("fails", 1), ("moved", 2)])
def test_a_program_starts_again_when_a_server_has_moved_not_when_its_address_cannot_be_read(
    tmp_path: Path, reads: str, num_starts: int
) -> None:
    script = f"""
        source {FUNCTIONS}
        CONNECT() {{ :; }}
        kill() {{ SECONDS=$((SECONDS + 5)); builtin kill "$@"; }}  # each look counts as five seconds
        cat() {{
            echo x >> "$RUN_DIR/reads"
            case "$(wc -l < "$RUN_DIR/reads")-{reads}" in
                2-fails) return 1 ;;
                1-moved) echo http://old:1 ;;
                *) echo http://new:1 ;;
            esac
        }}
        PROGRAM() {{ echo start; exec sleep 4; }}
        USES=hub
        run_part env exit 600 never 0
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["start"] * num_starts
    assert len((tmp_path / "reads").read_text().split()) > 2
