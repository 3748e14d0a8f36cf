"""The pages of the documentation: blocks that compile, flags that exist, links that lead somewhere."""

import ast
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from atroposlib.cli.launch.parts import parts_of
from atroposlib.cli.launch.run_file import read_run
from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.envs.tool_env import ToolEnv
from atroposlib.errors import ConfigError
from atroposlib.runtime.env_command import read_flags
from tests.processes import ROOT

MODES = ("serve", "process", "evaluate")
BASES = (DatasetEnv, JudgeEnv, AgentEnv, ToolEnv)


def paths_in(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict | list):
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from paths_in(entry)


NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
PAGES = [ROOT / name for name in paths_in(NAV) if (ROOT / name).exists()]


def blocks(page: Path, *languages: str) -> list[str]:
    pattern = rf"^( *)```(?:{'|'.join(languages)})\n(.*?)^ *```"
    return [found[2] for found in re.finditer(pattern, page.read_text(), re.DOTALL | re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@functools.cache
def help_of(command: tuple[str, ...]) -> str:
    """Return what a command prints for `--help`."""
    words = [sys.executable, *command[1:]] if command[0] == "python" else list(command)
    if command[0] != "python":
        words[0] = str(Path(sys.executable).parent / words[0])
    return subprocess.run([*words, "--help"], cwd=ROOT, capture_output=True, text=True).stdout


def commands() -> list[list[str]]:
    """Return this project's commands in blocks for a shell, without assignments before them."""
    found = []
    for page in PAGES:
        for line in "".join(blocks(page, "sh", "bash")).replace("\\\n", " ").splitlines():
            words = re.split(r"\s+\d?[|&<>]", line)[0]
            words = re.sub(r"^(?:[A-Z_]+=\S+\s+)*", "", words)
            if re.match(r"(run-api|atropos|view-run|python (-m atroposlib|\S+\.py))", words):
                found.append(shlex.split(words, comments=True))
    return found


def accepts(command: list[str]) -> bool:
    """Whether a command has every flag of the line."""
    flags = {word.split("=")[0] for word in command if re.match(r"--\w", word)}
    match command:
        case ["python", path, mode, *rest] if mode in MODES:
            for base in BASES:
                try:
                    read_flags(
                        base, mode, [word for word in rest if word != "--testing"], prog=path
                    )
                except ConfigError:
                    continue
                return True
            return False
        case ["python", "-m", module, *_]:
            known = help_of(("python", "-m", module))
        case ["python", path, "check", *_]:
            known = help_of(("python", "environments/letter_reversal_server.py", "check"))
        case ["python", *_]:
            return True  # scripts of benchmarks, and those that a reader writes
        case ["atropos-env", "run" | "openenv", *_]:
            return True  # with flags of the environment, as after `python FILE.py MODE`
        case ["atropos" | "atropos-env", verb, *_]:
            known = help_of((command[0], verb))
        case [script, *_]:
            known = help_of((script,))
    # `--from-file` is `--from_file`, and `--model` is `--model_name`.
    known = known.replace("-", "_")
    return all(re.search(rf"{flag.replace('-', '_')}(?:_name)?\b", known) for flag in flags)


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_every_flag_in_a_block_exists() -> None:
    found = commands()
    assert len(found) > 40
    assert [" ".join(command) for command in found if not accepts(command)] == []


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """mkdocs ends with 1 for a link or an anchor that leads nowhere, and for a page that no menu has."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\"> ]+)", page.read_text()
        )
        assert loaded == [], page


def test_links_between_the_files_of_the_repository_lead_to_files() -> None:
    for page in {*PAGES, *ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.md")}:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_run_file_in_the_readme_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.yaml"
    path.write_text(blocks(ROOT / "README.md", "yaml")[0])
    parts = parts_of(read_run(path), on_one_machine=True)
    assert {"hub", "engine", "trainer", "gsm8k_server"} <= {part.name for part in parts}
