"""`atropos-env compare BEFORE AFTER [--html PAGE]`: the difference of two evaluations, and the items that changed.

Items that both have are paired, which removes the variance between items (arXiv:2411.00640). The answers to one item
are averaged first. The page shows the answers of both to every item, most changed first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from atroposlib.envs.eval_run import INDEX_KEYS, Sample, stored_samples
from atroposlib.errors import ConfigError
from atroposlib.frontend.evaluations import Evaluation, Metric
from atroposlib.frontend.page import write_page
from atroposlib.frontend.view_groups import text_in, views_of_samples
from atroposlib.utils.display import table_of, uncertainty
from atroposlib.utils.estimates import Estimate, estimate_mean

ItemKey: TypeAlias = tuple[str, int]
"""An item's hash, and how many items before it have the same."""


SCORE = "score"
"""The value whose changed items are listed; without it, the first value that both evaluations have."""
MAX_ITEMS = 20
"""Changed items in the terminal; the page has all."""
ASKED_CHARS = 60


class Comparison(NamedTuple):
    """One value of the samples in two evaluations, over the items that both have."""

    before: float
    after: float
    difference: Estimate
    """`after - before`; its n is the number of items."""


class ItemPair(NamedTuple):
    """An item in two evaluations, and the mean of each number in its samples."""

    before: list[Sample]
    after: list[Sample]
    old: dict[str, float]
    new: dict[str, float]

    def change(self, value: str) -> float:
        return self.new[value] - self.old[value]


def print_comparison(before_path: Path, after_path: Path, *, page: Path | None) -> None:
    """Print the difference of two evaluations, each a directory or a file of samples, and write `page`, if given.

    ConfigError if a file cannot be read or the two have nothing in common.
    """
    rows = [("Value", "Before", "After", "Difference", "Stderr", "95 % interval", "Items")]
    pairs = paired_items(stored_samples(before_path), stored_samples(after_path))
    found = compare(pairs)
    for name, (old, new, difference) in found.items():
        means = (f"{old:.4f}", f"{new:.4f}", f"{difference:+.4f}")
        rows.append((name, *means, *uncertainty(difference)))
    print(table_of(rows), end="")
    value = SCORE if SCORE in found else next(iter(found))
    pairs = [pair for pair in pairs if value in pair.old and value in pair.new]
    pairs.sort(key=lambda pair: -abs(pair.change(value)))
    print(_changes_text(pairs, value), end="")
    if page is not None:
        about = f"before: {before_path}, after: {after_path}; sorted by the change of {value}"
        views = (view_of_pair(pair, value) for pair in pairs)
        metrics = [
            Metric.of(name, difference, before=old, after=new)
            for name, (old, new, difference) in found.items()
        ]
        metrics.sort(key=lambda metric: metric.name != value)
        evaluation = Evaluation(metrics)
        write_page(page, views, title="Two evaluations", about=about, evaluation=evaluation)
        print(f"page: {page}")


def _changes_text(pairs: Sequence[ItemPair], value: str) -> str:
    changed = [pair for pair in pairs if pair.change(value)]
    shown = changed[:MAX_ITEMS]
    text = f"\n{value} changed in {len(changed):,} of {len(pairs):,} items"
    if not changed:
        return f"{text}\n"
    rows = [("Item", "Before", "After", "Difference", "Asked")]
    for pair in shown:
        numbers = (f"{pair.old[value]:.4f}", f"{pair.new[value]:.4f}", f"{pair.change(value):+.4f}")
        rows.append((str(pair.after[0]["item_index"]), *numbers, _asked(pair.after[0])))
    more = f"; the {len(shown)} that changed most:" if len(shown) < len(changed) else ":"
    return f"{text}{more}\n{table_of(rows)}"


def paired_items(before: Sequence[Sample], after: Sequence[Sample]) -> list[ItemPair]:
    """Return the items that both evaluations have."""
    old, new = _by_item(before), _by_item(after)
    return [
        ItemPair(old[item], new[item], _means(old[item]), _means(new[item]))
        for item in old
        if item in new
    ]


def compare(pairs: Sequence[ItemPair]) -> dict[str, Comparison]:
    """Return every number that samples of both have, over the items that have it; ConfigError if there are none."""
    items: dict[str, list[ItemPair]] = defaultdict(list)
    for pair in pairs:
        for name in pair.old:
            if name in pair.new:
                items[name].append(pair)
    if not items:
        raise ConfigError("the two evaluations have no item with a number in common")
    return {
        name: Comparison(
            before=sum(pair.old[name] for pair in both) / len(both),
            after=sum(pair.new[name] for pair in both) / len(both),
            difference=estimate_mean([pair.change(name) for pair in both], are_shares=False),
        )
        for name, both in items.items()
    }


def view_of_pair(pair: ItemPair, value: str) -> dict[str, Any]:
    """Return an item as one group of the viewer, with the answers before and after."""
    [old] = views_of_samples(pair.before)
    [new] = views_of_samples(pair.after)
    sequences = [
        {**sequence, "label": label}
        for label, view in (("before", old), ("after", new))
        for sequence in view["sequences"]
    ]
    facts = {"before": pair.old[value], "after": pair.new[value], "difference": pair.change(value)}
    verdict = {
        **new["verdicts"][0],
        "kind": _change_of(pair.old[value], pair.new[value]),
        "read": " \u2192 ".join(str(view["verdicts"][0]["read"]) for view in (old, new)),
    }
    return {**new, "facts": facts, "sequences": sequences, "verdicts": [verdict]}


def _change_of(old: float, new: float) -> str:
    """Return what became of an item.

    >>> _change_of(0.0, 1.0), _change_of(1.0, 0.0), _change_of(0.5, 0.5)
    ('wrong to right', 'right to wrong', 'unchanged')
    """
    if old == new:
        return "unchanged"
    if {old, new} == {0.0, 1.0}:
        return "wrong to right" if new else "right to wrong"
    return "better" if new > old else "worse"


def _by_item(samples: Sequence[Sample]) -> dict[ItemKey, list[Sample]]:
    by_index: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_index[sample["item_index"]].append(sample)
    num_equal: Counter[str] = Counter()
    found = {}
    for listed in by_index.values():
        item_hash = listed[0]["item_hash"]
        found[item_hash, num_equal[item_hash]] = listed
        num_equal[item_hash] += 1
    return found


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        flat = {**sample, **(sample.get("metrics") or {})}
        for name, value in flat.items():
            if isinstance(value, Real) and math.isfinite(value) and name not in INDEX_KEYS:
                values[name].append(float(value))
    return {name: sum(found) / len(found) for name, found in values.items()}


def _asked(sample: Sample) -> str:
    """Return the start of an item's question, on one line."""
    messages = sample.get("messages") or ()
    said = [text_in(each.get("content")) for each in messages if each.get("role") == "user"]
    text = said[0] if said else str(sample.get("row", sample.get("item", "")))
    return " ".join(text.split())[:ASKED_CHARS].replace("|", "/")
