"""`python my_env.py serve|process|evaluate|check`: merge the configuration, build the environment, run it.

Precedence: the environment's own `config_init` < YAML < flags. Flags are `--env.<field>`, `--openai.<field>`,
`--slurm`, `--testing`; a name that only one section has may omit its namespace (`--model_name`). What runs a command is
imported by the function that starts it, so that `--help` and a mistake in a flag are answered in half a second.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, create_model

from atroposlib.config import (
    HelpLayout,
    SectionValues,
    build,
    check_yaml,
    parse_sections,
    read_yaml,
)
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.env_config import WORKER_FIELDS, BaseEnvConfig, ProcessOptions
from atroposlib.envs.eval_run import PAGE_FILE, read_config
from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.sandbox import ISOLATION_VARIABLE
from atroposlib.errors import ConfigError, EnvError, cli_boundary
from atroposlib.inference.config import (
    APIServerConfig,
    ServerManagerConfig,
)
from atroposlib.inference.resolve_configs import ServerConfigs, resolve_servers
from atroposlib.inference.scripted_answers import ByteTokenizer
from atroposlib.runtime.masking import without_masked, without_secrets
from atroposlib.utils.event_loop import collect_less_often, loop_with_short_rounds
from atroposlib.utils.tokenizers import is_at_hand
from atroposlib.utils.wording import TerminalFormatter, columns_of, wrapped

logger = logging.getLogger(__name__)

MODES = {
    "serve": "keep the hub supplied with groups until the trainer is done",
    "process": "write total_steps groups to a JSONL file and an HTML page, without a hub",
    "evaluate": "run evaluate() once, without a hub",
    "check": "run a few items on a scripted engine and report what would go wrong in training",
}

FIRST_FLAGS = {
    "serve": "env.rollout_server_url",
    "process": "env.total_steps",
    "evaluate": "env.data_dir_to_save_evals",
}
"""The flag of each mode that `--help` lists first, after the four about engine and tokenizer."""

FOR_A_TRAINER = frozenset(
    {
        "rollout_server_url",
        "batch_size",
        "max_batches_offpolicy",
        "min_batch_allocation",
        "min_items_sent_before_logging",
        "inference_weight",
        "steps_per_eval",
        "eval_handling",
        "eval_limit_ratio",
    }
)
"""Fields of `BaseEnvConfig` that only `serve` reads."""

FOR_EVALUATION = frozenset({"data_dir_to_save_evals", "max_eval_workers"})
"""Fields of `BaseEnvConfig` that `process` does not read."""

FOR_GROUPS = frozenset(
    {
        "data_path_to_save_groups",
        "ensure_scores_are_not_same",
        "include_messages",
        "max_consecutive_failures",
        "max_item_attempts",
        "max_num_workers",
        "max_num_workers_per_node",
        "num_rollouts_per_group_for_logging",
        "num_rollouts_to_keep",
        "total_steps",
        "worker_timeout",
    }
)
"""Fields of `BaseEnvConfig` that `evaluate` does not read."""

UNUSED_FIELDS = {
    "serve": frozenset[str](),
    "process": FOR_A_TRAINER | FOR_EVALUATION,
    "evaluate": FOR_A_TRAINER | FOR_GROUPS,
}
"""Fields whose flags `--help` does not list, by mode; the flags are still accepted."""

FLAT_NAMES = {"tokenizer_name": ENV_NAMESPACE}
"""Names that both sections have, with the section meant when the namespace is omitted."""


FOR_EVALUATE = frozenset({"resume", "rescore"})
"""Fields of `ManagerFlags` that only `evaluate` reads."""


class ManagerFlags(ServerManagerConfig):
    """Flags without a namespace."""

    verbose: bool = False
    """Print the whole configuration at the start."""
    require_isolation: bool = False
    """Run programs that a model wrote only in bubblewrap or containers, or not at all."""
    resume: str | None = None
    """Directory of an interrupted evaluation; it continues with the configuration stored there."""
    rescore: str | None = None
    """Directory of an evaluation whose answers are scored again, with the configuration stored there."""


class ProcessFlags(ManagerFlags, ProcessOptions):
    """Flags without a namespace of `process`."""


def run_environment(env_cls: type[EnvHooks], argv: Sequence[str] | None = None) -> int:
    """Run the command line of one environment and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return cli_boundary(lambda: _run(env_cls, arguments))


