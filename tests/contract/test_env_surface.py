"""The names, signatures and flags that environments of the original rely on.

Names are those that its environments, trainers and documents import. Signatures keep positional order, for callers in
the wild pass positionally.
"""

import importlib
import inspect
import logging
import operator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from atroposlib.envs.base import (
    APIServer,
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    ServerBaseline,
)
from atroposlib.envs.server_handling.openai_server import resolve_openai_configs
from atroposlib.errors import ConfigError
from atroposlib.inference.config import ServerManagerConfig
from atroposlib.runtime.env_command import build_environment, resolve_servers, run_environment
from tests.builders.tables import table
from tests.runtime.helpers_runtime import ScriptedEnv

SURFACE = table("contract/env_surface")
NAMES, METHODS, PARAMETERS = SURFACE["names"], SURFACE["methods"], SURFACE["parameters"]


def _missing(module: str) -> list[str]:
    """Return the promised names that cannot be imported from `module`."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return NAMES[module].split()
    return [name for name in NAMES[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_environments_import_them_from(module: str) -> None:
    assert _missing(module) == []


def _spelled(method: Any) -> str:
    words = ["async"] if inspect.iscoroutinefunction(method) else []
    for parameter in inspect.signature(method).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        has_default = parameter.default is not parameter.empty
        words.append(f"{stars}{parameter.name}" + (f"={parameter.default}" if has_default else ""))
    return " ".join(word for word in words if word != "self")


@pytest.mark.parametrize("name", METHODS)
def test_method_has_the_original_signature(name: str) -> None:
    assert _spelled(getattr(BaseEnv, name)) == METHODS[name]


def test_class_attributes_and_constructor_are_the_originals() -> None:
    assert _spelled(BaseEnv.__init__) == "config server_configs slurm=False testing=False"
    assert (BaseEnv.name, BaseEnv.env_config_cls, BaseEnv.server_cls) == (
        None,
        BaseEnvConfig,
        APIServer,
    )
    assert BaseEnv.__abstractmethods__ == {"get_next_item", "evaluate"}
    config, servers = BaseEnv.config_init()
    assert (type(config), type(servers)) == (BaseEnvConfig, ServerBaseline)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_have_the_originals_names(path: str) -> None:
    module, _, name = path.partition(":")
    called = operator.attrgetter(name)(importlib.import_module(f"atroposlib.{module}"))
    names = [word for word in inspect.signature(called).parameters if word != "self"]
    wanted = PARAMETERS[path].split()
    assert names[: len(wanted)] == wanted


def test_instance_attributes_are_there_after_construction() -> None:
    env = ScriptedEnv()
    assert [name for name in SURFACE["attributes"].split() if name not in vars(env)] == []
    assert not hasattr(env, "process_mode")
    assert (env.curr_step, env.max_token_len, env.checkpoint_dir) == (0, -1, "")
    assert (env.checkpoint_interval, env.derived_batch_size) == (-1, -1)


def test_derived_batch_size_is_the_share_that_may_be_filled() -> None:
    env = ScriptedEnv(batch_size=32)
    assert env.derived_batch_size == 32
    env.status_dict = {"unallocated_fraction": 0.5}
    assert env.derived_batch_size == 16
    env.config.min_batch_allocation = 0.25
    assert env.derived_batch_size == 24


CONFIG_DEFAULTS = SURFACE["defaults"] | {"eval_handling": EvalHandlingEnum.STOP_TRAIN}


def test_configuration_has_the_original_fields_and_defaults() -> None:
    config = BaseEnvConfig()
    assert {name: getattr(config, name) for name in CONFIG_DEFAULTS} == CONFIG_DEFAULTS


def test_evaluation_modes_are_named_as_in_yaml_and_flags() -> None:
    assert [(mode.name, mode.value) for mode in EvalHandlingEnum] == [
        (name, name) for name in ("STOP_TRAIN", "LIMIT_TRAIN", "NONE")
    ]


def test_typed_dicts_work_in_the_models_of_environments() -> None:
    """pydantic refuses `typing.TypedDict` before Python 3.12."""
    from atroposlib.scored_data import ScoredDataGroup, ScoredDataItem
    from atroposlib.type_definitions import GameHistory, Message

    assert ScoredDataGroup() == {}
    group = ScoredDataGroup(tokens=[[1]], masks=[[1]], scores=[0.0])
    assert TypeAdapter(ScoredDataGroup).validate_python(group) == group
    assert TypeAdapter(ScoredDataItem).validate_python({"tokens": [1], "scores": 1.0})
    assert TypeAdapter(list[Message]).validate_python([{"role": "user", "content": "x"}])
    assert TypeAdapter(GameHistory).validate_python([{"step": 1}]) == [{"step": 1}]
    item_keys = ScoredDataItem.__annotations__
    assert {"inference_logprobs", "group_overrides", "overrides", "images"} <= item_keys.keys()


SAMPLES: dict[str, tuple[str, Any]] = {
    "eval_handling": ("LIMIT_TRAIN", EvalHandlingEnum.LIMIT_TRAIN),
    "eval_limit_ratio": ("0.25", 0.25),
    "inference_weight": ("-1", -1.0),
    "min_batch_allocation": ("0.5", 0.5),
    "worker_timeout": ("-1", -1.0),
    "max_reasoning_tokens": ("2048", 2048),
    "reasoning_effort": ("high", "high"),
    "requests_per_minute": ("600", 600.0),
    "tokens_per_minute": ("1e6", 1e6),
    "prompt_price": ("0.15", 0.15),
    "completion_price": ("0.6", 0.6),
}


def _sample(name: str, default: Any) -> tuple[str, Any]:
    """Return a text for the flag and the value it stands for."""
    if name in SAMPLES:
        return SAMPLES[name]
    if isinstance(default, bool):
        return str(not default).lower(), not default
    if isinstance(default, int):
        return "7", 7
    return "some text", "some text"


def build(*argv: str, mode: str = "serve", env_cls: type[BaseEnv] = ScriptedEnv) -> BaseEnv:
    return build_environment(env_cls, mode, ["--testing", *argv], prog="env.py")


@pytest.mark.parametrize("name", CONFIG_DEFAULTS)
def test_every_field_is_a_flag_in_both_spellings(name: str) -> None:
    text, value = _sample(name, CONFIG_DEFAULTS[name])
    assert getattr(build(f"--env.{name}={text}").config, name) == value
    assert getattr(build(f"--env.{name}", text).config, name) == value


@pytest.mark.parametrize("name", [n for n, default in CONFIG_DEFAULTS.items() if default is None])
def test_the_text_none_is_null(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"env:\n  {name}: {_sample(name, None)[0]}\n")
    config = build("--config", str(path), f"--env.{name}", "None").config
    assert getattr(config, name) is None


SERVER_SAMPLES = {
    "server_type": ("vllm", "vllm"),
    "base_url": ("http://localhost:7/v1", "http://localhost:7/v1"),
    "timeout": ("7", 7),
    "health_wait_s": ("7.5", 7.5),
}


@pytest.mark.parametrize("name", APIServerConfig.model_fields)
def test_every_field_of_a_server_is_a_flag(name: str) -> None:
    default = APIServerConfig.model_fields[name].default
    text, value = SERVER_SAMPLES.get(name) or _sample(name, default)
    env = build(f"--openai.{name}={text}")
    assert getattr(env.server.servers[0].config, name) == value


def test_help_lists_every_flag_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        run_environment(ScriptedEnv, ["serve", "--help"])
    assert exited.value.code == 0
    listed = capsys.readouterr().out
    flags = [f"--env.{name}" for name in BaseEnvConfig.model_fields]
    flags += [f"--openai.{name}" for name in APIServerConfig.model_fields]
    flags += [f"--{name}" for name in ServerManagerConfig.model_fields]
    assert [flag for flag in [*flags, "--config"] if f"  {flag} " not in listed] == []


def test_field_constraints_hold_for_flags() -> None:
    with pytest.raises(ConfigError, match="--env.max_reasoning_tokens: got 7"):
        build("--env.max_reasoning_tokens", "7")
    with pytest.raises(ConfigError, match="--env.group_size: got 0"):
        build("--env.group_size=0")


@pytest.mark.parametrize("mode", ["serve", "process", "evaluate"])
@pytest.mark.parametrize(
    ("in_yaml", "typed", "value"),
    [
        (None, None, "init"),
        ("yaml", None, "yaml"),
        (None, "flag", "flag"),
        ("yaml", "flag", "flag"),
    ],
)
def test_flags_win_over_yaml_over_config_init_in_every_mode(
    mode: str, in_yaml: str | None, typed: str | None, value: str, tmp_path: Path
) -> None:
    class Own(ScriptedEnv):
        @classmethod
        def config_init(cls) -> Any:
            server = APIServerConfig(base_url="http://localhost:9/v1", model_name="init")
            return BaseEnvConfig(wandb_name="init"), [server]

    argv = []
    if in_yaml:
        path = tmp_path / "c.yaml"
        path.write_text(
            f"env: {{wandb_name: {in_yaml}}}\nopenai: [{{model_name: {in_yaml}, weight: 2}}]\n"
        )
        argv = ["--config", str(path)]
    if typed:
        argv += ["--env.wandb_name", typed, "--openai.model_name", typed]
    env = build(*argv, mode=mode, env_cls=Own)
    assert (env.config.wandb_name, env.server.servers[0].config.model_name) == (value, value)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], (False, True, "data/scripted.jsonl")),
        (["--env.ensure_scores_are_not_same", "true"], (True, True, "data/scripted.jsonl")),
        (["--env.include_messages", "false"], (False, False, "data/scripted.jsonl")),
        (["--env.data_path_to_save_groups", "x.jsonl"], (False, True, "x.jsonl")),
    ],
)
def test_defaults_of_process_lie_under_yaml_and_flags(argv: list[str], expected: Any) -> None:
    config = build(*argv, mode="process").config
    found = (config.ensure_scores_are_not_same, config.include_messages)
    assert (*found, config.data_path_to_save_groups) == expected
    assert build(mode="serve").config.ensure_scores_are_not_same is True


ONE = APIServerConfig(base_url="http://a/v1", model_name="m")
TWO = [ONE, APIServerConfig(base_url="http://b/v1")]
YAML_TWO = [{"base_url": "http://p"}, {"base_url": "http://q"}]


@pytest.mark.parametrize(
    ("given", "in_yaml", "typed", "expected"),
    [
        (ONE, YAML_TWO, {}, ["http://p", "http://q"]),
        (TWO, YAML_TWO, {}, ["http://p", "http://q"]),
        (ServerBaseline(), YAML_TWO, {}, ["http://p", "http://q"]),
        (TWO, None, {"base_url": "http://z"}, ConfigError),
        (ONE, YAML_TWO, {"base_url": "http://z"}, ConfigError),
        (ONE, None, {}, "http://a/v1"),
        (ONE, {"base_url": "http://y"}, {}, "http://y"),
        (ONE, [{"base_url": "http://y"}], {"base_url": "http://z"}, "http://z"),
        ([ONE], None, {}, ["http://a/v1"]),
        ([ONE], {"base_url": "http://y"}, {"base_url": "http://z"}, ["http://z"]),
        (ServerBaseline(), None, {}, ServerBaseline()),
        (ServerBaseline(), {"base_url": "http://y"}, {}, "http://y"),
        (ServerBaseline(), None, {"base_url": "http://z"}, "http://z"),
        (TWO, None, {}, ["http://a/v1", "http://b/v1"]),
    ],
)
def test_servers_come_out_as_the_table_says(
    given: Any, in_yaml: Any, typed: dict[str, Any], expected: Any
) -> None:
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="several servers"):
            resolve_servers(given, in_yaml, typed)
        return
    servers = resolve_servers(given, in_yaml, typed)
    if isinstance(expected, list):
        assert isinstance(servers, list)
        assert [server.base_url for server in servers] == expected
    elif isinstance(expected, str):
        assert isinstance(servers, APIServerConfig)
        assert servers.base_url == expected
    else:
        assert servers == expected


def test_original_name_of_the_table_takes_the_original_arguments() -> None:
    document = {"openai": {"base_url": "http://y"}, "env": {"openai.base_url": "no"}}
    flags = {"openai.model_name": "typed", "env.group_size": "2"}
    logger = logging.getLogger(__name__)
    merged = {"timeout": 7, "model_name": "merged"}
    server = resolve_openai_configs([ONE], merged, document, flags, logger)
    assert isinstance(server, list)
    assert [(s.base_url, s.model_name, s.timeout) for s in server] == [("http://y", "typed", 7)]
    assert resolve_openai_configs(ServerBaseline(), {}, {}, {}, logger) == ServerBaseline()
    assert resolve_openai_configs(ServerBaseline(), merged, None, None) == ServerBaseline()
    assert resolve_openai_configs(TWO, merged, {}, {}, logger) == TWO
    with pytest.raises(ConfigError, match="several servers"):
        resolve_openai_configs(TWO, {}, {}, flags, logger)


@pytest.mark.parametrize("mode", ["process", "evaluate"])
def test_flags_reach_the_servers_of_a_pure_baseline_in_every_mode(mode: str) -> None:
    """Ten evaluation environments return a pure `ServerBaseline`."""

    class Pure(ScriptedEnv):
        @classmethod
        def config_init(cls) -> Any:
            return BaseEnvConfig(), ServerBaseline()

    env = build_environment(Pure, mode, ["--openai.base_url", "http://h:1/v1"], prog="env.py")
    assert [server.config.base_url for server in env.server.servers] == ["http://h:1/v1"]
    env = build_environment(Pure, mode, [], prog="env.py")
    ports = [9004, 9005, 9006, 9007]
    assert [server.config.base_url for server in env.server.servers] == [
        f"http://localhost:{port}/v1" for port in ports
    ]


def test_exit_codes_and_where_the_words_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_environment(ScriptedEnv, []) == 2
    assert "usage:" in capsys.readouterr().err
    assert run_environment(ScriptedEnv, ["--help"]) == 0
    assert "usage:" in capsys.readouterr().out
    assert run_environment(ScriptedEnv, ["train"]) == 2
    assert "unknown command 'train'" in capsys.readouterr().err


def test_importing_the_base_leaves_log_levels_alone() -> None:
    assert logging.getLogger("atroposlib.envs.base").level == logging.NOTSET
