"""Importing the library stays light: heavy packages load when they are used, not before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "wandb", "datasets", "openai", "gradio", "matplotlib", "pandas")


def loaded_after(statement: str) -> set[str]:
    """Run `statement` in a fresh interpreter and return the heavy packages it loaded."""
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def light_modules() -> list[str]:
    names = []
    for path in (ROOT / "atroposlib").rglob("*.py"):
        relative = path.relative_to(ROOT).with_suffix("")
        if "engine" not in relative.parts:
            names.append(".".join(p for p in relative.parts if p != "__init__"))
    return sorted(names)


def test_no_module_of_the_library_loads_a_heavy_package() -> None:
    modules = ", ".join(light_modules())
    assert loaded_after(f"import {modules}") == set()