def _run(env_cls: type[EnvHooks], argv: Sequence[str]) -> int:
    prog = Path(sys.argv[0]).name or env_cls.__name__
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(env_cls, prog), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    mode, *rest = argv
    if mode not in MODES:
        raise ConfigError(f"unknown command {mode!r}; choose one of {', '.join(MODES)}")
    if mode == "check":
        from atroposlib.checker.check_command import check_environment

        return check_environment(env_cls, rest, prog=f"{prog} check", build=build_environment)
    TerminalFormatter.install(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # has a handler of its own
    for name in ("httpx", "httpx2"):  # of the openai package: a line per request of an agent
        logging.getLogger(name).setLevel(logging.WARNING)
    hook = f"get_cli_{mode}_config_cls"
    command = getattr(env_cls, hook)()
    if not (isinstance(command, type) and issubclass(command, EnvCommand)):
        raise EnvError(f"{env_cls.__name__}.{hook} must return a subclass of what super() returns")
    command.from_argv(rest, prog=f"{prog} {mode}").run()
    return 0


class EnvCommand(BaseModel):
    """One command with its options: a field per flag, with the flag's name (`env.group_size`), and the YAML file.

    `command_class` makes the subclass for an environment and a mode. Values are converted to the flags' types when
    the environment is built; only fields that were set override YAML and `config_init`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    env_cls: ClassVar[type[EnvHooks]]
    mode: ClassVar[str]
    config: str | None = None
    """YAML file read before the flags."""
    _yaml: dict[str, Any] | None = PrivateAttr(default=None)

    @classmethod
    def from_argv(cls, argv: Sequence[str], *, prog: str = "env.py") -> Self:
        """Read flags; ConfigError for a mistake in them, exit 0 after `--help`."""
        values = read_flags(cls.env_cls, cls.mode, argv, prog=prog)
        flags = {
            _flag_name(s, name): v for s, given in values.flags.items() for name, v in given.items()
        }
        command = cls(**flags)
        command._yaml = values.yaml
        return command

    def build(self) -> EnvHooks:
        """Construct the environment; ConfigError for any mistake in the three layers."""
        flags: dict[str, dict[str, Any]] = {}
        for name in self.model_fields_set - {"config"}:
            section, _, field = name.rpartition(NAMESPACE_SEP)
            flags.setdefault(section, {})[field] = getattr(self, name)
        document = self._yaml
        if document is None:
            document = read_yaml(self.config) if self.config else {}
        return environment_from(self.env_cls, self.mode, SectionValues(flags=flags, yaml=document))

    def run(self) -> None:
        """Build the environment and run it."""
        env = self.build()
        collect_less_often()
        with asyncio.Runner(loop_factory=loop_with_short_rounds) as runner:
            runner.run(run_mode(env, self.mode))


def command_class(env_cls: type[EnvHooks], mode: str) -> type[EnvCommand]:
    """Return the command class that `BaseEnv.get_cli_<mode>_config_cls` returns by default."""
    defaults, _ = env_cls.config_init()
    fields: dict[str, Any] = {
        _flag_name(section, name): (Any, Field(default=None, description=info.description))
        for section, model in _sections(env_cls, defaults, mode).items()
        for name, info in model.model_fields.items()
    }
    name = f"{env_cls.__name__}{mode.capitalize()}"
    made: type[EnvCommand] = create_model(name, __base__=EnvCommand, **fields)
    made.env_cls, made.mode = env_cls, mode
    return made


async def run_mode(env: EnvHooks, mode: str) -> None:
    """Run `serve`, `process` or `evaluate` through the environment's own methods, with the engines checked."""
    from atroposlib.runtime.evaluate import evaluate
    from atroposlib.runtime.guards import engines_checked

    async with engines_checked(env, mode):
        if mode == "serve":
            await env.env_manager()
        elif mode == "process":
            await env.process_manager()
            groups = Path(env.config.data_path_to_save_groups or "")
            _print_end("groups", groups, page=groups.with_suffix(".html"))
        else:
            results = await evaluate(env)
            _print_end("results", results, page=results / PAGE_FILE)


def _print_end(name: str, written: Path, *, page: Path) -> None:
    if written.exists():
        _print_wrapped(f"{name}: {written}" + f"\nnext: open {page}" * page.exists())


def _print_wrapped(text: str) -> None:
    print(wrapped(text, columns_of(sys.stdout)), flush=True)


def _first_line(env_cls: type[EnvHooks]) -> str:
    """Return the first line of an environment's own docstring, or of its module's."""
    module = sys.modules[env_cls.__module__]
    text = inspect.cleandoc(env_cls.__doc__ or module.__doc__ or "")
    return text.partition("\n")[0]


def _flag_name(section: str, name: str) -> str:
    return f"{section}{NAMESPACE_SEP}{name}" if section else name


def _usage(env_cls: type[EnvHooks], prog: str) -> str:
    lines = [
        f"usage: {prog} COMMAND [--env.FIELD VALUE] [--openai.FIELD VALUE] [--config FILE]",
        "",
    ]
    lines += [f"  {mode:10} {text}" for mode, text in MODES.items()]
    return "\n".join([*lines, "", f"{prog} serve --help lists the flags of {env_cls.__name__}."])


def build_environment(
    env_cls: type[EnvHooks],
    mode: str,
    argv: Sequence[str],
    *,
    prog: str,
    needs_tokens: bool = True,
) -> EnvHooks:
    """Read the flags and construct the environment; ConfigError for any mistake in them."""
    given = read_flags(env_cls, mode, argv, prog=prog)
    return environment_from(env_cls, mode, given, needs_tokens=needs_tokens)


def read_flags(
    env_cls: type[EnvHooks], mode: str, argv: Sequence[str], *, prog: str
) -> SectionValues:
    """Read flags and the YAML file they name, for the sections this environment has."""
    defaults, _ = env_cls.config_init()
    sections = _sections(env_cls, defaults, mode)
    flat_names = dict(FLAT_NAMES)
    if len(sections) > 3:  # a bare --model_name means the policy's servers, not a judge's
        own = type(defaults).model_fields
        servers = [name for name in APIServerConfig.model_fields if name not in own]
        flat_names |= dict.fromkeys(servers, OPENAI_NAMESPACE)
    return parse_sections(
        sections,
        argv,
        prog=prog,
        description=_first_line(env_cls),
        flat_names=flat_names,
        layout=_help_layout(env_cls, mode) if {"-h", "--help"} & set(argv) else None,
    )


def _help_layout(env_cls: type[EnvHooks], mode: str) -> HelpLayout:
    """Return the flags of a mode, with the defaults of this environment."""
    hidden = UNUSED_FIELDS[mode]
    config, sections, manager = _settings(env_cls, mode, SectionValues())
    models: dict[str, BaseModel] = {ENV_NAMESPACE: config, "": manager}
    for namespace, servers in sections.items():
        models[namespace] = servers[0] if isinstance(servers, list) else servers
    defaults = {
        _flag_name(section, name): value
        for section, model in models.items()
        for name, value in without_secrets(dict(model)).items()
    }
    first = [f"openai.{name}" for name in ("base_url", "model_name", "server_type")]
    return HelpLayout(
        first=[*first, "env.tokenizer_name", FIRST_FLAGS[mode]],
        hidden=frozenset(_flag_name(ENV_NAMESPACE, name) for name in hidden)
        | (frozenset() if mode == "evaluate" else FOR_EVALUATE),
        defaults=defaults,
    )


def _sections(
    env_cls: type[EnvHooks], defaults: BaseEnvConfig, mode: str
) -> dict[str, type[BaseModel]]:
    return {
        ENV_NAMESPACE: type(defaults),
        OPENAI_NAMESPACE: APIServerConfig,
        **dict.fromkeys(env_cls.extra_servers(), APIServerConfig),
        "": _manager_flags(mode),
    }


def _manager_flags(mode: str) -> type[ManagerFlags]:
    return ProcessFlags if mode == "process" else ManagerFlags


class _Settings(NamedTuple):
    config: BaseEnvConfig
    servers: dict[str, ServerConfigs]
    """By section; those of an optional section are missing unless configured."""
    manager: ManagerFlags


def _settings(env_cls: type[EnvHooks], mode: str, given: SectionValues) -> _Settings:
    """Merge `config_init`, YAML and flags."""
    defaults, default_servers = env_cls.config_init()
    check_yaml(given.yaml, _sections(env_cls, defaults, mode))
    values = SectionValues(flags=given.flags, yaml=without_masked(given.yaml))
    config = _env_config(env_cls, defaults, values, mode)
    servers = {
        OPENAI_NAMESPACE: resolve_servers(
            default_servers, values.yaml.get("openai"), values.flags.get(OPENAI_NAMESPACE, {})
        )
    }
    for namespace, (_, default) in env_cls.extra_servers().items():
        from_yaml, typed = values.yaml.get(namespace), values.flags.get(namespace, {})
        if default is None and not (from_yaml or typed):
            continue
        servers[namespace] = resolve_servers(
            default or APIServerConfig(), from_yaml, typed, namespace=namespace
        )
    flags = _manager_flags(mode)
    from_yaml = {name: values.yaml[name] for name in flags.model_fields if name in values.yaml}
    return _Settings(config, servers, build(flags, from_yaml, values.flags.get("", {})))


def environment_from(
    env_cls: type[EnvHooks], mode: str, given: SectionValues, *, needs_tokens: bool = True
) -> EnvHooks:
    """Merge `config_init`, YAML and flags, print a line about the result, and construct the environment.

    Bytes may stand in for tokens where they are not needed, and with `--testing` unless a tokenizer is named.
    """
    given = _with_stored_config(given, mode)
    config, servers, manager = _settings(env_cls, mode, given)
    described = _describe(config, servers, manager)
    if manager.verbose:
        print(described, end="")
    _print_wrapped(_summary(env_cls, mode, config, servers[OPENAI_NAMESPACE], manager))
    sections = (given.yaml.get(ENV_NAMESPACE) or {}, given.flags.get(ENV_NAMESPACE, {}))
    is_named = any("tokenizer_name" in section for section in sections)
    if not needs_tokens or (manager.testing and not is_named):
        env_cls = _with_stand_in_tokenizer(env_cls, fetches=is_named)
    env = _construct(
        env_cls,
        config,
        servers[OPENAI_NAMESPACE],
        slurm=manager.slurm,
        testing=manager.testing,
        extra={
            keyword: servers[namespace]
            for namespace, (keyword, _) in env_cls.extra_servers().items()
            if namespace in servers
        },
    )
    if manager.require_isolation:
        os.environ[ISOLATION_VARIABLE] = "1"
    if os.environ.get(ISOLATION_VARIABLE) and env.runs_model_code and not env.is_isolated():
        raise ConfigError(
            f"--require-isolation: {env_cls.__name__} runs programs that a model wrote, and bubblewrap is missing or "
            "may not create namespaces here. Install it (apt install bubblewrap), or choose containers where the "
            "environment can (--env.docker_image python:3.11-slim)"
        )
    if "max_n_completions" in manager.model_fields_set:
        env.server.max_n_completions = manager.max_n_completions
    if manager.proxy_url:
        env.server.proxy_url = manager.proxy_url
    if isinstance(manager, ProcessFlags):
        vars(env).update(
            process_options=manager,
            process_mode=True,
            n_groups_to_process=config.total_steps,
            group_size_to_process=config.group_size,
        )
    if mode == "evaluate":
        from atroposlib.runtime.evaluate import eval_run_of

        env.eval_run = eval_run_of(
            env, config=described, resume=manager.resume, rescore=manager.rescore
        )
    return env


def _with_stand_in_tokenizer(env_cls: type[EnvHooks], *, fetches: bool) -> type[EnvHooks]:
    """Return a subclass that takes bytes for tokens where its own tokenizer cannot be loaded.

    Unless it `fetches`, a tokenizer that is not on this machine is not asked for.
    """
    asks = fetches or env_cls.load_tokenizer is not EnvHooks.load_tokenizer

    def load_tokenizer(self: EnvHooks) -> Any:
        name = self.config.tokenizer_name
        if not (asks or is_at_hand(name)):
            logger.info("bytes stand in for tokens: %s is not on this machine", name)
            return ByteTokenizer()
        try:
            return env_cls.load_tokenizer(self)
        except ConfigError as error:
            logger.warning("%s; bytes stand in for its tokens", error)
            return ByteTokenizer()

    body = {
        "load_tokenizer": load_tokenizer,
        "__module__": env_cls.__module__,
        "__doc__": env_cls.__doc__,
    }
    return type(env_cls.__name__, (env_cls,), body)


def _with_stored_config(given: SectionValues, mode: str) -> SectionValues:
    """Return the values with the configuration of the evaluation to resume or rescore, unless YAML is given."""
    typed = given.flags.get("", {})
    folders = [typed[name] for name in ("resume", "rescore") if typed.get(name)]
    if not folders:
        return given
    if mode != "evaluate":
        raise ConfigError(f"--resume, --rescore: {mode} has no such flag, only evaluate")
    if len(folders) > 1:
        raise ConfigError("--resume and --rescore exclude each other")
    stored = yaml.safe_load(read_config(Path(folders[0])))
    stored["env"]["data_dir_to_save_evals"] = None
    return SectionValues(flags=given.flags, yaml=given.yaml or stored)


def _summary(
    env_cls: type[EnvHooks],
    mode: str,
    config: BaseEnvConfig,
    servers: ServerConfigs,
    manager: ManagerFlags,
) -> str:
    """Return one line: model, engines, tokenizer, and where the results go."""
    listed = servers if isinstance(servers, list) else [servers]
    urls = [getattr(each, "base_url", None) or "default servers" for each in listed]
    parts = [
        f"model {listed[0].model_name} at {', '.join(urls[:2])}"
        + (f" and {len(urls) - 2} more" if len(urls) > 2 else "")
        + f" ({listed[0].server_type})",
    ]
    is_text = all(each.server_type == "openai" for each in listed) and not manager.proxy_url
    if env_cls.load_tokenizer is EnvHooks.load_tokenizer and not (is_text or manager.testing):
        parts.append(f"tokenizer {config.tokenizer_name}")
    if manager.testing:
        parts[0] = "scripted answers (--testing)"
    if mode == "serve":
        parts.append(f"hub {config.rollout_server_url}")
    if mode == "evaluate" and config.data_dir_to_save_evals:
        parts.append(f"results to {config.data_dir_to_save_evals}")
    line = without_secrets(f"{config.wandb_name}: {'; '.join(parts)}")
    return f"{mode} {line}"


def default_groups_path(env_cls: type[EnvHooks]) -> str:
    """Return where `process` writes the groups of a class whose `config_init` gives no path."""
    return f"data/{env_cls.name or 'groups'}.jsonl"


def _env_config(
    env_cls: type[EnvHooks], defaults: BaseEnvConfig, values: SectionValues, mode: str
) -> BaseEnvConfig:
    own = {name: getattr(defaults, name) for name in type(defaults).model_fields}
    for name in WORKER_FIELDS - defaults.model_fields_set:
        del own[name]  # so that the runtime sees that the author left them to it
    forced: dict[str, Any] = {}
    if own.get("wandb_name") is None:
        forced["wandb_name"] = env_cls.name or env_cls.__name__
    if mode != "serve" and "use_wandb" not in defaults.model_fields_set:
        forced["use_wandb"] = False  # both work offline; wandb only if `config_init` sets it
    if mode == "process":
        forced |= {"ensure_scores_are_not_same": False, "include_messages": True}
        if not defaults.data_path_to_save_groups:
            forced["data_path_to_save_groups"] = default_groups_path(env_cls)
    from_yaml = values.yaml.get(ENV_NAMESPACE) or {}
    if not isinstance(from_yaml, Mapping):
        raise ConfigError(
            f"env: the YAML section must be a mapping, not {type(from_yaml).__name__}"
        )
    typed = values.flags.get(ENV_NAMESPACE, {})
    namespace = ENV_NAMESPACE + NAMESPACE_SEP
    return build(type(defaults), own, forced, from_yaml, typed, namespace=namespace)


def _construct(
    env_cls: type[EnvHooks],
    config: BaseEnvConfig,
    servers: ServerConfigs,
    *,
    slurm: bool,
    testing: bool,
    extra: Mapping[str, Any],
) -> EnvHooks:
    """Call the constructor with the parameters it accepts.

    Existing environments name the third parameter `slurm_job_id` or `slurm_config`, omit it, or take `*args`. A
    parameter whose name resembles a flag gets the flag; other parameters with a default keep it.
    """
    parameters = list(inspect.signature(env_cls).parameters.values())
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    values = {"slurm": slurm, "testing": testing}
    keywords = {name: value for name, value in values.items() if name in names or takes_any}
    keywords |= extra
    rest = {name: value for name, value in values.items() if name not in keywords}
    for parameter in parameters[2:]:
        if parameter.name in keywords or parameter.name not in names:
            continue
        similar = [name for name in rest if name[:4] in parameter.name.lower()]
        if similar:
            keywords[parameter.name] = rest.pop(similar[0])
        elif parameter.default is parameter.empty and rest:
            keywords[parameter.name] = rest.pop(next(iter(rest)))
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return env_cls(config, servers, *(rest.values() if takes_more else ()), **keywords)


def _describe(
    config: BaseModel, sections: Mapping[str, ServerConfigs], manager: ManagerFlags
) -> str:
    """Return the configuration as YAML that `--config` can read, with secrets masked."""
    document: dict[str, Any] = {"env": config.model_dump(mode="json", fallback=str)}
    for namespace, servers in sections.items():
        listed = servers if isinstance(servers, list) else [servers]
        document[namespace] = [server.model_dump(mode="json") for server in listed]
    shown = {"slurm", "testing", *ProcessOptions.model_fields}
    document |= manager.model_dump(mode="json", include=shown)
    if manager.rescore:
        document["rescore"] = manager.rescore
    if manager.require_isolation:
        document["require_isolation"] = True
    return yaml.safe_dump(without_secrets(document), sort_keys=False, allow_unicode=True)
