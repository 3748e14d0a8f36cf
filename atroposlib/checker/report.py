"""What the check found: one finding per rule, with evidence, as text and as JSON."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_EVIDENCE = 5


class Status(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that every environment owes its users."""

    name: str
    claim: str
    """What holds when the rule passes."""
    advice: str
    """What to change when it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where a rule was broken and how."""

    what: str
    item: int | None = None
    """Index of the item, counted from 0 in the order `get_next_item` gave them."""
    sequence: int | None = None
    """Index in the group."""

    def __str__(self) -> str:
        place = [
            f"{name} {value}"
            for name, value in (("item", self.item), ("sequence", self.sequence))
            if value is not None
        ]
        return f"{', '.join(place)}: {self.what}" if place else self.what


@dataclass(slots=True, kw_only=True)
class Finding:
    """The verdict of one rule."""

    rule: Rule
    status: Status = Status.PASS
    reason: str = ""
    """Why it was skipped."""
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdicts on one environment."""

    environment: str
    findings: list[Finding]
    num_items: int
    num_groups: int
    duration_s: float

    @property
    def is_ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the rules that failed."""
        return self._named(Status.FAIL)

    @property
    def skipped(self) -> list[str]:
        """Names of the rules that could not be judged, or were not to be."""
        return self._named(Status.SKIPPED)

    def finding(self, name: str) -> Finding:
        """Return the verdict of the rule called `name`."""
        return next(finding for finding in self.findings if finding.rule.name == name)

    def _named(self, status: Status) -> list[str]:
        return [finding.rule.name for finding in self.findings if finding.status is status]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "environment": self.environment,
            "ok": self.is_ok,
            "items": self.num_items,
            "groups": self.num_groups,
            "duration_s": round(self.duration_s, 3),
            "rules": [
                {
                    "name": finding.rule.name,
                    "claim": finding.rule.claim,
                    "status": finding.status.value,
                    "reason": finding.reason,
                    "evidence": [asdict(evidence) for evidence in finding.evidence],
                    "advice": finding.rule.advice if finding.status is Status.FAIL else "",
                }
                for finding in self.findings
            ],
        }

    def to_text(self) -> str:
        """Return the report for people: a line per rule, and what to change under those that failed."""
        width = max(len(finding.rule.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            status = finding.status.value.upper()
            about = finding.reason if finding.status is Status.SKIPPED else finding.rule.claim
            lines.append(f"{status:7} {finding.rule.name:{width}}  {about}")
            if finding.status is Status.FAIL:
                lines += [f"{'':8}- {evidence}" for evidence in finding.evidence[:MAX_EVIDENCE]]
                if len(finding.evidence) > MAX_EVIDENCE:
                    lines.append(f"{'':8}- and {len(finding.evidence) - MAX_EVIDENCE} more")
                lines.append(f"{'':8}> {finding.rule.advice}")
        num_passed = len(self.findings) - len(self.failed) - len(self.skipped)
        lines.append(
            f"{self.environment}: {num_passed} passed, {len(self.failed)} failed,"
            f" {len(self.skipped)} skipped"
            f" ({self.num_items} items, {self.num_groups} groups, {self.duration_s:.1f} s)"
        )
        return "\n".join(lines)
