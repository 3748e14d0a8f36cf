"""Hook of mkdocs: the pages of the site are the repository's Markdown files, at their own paths.

A page keeps its path, so its relative links hold in the repository and on the site. A path of another page in backticks
becomes a link to it; `reference/flags.md` is the text that each command prints for `--help`. Called by `make docs`.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PICTURE = re.compile(r"(?:!\[[^\]]*\]\(|<img src=\")([^)\"]+\.(?:png|svg))")
QUOTED = re.compile(r"(?<![\[`])`([\w/]*[A-Z]+\.md)`")
COMMANDS = (
    ("run-api",),
    ("python my_env.py serve", "environments/letter_reversal_server.py", "serve"),
    ("python my_env.py process", "environments/letter_reversal_server.py", "process"),
    ("python my_env.py evaluate", "environments/letter_reversal_server.py", "evaluate"),
    ("python my_env.py check", "environments/letter_reversal_server.py", "check"),
    ("atropos-grpo",),
    ("atropos-grpo-run",),
    ("atropos-engine",),
    ("view-run",),
    ("atropos-sft-gen",),
    ("atropos-dpo-gen",),
    ("atropos-demo",),
)
"""Heading, and the script and its words where the heading is not the command itself."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the Markdown files that the navigation names, and their pictures."""
    for name in paths_in(config.nav):
        if name == "reference/flags.md":
            files.append(File.generated(config, name, content=flags()))
        elif files.get_file_from_path(name) is None:
            add(files, config, name)
            for picture in PICTURE.findall((ROOT / name).read_text(encoding="utf-8")):
                add(
                    files,
                    config,
                    posixpath.normpath(posixpath.join(posixpath.dirname(name), picture)),
                )
    return files


def add(files: Files, config: MkDocsConfig, name: str) -> None:
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the paths of other pages; leave code blocks as they are."""
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        if found[1] == page.file.src_uri or files.get_file_from_path(found[1]) is None:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(found[1], here or '.')})"

    blocks = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(QUOTED.sub(link, text) if i % 2 == 0 else text for i, text in enumerate(blocks))


def paths_in(nav: Any) -> Iterator[str]:
    """Yield the paths of a navigation: lists of names to paths or to further lists."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from paths_in(entry)


def flags() -> str:
    """Return `--help` of every command with flags, 100 columns wide."""
    text = "# Commands and flags\n\nWhat each command prints for `--help`. In YAML, "
    text += "`--env.group_size 8` is `env: {group_size: 8}`.\n"
    for heading, *words in COMMANDS:
        command = (
            [sys.executable, *words] if words else [str(Path(sys.executable).parent / heading)]
        )
        env = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
        printed = subprocess.run(
            [*command, "--help"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        ).stdout
        text += f"\n## `{heading}`\n\n```text\n{printed.strip()}\n```\n"
    return text
