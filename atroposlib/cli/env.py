"""`python my_env.py serve|process|evaluate`: merge the configuration, build the environment, run it.

Precedence: the environment's own `config_init` < YAML < flags. Flags are `--env.<field>`, `--openai.<field>`,
`--slurm`, `--testing`; a name that only one section has may stand without its namespace (`--model_name`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from atroposlib.config import SectionValues, build, parse_sections
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.envs.runtime.evaluate import evaluate
from atroposlib.envs.runtime.process import process
from atroposlib.envs.runtime.serve import serve
from atroposlib.envs.server_handling.server_config import (
    APIServerConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.errors import ConfigError, cli_boundary
from atroposlib.frontend.jsonl2html import generate_html

logger = logging.getLogger(__name__)

ServerConfigs = ServerBaseline | APIServerConfig | list[APIServerConfig]

MODES = {
    "serve": "keep the hub supplied with groups until the trainer is done",
    "process": "write total_steps groups to a JSONL file and an HTML page, without a hub",
    "evaluate": "run evaluate() once, without a hub",
}

FLAT_NAMES = {"tokenizer_name": ENV_NAMESPACE}
"""Both sections have these; without a namespace early documentation means this section."""


def run_environment(env_cls: type[BaseEnv], argv: Sequence[str] | None = None) -> int:
    """Run the command line of one environment and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return cli_boundary(lambda: _run(env_cls, arguments))


async def serve_environment(env: BaseEnv) -> None:
    """Serve until the trainer is done."""
    await serve(env)


async def process_environment(env: BaseEnv) -> None:
    """Fill the JSONL file, then render it."""
    result = await process(env)
    if result.num_groups:
        page = await asyncio.to_thread(generate_html, result.path)
        print(f"{result.num_groups} groups: {result.path}, {page}")


async def evaluate_environment(env: BaseEnv) -> None:
    """Evaluate once."""
    await evaluate(env)


def _run(env_cls: type[BaseEnv], argv: Sequence[str]) -> int:
    prog = Path(sys.argv[0]).name or env_cls.__name__
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(env_cls, prog), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    mode, *rest = argv
    if mode not in MODES:
        raise ConfigError(f"unknown command {mode!r}; choose one of {', '.join(MODES)}")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    env = build_environment(env_cls, mode, rest, prog=f"{prog} {mode}")
    run = {
        "serve": serve_environment,
        "process": process_environment,
        "evaluate": evaluate_environment,
    }[mode]
    asyncio.run(run(env))
    return 0


def _usage(env_cls: type[BaseEnv], prog: str) -> str:
    lines = [
        f"usage: {prog} COMMAND [--env.FIELD VALUE] [--openai.FIELD VALUE] [--config FILE]",
        "",
    ]
    lines += [f"  {mode:10} {text}" for mode, text in MODES.items()]
    return "\n".join([*lines, "", f"{prog} serve --help lists the flags of {env_cls.__name__}."])


def build_environment(
    env_cls: type[BaseEnv], mode: str, argv: Sequence[str], *, prog: str
) -> BaseEnv:
    """Merge the three layers and construct the environment; ConfigError for any mistake in them."""
    defaults, default_servers = env_cls.config_init()
    values = parse_sections(
        {
            ENV_NAMESPACE: type(defaults),
            OPENAI_NAMESPACE: APIServerConfig,
            "": ServerManagerConfig,
        },
        argv,
        prog=prog,
        description=(inspect.getdoc(env_cls) or "").partition("\n")[0],
        flat_names=FLAT_NAMES,
    )
    config = _env_config(env_cls, defaults, values, mode)
    servers = resolve_servers(
        default_servers, values.yaml.get("openai"), values.flags.get(OPENAI_NAMESPACE, {})
    )
    manager = build(
        ServerManagerConfig,
        {key: values.yaml[key] for key in ("slurm", "testing") if key in values.yaml},
        values.flags.get("", {}),
    )
    print(_describe(config, servers), end="")
    env = _construct(env_cls, config, servers, slurm=manager.slurm, testing=manager.testing)
    if mode == "process":
        vars(env).update(
            process_mode=True,
            n_groups_to_process=config.total_steps,
            group_size_to_process=config.group_size,
        )
    if mode == "evaluate" and config.data_dir_to_save_evals:
        folder = Path(config.data_dir_to_save_evals)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evaluate_config.yaml").write_text(_describe(config, servers))
    return env


