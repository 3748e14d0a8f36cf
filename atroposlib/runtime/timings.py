"""Intervals of a serving environment."""

from __future__ import annotations

from dataclasses import dataclass

from atroposlib.patience import Backoff


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Intervals in seconds; tests shorten them."""

    tick_s: float = 0.1
    """Between two checks of state that must be polled: the author's next item, the engine's health."""
    poll_wait_s: float = 10.0
    """How long the hub may hold a status request while nothing changes."""
    control_refill_s: float = 0.25
    """Average interval of control calls to the hub. A step of the trainer takes two: its batch is cut, its weights are
    published. With 1.0 a trainer with steps of 0.5 s waits twice as long (measured at commit b1f565b)."""
    control_burst: int = 3
    """Control calls that may follow at once after a pause."""
    register_s: float = 1.0
    """Between two registrations while the trainer has not started."""
    backoff_first_s: float = 0.5
    backoff_cap_s: float = 4.0
    """Longest delay before a recovered hub or engine is noticed."""
    engine_reminder_s: float = 30.0
    """Between two log lines while the engine is unavailable."""
    no_item_reminder_s: float = 30.0
    """Between two log lines while there is capacity, nothing is in flight and the author's code produces nothing."""
    no_group_reminder_s: float = 30.0
    """Between two warnings with the reasons while items end and no group comes."""
    progress_s: float = 10.0
    """Between two log lines about the run, where there is no terminal."""
    drain_s: float = 10.0
    """Wait for items in flight after a signal; a second signal ends it."""
    flush_s: float = 30.0
    """Wait for held groups to be delivered at the end of the run."""
    spool_after_s: float = 2.0
    """Undelivered groups are written to disk after this part of `flush_s`, in case the process is killed."""
    disconnect_s: float = 5.0
    """Timeout of the request that disconnects from the hub."""

    def backoff(self) -> Backoff:
        return Backoff(first_s=self.backoff_first_s, cap_s=self.backoff_cap_s)
