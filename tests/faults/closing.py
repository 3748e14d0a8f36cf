"""Read what an environment process says at its end: its groups, its items, and the record of `faulty_env.py`."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

MARK = "author: "
"""Begins the line with the record."""


def closing_counts(log: str) -> dict[str, Any]:
    """What an environment said at its end: groups, items, and the author's own record."""
    groups = re.findall(
        r"(\d+) groups accepted, (\d+) stored by the hub, (\d+) held; dropped: (.*)", log
    )
    items = re.findall(
        r"(\d+) items started: (\d+) gave groups, (\d+) gave none, (\d+) given up \((.*)\),"
        r" (\d+) unfinished; failed attempts: (.*); put back",
        log,
    )
    authors = re.findall(MARK + "(.*)", log)
    assert len(groups) == len(items) == len(authors) == 1, log[-4000:]
    accepted, stored, held, dropped = groups[0]
    started, with_groups, without, given_up, given_up_as, unfinished, failed = items[0]
    return {
        "accepted": int(accepted),
        "stored": int(stored),
        "held": int(held),
        "dropped": counted(dropped),
        "started": int(started),
        "with groups": int(with_groups),
        "without": int(without),
        "given up": int(given_up),
        "given up as": counted(given_up_as),
        "unfinished": int(unfinished),
        "failed": counted(failed),
        "author": json.loads(authors[0]),
    }


def counted(listed: str) -> Counter[str]:
    """Read `ValueError 3, TimeoutError 1`, or `none`."""
    if listed == "none":
        return Counter()
    pairs = [entry.rpartition(" ") for entry in listed.split(", ")]
    return Counter({name: int(number) for name, _, number in pairs})
