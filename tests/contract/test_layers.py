"""Imports point down only (the layers of the architecture), and nothing imports in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Longest matching prefix wins. A module may import its own layer's listed peers and anything of a lower rank.
RANKS = {
    "atroposlib.type_definitions": 0,
    "atroposlib.scored_data": 0,
    "atroposlib.samples": 0,
    "atroposlib.wire": 0,
    "atroposlib.errors": 0,
    "atroposlib.http_bodies": 0,
    "atroposlib.http_guard": 0,
    "atroposlib.config": 0,
    "atroposlib.utils": 0,
    "atroposlib.frontend": 0,
    "atroposlib.api.schemas": 1,
    "atroposlib.api.allocator": 1,
    "atroposlib.api.batching": 1,
    "atroposlib.api.queue": 1,
    "atroposlib.api.sums": 1,
    "atroposlib.api.environments": 1,
    "atroposlib.api.leases": 1,
    "atroposlib.api.backlog": 1,
    "atroposlib.api.calls": 1,
    "atroposlib.api.signals": 1,
    "atroposlib.api.admission": 1,
    "atroposlib.api.dead_letters": 1,
    "atroposlib.api.experiments": 1,
    "atroposlib.api.explaining": 1,
    "atroposlib.api.hub": 1,
    "atroposlib.api.stores": 1,
    "atroposlib.api.coordinator": 1,
    "atroposlib.api": 2,
    "atroposlib.client": 2,
    "atroposlib.envs.server_handling": 3,
    "atroposlib.envs": 4,
    "atroposlib.cli": 5,
    "atroposlib.engine": 5,
    "atroposlib.tests": 5,
    "example_trainer": 5,
    "environments": 5,
}

# What a package may see is narrower than its rank for these.
NARROWER = {
    "atroposlib.client": {"atroposlib.api.schemas"},
    "atroposlib.api": {"atroposlib.api"},
    "atroposlib.envs.server_handling": {"atroposlib.envs.server_handling"},
    "atroposlib.envs": {"atroposlib.envs", "atroposlib.client"},
    "atroposlib.engine": {"atroposlib.engine"},
    "example_trainer": {"example_trainer", "atroposlib.client"},
}

# `BaseEnv.cli()` starts the command line of an environment: the one upward edge, local to that function.
ALLOWED_UPWARD = {("atroposlib.envs.base", "atroposlib.cli.env")}


def rank_of(module: str) -> int | None:
    prefixes = [p for p in RANKS if module == p or module.startswith(p + ".")]
    return RANKS[max(prefixes, key=len)] if prefixes else None


def modules() -> dict[str, Path]:
    found = {}
    for package in ("atroposlib", "example_trainer", "environments"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, known: dict[str, Path]) -> list[tuple[str, bool]]:
    """Return (imported module, at module level) for every import of our own code."""
    tree = ast.parse(path.read_text())
    top_level = {id(n) for n in tree.body}
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


EDGES = [
    (module, target, top)
    for known in [modules()]
    for module, path in known.items()
    for target, top in imports_of(module, path, known)
    if module != target
]


def test_every_module_belongs_to_a_layer() -> None:
    unranked = [m for m in modules() if m != "atroposlib" and rank_of(m) is None]
    assert unranked == []


def test_imports_point_down_only() -> None:
    upward = []
    for module, target, _ in EDGES:
        source_rank, target_rank = rank_of(module), rank_of(target)
        if target == "atroposlib" or source_rank is None or target_rank is None:
            continue
        if target_rank > source_rank and (module, target) not in ALLOWED_UPWARD:
            upward.append(f"{module} -> {target}")
    assert upward == []


def test_packages_see_only_what_the_architecture_allows() -> None:
    wrong = []
    for module, target, _ in EDGES:
        owner = max(
            (p for p in NARROWER if module == p or module.startswith(p + ".")),
            key=len,
            default=None,
        )
        if owner is None or target == "atroposlib" or rank_of(target) == 0:
            continue
        if owner == "atroposlib.envs" and target.startswith("atroposlib.envs"):
            continue
        seen = any(target == p or target.startswith(p + ".") for p in NARROWER[owner])
        if not seen and (module, target) not in ALLOWED_UPWARD:
            wrong.append(f"{module} -> {target}")
    assert wrong == []


def test_top_packages_do_not_import_each_other() -> None:
    tops = ("atroposlib.cli", "atroposlib.engine", "example_trainer", "environments")

    def top_of(module: str) -> str | None:
        return next((t for t in tops if module == t or module.startswith(t + ".")), None)

    sideways = [
        f"{module} -> {target}"
        for module, target, _ in EDGES
        if (a := top_of(module)) and (b := top_of(target)) and a != b
    ]
    assert sideways == []


def test_only_the_command_starts_the_server() -> None:
    importers = {m for m, target, _ in EDGES if target == "atroposlib.api.server"}
    assert importers <= {"atroposlib.cli.run_api", "atroposlib.api"}


def test_no_import_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, target, top in EDGES:
        if top:
            graph.setdefault(module, set()).add(target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail("circle: " + " -> ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, (*path, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())
