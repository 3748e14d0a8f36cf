"""Configuration: defaults < YAML < flags, for every command of this project.

The only reader of `argv`. A flag is parsed as its field's type (so `-1`, `None`, `1e-5`, enum values, JSON and comma
lists work), `-` and `_` are equal, a boolean flag needs no value, and an unknown flag is refused with the nearest
valid name. Unknown *keys* in YAML or code are ignored with a warning that names them, because existing environments
pass extra keys; `check_yaml` refuses those that are misspelt. `parse_flags` serves commands with one model;
`parse_sections` serves the environment command line, where a flag belongs to a section (`--env.group_size`).
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import AliasChoices, BaseModel, ConfigDict, PydanticUserError, TypeAdapter
from pydantic import ValidationError as PydanticValidationError
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo

from atroposlib.errors import ConfigError
from atroposlib.utils.wording import nearest, similar_path

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)

_BOOLEAN_WORDS = frozenset(
    {"true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n"}
)
"""Words that pydantic reads as a boolean; a boolean flag takes the next argument only if it is one of them."""

MISSPELT = 0.85
"""Similarity (`difflib`) from which an unknown YAML key counts as a misspelt one: `groupsize`, not `max_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """The flag of one field."""

    section: str
    """Namespace before the dot; "" for none."""
    name: str
    info: FieldInfo

    @property
    def spelling(self) -> str:
        """The flag as documented, e.g. `--env.group_size`."""
        return f"--{self.section}.{self.name}" if self.section else f"--{self.name}"

    @property
    def is_boolean(self) -> bool:
        return bool in _union_members(self.info.annotation)

    @property
    def is_list(self) -> bool:
        return any(
            origin in (list, tuple, set, frozenset)
            for member in _union_members(self.info.annotation)
            for origin in [get_origin(member) or member]
        )

    @property
    def aliases(self) -> list[str]:
        """Other names that the model accepts for this field."""
        alias = self.info.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias, self.info.alias]
        return [choice for choice in choices if isinstance(choice, str) and choice != self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpLayout:
    """How `--help` of a command with sections differs from a list of all flags; names are like `env.group_size`."""

    first: Sequence[str] = ()
    """Flags to list before the sections."""
    hidden: frozenset[str] = frozenset()
    """Flags that have no effect in this command."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace the defaults of the models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionValues:
    """Values of the command line and the YAML file, before they are merged with defaults."""

    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section -> field -> value, only for flags that were given."""
    yaml: dict[str, Any] = field(default_factory=dict)
    """The whole YAML file; {} without one."""


def parse_flags(
    model: type[M],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str = "",
    positional: Sequence[str] = (),
) -> M:
    """Build `model` from its defaults, then `--config FILE`, then flags.

    `argv` None reads the process's arguments; `-h` prints every field and exits 0. `positional` are fields whose values
    may also be given without their flags, in this order. Raises ConfigError for an unknown flag, a missing or bad
    value, a bad file.

    >>> class Serve(BaseModel):
    ...     port: int = 8000
    ...     verbose: bool = False
    >>> parse_flags(Serve, ["--port=-1", "--verbose"], prog="serve")
    Serve(port=-1, verbose=True)
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    values = parse_sections(
        {"": model}, arguments, prog=prog, description=description, positional=positional
    )
    from_yaml = {key.replace("-", "_"): value for key, value in values.yaml.items()}
    return build(model, from_yaml, values.flags.get("", {}))


def parse_sections(
    sections: Mapping[str, type[BaseModel]],
    argv: Sequence[str],
    *,
    prog: str,
    description: str = "",
    flat_names: Mapping[str, str] | None = None,
    positional: Sequence[str] = (),
    layout: HelpLayout | None = None,
) -> SectionValues:
    """Read flags of several models at once; each key is a namespace, "" for flags without one.

    A name without its namespace is accepted if exactly one section has it, or `flat_names` maps it to a section.
    Nothing is validated here: the caller merges the values with its own defaults and calls `build`.
    """
    flags = [
        _Flag(section=section, name=name, info=info)
        for section, model in sections.items()
        for name, info in model.model_fields.items()
    ]
    index, ambiguous = _index_flags(flags, flat_names or {})
    reads_yaml = "config" not in index
    typed: dict[str, dict[str, Any]] = {}
    document: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            usage = " ".join([prog, *map(str.upper, positional)])
            head = [f"usage: {usage} [--flag VALUE | --flag=VALUE]...", ""]
            head += [description, ""] if description else []
            sys.stdout.write(
                "\n".join([*head, *_help(flags, layout or HelpLayout(), reads_yaml)]) + "\n"
            )
            raise SystemExit(0)
        if not argument.startswith("--"):
            free = next((name for name in positional if name not in typed.get("", {})), None)
            if free is None or argument.startswith("-"):
                raise ConfigError(f"unexpected argument {argument!r}: flags start with '--'")
            argument = f"--{free}={argument}"
        spelled, equals, text = argument[2:].partition("=")
        name = spelled.replace("-", "_")
        given = [text] if equals else None
        if name == "config" and reads_yaml:
            document = read_yaml(_take(rest, given, "--config", "a YAML file")[0])
            continue
        flag = index.get(name)
        if flag is None:
            _refuse_flag(spelled, name, flags, ambiguous)
        values = typed.setdefault(flag.section, {})
        values[flag.name] = _read_value(flag, rest, given, values.get(flag.name))
    return SectionValues(flags=typed, yaml=document)


def build(model: type[M], *layers: Mapping[str, Any], namespace: str = "") -> M:
    """Merge `layers` (later wins, dicts recursively) into `model`; unknown keys are ignored with a warning.

    Raises ConfigError naming each bad field and its value.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    names = _accepted_names(model)
    warn_unknown_keys(model, merged)
    settings = model.model_config
    by_name = bool(settings.get("populate_by_name") or settings.get("validate_by_name"))
    values: dict[str, Any] = {}
    for key, value in merged.items():
        if key not in names:
            continue
        info = model.model_fields.get(names[key])
        alias = info.validation_alias if info is not None else None
        if isinstance(alias, AliasChoices):
            alias = next((choice for choice in alias.choices if isinstance(choice, str)), None)
        values[names[key] if by_name or not isinstance(alias, str) else alias] = value
    try:
        return model.model_validate(values)
    except PydanticValidationError as error:
        raise ConfigError(_explain(error, namespace)) from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overridden by `over`; where both have a dict (or `base` a model), they are merged.

    >>> merge({"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 3}})
    {'a': 1, 'b': {'x': 1, 'y': 3}}
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, BaseModel):
            old = old.model_dump()
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def read_yaml(
    path: str | Path, *, if_missing: str = "--help lists the keys of one"
) -> dict[str, Any]:
    """Read a YAML mapping; an empty file is {}. Raises ConfigError if it is missing, invalid or not a mapping."""
    try:
        with Path(path).open(encoding="utf-8") as file:  # its name is in the messages of yaml
            document = yaml.safe_load(file)
    except OSError as error:
        hint = "" if Path(path).exists() else "; " + similar_path(Path(path), otherwise=if_missing)
        raise ConfigError(
            f"cannot read the config file {str(path)!r}: {error.strerror}{hint}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {str(path)!r} is not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise ConfigError(
            f"the config file {str(path)!r} must contain a mapping at the top level, not {kind}"
        )
    return {str(key): value for key, value in document.items()}


def check_yaml(document: Mapping[str, Any], sections: Mapping[str, type[BaseModel]]) -> None:
    """Refuse misspelt sections and keys of a YAML file, and log one line naming other unknown sections.

    Foreign names are legal: launchers keep sections of their own in the file, and environments read undeclared keys.
    Those in a known section are named by `build`.
    """
    top = [*filter(None, sections), *_accepted_names(sections[""])]
    _refuse_misspelt(document, top, where="")
    for section, model in sections.items():
        entries = document.get(section) if section else None
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, Mapping):
                _refuse_misspelt(entry, _accepted_names(model), where=f"{section}.")
    hints = []
    for key in document:
        owners = [f"{name}.{key}" for name, model in sections.items() if key in model.model_fields]
        hints += [] if key in top else [_with_hint(key, owners or top, 0.0 if owners else 0.5)]
    if hints:
        logger.warning("unknown sections of the config file are ignored: %s", ", ".join(hints))


def _refuse_misspelt(keys: Iterable[Any], names: Collection[str], *, where: str) -> None:
    for key in map(str, keys):
        spelled = key.replace("-", "_")
        hint = nearest(spelled, names, otherwise="", show=where.__add__, cutoff=MISSPELT)
        if hint and key not in names:
            raise ConfigError(f"unknown key {where + key!r} in the config file; {hint}")


def warn_unknown_keys(model: type[BaseModel], keys: Iterable[str]) -> None:
    """Log one line naming those of `keys` that are neither a field nor an alias of `model`."""
    names = _accepted_names(model)
    hints = [_with_hint(key, names) for key in keys if key not in names]
    if hints:
        logger.warning("%s ignores unknown keys: %s", model.__name__, ", ".join(hints))


def _accepted_names(model: type[BaseModel]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, info in model.model_fields.items():
        names[name] = name
        for alias in _Flag(section="", name=name, info=info).aliases:
            names.setdefault(alias, name)
    return names


def _index_flags(
    flags: Iterable[_Flag], flat_names: Mapping[str, str]
) -> tuple[dict[str, _Flag], dict[str, list[_Flag]]]:
    """Return spelling -> flag, and the names without namespace that are in several sections."""
    index: dict[str, _Flag] = {}
    bare: dict[str, list[_Flag]] = {}
    for flag in flags:
        for name in [flag.name, *flag.aliases]:
            index[f"{flag.section}.{name}" if flag.section else name] = flag
            if flag.section:
                bare.setdefault(name, []).append(flag)
    for name, section in flat_names.items():
        bare[name] = [flag for flag in bare.get(name, []) if flag.section == section]
    ambiguous = {name: owners for name, owners in bare.items() if len(owners) > 1}
    for name, owners in bare.items():
        if len(owners) == 1:
            index.setdefault(name, owners[0])
    return index, ambiguous


def _refuse_flag(
    spelled: str, name: str, flags: Iterable[_Flag], ambiguous: Mapping[str, list[_Flag]]
) -> NoReturn:
    if name in ambiguous:
        choices = " or ".join(flag.spelling for flag in ambiguous[name])
        raise ConfigError(f"flag --{spelled} is ambiguous: write {choices}")
    full = {flag.spelling[2:]: flag.spelling for flag in flags} | {"config": "--config"}
    bare = {key.rpartition(".")[2]: spelling for key, spelling in full.items()}
    hint = nearest(name, full, otherwise="", show=full.__getitem__) or nearest(
        name.rpartition(".")[2], bare, otherwise="--help lists the flags", show=bare.__getitem__
    )
    raise ConfigError(f"unknown flag --{spelled}; {hint}")


def _take(rest: list[str], given: list[str] | None, spelling: str, what: str) -> list[str]:
    """Return the flag's one value: the text after `=`, else the next argument."""
    if given is not None:
        return given
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{spelling} needs a value: {what}")
    return [rest.pop(0)]


def _read_value(flag: _Flag, rest: list[str], given: list[str] | None, earlier: Any) -> Any:
    """Consume the flag's value; a list flag takes every following word and adds to `earlier`."""
    if given is None and flag.is_boolean:
        if not rest or rest[0].lower() not in _BOOLEAN_WORDS | {"none"}:
            return True
        return _decode(flag.info, rest.pop(0))
    texts = _take(rest, given, flag.spelling, f"{_type_name(flag.info.annotation)} expected")
    if not flag.is_list:
        return _decode(flag.info, texts[0])
    while given is None and rest and not rest[0].startswith("--"):
        texts.append(rest.pop(0))
    if len(texts) > 1:
        value: Any = texts
    else:
        value = _decode(flag.info, texts[0])
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(earlier, list) and isinstance(value, list):
        return earlier + value
    return value


def _decode(info: FieldInfo, text: str) -> Any:
    """Read `text` as JSON if that fits the field's type, else keep the text; "None" is null."""
    if text == "None":
        return None
    for member in _union_members(info.annotation):
        if (
            isinstance(member, type)
            and issubclass(member, enum.Enum)
            and text in member.__members__
        ):
            return member[text]
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    if parsed is None or isinstance(parsed, str):
        return text
    try:
        _adapter(info.annotation).validate_python(parsed)
    except (PydanticValidationError, PydanticSchemaGenerationError):
        return text
    return parsed


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=_ANY_TYPE)
    except PydanticUserError:  # models and dataclasses have their own config
        return TypeAdapter(annotation)


def _union_members(annotation: Any) -> list[Any]:
    """Return the members of `X | Y` or `Optional[X]`; for any other type, the type itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _union_members(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in _union_members(member)]
    return [annotation]


def _type_name(annotation: Any) -> str:
    names: list[str] = []
    for member in _union_members(annotation):
        if member is type(None):
            names.append("None")
        elif get_origin(member) is typing.Literal:
            names.extend(str(value) for value in get_args(member))
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            names.extend(str(value.value) for value in member)
        elif get_origin(member) is None and isinstance(member, type):
            names.append(member.__name__)
        elif get_origin(member) is list:
            names.append(f"list[{', '.join(map(_type_name, get_args(member)))}]")
        else:
            names.append(str(member).replace("typing.", ""))
    return "|".join(names)


def _with_hint(key: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    hint = nearest(key, names, otherwise="", cutoff=cutoff)
    return f"{key!r} ({hint})" if hint else repr(key)


def _explain(error: PydanticValidationError, namespace: str) -> str:
    """Return, per bad field, the flag, the given value and pydantic's reason."""
    lines = []
    for problem in error.errors(include_url=False):
        path = ".".join(str(part) for part in problem["loc"])
        reason = problem["msg"]
        if problem["type"] == "missing":
            lines.append(f"--{namespace}{path}: a value is required")
            continue
        shown = repr(problem.get("input"))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        lines.append(f"--{namespace}{path}: got {shown}: {reason}" if path else reason)
    return "; ".join(lines)


def _help(flags: Sequence[_Flag], layout: HelpLayout, reads_yaml: bool) -> list[str]:
    """Return the lines about the flags: those needed first, then each section."""
    by_name = {flag.spelling[2:]: flag for flag in flags if flag.spelling[2:] not in layout.hidden}
    lines = ["Needed first:", ""] if layout.first else []
    for name in layout.first:
        lines += _about(by_name.pop(name), layout.defaults)
    if reads_yaml:
        lines += ["  --config FILE", "      YAML file read before the flags; flags win"]
    sections = dict.fromkeys(flag.section for flag in by_name.values())
    for section in sections:
        if lines:
            lines.append("")
        if layout.first:
            lines += [f"Section {section!r}:" if section else "Without a section:", ""]
        for flag in by_name.values():
            if flag.section == section:
                lines += _about(flag, layout.defaults)
    return lines


def _about(flag: _Flag, defaults: Mapping[str, Any]) -> list[str]:
    name = flag.spelling[2:]
    default = "required" if flag.info.is_required() else f"default: {_default_text(flag.info)}"
    if name in defaults:
        default = f"default: {_shown(defaults[name])}"
    return [
        f"  {flag.spelling} {_type_name(flag.info.annotation)}",
        "      " + " ".join([*(flag.info.description or "").split(), f"({default})"]),
    ]


def _default_text(info: FieldInfo) -> str:
    if info.default_factory is None:
        return _shown(info.default)
    return _shown(info.get_default(call_default_factory=True, validated_data={}))


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum | Path):
        return str(value.value if isinstance(value, enum.Enum) else value)
    return repr(value)
