"""The environment command line: precedence, both spellings, the server table, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.env import build_environment, resolve_servers, run_environment
from atroposlib.envs.base import APIServerConfig, ServerBaseline
from atroposlib.errors import ConfigError
from tests.envs.helpers_runtime import ScriptedEnv


def build(*argv: str, mode: str = "serve", env_cls: type[ScriptedEnv] = ScriptedEnv) -> ScriptedEnv:
    env = build_environment(env_cls, mode, ["--testing", *argv], prog="env.py")
    assert isinstance(env, ScriptedEnv)
    return env


def test_flags_win_over_yaml_over_config_init(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("env:\n  group_size: 3\n  total_steps: 7\ntinker:\n  ignored: 1\n")
    config = build("--config", str(path), "--env.group_size", "5").config
    assert (config.group_size, config.total_steps, config.max_num_workers) == (5, 7, 4)


def test_flat_names_reach_their_section(capsys: pytest.CaptureFixture[str]) -> None:
    config = build("--tokenizer_name", "tok", "--total-steps=-1", "--model_name", "llama").config
    assert (config.tokenizer_name, config.total_steps) == ("tok", -1)
    assert "model_name: llama" in capsys.readouterr().out


def test_api_key_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    build()
    out = capsys.readouterr().out
    assert "secret" not in out
    assert "api_key: '***'" in out


ONE = APIServerConfig(base_url="http://a/v1", model_name="m")
TWO = [ONE, APIServerConfig(base_url="http://b/v1")]


@pytest.mark.parametrize(
    ("default", "from_yaml", "typed", "urls"),
    [
        (ONE, None, {"base_url": "http://z"}, "http://z"),
        ([ONE], None, {"base_url": "http://z"}, ["http://z"]),
        ([ONE], {"base_url": "http://y"}, {"model_name": "q"}, ["http://y"]),
        ([ONE], [{"base_url": "http://y"}], {"base_url": "http://z"}, ["http://z"]),
        (ServerBaseline(), None, {"base_url": "http://z"}, "http://z"),
        (ServerBaseline(), {"base_url": "http://y"}, {}, "http://y"),
        (ONE, [{"base_url": "http://p"}, {"base_url": "http://q"}], {}, ["http://p", "http://q"]),
        (TWO, None, {}, ["http://a/v1", "http://b/v1"]),
    ],
)
def test_server_table(default: Any, from_yaml: Any, typed: dict[str, Any], urls: Any) -> None:
    servers = resolve_servers(default, from_yaml, typed)
    if isinstance(servers, list):
        assert [server.base_url for server in servers] == urls
    else:
        assert isinstance(servers, APIServerConfig)
        assert servers.base_url == urls


def test_overrides_keep_the_other_fields() -> None:
    servers = resolve_servers([ONE], None, {"base_url": "http://z"})
    assert isinstance(servers, list)
    assert servers[0].model_name == "m"
    assert resolve_servers(ServerBaseline(), None, {}) == ServerBaseline()


@pytest.mark.parametrize(
    ("default", "from_yaml"), [(TWO, None), (ONE, [{"model_name": "a"}, {"model_name": "b"}])]
)
def test_flag_for_several_servers_is_refused(default: Any, from_yaml: Any) -> None:
    with pytest.raises(ConfigError, match=r"--openai.base_url: there are several servers"):
        resolve_servers(default, from_yaml, {"base_url": "http://z"})


def test_base_url_flag_reaches_the_server_that_is_called() -> None:
    class Bare(ScriptedEnv):
        @classmethod
        def config_init(cls) -> Any:
            config, servers = super().config_init()
            return config, servers[0]

    argv = ["--openai.base_url", "http://localhost:1234/v1"]
    for env_cls in (Bare, ScriptedEnv):
        env = build_environment(env_cls, "serve", argv, prog="env.py")
        assert [s.config.base_url for s in env.server.servers] == ["http://localhost:1234/v1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--env.groupsize", "4"], "did you mean --env.group_size?"),
        (["serve", "--env.group_size", "four"], "--env.group_size: got 'four'"),
        (["serve", "--openai.base_url", "localhost:9"], "--openai.base_url: got 'localhost:9'"),
        (["srve"], "unknown command 'srve'"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read the config file"),
        ([], "usage:"),
    ],
)
def test_mistake_exits_2_with_its_cure(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_environment(ScriptedEnv, argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_missing_tokenizer_exits_2_and_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class WithTokenizer(ScriptedEnv):
        def load_tokenizer(self) -> Any:
            return super(ScriptedEnv, self).load_tokenizer()

    missing = str(tmp_path / "missing")
    argv = ["serve", "--testing", "--env.tokenizer_name", missing]
    assert run_environment(WithTokenizer, argv) == 2
    assert f"cannot load the tokenizer {missing!r}" in capsys.readouterr().err


def test_process_writes_lines_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "g.jsonl"
    argv = ["process", "--testing", "--env.data_path_to_save_groups", str(path)]
    assert run_environment(ScriptedEnv, [*argv, "--env.total_steps=3"]) == 0
    assert len(path.read_text().splitlines()) == 3
    assert "3 groups" in path.with_suffix(".html").read_text()
    assert json.loads(path.read_text().splitlines()[0])["messages"]
    assert str(path.with_suffix(".html")) in capsys.readouterr().out


def test_run_that_keeps_failing_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(ScriptedEnv):
        async def collect_trajectories(self, item: int) -> Any:
            raise KeyError("reward")

    path = tmp_path / "g.jsonl"
    argv = ["process", "--testing", "--env.data_path_to_save_groups", str(path)]
    assert run_environment(Broken, argv) == 1
    assert "16 items in a row failed with KeyError" in capsys.readouterr().err


def test_subclass_that_renames_the_last_parameters_is_built_positionally() -> None:
    class Renamed(ScriptedEnv):
        def __init__(
            self, config: Any, server_configs: Any, use_slurm: bool = True, test: bool = False
        ):
            super().__init__(config, server_configs, use_slurm, test)
            self.flags = (use_slurm, test)

    env = build_environment(Renamed, "serve", ["--testing"], prog="env.py")
    assert isinstance(env, Renamed)
    assert env.flags == (False, True)


def test_only_process_sets_process_mode(tmp_path: Path) -> None:
    assert not hasattr(build(), "process_mode")
    env: Any = build("--env.total_steps", "2", mode="process")
    assert (env.process_mode, env.n_groups_to_process, env.group_size_to_process) == (True, 2, 2)
    assert env.config.data_path_to_save_groups == "data/scripted.jsonl"
    assert env.config.use_wandb is False
