"""The environment command line: precedence, both spellings, the server table, exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.envs import hooks
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ExtraServers
from atroposlib.envs.env_config import workers_are_set
from atroposlib.errors import ConfigError, HubUnavailable
from atroposlib.inference.harness import ServerHarness
from atroposlib.runtime import env_command
from atroposlib.runtime.env_command import build_environment, run_environment
from atroposlib.runtime.metrics import start_wandb
from tests.runtime.helpers_runtime import ScriptedEnv


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `evaluate` writes to evals/
    # It scans the heap of all tests.
    monkeypatch.setattr(env_command, "collect_less_often", lambda: None)


def build(*argv: str, mode: str = "serve", env_cls: type[ScriptedEnv] = ScriptedEnv) -> ScriptedEnv:
    env = build_environment(env_cls, mode, ["--testing", *argv], prog="env.py")
    assert isinstance(env, ScriptedEnv)
    return env


@pytest.mark.parametrize(
    ("default", "flags", "expected"),
    [
        ({}, [], False),
        ({}, ["--env.max_num_workers_per_node=8"], True),
        ({}, ["--max_num_workers", "-1"], True),
        ({"max_num_workers": 4}, [], True),
        ({"max_num_workers_per_node": 8}, [], True),
    ],
)
def test_the_number_of_workers_counts_as_set_where_someone_wrote_it(
    default: dict[str, int], flags: list[str], expected: bool
) -> None:
    own = beginning_with(BaseEnvConfig(group_size=2, **default), [ONE])
    assert workers_are_set(build(*flags, env_cls=own).config) is expected


def test_flat_names_reach_their_section(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tokenizer_name", "tok", "--total-steps=-1", "--model_name", "llama", "--verbose"]
    config = build(*argv).config
    assert (config.tokenizer_name, config.total_steps) == ("tok", -1)
    assert "model_name: llama" in capsys.readouterr().out


def test_the_start_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    build_environment(ScriptedEnv, "serve", ["--openai.base_url=http://me:pw@a/v1"], prog="env.py")
    assert capsys.readouterr().out == (
        "serve scripted: model m at http://***@a/v1 (openai); hub http://localhost:8000\n"
    )


def test_help_shows_the_flags_of_the_mode_with_the_defaults_of_the_environment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {}
    for mode in ("serve", "process", "evaluate"):
        assert_exits_0([mode, "--help"])
        shown[mode] = capsys.readouterr().out
    first = shown["process"].split("Section 'env'")[0]
    assert [line.split()[0] for line in first.splitlines() if line.startswith("  --")] == [
        *("--openai.base_url", "--openai.model_name", "--openai.server_type"),
        *("--env.tokenizer_name", "--env.total_steps", "--config"),
    ]
    assert "(default: 'http://localhost:9001/v1')" in first
    assert "--env.group_size int\n      Sequences per group. (default: 2)" in shown["serve"]
    assert "(default: 'data/scripted.jsonl')" in shown["process"]
    assert "secret" not in shown["serve"]
    for flag, modes in {
        "--env.rollout_server_url": ["serve"],
        "--env.worker_timeout": ["serve", "process"],
        "--env.max_eval_workers": ["serve", "evaluate"],
        "--env.max_token_length": ["serve", "process", "evaluate"],
    }.items():
        assert [mode for mode, text in shown.items() if flag in text] == modes


def assert_exits_0(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_environment(ScriptedEnv, argv)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("envs: {group_size: 3}", "'envs' in the config file; did you mean env"),
        ("env: {groupsize: 3}", "'env.groupsize' in the config file; did you mean env.group_size"),
        ("openai: [{base-url: http://a}]", "did you mean openai.base_url"),
        ("openai: {modelname: m}", "did you mean openai.model_name"),
        ("teacher: {modelname: m}", "did you mean teacher.model_name"),
    ],
)
def test_misspelt_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        build("--config", str(path), env_cls=WithTeacher)


def test_yaml_of_the_original_is_read_and_what_it_does_not_know_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "tinker: {lora_rank: 8}\ntotal_steps: 9\nenv: {dump_rollouts: true, group_size: 3}\n"
        "openai: [{weight: 1.0, api_server_type: openai, model_name: q}]\n"
    )
    env = build_environment(ScriptedEnv, "serve", ["--config", str(path)], prog="env.py")
    assert (env.config.group_size, env.config.total_steps) == (3, 1000)
    assert env.server.servers[0].config.model_name == "q"
    assert "ignored: 'tinker', 'total_steps' (did you mean env.total_steps?)" in caplog.text
    assert "ignores unknown keys: 'dump_rollouts'" in caplog.text
    assert "'weight'" in caplog.text


def beginning_with(config: BaseEnvConfig, servers: Any) -> type[ScriptedEnv]:
    """Return an environment whose `config_init` returns this."""
    return type("Own", (ScriptedEnv,), {"config_init": classmethod(lambda cls: (config, servers))})


ONE = APIServerConfig(base_url="http://a/v1", model_name="m")


def test_base_url_flag_reaches_the_server_that_is_called() -> None:
    argv = ["--openai.base_url", "http://localhost:1234/v1"]
    for env_cls in (beginning_with(BaseEnvConfig(), ONE), ScriptedEnv):
        env = build_environment(env_cls, "serve", argv, prog="env.py")
        [server] = env.server.servers
        assert server.config.base_url == "http://localhost:1234/v1"
        assert server.config.model_name == "m"  # other fields stay


def test_process_has_flags_of_its_own(tmp_path: Path) -> None:
    env = build_environment(ScriptedEnv, "process", ["--append", "--epochs", "2"], prog="env.py")
    assert (env.process_options.append, env.process_options.epochs) == (True, 2)
    (tmp_path / "c.yaml").write_text("append: true")
    argv = ["--config", str(tmp_path / "c.yaml"), "--append", "false"]
    env = build_environment(ScriptedEnv, "process", argv, prog="env.py")
    assert (env.process_options.append, env.process_options.epochs) == (False, None)


def test_process_writes_lines_and_page_and_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "g.jsonl"
    flags = ["process", "--testing", "--env.data_path_to_save_groups", str(path)]
    assert run_environment(ScriptedEnv, [*flags, "--env.total_steps", "2"]) == 0
    assert str(path.with_suffix(".html")) in capsys.readouterr().out
    assert run_environment(ScriptedEnv, [*flags, "--env.total_steps", "3", "--append"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["item"] for row in rows] == [0, 1, 2]
    assert rows[0]["messages"]
    assert "3 groups" in path.with_suffix(".html").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--append"], "unknown flag --append"),
        (["process", "--epochs", "0"], "--epochs: got 0"),
        (["serve", "--env.groupsize", "4"], "did you mean --env.group_size?"),
        (["serve", "--env.group_size", "four"], "--env.group_size: got 'four'"),
        (["serve", "--openai.base_url", "localhost:9"], "--openai.base_url: got 'localhost:9'"),
        (["serve", "--config", "/nowhere.yaml"], "cannot read the config file"),
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
            return BaseEnv.load_tokenizer(self)

    missing = str(tmp_path / "missing")
    argv = ["serve", "--testing", "--env.tokenizer_name", missing]
    assert run_environment(WithTokenizer, argv) == 2
    assert f"cannot load the tokenizer {missing!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "needs_tokens", "asked"),
    [
        (["--testing"], True, []),
        (["--testing", "--env.tokenizer_name=a/b"], True, ["a/b"]),
        ([], False, []),
        (["--env.tokenizer_name=a/b"], False, ["a/b"]),
        ([], True, ["default/one"]),
    ],
)
def test_a_tokenizer_is_fetched_only_if_named_or_needed(
    flags: list[str],
    needs_tokens: bool,
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Default(beginning_with(BaseEnvConfig(tokenizer_name="default/one"), [ONE])):  # type: ignore[misc]
        load_tokenizer = BaseEnv.load_tokenizer

    fetched: list[str] = []
    monkeypatch.setattr(hooks, "load_tokenizer", lambda name: fetched.append(name) or "loaded")
    env = build_environment(Default, "process", flags, prog="env.py", needs_tokens=needs_tokens)
    assert (env.tokenizer == "loaded") is bool(asked)
    assert (fetched, caplog.records) == (asked, [])


def test_requests_of_an_agents_client_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Asking(ScriptedEnv):
        async def collect_trajectories(self, item: int) -> Any:
            transport = httpx.MockTransport(lambda request: httpx.Response(200))
            async with httpx.AsyncClient(transport=transport) as client:
                await client.get("http://agent")
            return await super().collect_trajectories(item)

    argv = ["process", "--testing", "--env.data_path_to_save_groups", str(tmp_path / "g.jsonl")]
    with caplog.at_level(logging.INFO):
        assert run_environment(Asking, [*argv, "--env.total_steps=1"]) == 0
    assert "HTTP Request" not in caplog.text
    assert "1 groups" in caplog.text


def test_run_that_keeps_failing_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(ScriptedEnv):
        async def collect_trajectories(self, item: int) -> Any:
            raise KeyError("reward")

    path = tmp_path / "g.jsonl"
    argv = ["process", "--testing", "--env.data_path_to_save_groups", str(path)]
    assert run_environment(Broken, argv) == 1
    assert "16 items in a row failed with KeyError" in capsys.readouterr().err


def _class_with(signature: str, forwarded: str) -> Any:
    """Return an environment whose constructor has `signature` and records what it was given."""
    scope: dict[str, Any] = {"ScriptedEnv": ScriptedEnv}
    exec(  # the signature is the test's parameter
        f"class Own(ScriptedEnv):\n"
        f"    def __init__(self, {signature}):\n"
        f"        super().__init__(config, server_configs, testing=True)\n"
        f"        self.given = {forwarded}\n",
        scope,
    )
    return scope["Own"]


@pytest.mark.parametrize(
    ("signature", "forwarded", "given"),
    [
        ("config, server_configs, slurm=False, testing=False", "(slurm, testing)", (True, True)),
        ("config, server_configs, slurm_job_id=None", "slurm_job_id", True),
        ("config, server_configs, slurm_config, testing=False", "(slurm_config, testing)", (True, True)),
        ("config, server_configs, use_slurm=True, test=False", "(use_slurm, test)", (True, True)),
        ("config, server_configs, testing=False", "testing", True),
        ("config, server_configs", "()", ()),
        ("config, server_configs, *args", "args", (True, True)),
        ("config, server_configs, **kwargs", "kwargs", {"slurm": True, "testing": True}),
        ("config, server_configs, dataset='d', slurm=False", "(dataset, slurm)", ("d", True)),
        ("config, server_configs, *, slurm=False, testing=False", "(slurm, testing)", (True, True)),
    ],
)  # fmt: skip
def test_constructor_is_called_with_the_names_it_has(
    signature: str, forwarded: str, given: Any
) -> None:
    env_cls = _class_with(signature, forwarded)
    env: Any = build_environment(env_cls, "evaluate", ["--testing", "--slurm"], prog="env.py")
    assert env.given == given


def test_only_process_sets_process_mode(tmp_path: Path) -> None:
    assert not hasattr(build(), "process_mode")
    env: Any = build("--env.total_steps", "2", mode="process")
    assert (env.process_mode, env.n_groups_to_process, env.group_size_to_process) == (True, 2, 2)
    assert env.config.data_path_to_save_groups == "data/scripted.jsonl"
    assert env.config.use_wandb is False


def test_secrets_are_masked_wherever_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Config(BaseEnvConfig):
        judge_api_key: str = "judge-secret"
        hf_token: str = "hf-secret"
        extra: dict[str, str] = {"password": "nested-secret"}

    server = APIServerConfig(base_url="http://me:url-secret@h/v1", api_key="server-secret")
    env = build("--verbose", env_cls=beginning_with(Config(group_size=2), [server]))
    out = capsys.readouterr().out
    assert "secret" not in out
    assert "api_key: '***'" in out
    assert "max_token_length: 2048" in out
    assert env.config.judge_api_key == "judge-secret"  # type: ignore[attr-defined]


def test_wandb_gets_no_secrets_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config(BaseEnvConfig):
        judge_api_key: str = "judge-secret"

    calls: list[dict[str, Any]] = []
    fake = SimpleNamespace(init=lambda **kwargs: calls.append(kwargs), run=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start_wandb(ScriptedEnv(Config(group_size=2)), project="p", group=None)
    assert calls[0]["config"]["judge_api_key"] == "***"
    assert calls[0]["name"].startswith("scripted-")
    assert (calls[0]["project"], calls[0]["group"]) == ("p", None)


def test_wandb_that_refuses_names_the_flag_that_turns_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(Exception):
        pass

    def init(**_: Any) -> None:
        raise Refused("no API key configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=Refused, run=None))
    with pytest.raises(ConfigError, match=r"no API key configured .*--env.use_wandb false"):
        start_wandb(ScriptedEnv(), project=None, group=None)


def test_wandb_name_defaults_to_the_environments() -> None:
    class Nameless(ScriptedEnv):
        name = None

    assert build().config.wandb_name == "scripted"
    assert build(env_cls=Nameless).config.wandb_name == "Nameless"
    assert build("--env.wandb_name", "mine").config.wandb_name == "mine"


def test_evaluate_opens_a_wandb_run_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        logged: list[dict[str, Any]] = []

        def log(self, metrics: dict[str, Any], step: int) -> None:
            self.logged.append(metrics)

        def finish(self) -> None:
            self.logged.append({"finished": True})

    class Logging(ScriptedEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            await self.wandb_log({"eval/x": 1.0})

    fake = SimpleNamespace(init=lambda **kwargs: Run(), run=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert run_environment(Logging, ["evaluate", "--testing", "--env.use_wandb", "true"]) == 0
    assert [("eval/x" in metrics, "finished" in metrics) for metrics in Run.logged] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("mode", ["process", "evaluate"])
def test_use_wandb_of_config_init_is_respected(mode: str) -> None:
    def env_with(**fields: Any) -> type[ScriptedEnv]:
        return beginning_with(BaseEnvConfig(**fields), [ONE])

    assert build(mode=mode, env_cls=env_with(use_wandb=False)).config.use_wandb is False
    assert build(mode=mode, env_cls=env_with(use_wandb=True)).config.use_wandb is True
    assert build(mode=mode, env_cls=env_with()).config.use_wandb is False


def test_empty_yaml_file_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text in ("", "# nothing\n", "env:\nopenai:\n"):
        path.write_text(text)
        assert build("--config", str(path)).config.group_size == 2


def test_yaml_slurm_and_testing_are_read_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("slurm: 'false'\ntesting: true\nmax_n_completions: 3\n")
    env = build_environment(ScriptedEnv, "serve", ["--config", str(path)], prog="env.py")
    assert isinstance(env.server.servers[0], ServerHarness)
    assert env.server.max_n_completions == 3
    assert build("--max_n_completions", "5").server.max_n_completions == 5


def test_proxy_url_reaches_the_servers_of_the_environment() -> None:
    assert build("--proxy_url", "http://p").server.use_proxy
    assert not build().server.use_proxy


class WithTeacher(ScriptedEnv):
    """A constructor with further servers before `slurm`, as the original's teacher environment has."""

    def __init__(
        self,
        config: Any,
        server_configs: Any,
        teacher_server_configs: Any = None,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.teacher = teacher_server_configs

    @classmethod
    def extra_servers(cls) -> dict[str, ExtraServers]:
        return {"teacher": ExtraServers("teacher_server_configs", None)}


def test_further_servers_come_from_flags_and_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env: Any = build(env_cls=WithTeacher)
    assert env.teacher is None
    path = tmp_path / "c.yaml"
    path.write_text("teacher:\n  base_url: http://t/v1\n  model_name: yaml\n")
    argv = ["--config", str(path), "--teacher.model_name", "big", "--teacher.api_key=t-secret"]
    env = build(*argv, "--model_name", "small", env_cls=WithTeacher)
    assert (env.teacher.base_url, env.teacher.model_name) == ("http://t/v1", "big")
    assert env.server.servers[0].config.model_name == "small"
    assert "t-secret" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean --teacher.model_name"):
        build("--teacher.modelname", "x", env_cls=WithTeacher)


def test_command_classes_are_constructible_and_runnable(tmp_path: Path) -> None:
    command_cls = ScriptedEnv.get_cli_process_config_cls()
    assert {"env.group_size", "openai.base_url", "slurm", "config"} <= set(command_cls.model_fields)
    path = tmp_path / "g.jsonl"
    values = {"env.data_path_to_save_groups": str(path), "env.total_steps": "2", "testing": True}
    command_cls(**values).run()
    assert len(path.read_text().splitlines()) == 2
    yaml_path = tmp_path / "c.yaml"
    yaml_path.write_text("env:\n  group_size: 7\n  total_steps: 9\n")
    command = ScriptedEnv.get_cli_serve_config_cls()(
        config=str(yaml_path), **{"env.total_steps": 4}
    )
    config = command.build().config
    assert (config.group_size, config.total_steps) == (7, 4)
    with pytest.raises(ValueError, match="groupsize"):
        command_cls(**{"env.groupsize": 4})


def test_override_of_a_command_class_is_what_the_command_line_runs() -> None:
    ran: list[str] = []

    class Own(ScriptedEnv):
        @classmethod
        def get_cli_evaluate_config_cls(cls) -> type[Any]:
            class Command(super().get_cli_evaluate_config_cls()):  # type: ignore[misc]
                def run(self) -> None:
                    ran.append(self.build().config.wandb_name)

            return Command

        @classmethod
        def get_cli_serve_config_cls(cls) -> type[Any]:
            return dict

    assert run_environment(Own, ["evaluate", "--testing"]) == 0
    assert ran == ["scripted"]
    assert run_environment(Own, ["serve", "--testing"]) == 1


def test_overrides_of_the_managers_are_what_the_command_line_runs(tmp_path: Path) -> None:
    ran: list[str] = []

    class Own(ScriptedEnv):
        async def env_manager(self) -> None:
            ran.append("serve")

        async def process_manager(self) -> None:
            ran.append("process")
            await super().process_manager()

    path = tmp_path / "g.jsonl"
    argv = ["--testing", "--env.data_path_to_save_groups", str(path), "--env.total_steps=1"]
    assert run_environment(Own, ["serve", *argv]) == 0
    assert run_environment(Own, ["process", *argv]) == 0
    assert ran == ["serve", "process"]
    assert path.with_suffix(".html").exists()


async def test_run_that_leaves_groups_in_a_file_is_an_error_of_the_command() -> None:
    class Leaves(ScriptedEnv):
        async def env_manager(self) -> None:
            raise HubUnavailable("2 groups could not be delivered; they are in F")

    code = await asyncio.to_thread(run_environment, Leaves, ["serve", "--testing"])
    assert code == 1
