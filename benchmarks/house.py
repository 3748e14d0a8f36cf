"""Metrics of the source code: lines per folder, length of functions, repeated blocks, declared names.

    python benchmarks/house.py [ROOT ...]

prints a table with a column per root, to compare checkouts. Reads files only; imports nothing.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

SHIPPED = ("atroposlib", "example_trainer", "environments")
BLOCK_LINES = 8
"""Length of a repeated block: lines with code that occur twice, ignoring white space."""


class Module(NamedTuple):
    folder: str
    """At most three parts of the path, for example `atroposlib/api/http`."""
    name: str
    lines: list[str]
    tree: ast.Module


def read(root: Path, packages: tuple[str, ...]) -> list[Module]:
    """Return every Python module of `packages`."""
    found = []
    for path in sorted(p for package in packages for p in (root / package).rglob("*.py")):
        parts = path.relative_to(root).parent.parts[:3]
        text = path.read_text(encoding="utf-8")
        found.append(Module("/".join(parts), path.stem, text.splitlines(), ast.parse(text)))
    return found


def definitions(modules: list[Module], *kinds: type[ast.stmt]) -> list[tuple[str, int]]:
    """Return the name and the number of lines of each function or class of these kinds."""
    nodes: list[Any] = [n for m in modules for n in ast.walk(m.tree) if isinstance(n, kinds)]
    return [(n.name, n.end_lineno - n.lineno + 1) for n in nodes]


def repeated_blocks(modules: list[Module]) -> int:
    """Return the number of blocks of `BLOCK_LINES` lines that occur more than once; overlapping ones count once."""
    seen: dict[tuple[str, ...], int] = {}
    repeated = 0
    for number, module in enumerate(modules):
        code = [line.strip() for line in module.lines]
        code = [c for c in code if len(c) > 1 and not c.startswith(("#", "from ", "import "))]
        at = 0
        while at + BLOCK_LINES <= len(code):
            block = tuple(code[at : at + BLOCK_LINES])
            if seen.setdefault(block, number * 1_000_000 + at) != number * 1_000_000 + at:
                repeated += 1
                at += BLOCK_LINES
            else:
                at += 1
    return repeated


def declares_names(module: Module) -> bool:
    """Whether a package's `__init__` has `__all__`."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in module.tree.body
    )


def facts(root: Path) -> dict[str, str]:
    """Return the rows of the table for one checkout."""
    shipped, tests = read(root, SHIPPED), read(root, ("tests",))
    lines = Counter[str]()
    for module in shipped:
        lines[module.folder] += len(module.lines)
    total = sum(lines.values())
    flat = Counter[str]()
    for folder, count in lines.items():
        flat["/".join(folder.split("/")[:2])] += count
    largest, share = flat.most_common(1)[0]
    functions = definitions(shipped, ast.FunctionDef, ast.AsyncFunctionDef)
    sizes = sorted(length for _, length in functions)
    classes = definitions(shipped, ast.ClassDef)
    names = Counter(name for name, _ in classes)
    files = Counter(m.name for m in shipped if not m.name.startswith("__"))
    packages = [m for m in shipped if m.name == "__init__"]
    rows = {
        "lines shipped": f"{total:,}",
        "lines of tests": f"{sum(len(m.lines) for m in tests):,}",
        "modules": f"{len(shipped)}",
        "largest folder": f"{largest} {share / total:.0%}",
        "functions, median and p90 lines": f"{sizes[len(sizes) // 2]}, {sizes[len(sizes) * 9 // 10]}",
        "longest class": f"{max(length for _, length in classes)}",
        "class names defined more than once": f"{sum(n > 1 for n in names.values())}",
        "file names used more than once": f"{sum(n > 1 for n in files.values())}",
        f"repeated blocks of {BLOCK_LINES} lines": f"{repeated_blocks(shipped)}",
        "packages with __all__": f"{sum(map(declares_names, packages))} of {len(packages)}",
    }
    return rows | {f"{folder}/": f"{count:,}" for folder, count in sorted(lines.items())}


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[1]]
    columns = [facts(root) for root in roots]
    print("| |" + "".join(f" {root} |" for root in roots))
    print("|---|" + "---|" * len(roots))
    for row in dict.fromkeys(name for column in columns for name in column):
        print(f"| {row} |" + "".join(f" {column.get(row, '')} |" for column in columns))


if __name__ == "__main__":
    main()
