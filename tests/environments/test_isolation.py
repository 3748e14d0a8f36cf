"""`--require-isolation`: no command starts that would run a model's program without namespaces or a container."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.child_variables import child_variables
from atroposlib.envs.sandbox import ISOLATION_VARIABLE, ProcessSandbox, local_sandbox, run_code
from atroposlib.errors import ConfigError, EnvError
from atroposlib.runtime.env_command import command_class
from tests.environments.helpers_environments import load
from tests.envs.test_sandbox import bubblewrap
from tests.runtime.helpers_runtime import ScriptedEnv

ENVIRONMENTS = Path(load("terminal_env").__file__).parent


class Coding(ScriptedEnv):
    runs_model_code = True


class InContainers(Coding):
    def is_isolated(self) -> bool:
        return True


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISOLATION_VARIABLE, "")  # the flag sets it


@pytest.fixture
def plain(unset: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide bubblewrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    local_sandbox.cache_clear()
    yield
    local_sandbox.cache_clear()


def build(env_cls: type[BaseEnv], mode: str, *argv: str) -> BaseEnv:
    return command_class(env_cls, mode).from_argv([*argv, "--testing"], prog="env.py").build()


@pytest.mark.parametrize(
    ("mode", "flag"),
    [
        *(("serve", flag) for flag in ("--require-isolation", "--require_isolation", "yaml")),
        *((mode, "variable") for mode in ("serve", "process", "evaluate")),
    ],
)
def test_without_namespaces_a_run_that_requires_them_does_not_start(
    mode: str, flag: str, plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [flag]
    if flag == "yaml":
        (tmp_path / "c.yaml").write_text("require_isolation: true\n")
        given = ["--config", str(tmp_path / "c.yaml")]
    if flag == "variable":
        monkeypatch.setenv(ISOLATION_VARIABLE, "1")
        given = []
    with pytest.raises(ConfigError, match="Coding runs programs .*apt install bubblewrap"):
        build(Coding, mode, *given)
    build(InContainers, mode, *given)
    build(ScriptedEnv, mode, *given)


def test_with_namespaces_it_starts(unset: None) -> None:
    bubblewrap()
    build(Coding, "serve", "--require-isolation")


def test_without_the_flag_it_starts(plain: None) -> None:
    build(Coding, "serve")


@pytest.mark.parametrize("sandbox", [None, ProcessSandbox()])
def test_a_program_that_no_class_announces_does_not_run_either(
    sandbox: Any, plain: None, tmp_path: Path
) -> None:
    build(ScriptedEnv, "serve", "--require-isolation")
    assert child_variables()[ISOLATION_VARIABLE] == "1"  # reward workers run programs
    tmp_path.chmod(0o777)
    with pytest.raises(EnvError, match="isolation is required"):
        run_code(f"open({str(tmp_path / 'ran')!r}, 'w')", sandbox=sandbox)
    assert [*tmp_path.iterdir()] == []


def test_an_evaluation_that_is_continued_still_requires_it(unset: None, tmp_path: Path) -> None:
    bubblewrap()
    folder = tmp_path / "evals"
    env = build(
        Coding, "evaluate", "--require-isolation", "--env.data_dir_to_save_evals", str(folder)
    )
    assert env.eval_run is not None
    with env.eval_run:
        assert "require_isolation: true" in (folder / "evaluate_config.yaml").read_text()
    os.environ[ISOLATION_VARIABLE] = ""
    build(Coding, "evaluate", "--resume", str(folder))
    assert os.environ[ISOLATION_VARIABLE] == "1"


def test_every_environment_that_uses_a_sandbox_announces_it() -> None:
    """Those of this repository; `judge_program`, `run_code` and `ShellEnv` start the programs."""
    users = {
        path.stem: f"{path.parent.relative_to(ENVIRONMENTS)}.{path.stem}".replace("/", ".").lstrip(
            "."
        )
        for path in ENVIRONMENTS.rglob("*.py")
        if {"run_code", "judge_program", "ShellEnv"} & set(re.findall(r"\w+", path.read_text()))
    }
    assert len(users) >= 4
    for name in users.values():
        made = [
            each
            for each in vars(load(name)).values()
            if isinstance(each, type)
            and issubclass(each, BaseEnv)
            and each.__module__.endswith(name)
        ]
        assert [each.runs_model_code for each in made] == [True], name


@pytest.mark.parametrize(
    "name", ["terminal_env.TerminalEnv", "code_execution_server.coding_server.CodingEnv"]
)
async def test_containers_isolate(name: str, plain: None, made: Any) -> None:
    module, _, env_cls = name.rpartition(".")
    for image in (None, "python:3.11-slim"):
        env = made(getattr(load(module), env_cls), lambda r: "", docker_image=image)
        assert env.is_isolated() == bool(image)
