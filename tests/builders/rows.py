"""Files with one JSON value a line: what programs read, and what they wrote."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def rows_in(path: Path) -> list[Any]:
    """Return the values of a file, of which the last line ends; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def write_rows(path: Path, *rows: Any, rest: str = "") -> Path:
    """Write the values, and after them `rest` as it is; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)
    return path


def tokens_by_fate(steps: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the sampled tokens that a trainer received, by what became of them, from the steps of `metrics.jsonl`."""
    fates = Counter[str]()
    for step in steps:
        fates["trained"] += step["num_trained_tokens"]
        fates["too_old"] += step["num_too_old_tokens"]
        for name, count in step.items():
            if name.startswith("num_skipped_tokens_"):
                fates[name.removeprefix("num_skipped_tokens_")] += count
    return dict(+fates)
