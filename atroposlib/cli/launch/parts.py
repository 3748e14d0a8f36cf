"""The parts of a run as commands: what `up` starts and `render` writes.

A command may contain variables, written `${NAME}`, which every part also has as environment variables:

    RUN_DIR       directory of the run
    DATA_DIR      directory of the hub's data, on a disk of its own machine (in the hub's command only)
    INDEX         number of the instance, from 0
    HOST          address to listen on
    PORT          the instance's own port
    HUB_URL       address of the part `hub`; every part with a port has one (`my_judge`: MY_JUDGE_URL).
                  With several instances, instance i of another part gets instance i modulo their number,
                  and each instance of this part its own
    ENGINE_URLS   addresses of all instances, comma-separated; every part with a port has one
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atroposlib.cli.environments import find_environments, is_there
from atroposlib.cli.launch.run_file import (
    VARIABLE,
    EnginePart,
    EnvironmentPart,
    HubPart,
    OwnPart,
    RunFile,
    Section,
    TrainerPart,
    flag_name,
)
from atroposlib.errors import ConfigError
from atroposlib.utils.wording import nearest

PYTHON = "python"

FSDP2: Mapping[str, object] = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "num_machines": 1,
    "mixed_precision": "bf16",
    "dynamo_backend": "no",
}
"""Flags of `accelerate launch`. A sharded state dict would leave no model at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part, for all its instances."""

    name: str
    command: list[str]
    """With variables."""
    needs: list[str]
    section: Section
    env: dict[str, str] = field(default_factory=dict)
    """The run's and the part's own; ${NAME} is a variable of the environment."""
    ends_run: bool = False

    @property
    def ready(self) -> str | None:
        """`/path`, `port`, `exit`, or None: ready as soon as it is started."""
        return self.section.ready or (None if self.port is None else "port")

    @property
    def port(self) -> int | None:
        """Port of the first instance; None for a part without an address."""
        return self.section.port

    @property
    def scheme(self) -> str:
        """`https` for a hub with a certificate, else `http`."""
        flags = self.section.flags if isinstance(self.section, OwnPart) else {}
        return "https" if "ssl_certfile" in map(flag_name, flags) else "http"

    @property
    def instances(self) -> list[str]:
        """`engine`, or `engine-0`, `engine-1`, ... if there are several."""
        return [self.instance(str(index)) for index in range(self.section.count)]

    def instance(self, index: str) -> str:
        """Return the name of an instance; `index` may be a variable of a shell."""
        return self.name if self.section.count == 1 else f"{self.name}-{index}"

    @property
    def host_name(self) -> str:
        """The name as a host name: `my-judge` for `My_judge`."""
        return host_name(self.name)

    @property
    def variable(self) -> str:
        """The variable of the address, `MY_JUDGE_URL`; with an S that of all instances."""
        return self.name.upper().replace("-", "_") + "_URL"

    @property
    def secrets(self) -> list[str]:
        """The environment variables that refer to others."""
        return [name for name, value in self.env.items() if VARIABLE.search(value)]

    def needed(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that must be ready before this one."""
        return [part for part in parts if part.name in self.needs]


def host_name(name: str) -> str:
    """Return a name in the letters of host names, in which `_` does not occur."""
    return name.lower().replace("_", "-")


def parts_of(run: RunFile, *, on_one_machine: bool) -> list[Part]:
    """Return the parts, those needed first; ConfigError for unknown names and circles."""
    found = []
    if run.hub is not None:
        found.append(_hub(run, run.hub))
    if run.engine is not None:
        found.append(_engine(run, run.engine))
    if run.trainer is not None:
        found.append(_trainer(run, run.trainer, on_one_machine=on_one_machine))
    found += [_environment(run, name, each) for name, each in run.environments.items()]
    found += [_other(name, section) for name, section in run.parts.items()]
    found = [_complete(run, part, found) for part in found]
    if not found:
        raise ConfigError("the run has no part: give hub, engine, trainer, environments or parts")
    _check_names(found)
    _check_variables(found)
    return _needed_first(found)


def variables_in(part: Part) -> set[str]:
    """Return the variables in a part's command."""
    return {name for word in part.command for name in VARIABLE.findall(word)}


