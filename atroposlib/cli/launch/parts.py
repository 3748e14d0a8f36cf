"""The parts of a run as commands: what `up` starts and `render` writes.

A command may contain variables, written `${NAME}`, which every part also has as environment variables:

    RUN_DIR       directory of the run
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
    nearest,
)
from atroposlib.errors import ConfigError

PYTHON = "python"


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
        return self.section.ready or (None if self.section.port is None else "port")


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
    names = [part.name for part in found]
    for name in names:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,40}", name):
            raise ConfigError(f"{name!r}: a name has letters, digits, _ and -")
        if names.count(name) > 1:
            raise ConfigError(f"{name}: two parts have this name")
    for part in found:
        for need in part.needs:
            if need not in names:
                raise ConfigError(
                    f"{part.name}.needs: there is no part {need!r}; {nearest(need, names)}"
                )
    _check_variables(found)
    return _needed_first(found)


def variable_of(part: Part) -> str:
    """Return the variable of a part's address; with an S those of all instances.

    >>> variable_of(_other("my-judge", Section(command=["x"], port=1)))
    'MY_JUDGE_URL'
    """
    return part.name.upper().replace("-", "_") + "_URL"


def instance_names(part: Part) -> list[str]:
    """Return `engine`, or `engine-0`, `engine-1`, ... if there are several."""
    if part.section.count == 1:
        return [part.name]
    return [f"{part.name}-{index}" for index in range(part.section.count)]


def variables_in(part: Part) -> set[str]:
    """Return the variables in a part's command."""
    return {name for word in part.command for name in VARIABLE.findall(word)}


def program_and_arguments(part: Part) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and the rest.

    >>> program_and_arguments(Part(name="x", needs=[], section=Section(), command=["python", "-m", "a", "--b", "1"]))
    (['python', '-m', 'a'], ['--b', '1'])
    """
    words = part.command
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:first], words[first:]


def servers(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with an address."""
    return [part for part in parts if part.section.port is not None]


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
    defaults = {"host": "${HOST}", "port": "${PORT}", "data_dir": "${RUN_DIR}/hub"}
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
        own = _program("atroposlib.engine.server", engine, defaults)
    command = _command(engine, "engine", own)
    return Part(name="engine", command=command, needs=_needs(engine, run), section=engine)


def _trainer(run: RunFile, trainer: TrainerPart, *, on_one_machine: bool) -> Part:
    own: list[str] = []
    if trainer.command is None:
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
        if {variable_of(each), f"{variable_of(each)}S"} & used and each.name != part.name
    ]
    env = {name: _text(value) for name, value in {**run.env, **part.section.env}.items()}
    return replace(part, needs=list(dict.fromkeys([*part.needs, *named])), env=env)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_variables(parts: Sequence[Part]) -> None:
    known = ["RUN_DIR", "INDEX"]
    for part in servers(parts):
        known += [variable_of(part), f"{variable_of(part)}S"]
    for part in parts:
        own = [*known, *(["HOST", "PORT"] if part.section.port is not None else [])]
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
