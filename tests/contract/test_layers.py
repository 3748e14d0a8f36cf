"""A folder is a layer: imports point down only, and no modules import each other in a circle.

Every import counts: at module level, inside of functions and for type checking.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FOUNDATION = """
type_definitions scored_data samples wire errors config patience http_bodies http_guard hub_address utils
utils.number_list utils.wording frontend
"""
FOUNDATION = {f"atroposlib.{name}" for name in _FOUNDATION.split()}
"""Every row of LAYERS may import these; they import each other alone."""

HUB = "api.schemas api.run.types api.stores api.run api.http api"
LAYERS = {
    "atroposlib.api.schemas": "",
    "atroposlib.api.run.types": "",
    "atroposlib.api.stores": "api.run.types",
    "atroposlib.api.run": "api.schemas api.run.types api.stores",
    "atroposlib.api.http": "api.schemas api.run.types api.stores api.run",
    "atroposlib.api": HUB,
    "atroposlib.client": "api.schemas",
    "atroposlib.inference.config": "",
    "atroposlib.inference.tools": "",
    "atroposlib.inference.servers": "inference.config inference.tools",
    "atroposlib.inference.sessions": "inference.config inference.tools inference.servers",
    "atroposlib.inference": "inference",
    "atroposlib.proxy": "inference",
    "atroposlib.envs": "inference proxy",
    "atroposlib.checker": "inference envs",
    "atroposlib.runtime": "client inference envs checker proxy",
    "atroposlib.engine": "",
    "atroposlib.cli": f"{HUB} client inference envs runtime environments",
    "atroposlib.environments": "",
    "atroposlib.testing": "checker runtime",
    "atroposlib.tests": "",
    "atropos_taskset": "envs cli",
    "atropos_verl": "envs cli",
    "example_trainer": "client",
    "environments": "client inference envs",
}
"""Folder -> what it may import beside itself and FOUNDATION; a name stands for everything under it.

The longest name that fits a module is its row.
"""

UPWARD = {("atroposlib.envs.base", "atroposlib.runtime")}
"""`BaseEnv.cli()`, `serve` and `process` start the runtime: imports inside of functions."""


ROWS = FOUNDATION | set(LAYERS)


def _fits(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def row_of(module: str) -> str | None:
    return max((row for row in ROWS if _fits(module, row)), key=len, default=None)


def modules() -> dict[str, Path]:
    found = {}
    for package in (
        "atroposlib",
        "atropos_taskset",
        "atropos_verl",
        "example_trainer",
        "environments",
    ):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: dict[str, Path]) -> list[tuple[str, bool]]:
    """Return (imported module, at module level) for every import of our own code."""
    tree = ast.parse(path.read_text())
    top_level = {id(node) for node in tree.body}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names = [
                f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names
            ]
        found += [(name, id(node) in top_level) for name in names if name in known]
    return found


@functools.cache
def edges() -> list[tuple[str, str, bool]]:
    """Return every import of one of our modules by another: importer, imported, whether at module level."""
    known = modules()
    return [
        (module, target, is_top)
        for module, path in known.items()
        for target, is_top in imports_of(module, path, known)
        if module != target and target != "atroposlib"
    ]


def test_every_module_belongs_to_a_row() -> None:
    assert [m for m in modules() if m != "atroposlib" and row_of(m) is None] == []


def test_every_row_names_rows() -> None:
    assert {f"atroposlib.{name}" for sees in LAYERS.values() for name in sees.split()} <= set(
        LAYERS
    )


def _may_import(module: str, target: str) -> bool:
    row, of = row_of(module), row_of(target)
    assert row is not None
    assert of is not None
    if row in FOUNDATION:
        return of in FOUNDATION
    seen = [row, *FOUNDATION, *(f"atroposlib.{name}" for name in LAYERS[row].split())]
    return any(_fits(of, name) for name in seen)


def test_imports_point_down_only() -> None:
    wrong = {
        f"{module} -> {target}"
        for module, target, is_top in edges()
        if not _may_import(module, target)
        and not any(module == a and _fits(target, b) and not is_top for a, b in UPWARD)
    }
    assert wrong == set()


def test_only_the_command_starts_the_server() -> None:
    importers = {module for module, target, _ in edges() if target == "atroposlib.api.server"}
    assert importers <= {"atroposlib.cli.run_api", "atroposlib.api"}


def _circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return every set of nodes that reach each other."""
    reach = {node: {node} for node in graph}
    changed = True
    while changed:
        changed = False
        for node, targets in graph.items():
            wider = reach[node].union(*(reach.get(target, {target}) for target in targets))
            changed |= len(wider) > len(reach[node])
            reach[node] = wider
    together = {
        frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph
    }
    return {circle for circle in together if len(circle) > 1}


def test_modules_import_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, target, _ in edges():
        graph.setdefault(module, set()).add(target)
    assert _circles(graph) == set()


def test_rows_import_in_no_circle() -> None:
    """The named imports upwards do not count."""
    graph: dict[str, set[str]] = {}
    for module, target, _ in edges():
        row, of = row_of(module), row_of(target)
        assert row is not None
        assert of is not None
        if row != of and not any(module == a and _fits(target, b) for a, b in UPWARD):
            graph.setdefault(row, set()).add(of)
    assert _circles(graph) == set()


def test_a_circle_is_found() -> None:
    two = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": {"a", "d"}}
    assert _circles(two) == {frozenset("bc"), frozenset("de")}
    assert _circles({"a": {"b", "c"}, "b": {"c"}}) == set()


def test_benchmarks_import_nothing_of_the_tests() -> None:
    found = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found += [(path.name, name) for name in names if name.split(".")[0] == "tests"]
    assert found == []
