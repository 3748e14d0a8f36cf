"""Importing the library stays light: heavy packages load when they are used, not before."""

import pytest

from tests.builders.programs import run_python
from tests.processes import ROOT

CLIENTS = ("aiohttp", "httpx", "fastapi", "atroposlib.client", "atroposlib.checker")
"""What takes longest to import of what commands need that call a server."""
HEAVY = ("torch", "transformers", "wandb", "datasets", "openai", "gradio", "matplotlib", "pandas")


def loaded_after(statement: str, among: tuple[str, ...] = HEAVY) -> set[str]:
    """Run `statement` in a fresh interpreter and return those of the packages that it loaded."""
    code = f"import sys; {statement}; print(*[m for m in {among!r} if m in sys.modules])"
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


@pytest.mark.parametrize(
    "command",
    [
        "environments/gsm8k_server.py --help",
        "environments/gsm8k_server.py serve --help",
        "atroposlib/cli/atropos.py --help",
        "atroposlib/cli/environments.py list",
    ],
)
def test_help_and_lists_load_no_package_that_calls_servers(command: str) -> None:
    file, *arguments = command.split()
    run = f"sys.argv[1:] = {arguments!r}; runpy.run_path({file!r}, run_name='__main__')"
    quiet = "contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit)"
    code = f"import contextlib, io, runpy\nwith {quiet}: {run}\npass"
    assert loaded_after(code, CLIENTS) == set()