def _env_config(
    env_cls: type[BaseEnv], defaults: BaseEnvConfig, values: SectionValues, mode: str
) -> BaseEnvConfig:
    own = {name: getattr(defaults, name) for name in type(defaults).model_fields}
    forced: dict[str, Any] = {}
    if mode != "serve" and "use_wandb" not in defaults.model_fields_set:
        forced["use_wandb"] = False  # both work offline; wandb only where somebody asked for it
    if mode == "process":
        forced |= {"ensure_scores_are_not_same": False, "include_messages": True}
        if not defaults.data_path_to_save_groups:
            forced["data_path_to_save_groups"] = f"data/{env_cls.name or 'groups'}.jsonl"
    from_yaml = values.yaml.get(ENV_NAMESPACE) or {}
    if not isinstance(from_yaml, Mapping):
        raise ConfigError(
            f"env: the YAML section must be a mapping, not {type(from_yaml).__name__}"
        )
    typed = values.flags.get(ENV_NAMESPACE, {})
    namespace = ENV_NAMESPACE + NAMESPACE_SEP
    return build(type(defaults), own, forced, from_yaml, typed, namespace=namespace)


def resolve_servers(
    default: ServerConfigs, from_yaml: Any, typed: Mapping[str, Any]
) -> ServerConfigs:
    """Lay YAML and flags over the environment's servers.

    One server (bare or in a list) takes overrides field by field; a `ServerBaseline` with overrides becomes one
    server. Several servers are replaced by a YAML list, and refuse flags: which one would be meant?
    """
    entries = from_yaml if isinstance(from_yaml, list) else [from_yaml] if from_yaml else []
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError("openai: the YAML section must be a mapping or a list of mappings")
    several = len(entries) > 1 or (not entries and isinstance(default, list) and len(default) > 1)
    if several and typed:
        names = ", ".join(f"--openai.{name}" for name in typed)
        raise ConfigError(f"{names}: there are several servers; describe them as a list in YAML")
    if len(entries) > 1:
        return [_server(entry) for entry in entries]
    if several or not (entries or typed):
        return default
    base = default[0] if isinstance(default, list) and default else default
    own = {} if isinstance(base, list) else base.model_dump()
    server = _server(own, *entries, typed)
    return [server] if isinstance(default, list) else server


def _server(*layers: Mapping[str, Any]) -> APIServerConfig:
    return build(APIServerConfig, *layers, namespace=OPENAI_NAMESPACE + NAMESPACE_SEP)


def _construct(
    env_cls: type[BaseEnv],
    config: BaseEnvConfig,
    servers: ServerConfigs,
    *,
    slurm: bool,
    testing: bool,
) -> BaseEnv:
    """Call the constructor by keyword, or positionally where a subclass renamed the parameters."""
    parameters = inspect.signature(env_cls).parameters
    has_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if has_any or {"slurm", "testing"} <= set(parameters):
        return env_cls(config, servers, slurm=slurm, testing=testing)
    positional: tuple[Any, ...] = (config, servers, slurm, testing)
    return env_cls(*positional[: len(parameters)])


def _describe(config: BaseModel, servers: ServerConfigs) -> str:
    """Return the configuration as YAML, API keys masked."""
    listed = servers if isinstance(servers, list) else [servers]
    dumped = [server.model_dump(mode="json") for server in listed]
    for server in dumped:
        if server.get("api_key"):
            server["api_key"] = "***"
    document = {"env": config.model_dump(mode="json", fallback=str), "openai": dumped}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
