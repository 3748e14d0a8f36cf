"""The run file: one YAML file that names the parts of a run. `parts.py` turns it into commands.

Every error names the key and, for an unknown key, the nearest valid one. A secret never stands in the file: `${NAME}`
below `env` refers to a variable of the environment.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from atroposlib.config import read_yaml
from atroposlib.errors import ConfigError
from atroposlib.utils.wording import nearest

Scalar: TypeAlias = bool | int | float | str | None
Restart: TypeAlias = Literal["always", "on-failure", "never"]

VARIABLE = re.compile(r"\$\{(\w*)\}")
_SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|DATABASE|_KEY)$")
_SECRET_FLAGS = ("token", "hub_token", "api_key", "engine_api_key")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Section(_Strict):
    """What every part may say."""

    command: list[str | int | float] | None = None
    """Program and arguments. They may name variables of the run, such as ${HUB_URL} and ${PORT}."""
    count: int = Field(default=1, ge=1)
    """Instances; each has its own ${INDEX}, from 0."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the first instance; the others have the next ones."""
    ready: str | None = Field(default=None, pattern=r"^(/.*|port|exit)$")
    """When parts that need this one may start: a path that answers 200 on `port`, `port` (it accepts connections), or
    `exit` (the command has ended with status 0). None: `port` if there is one, else as soon as it is started."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds to become ready; a server that then does not answer for as long is restarted."""
    needs: list[str] = []
    """Parts that must be ready before this one starts, in addition to the usual ones."""
    restart: Restart = "on-failure"
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row, after which the run fails; ten minutes without a failure start a new row."""
    env: dict[str, bool | str | int | float] = {}
    """Environment variables; ${NAME} is a variable of the environment and passes secrets."""
    cpus: int | None = Field(default=None, ge=1)
    gpus: int = Field(default=0, ge=0)
    gpu_type: str = "H100"
    """For SkyPilot."""
    memory: str | None = Field(default=None, pattern=r"^\d+(\.\d+)?[MGT]$")
    """For example 16G."""
    time: str | None = Field(default=None, pattern=r"^\d+:\d\d:\d\d$")
    """Time limit of the job, HH:MM:SS (Slurm)."""
    image: str | None = None
    """Container image, instead of the run's."""

    @field_validator("time", mode="before")
    @classmethod
    def _time_in_quotes(cls, time: Any) -> Any:
        if isinstance(time, int):
            raise ValueError('write it in quotes, as "24:00:00": YAML reads 24:00:00 as a number')
        return time

    @field_validator("env")
    @classmethod
    def _secrets_by_reference(cls, env: dict[str, Any]) -> dict[str, Any]:
        for name, value in env.items():
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
                raise ValueError(f"{name!r} is no name of an environment variable")
            if _SECRET_VARIABLE.search(name) and VARIABLE.fullmatch(str(value)) is None:
                raise ValueError(
                    f"{name} is a secret: write ${{{name}}} here and set the variable outside"
                )
        return env


class OwnPart(Section):
    """One of our own programs."""

    flags: dict[str, Scalar | list[Scalar]] = {}
    """Flags of the program, without the dashes; they replace those that the launcher sets."""

    @field_validator("flags")
    @classmethod
    def _no_secret_flags(cls, flags: dict[str, Any]) -> dict[str, Any]:
        for name in flags:
            if flag_name(name).rpartition(".")[2] in _SECRET_FLAGS:
                raise ValueError(
                    f"{name}: process lists show command lines; pass a secret by a variable below env"
                )
        return flags


class HubPart(OwnPart):
    """`run-api`."""

    port: int | None = Field(default=8000, ge=1, le=65535)
    ready: str | None = "/healthz"
    restart: Restart = "always"


class EnginePart(OwnPart):
    """`atropos-engine`, or another engine by `command`."""

    model: str | None = None
    port: int | None = Field(default=9001, ge=1, le=65535)
    ready: str | None = "/health"
    restart: Restart = "always"


