"""Importing the library stays light: heavy packages load when they are used, not before."""

from tests.builders.programs import run_python
from tests.processes import ROOT

HEAVY = ("torch", "transformers", "wandb", "datasets", "openai", "gradio", "matplotlib", "pandas")


def loaded_after(statement: str) -> set[str]:
    """Run `statement` in a fresh interpreter and return the heavy packages it loaded."""
    code = f"import sys; {statement}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return set(run_python("-W", "error", "-c", code).split())


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