def servers(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with an address."""
    return [part for part in parts if part.port is not None]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace `${NAME}` by its value."""
    return VARIABLE.sub(lambda found: values[found[1]], text)


def _program(module: str, section: OwnPart, defaults: Mapping[str, object]) -> list[str]:
    """Return the command of one of our programs; the file's flags replace the defaults."""
    given = {flag_name(name): value for name, value in section.flags.items()}
    kept = {
        name: value
        for name, value in defaults.items()
        if name not in given and name.rpartition(".")[2] not in given
    }
    words = [PYTHON, "-m", *module.split()]
    for name, value in {**kept, **given}.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}={_text(each)}" for each in values]
    return words


def _command(section: Section, where: str, own: list[str]) -> list[str]:
    if section.command is None:
        return own
    if isinstance(section, OwnPart) and section.flags:
        raise ConfigError(f"{where}: give command or flags, not both")
    return [str(word) for word in section.command]


def _needs(section: Section, run: RunFile, *usual: str) -> list[str]:
    there = [name for name in usual if getattr(run, name) is not None]
    return [*there, *(need for need in section.needs if need not in there)]


def _hub(run: RunFile, hub: HubPart) -> Part:
    defaults = {"host": "${HOST}", "port": "${PORT}", "data_dir": "${DATA_DIR}"}
    words = [str(word).partition("=")[0] for word in hub.command or []]
    has_database = (
        "database" in hub.flags
        or "--database" in words
        or "ATROPOS_DATABASE" in {**run.env, **hub.env}
    )
    if has_database:
        defaults["advertise"] = "${HUB_URL}"
    if has_database or "memory" in hub.flags:
        del defaults["data_dir"]
    own = _program("atroposlib.cli.run_api", hub, defaults)
    if hub.count > 1 and not has_database:
        raise ConfigError(
            "hub.count: several hubs share a database: give its URL as hub.flags.database, or as ATROPOS_DATABASE "
            "below env"
        )
    return Part(name="hub", command=_command(hub, "hub", own), needs=_needs(hub, run), section=hub)


def _engine(run: RunFile, engine: EnginePart) -> Part:
    own: list[str] = []
    if engine.command is None:
        model = _model(run, engine.model, "engine")
        defaults = {"model": model, "host": "${HOST}", "port": "${PORT}"}
        own = _program("atroposlib.engine", engine, defaults)
    command = _command(engine, "engine", own)
    return Part(name="engine", command=command, needs=_needs(engine, run), section=engine)


def _trainer(run: RunFile, trainer: TrainerPart, *, on_one_machine: bool) -> Part:
    own: list[str] = []
    if trainer.accelerate is not None:
        own = _trl(run, trainer, trainer.accelerate)
    elif trainer.command is None:
        defaults = {"model_name": _model(run, trainer.model, "trainer")}
        if run.hub is not None:
            defaults["hub_url"] = "${HUB_URL}"
        if run.engine is not None:
            defaults |= {"bridge": "reload", "engine_url": "${ENGINE_URLS}"}
        defaults |= {
            "save_path": "${RUN_DIR}/checkpoints",
            "metrics_path": "${RUN_DIR}/metrics.jsonl",
            "resume": "true",
        }
        if not on_one_machine:  # engines elsewhere cannot read this machine's memory
            defaults["weights_dir"] = "${RUN_DIR}/weights"
        own = _program("example_trainer.grpo", trainer, defaults)
    return Part(
        name="trainer",
        command=_command(trainer, "trainer", own),
        needs=_needs(trainer, run, "hub", "engine"),
        section=trainer,
        ends_run=True,
    )


def _trl(run: RunFile, trainer: TrainerPart, flags: Mapping[str, object]) -> list[str]:
    if trainer.command is not None:
        raise ConfigError("trainer: give command or accelerate, not both")
    defaults = {"model_name": _model(run, trainer.model, "trainer")}
    if run.hub is not None:
        defaults["hub_url"] = "${HUB_URL}"
    if run.engine is not None:
        if run.engine.command is None or run.engine.count > 1:
            raise ConfigError("trainer.accelerate: TRL needs one vLLM, by engine.command")
        defaults["vllm_server_base_url"] = "${ENGINE_URL}"
    defaults["output_dir"] = "${RUN_DIR}/checkpoints"
    program = _program("example_trainer.other_trainers.trl_worker", trainer, defaults)
    launch = {"num_processes": max(trainer.gpus, 1), **FSDP2, **flags}
    words = [f"--{name}={_text(value)}" for name, value in launch.items()]
    return [PYTHON, "-m", "accelerate.commands.launch", "--use_fsdp", *words, *program[1:]]