class TrainerPart(OwnPart):
    """`atropos-grpo`, TRL's trainer by `accelerate`, or another one by `command`. The run ends with it."""

    model: str | None = None
    count: Literal[1] = 1
    accelerate: dict[str, Scalar] | None = None
    """Flags of `accelerate launch`, which starts TRL's trainer with FSDP2 on `gpus` GPUs; `flags` are those of TRL."""

    @model_validator(mode="before")
    @classmethod
    def _trl_does_not_resume(cls, values: Any) -> Any:
        if isinstance(values, dict) and "accelerate" in values:
            return {"restart": "never", **values, "accelerate": values["accelerate"] or {}}
        return values


class EnvironmentPart(OwnPart):
    """An environment by its name in `atropos-env list`, or by `file`."""

    file: Path | None = None


class SlurmOptions(_Strict):
    """How to render for Slurm."""

    options: dict[str, Scalar] = {}
    """Options of sbatch for every job, such as `partition`; true: an option without a value, like `exclusive`."""


class KubernetesOptions(_Strict):
    """How to render for Kubernetes."""

    namespace: str | None = None
    volume: str = "atropos-runs"
    """Name of the persistent volume claim that all pods mount: run directory, models and checkpoints."""
    hub_storage: str = Field(default="100Gi", pattern=r"^\d+[MGT]i$")
    """Size of the volume for the hub's data, which the cluster's default storage class makes."""


class RunFile(_Strict):
    """A whole run."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=40)
    """Its files are in runs/NAME."""
    model: str | None = None
    """Checkpoint directory or name of the model, for engine, trainer and the environments' tokenizer."""
    env: dict[str, bool | str | int | float] = {}
    """Environment variables of every part."""
    setup: str = ""
    """Shell lines before every part's command (Slurm, SkyPilot), for example activating a virtual environment."""
    image: str | None = None
    """Container image (Kubernetes, SkyPilot)."""
    hub: HubPart | None = None
    engine: EnginePart | None = None
    trainer: TrainerPart | None = None
    environments: dict[str, EnvironmentPart] = {}
    parts: dict[str, Section] = {}
    """Any other command."""
    slurm: SlurmOptions = SlurmOptions()
    kubernetes: KubernetesOptions = KubernetesOptions()

    _secrets = field_validator("env")(Section._secrets_by_reference.__func__)  # type: ignore[attr-defined]


def read_run(path: Path) -> RunFile:
    """Read and check a run file; ConfigError names the key that is wrong."""
    document = _fill_empty_sections(read_yaml(path, if_missing="README.md has one to copy"))
    try:
        return RunFile.model_validate(document)
    except ValidationError as error:
        faults = [_describe(fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{path}: " + "; ".join(faults)) from error


def flag_name(name: str) -> str:
    """Return a flag's name with underscores.

    >>> flag_name("served-model-name")
    'served_model_name'
    """
    return name.lstrip("-").replace("-", "_")


def _fill_empty_sections(document: dict[str, Any]) -> dict[str, Any]:
    """Let `hub:` without anything below it mean a hub with the defaults."""

    def filled(value: Any) -> Any:
        return {} if value is None else value

    for name in ("hub", "engine", "trainer"):
        if name in document:
            document[name] = filled(document[name])
    if isinstance(document.get("environments"), dict):
        environments = document["environments"]
        document["environments"] = {name: filled(each) for name, each in environments.items()}
    return document


def _describe(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        *parents, name = fault["loc"]
        return f"{where}: unknown key; {nearest(str(name), _keys_below(parents))}"
    if fault["type"] == "missing":
        return f"{where}: a value is required"
    shown = str(fault["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    reason = fault["msg"].removeprefix("Value error, ")
    # The value may be a secret in the wrong place.
    return (
        f"{where}: {reason}"
        if fault["type"] == "value_error"
        else f"{where}: {reason}; got {shown}"
    )


def _keys_below(parents: list[str | int]) -> list[str]:
    annotation: Any = RunFile
    for parent in parents:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            annotation = _model_in(annotation).model_fields[str(parent)].annotation
    return list(_model_in(annotation).model_fields)


def _model_in(annotation: Any) -> type[BaseModel]:
    members = [annotation, *get_args(annotation)]
    return next(each for each in members if isinstance(each, type) and issubclass(each, BaseModel))
