"""Every deliberate difference from the original, as MIGRATING.md lists them, is pinned by a test."""

import re

from tests.processes import ROOT


def test_every_difference_names_a_test_that_exists() -> None:
    table = (ROOT / "MIGRATING.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`test_" in line]
    named = {re.findall(r"`(test_\w+)`", row)[-1] for row in rows}
    assert len(named) == len(rows) > 20
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in sorted(named) if f"def {name}(" not in sources]
    assert missing == []


def test_every_shipped_environment_is_compared_with_the_originals() -> None:
    folder = ROOT / "environments"
    shipped = {path.stem for path in folder.rglob("*.py") if ".cli()\n" in path.read_text()}
    table = (folder / "MIGRATING.md").read_text().partition("## Not carried over")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(shipped)
