"""Programs that a model might write to get a score that they did not earn, or to harm those who judge them.

The programs are in data/hostile_programs.yaml. None may print the expected answer, which the processes that judge it
hold as `answer-` and 32 hexadecimal digits.
"""

from __future__ import annotations

from typing import NamedTuple

from atroposlib.envs.sandbox import SandboxLimits, run_code
from tests.builders.tables import table

HANG_S = 1.5
"""Deadline of programs that are to reach it."""
PATIENT_S = 60.0
"""Deadline of all others."""

RIGHT = "print('answer-' + input()[::-1])"
WRONG = "print('answer-' + input())"


class Attack(NamedTuple):
    source: str
    ends: tuple[str, ...]
    """How it may end: reasons of `sandbox.Result`."""
    needs_separate_user: bool
    """Where programs share their grader's user, the kernel cannot stop it."""


_CORPUS = table("faults/hostile_programs")
ATTACKS = {
    name: Attack(
        "".join(_CORPUS["pieces"][piece] for piece in row.get("uses", "").split()) + row["source"],
        tuple(row.get("ends", ["exit"])),
        row.get("needs_separate_user", False),
    )
    for name, row in _CORPUS["attacks"].items()
}


def judge(source: str, stdin: str, expected: str, wall_s: float) -> list[object]:
    """Run a program; return how it ended, and whether it printed what was expected. Runs in a reward worker."""
    limits = SandboxLimits(wall_s=wall_s, memory_mb=256, num_processes=8, output_bytes=100_000)
    result = run_code(source, stdin=stdin, limits=limits)
    return [result.reason, result.exit_code == 0 and result.stdout.strip() == expected]
