"""Flags and YAML: every value arrives as its field's own type, every mistake names its cure."""

import enum
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import AliasChoices, BaseModel, Field

from atroposlib.config import build, parse_flags, parse_sections
from atroposlib.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Limits(BaseModel):
    low: int = 0
    high: int = 9


class Settings(BaseModel):
    port: int = Field(8000, ge=-1, description="TCP port; 100% yours")
    rate: float = 0.5
    name: str | None = "x"
    verbose: bool = False
    colour: Colour = Colour.RED
    dtype: Literal["float32", "bfloat16"] = "float32"
    layers: list[int] = [1]
    urls: list[str] = []
    extra: dict[str, Any] = {}
    limits: Limits = Limits()
    hub_url: str = Field("http://h", validation_alias=AliasChoices("hub_url", "atropos_url"))


def parse(*argv: str) -> Settings:
    return parse_flags(Settings, list(argv), prog="settings")


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--port", "-1"], "port", -1),
        (["--port=-1"], "port", -1),
        (["--rate", "1e-5"], "rate", 1e-5),
        (["--name", "None"], "name", None),
        (["--name", "123"], "name", "123"),
        (["--name", "true"], "name", "true"),
        (["--name", "-x"], "name", "-x"),
        (["--name", "none"], "name", "none"),
        (["--name="], "name", ""),
        (["--verbose"], "verbose", True),
        (["--verbose", "False"], "verbose", False),
        (["--verbose=0"], "verbose", False),
        (["--verbose", "--port", "1"], "verbose", True),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--colour", "BLUE"], "colour", Colour.BLUE),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--layers", "[3, 4]"], "layers", [3, 4]),
        (["--layers", "3,4"], "layers", [3, 4]),
        (["--layers", "3", "4"], "layers", [3, 4]),
        (["--layers", "3"], "layers", [3]),
        (["--layers", "None,"], "layers", ConfigError),
        (["--urls", "http://a", "--urls", "http://b"], "urls", ["http://a", "http://b"]),
        (["--extra", '{"a": {"b": 1}}'], "extra", {"a": {"b": 1}}),
        (["--limits", '{"low": 5}'], "limits", Limits(low=5)),
        (["--hub-url", "http://z"], "hub_url", "http://z"),
        (["--atropos_url", "http://z"], "hub_url", "http://z"),
    ],
)
def test_flag_is_read_as_its_fields_type(argv: list[str], field: str, value: Any) -> None:
    if value is ConfigError:
        with pytest.raises(ConfigError):
            parse(*argv)
    else:
        assert getattr(parse(*argv), field) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--zzzzzz"], "unknown flag --zzzzzz; --help lists the flags"),
        (["--port", "abc"], "--port: got 'abc': Input should be a valid integer"),
        (["--port", "-5"], "--port: got -5: Input should be greater than or equal to -1"),
        (["--port"], "--port needs a value: int expected"),
        (["--port", "--verbose"], "--port needs a value"),
        (["--colour", "green"], "--colour: got 'green'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--verbose", "maybe"], "unexpected argument 'maybe'"),
        (["--config", "/nowhere.yaml"], "cannot read the config file '/nowhere.yaml'"),
    ],
)
def test_mistake_names_flag_value_and_cure(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert message in str(caught.value)


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 1\nrate: 0.25\n")
    settings = parse("--port", "2", "--config", str(path))
    assert (settings.port, settings.rate, settings.name) == (2, 0.25, "x")


def test_unknown_yaml_key_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("prot: 1\n")
    with caplog.at_level(logging.WARNING):
        assert parse("--config", str(path)).port == 8000
    assert "'prot' (did you mean port?)" in caplog.text


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_empty_yaml_changes_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert parse("--config", str(path)) == Settings()


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n"])
def test_yaml_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        parse("--config", str(path))


def test_help_shows_fields_defaults_and_percent_signs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "--port int" in out
    assert "TCP port; 100% yours (default: 8000)" in out
    assert "--dtype float32|bfloat16" in out


class Env(BaseModel):
    group_size: int = 4
    model_name: str = "env-model"
    tokenizer_name: str = "t"


class Server(BaseModel):
    model_name: str = "m"
    base_url: str | None = None


class Top(BaseModel):
    slurm: bool = False


SECTIONS = {"env": Env, "openai": Server, "": Top}


def test_sections_return_only_what_was_typed() -> None:
    values = parse_sections(
        SECTIONS, ["--env.group-size", "8", "--openai.base_url=None", "--slurm"], prog="env"
    )
    assert values.flags == {
        "env": {"group_size": 8},
        "openai": {"base_url": None},
        "": {"slurm": True},
    }


def test_flat_name_works_when_one_section_has_it() -> None:
    assert parse_sections(SECTIONS, ["--tokenizer_name", "q"], prog="env").flags == {
        "env": {"tokenizer_name": "q"}
    }


def test_ambiguous_flat_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write --env.model_name or --openai.model_name"):
        parse_sections(SECTIONS, ["--model_name", "q"], prog="env")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [("--env.groupsize", "--env.group_size"), ("--group_sise", "--env.group_size"),
     ("--opnai.base_url", "--openai.base_url")],
)  # fmt: skip
def test_unknown_section_flag_names_the_nearest(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {hint}"):
        parse_sections(SECTIONS, [flag, "1"], prog="env")


def test_build_names_the_section_of_a_bad_value() -> None:
    with pytest.raises(ConfigError, match=r"--env\.group_size: got 'many'"):
        build(Env, {"group_size": 1}, {"group_size": "many"}, namespace="env.")


@pytest.mark.parametrize(
    "argv",
    [
        ["out.jsonl", "--port", "1"],
        ["--port", "1", "out.jsonl"],
        ["--verbose", "out.jsonl", "--port=1"],
        ["--name=out.jsonl", "--port=1"],
    ],
)
def test_one_field_may_stand_without_its_flag(argv: list[str]) -> None:
    found = parse_flags(Settings, argv, prog="settings", positional=["name"])
    assert (found.name, found.port) == ("out.jsonl", 1)


def test_several_fields_may_stand_without_their_flags_in_order() -> None:
    class Two(BaseModel):
        run: str = ""
        other: str = ""

    for argv in (["a", "b"], ["--run=a", "b"], ["a", "--other", "b"]):
        found = parse_flags(Two, argv, prog="two", positional=["run", "other"])
        assert (found.run, found.other) == ("a", "b")
    with pytest.raises(ConfigError, match="unexpected argument 'c'"):
        parse_flags(Two, ["a", "b", "c"], prog="two", positional=["run", "other"])


@pytest.mark.parametrize("argv", [["a", "b"], ["--name=a", "b"], ["-n"]])
def test_what_stands_without_a_flag_stands_there_once(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="unexpected argument"):
        parse_flags(Settings, argv, prog="settings", positional=["name"])
