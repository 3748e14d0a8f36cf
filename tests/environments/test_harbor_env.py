"""Task folders of Harbor and Terminal-Bench, in sandboxes and in a program that imitates Docker."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.harbor_tasks import built, read_task, sandboxed
from tests.builders.fake_docker import fake_docker
from tests.environments.helpers_environments import load
from tests.environments.test_terminal_env import call, has_namespaces

harbor = load("harbor_env")
pytestmark = has_namespaces

SAMPLES = Path(harbor.__file__).with_name("samples") / "harbor"
HALF = "cd /app/reports; for file in *; do echo $file 0; done > ../errors.txt"
FORGE = "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt"
KILLS = 'echo "{\\"reward\\":1}" > /logs/verifier/reward.json; kill -9 $PPID'


@pytest.fixture
def played(started: Any) -> Any:
    """Return the score of one episode of a task."""

    async def play(name: str, *answers: str, runs_in: str = "sandbox") -> float:
        env = await started(
            harbor.HarborEnv, lambda r: answers[r.call], group_size=1, runs_in=runs_in
        )
        [task] = [each for each in env.train_rows if each.name == name]
        if not answers:
            answers = (*(turn(task.instruction) for turn in env.example_answers(task)), "Done.")
        group, _ = await env.collect_trajectories(task)
        score: float = group["scores"][0]
        return score

    return play


@pytest.mark.parametrize(
    ("name", "answers", "score"),
    [
        ("count-errors", [], 1.0),
        ("count-errors", [call(HALF), "Done."], 0.5),
        ("count-errors", [call(FORGE), "Done."], 0.0),
        ("repair-backup", [], 1.0),
        ("repair-backup", ["It works."], 0.0),
        ("repair-backup", [call(f"echo '{KILLS}' > backup.sh"), "Done."], 0.0),
        ("rename-fields", [], 1.0),
        ("rename-fields", [call("rm people.csv"), "Done."], 0.0),
    ],
)
async def test_the_tests_of_a_task_decide(
    played: Any, name: str, answers: list[str], score: float
) -> None:
    assert await played(name, *answers) == score


async def test_a_task_with_docker_has_a_container_in_which_files_of_the_verifier_do_not_count(
    played: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for answers, score in (([], 1.0), ([call(FORGE), "Done."], 0.0)):
        built.cache_clear()
        assert await played("rename-fields", *answers, runs_in="docker") == score
        (tmp_path / "images/built").rename(tmp_path / f"images/{score}")
    log = (tmp_path / "log").read_text()
    assert log.count("run --detach --rm") == log.count("rm --force") == 2
    assert "--network none" in log


BROKEN = {
    "FROM python:3.12-slim\nWORKDIR /app\nRUN make\n": "RUN make",
    "FROM another\nWORKDIR /app\n": "FROM another",
    "FROM bash\nWORKDIR /usr/app\n": "/usr/app",
    "FROM bash\nWORKDIR /app\nCOPY ../secret /app/\n": "not in the folder",
    "FROM bash\nWORKDIR /app\nCOPY Dockerfile /etc/\n": "outside",
}


@pytest.mark.parametrize(("dockerfile", "reason"), BROKEN.items())
def test_what_a_sandbox_cannot_do_needs_docker(
    tmp_path: Path, dockerfile: str, reason: str
) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/Dockerfile").write_text(dockerfile)
    (tmp_path / "task/task.toml").write_text("")
    (tmp_path / "task/instruction.md").write_text("Do it.")
    task = read_task(tmp_path / "task/task.toml")
    with pytest.raises(ValueError, match=reason):
        sandboxed(task, ["bash", "python:3.12-slim"])


def test_a_task_of_several_containers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("instruction: x")
    (tmp_path / "run-tests.sh").write_text("true")
    (tmp_path / "docker-compose.yaml").write_text("services: {client: {}}")
    assert (
        read_task(tmp_path / "task.yaml").test_command == "TEST_DIR=/tests bash /tests/run-tests.sh"
    )
    (tmp_path / "docker-compose.yaml").write_text("services: {client: {}, server: {}}")
    with pytest.raises(ValueError, match="several"):
        read_task(tmp_path / "task.yaml")


async def test_a_task_that_cannot_be_read_is_skipped(started: Any, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "rename-fields/task.yaml").write_text("instruction: [")
    (tmp_path / "repair-backup/task.toml").write_text("environment = 1")
    env = await started(harbor.HarborEnv, dataset_path=str(tmp_path), runs_in="sandbox")
    assert [each.name for each in env.train_rows] == ["count-errors"]
