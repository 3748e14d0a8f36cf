"""Task folders of Harbor and Terminal-Bench: read one, build its image, and read the reward that its tests write.

The layout is that of harborframework.com/docs/tasks; only files are read here, nothing of a task runs.
"""

from __future__ import annotations

import functools
import json
import posixpath
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import yaml

from atroposlib.envs.shell import docker

_COMPOSE = "docker-compose.y*ml"
_SYSTEM_FOLDERS = {(), ("bin",), ("dev",), ("lib",), ("logs",), ("proc",), ("tests",), ("usr",)}
"""Where a sandbox cannot have a working folder."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    instruction: str
    context: Path
    """Folder of the Dockerfile."""
    image: str | None
    """None: built from the context."""
    tests: dict[str, str] = field(repr=False)
    """Path in the container -> text."""
    test_command: str
    tests_timeout_s: float
    memory_mb: int
    num_cpus: float
    needs_network: bool
    solution: str | None = field(repr=False)


def read_task(path: Path) -> Task:
    """Read the task of a `task.toml` or `task.yaml`; ValueError for what is not supported."""
    top, is_harbor = path.parent, path.name == "task.toml"
    settings = tomllib.loads(path.read_text()) if is_harbor else yaml.safe_load(path.read_text())
    context = top / "environment" if is_harbor else top
    services = [yaml.safe_load(each.read_text())["services"] for each in context.glob(_COMPOSE)]
    if (top / "steps").is_dir() or any(len(each) > 1 for each in services):
        raise ValueError("tasks of several steps or containers are not supported")
    tests = {f"/tests/{each.relative_to(top / 'tests')}": each for each in _files(top / "tests")}
    if not is_harbor:
        tests["/tests/run-tests.sh"] = top / "run-tests.sh"
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    variables = {"TEST_DIR": "/tests", **verifier.get("env", {})}
    if any("${" in str(value) for value in variables.values()):
        raise ValueError("the verifier needs environment variables of this machine")
    exports = " ".join(f"{name}={shlex.quote(str(v))}" for name, v in variables.items())
    solution = top / ("solution/solve.sh" if is_harbor else "solution.sh")
    return Task(
        name=top.name,
        instruction=(top / "instruction.md").read_text() if is_harbor else settings["instruction"],
        context=context,
        image=environment.get("docker_image"),
        tests={where: _text_of(each) for where, each in tests.items()},
        test_command=f"{exports} bash /tests/{'test' if is_harbor else 'run-tests'}.sh",
        tests_timeout_s=float(
            verifier.get("timeout_sec", settings.get("max_test_timeout_sec", 600))
        ),
        memory_mb=int(environment.get("memory_mb", 2048)),
        num_cpus=float(environment.get("cpus", 1)),
        needs_network=bool(environment.get("allow_internet", True)),
        solution=solution.read_text() if solution.is_file() else None,
    )


def sandboxed(task: Task, bases: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the working folder and its files; ValueError if the Dockerfile does more than copy them."""
    workdir = ""
    files: dict[str, str] = {}
    for line in (task.context / "Dockerfile").read_text().splitlines():
        match shlex.split(line, comments=True):
            case []:
                continue
            case ["FROM", base] if base in bases:
                continue
            case ["WORKDIR", path] if PurePosixPath(path).parts[:1] == ("/",):
                workdir = path
            case ["COPY", name, target] if workdir:
                source = (task.context / name).resolve()
                if not source.is_relative_to(task.context.resolve()):
                    raise ValueError(f"{name} is not in the folder of the Dockerfile")
                files |= _copied(source, posixpath.join(workdir, target))
            case _:
                raise ValueError(f"it needs Docker for {line!r}")
    if not workdir or PurePosixPath(workdir).parts[1:2] in _SYSTEM_FOLDERS:
        raise ValueError(f"it needs Docker for its working folder {workdir!r}")
    relative = {posixpath.relpath(path, workdir): text for path, text in files.items()}
    if outside := [path for path in relative if path.startswith("..")]:
        raise ValueError(f"it needs Docker for files outside of the working folder: {outside}")
    return workdir, relative


def _copied(source: Path, target: str) -> dict[str, str]:
    if source.is_file():
        target = posixpath.join(target, source.name) if target.endswith(("/", "/.")) else target
        return {posixpath.normpath(target): _text_of(source)}
    found = {posixpath.join(target, each.relative_to(source)): each for each in _files(source)}
    return {posixpath.normpath(where): _text_of(each) for where, each in found.items()}


@functools.cache
def built(context: Path) -> str:
    """Build the image of a Dockerfile and return its id."""
    return docker("build", "--quiet", str(context)).decode().strip()


def reward_of(text: str | None, as_json: str | None) -> float | None:
    """Return what tests wrote as the reward; None if it is no number from 0 to 1.

    >>> reward_of("0.5\\n", None), reward_of(None, '{"reward": 1}'), reward_of("nan", None), reward_of("2", None)
    (0.5, 1.0, None, None)
    """
    try:
        found = json.loads(as_json)["reward"] if text is None and as_json else text
        reward = float("" if found is None else found)
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    return reward if 0 <= reward <= 1 else None


def _text_of(path: Path) -> str:
    return path.read_text(errors="surrogateescape")


def _files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file() and not each.is_symlink())
