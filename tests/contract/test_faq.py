"""FAQ.md names files, sections, flags and commands that exist."""

import re
import tomllib

from atroposlib.envs.base import BaseEnvConfig
from example_trainer.config import TrainerConfig
from tests.processes import ROOT

TEXT = (ROOT / "FAQ.md").read_text()
SENTENCES = re.sub(r"\s+", " ", TEXT)


def test_the_page_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_every_file_and_section_that_it_points_to_exists() -> None:
    named = re.findall(r"`([\w/]+\.md)`(?:, \"([^\"]+)\")?", SENTENCES)
    assert len(named) > 10
    for path, section in named:
        lines = (ROOT / path).read_text().splitlines()
        headings = [line.lstrip("# ").replace("`", "") for line in lines if line.startswith("#")]
        assert not section or any(each.startswith(section) for each in headings), (path, section)


def test_every_flag_and_command_exists() -> None:
    for flag in re.findall(r"`--env\.(\w+)", TEXT):
        assert flag in BaseEnvConfig.model_fields, flag
    for flag in ("bridge", "distill_coef", "max_logprob_gap"):
        assert f"`--{flag}" in TEXT
        assert flag in TrainerConfig.model_fields, flag
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for command in re.findall(r"`(atropos-[a-z-]+|view-run|run-api)", TEXT):
        assert command in scripts, command
