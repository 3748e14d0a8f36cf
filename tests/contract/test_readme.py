"""The README's promises that a machine can check: its length, its environment, its commands."""

import ast
import asyncio
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import check_env
from atroposlib.cli.environments import load
from atroposlib.cli.run_api import RunApiConfig
from atroposlib.config import parse_flags
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.inference.scripted_engine import ByteTokenizer, Script, ScriptedEngine
from atroposlib.runtime.env_command import read_flags, run_environment
from atroposlib.scored_data import Strictness, check_group
from environments.gsm8k_server import GSM8kEnv
from example_trainer.run import RunConfig
from tests.api.helpers_api import running_hub
from tests.processes import ROOT

README = (ROOT / "README.md").read_text()


def block(marker: str, text: str = README) -> str:
    found = re.search(rf"<!-- {marker} -->\n```python\n(.*?)```", text, re.S)
    assert found
    return found.group(1)


PROCESS = ["process", "--testing", "--env.total_steps", "5"]


def environment_source() -> str:
    return block("readme-environment", (ROOT / "atroposlib/envs/guides/by_hand.md").read_text())


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 200


async def test_the_first_environment_is_short_and_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count_vowels.py").write_text(block("readme-first"))
    env_cls = load("count_vowels.py")
    assert len(block("readme-first").split("\n\n\n")[1].split("\n")) <= 15
    report = await asyncio.to_thread(check_env, env_cls)
    assert report.failed == report.not_checked == []
    assert await asyncio.to_thread(run_environment, env_cls, PROCESS) == 0
    assert " ".join(PROCESS) in README
    rows = (tmp_path / "data/count_vowels.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        check_group(row, strictness=Strictness.MEANING)


def test_the_environment_in_the_readme_runs(tmp_path: Path) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(environment_source(), "README.md", "exec"), namespace)
    environment = namespace["CountVowels"]
    config, servers = environment.config_init()  # type: ignore[attr-defined]
    assert environment.name == "count_vowels"  # type: ignore[attr-defined]
    assert config.group_size == 8
    assert servers[0].base_url == "http://localhost:9001/v1"
    assert not environment.__abstractmethods__  # type: ignore[attr-defined]


async def test_the_three_lines_for_a_notebook_run() -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(environment_source(), "README.md", "exec"), namespace)
    offline = {"load_tokenizer": lambda self: ByteTokenizer()}
    namespace["CountVowels"] = type("CountVowels", (namespace["CountVowels"],), offline)
    lines = block("readme-notebook")
    assert len(lines.splitlines()) == 3
    async with ScriptedEngine(Script(answers=("4", "2"))) as engine:
        namespace |= {"MODEL": engine.model_name, "URL": f"{engine.url}/v1"}
        code = compile(lines, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        await eval(code, namespace)
    groups = namespace["groups"]
    assert [len(group["scores"]) for group in groups] == [8] * 4
    for group in groups:
        check_group(group, strictness=Strictness.MEANING)
    assert namespace["metrics"] == {"eval/accuracy": 0.0}


def test_the_body_of_the_environment_has_at_most_25_lines() -> None:
    body = (
        environment_source().split("class CountVowels(BaseEnv):\n")[1].split("\n\n\nif __name__")[0]
    )
    code = [line for line in body.splitlines() if line.strip()]
    assert len(code) <= 25, len(code)


def test_every_command_of_the_readme_is_installed_and_the_other_way_round() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    named = set(re.findall(r"^\| `([a-z0-9-]+)` \|", README, re.M))
    assert named == set(scripts)


def test_files_named_in_the_reading_order_exist() -> None:
    section = README.split("## Reading the code")[1]
    for path in re.findall(r"`((?:atroposlib|example_trainer)/[\w/]+\.py)`", section):
        assert (ROOT / path).is_file(), path


def test_pictures_exist_are_small_and_load_nothing() -> None:
    pictures = [ROOT / path for path in re.findall(r"docs/pictures/[\w.]+", README)]
    assert {path.name for path in pictures} == {path.name for path in pictures[0].parent.iterdir()}
    for path in pictures:
        assert path.stat().st_size < 150_000, path
        if path.suffix == ".svg":
            assert "url(http" not in path.read_text(), path


def test_pages_that_the_readme_names_exist() -> None:
    for path in re.findall(r"`((?:[\w/]+/)?[A-Z]+\.md)`", README):
        assert (ROOT / path).is_file(), path


def commands() -> list[list[str]]:
    """Return the words of every command in the README's blocks, without assignments before it."""
    text = "\n".join(re.findall(r"^```bash\n(.*?)^```", README, re.S | re.M)).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [words[1:] if re.match(r"[A-Z_]+=", words[0]) else words for words in found if words]


async def test_every_command_in_a_block_is_accepted() -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    async with running_hub() as hub:
        for words in commands():
            match words:
                case ["make", target]:
                    assert re.search(rf"^{target}:", makefile, re.M), words
                case ["pip", "install", "-e", package]:
                    assert set(package.removeprefix(".[").removesuffix("]").split(",")) <= set(
                        extras
                    )
                case ["python", "-m", "venv", *_]:
                    pass
                case ["run-api", *flags]:
                    parse_flags(RunApiConfig, flags, prog="run-api")
                case ["curl", url]:
                    answer = await hub.http.get(url.removeprefix("localhost:8000"))
                    assert answer.status_code == 200, words
                case ["atropos-grpo-run", *flags]:
                    parse_flags(RunConfig, flags, prog="atropos-grpo-run")
                case ["python", "count_vowels.py", mode, *flags]:
                    if mode != "check":
                        read_flags(DatasetEnv, mode, flags, prog="count_vowels.py")
                case ["python", path, "serve", *flags]:
                    assert (ROOT / path).is_file(), words
                    read_flags(GSM8kEnv, "serve", flags, prog=path)
                case _:
                    raise AssertionError(f"unknown command: {words}")
