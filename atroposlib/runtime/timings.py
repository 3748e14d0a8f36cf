"""Intervals of a serving environment."""

from __future__ import annotations

from dataclasses import dataclass

from atroposlib.patience import Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Intervals in seconds; tests shorten them."""

    tick_s: float = 0.1
    """Between two looks at what only the author's code knows: whether there is an item again, or an engine."""
    poll_wait_s: float = 10.0
    """How long the hub may hold a status request while nothing changes."""
    control_refill_s: float = 1.0
    """On average one control call to the hub in this time ..."""
    control_burst: int = 3
    """... and this many at once after a pause."""
    register_s: float = 1.0
    """Between two registrations while the trainer has not started."""
    backoff_first_s: float = 0.5
    backoff_cap_s: float = 4.0
    """A hub or an engine that is available again is noticed within this time."""
    engine_reminder_s: float = 60.0
    """Between two log lines while the engine is unavailable."""
    no_item_reminder_s: float = 30.0
    """Between two log lines while the author's code makes nothing though it could, and nothing is in flight."""
    drain_s: float = 10.0
    """How long items in flight may take to finish after a signal; a second signal ends it."""
    flush_s: float = 30.0
    """How long groups may still be delivered after the end."""
    spool_after_s: float = 2.0
    """Groups not delivered this long after the end are also on disk, in case the process is killed."""
    disconnect_s: float = 5.0
    """How long the hub may take to accept that this environment leaves."""

    def backoff(self) -> Backoff:
        return Backoff(first_s=self.backoff_first_s, cap_s=self.backoff_cap_s)
