"""CONTRIBUTING.md answers the questions of someone who opens the code for the first time."""

import ast
import re
from pathlib import Path

from tests.processes import ROOT


def test_every_answer_names_a_definition_that_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    titles = ("## Where is it?", "## What is a group, and where?", "## Who retries what?")
    sections = [text.partition(title)[2].partition("\n## ")[0] for title in titles]
    rows = [line for section in sections for line in section.splitlines() if "`: `" in line]
    assert len(rows) >= 20
    for row in rows:
        answers = re.findall(r"`([\w/]+\.py)`: `(\w+)`", row)
        assert answers, row
        folder = Path(answers[0][0]).parent
        for file, name in answers:
            path = ROOT / (file if "/" in file else folder / file)
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            nodes = ast.parse(path.read_text(encoding="utf-8")).body
            defined = {node.name for node in nodes if isinstance(node, kinds)}
            defined |= {ast.unparse(n.target) for n in nodes if isinstance(n, ast.AnnAssign)}
            defined |= {ast.unparse(n.targets[0]) for n in nodes if isinstance(n, ast.Assign)}
            assert name in defined, row
