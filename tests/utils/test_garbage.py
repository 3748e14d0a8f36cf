"""The garbage collector of our own processes."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from atroposlib.utils.garbage import THRESHOLDS, collect_less_often
before = gc.get_threshold()
collect_less_often()
class Knot: pass
def tie():
    knot = Knot()
    knot.itself = knot
import weakref
knot = Knot(); knot.itself = knot
seen = weakref.ref(knot)
del knot
for _ in range(THRESHOLDS[0] + 1):
    tie()
print(before != gc.get_threshold() == THRESHOLDS, gc.get_freeze_count() > 1000, seen() is None)
"""


def test_what_is_imported_is_left_alone_and_new_cycles_are_still_found() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True", "True"]