def _environment(run: RunFile, name: str, environment: EnvironmentPart) -> Part:
    defaults = {}
    if run.hub is not None:
        defaults["env.rollout_server_url"] = "${HUB_URL}"
    if run.model is not None:
        defaults["env.tokenizer_name"] = run.model
    if run.engine is not None:
        defaults |= {"openai.base_url": "${ENGINE_URL}/v1", "openai.server_type": "vllm"}
        served = run.engine.flags.get("served_model_name", run.engine.model or run.model)
        if served is not None:
            defaults["openai.model_name"] = str(served)
    own: list[str] = []
    if environment.command is None and environment.file is not None:
        own = _program("", environment, defaults)
        own[1:2] = [str(environment.file), "serve"]
    elif environment.command is None:
        own = _program(
            f"atroposlib.cli.environments run {_known(name)} serve", environment, defaults
        )
    return Part(
        name=name,
        command=_command(environment, f"environments.{name}", own),
        needs=_needs(environment, run, "hub", "engine"),
        section=environment,
    )


def _known(name: str) -> str:
    if not is_there(name):
        names = [each.name for each in find_environments()]
        raise ConfigError(
            f"environments.{name}: there is no such environment; {nearest(name, names)} "
            "(`atropos-env list` prints all; for a file of your own, give file)"
        )
    return name


def _other(name: str, section: Section) -> Part:
    if not section.command:
        raise ConfigError(f"parts.{name}.command: a value is required")
    command = [str(word) for word in section.command]
    if section.ready not in (None, "exit") and section.port is None:
        raise ConfigError(f"parts.{name}.ready: {section.ready} needs a port")
    return Part(name=name, command=command, needs=section.needs, section=section)


def _model(run: RunFile, own: str | None, section: str) -> str:
    model = own or run.model
    if model is None:
        raise ConfigError(f"{section}.model: a value is required, here or as the run's model")
    return model


def _complete(run: RunFile, part: Part, parts: Sequence[Part]) -> Part:
    """Add the part's environment variables, and the servers in its command to what it needs."""
    used = variables_in(part)
    named = [
        each.name
        for each in servers(parts)
        if {each.variable, f"{each.variable}S"} & used and each.name != part.name
    ]
    env = {name: _text(value) for name, value in {**run.env, **part.section.env}.items()}
    return replace(part, needs=list(dict.fromkeys([*part.needs, *named])), env=env)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_names(parts: Sequence[Part]) -> None:
    names = [part.name for part in parts]
    taken: dict[str, str] = {}
    for part in parts:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", part.name):
            raise ConfigError(f"{part.name!r}: a name has letters, digits, _ and -")
        for need in set(part.needs).difference(names):
            raise ConfigError(
                f"{part.name}.needs: there is no part {need!r}; {nearest(need, names)}"
            )
        for name in {host_name(each) for each in (part.name, *part.instances)}:
            if name in taken:
                raise ConfigError(f"{part.name}: {taken[name]} or an instance of it has this name")
            taken[name] = part.name


def _check_variables(parts: Sequence[Part]) -> None:
    known = ["RUN_DIR", "INDEX"]
    for part in servers(parts):
        known += [part.variable, f"{part.variable}S"]
    for part in parts:
        own = [*known, *(["HOST", "PORT"] if part.port is not None else [])]
        own += ["DATA_DIR"] if part.name == "hub" else []
        for name in sorted(variables_in(part).difference(own)):
            raise ConfigError(
                f"{part.name}: ${{{name}}} is no variable of the run; {nearest(name, own)} "
                "(a variable of the environment can stand below env)"
            )


def _needed_first(parts: Sequence[Part]) -> list[Part]:
    ordered: list[Part] = []
    while len(ordered) < len(parts):
        done = {part.name for part in ordered}
        free = [part for part in parts if part.name not in done and done.issuperset(part.needs)]
        if not free:
            names = ", ".join(part.name for part in parts if part.name not in done)
            raise ConfigError(f"needs: these parts wait for each other: {names}")
        ordered += free
    return ordered
