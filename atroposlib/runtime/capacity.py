"""How many items may be in flight: pure arithmetic on the hub's status and on what finished items took.

Two bounds hold at once. Staleness: groups queued at the hub, held here and expected from the items in flight add up to
at most `max_batches_offpolicy` batches, so that a group is trained on about that many steps after its start at the
latest. Workers: the number that the author set, in which case every item counts as a group, or else as many items as
the trainer needs (`Demand`). The result says how many items to start; running items are never cancelled.

Items that have taken longer than `max_batches_offpolicy` steps are over age. They count in neither need nor staleness,
or a tenth of long items would hold all slots and the trainer would wait for them. At most twice the staleness bound
of them are left out, because a trainer that fetches several batches in a row seems to take steps of no length. All
items together are at most what the servers take (`num_max_requests_at_once` each), divided by the group size, or the
default number of workers if that is more; no memory is reserved for them beyond that.

Who limits what: this module decides how many items are started; `inference/servers/admission.py` decides how many
requests an inference server gets. No item is started on demand while all servers are at their limit, so that a slow
server does not make the demand for items, which grows with their durations, overtake it.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SAFETY = 0.5
"""Standard deviations by which the stock exceeds the expected need. At steps of 5 s the trainer waits up to 9 % of the
time with 0, up to 5 % with 0.5, up to 2 % with 1 for groups that are up to 0.3 steps older (simulated at commit
8316a75)."""
MAX_STEPS = 64
"""Longest item considered, in steps, if there is no staleness bound."""
MIN_YIELD = 0.05
"""Groups per item assumed at least: an environment that gives none must not begin ever more items. With 0.1 a trainer
waits 10 % of the time for items of which 5 % give a group; without a limit, an environment that gives none begins all
items that the servers can serve."""
MAX_OVER_AGE = 2
"""Items over age that hold no slot, in staleness bounds."""
HISTORY = 128
"""Items whose durations and yields count. 16, 32, 64, 128 and 256 give a mean staleness of 2.00, 1.74, 1.64, 1.60 and
1.57 in 100 random settings (simulated at commit 42a6ba4); more adapt later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the trainer takes, and what items take and yield; recent measurements, no averages over the run."""

    step_s: float
    """Seconds the trainer needs for a batch, without waiting for it."""
    durations_s: Sequence[float]
    """Of recent items."""
    ages_s: Sequence[float] = ()
    """Of the items in flight."""
    groups_per_item: float
    """Mean of recent items; below 1 if groups are dropped."""
    missing_sequences: int = 0
    """What the trainer's next batch lacks, if it has waited for it longer than an item takes; else 0."""


class History:
    """How long recent items took and how many groups they gave."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque(maxlen=HISTORY)
        self._num_accepted: deque[int] = deque([0], maxlen=HISTORY + 1)
        """Groups accepted in total, at the end of each item."""

    def add(self, duration_s: float, *, num_accepted: int) -> None:
        """Record an item that ended; `num_accepted` counts the groups of the whole run."""
        self._durations_s.append(duration_s)
        self._num_accepted.append(num_accepted)

    def demand(
        self,
        *,
        step_s: float,
        ages_s: Sequence[float],
        missing_sequences: int,
        trainer_waits_s: float | None,
    ) -> Demand | None:
        """Return the demand for items of which those in flight have these ages; None if none has ended.

        The yield counts one group from one item before the first, so that a few items without a group mean little.
        """
        if not self._durations_s:
            return None
        num_groups = self._num_accepted[-1] - self._num_accepted[0]
        has_waited = (trainer_waits_s or 0.0) > statistics.median(self._durations_s)
        return Demand(
            step_s=step_s,
            durations_s=self._durations_s,
            ages_s=ages_s,
            groups_per_item=max(MIN_YIELD, (num_groups + 1) / (len(self._durations_s) + 1)),
            missing_sequences=missing_sequences if has_waited else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The inputs of the decision. Groups are counted in this environment's group size."""

    max_workers: int
    """Items that may be in flight; with a `demand`, only an upper limit."""
    running: int
    """Items in flight."""
    held: int = 0
    """Groups finished but not yet counted in `queue_size`."""
    group_size: int
    batch_size: int
    """Sequences per batch; -1 while the hub does not know it."""
    max_batches_offpolicy: int
    """0 or less: no staleness bound."""
    queue_size: int = 0
    """Groups waiting at the hub, of every environment."""
    self_queue_size: int = 0
    """Groups waiting at the hub, of this environment."""
    unallocated_fraction: float = 1.0
    """Share of a batch that no environment has reserved."""
    min_batch_allocation: float | None = None
    """Share of a batch this environment has reserved."""
    wanted_share: float = 1.0
    """Share of a batch that the hub wants from this environment; matters only with a `demand`."""
    demand: Demand | None = None
    """None: the author set the number of workers, or too little is known yet."""


def num_wanted(load: Load) -> int:
    """Return how many items should be in flight (0 or more).

    >>> num_wanted(Load(max_workers=8, running=2, group_size=4, batch_size=16,
    ...                   max_batches_offpolicy=2, queue_size=3))
    5
    """
    if load.demand is None or load.batch_size <= 0:
        return max(0, min(load.max_workers, _staleness_bound(load)))
    young = min(_wanted(load, load.demand), _staleness_bound(load))
    most = MAX_OVER_AGE * load.max_batches_offpolicy * load.batch_size // load.group_size
    over_age = min(num_over_age(load, load.demand), most)
    return max(0, min(load.max_workers, max(0, young) + over_age))


def num_to_start(load: Load) -> int:
    """Return how many items to start now: those wanted less those in flight; running items are never cancelled."""
    return max(0, num_wanted(load) - load.running)


def num_over_age(load: Load, demand: Demand) -> int:
    """Return how many items in flight are older than the staleness bound."""
    bound_s = max_age_s(load.max_batches_offpolicy, demand.step_s)
    return sum(age_s > bound_s for age_s in demand.ages_s)


def max_age_s(max_batches_offpolicy: int, step_s: float | None) -> float:
    """Return the age beyond which an item in flight is over age; infinity without a bound or a known step."""
    return max_batches_offpolicy * step_s if step_s and max_batches_offpolicy > 0 else math.inf


def stock(load: Load, demand: Demand) -> float:
    """Return how many groups of this environment should be queued, held and in flight.

    An order-up-to level (Scarf 1960, for batch demand every `step_s` and random lead times): a batch's share, plus the
    groups that are expected to be still in flight when the trainer asks, plus a safety for the variances of their
    number and of what items yield. An item started j steps before the trainer asks is in flight if it takes longer
    than j steps: the expected number is the sum over j of the share times P(duration > j steps), estimated from ended
    items and from the ages of the others (Kaplan and Meier 1958).

    The trainer takes groups of any environment, so one safety is enough for all of them: if environments are alike, the
    variance of the sum is `variance / share`, and this environment keeps its share of the standard deviation.
    """
    share = load.wanted_share * load.batch_size / load.group_size
    late = variance = 0.0
    steps = load.max_batches_offpolicy if load.max_batches_offpolicy > 0 else MAX_STEPS
    durations_s, ages_s = sorted(demand.durations_s), sorted(demand.ages_s)
    fraction, num_longer = 1.0, len(durations_s)
    for num_steps in range(1, steps + 1):
        num_ended = bisect.bisect_right(durations_s, num_steps * demand.step_s)
        num_older = len(ages_s) - bisect.bisect_right(ages_s, num_steps * demand.step_s)
        num_late = len(durations_s) - num_ended + num_older
        if not num_late:
            break
        fraction *= num_late / (num_longer + num_older)
        num_longer = len(durations_s) - num_ended
        late += share * fraction
        variance += share * fraction * (1.0 - fraction)
    variance += (share + late) * max(0.0, 1.0 - demand.groups_per_item)
    return share + late + SAFETY * math.sqrt(load.wanted_share * variance)


def _wanted(load: Load, demand: Demand) -> int:
    """Return how many items should be in flight, given the groups already queued or held."""
    missing = demand.missing_sequences / load.group_size
    groups = max(stock(load, demand) - load.self_queue_size, missing) - load.held
    return math.ceil(groups / demand.groups_per_item)


def _staleness_bound(load: Load) -> int:
    """Return how many items may be in flight, given the groups already queued or held."""
    if load.max_batches_offpolicy <= 0 or load.batch_size <= 0:
        return load.max_workers
    ahead = load.max_batches_offpolicy * load.batch_size
    reserved = load.min_batch_allocation or 0.0
    share = min(1.0, load.unallocated_fraction + reserved)
    room = int(ahead * share) // load.group_size - load.queue_size - load.held
    floor = math.ceil(ahead * reserved / load.group_size) - load.self_queue_size - load.held
    groups = max(room, floor)
    return groups if load.demand is None else math.ceil(groups / load.demand.groups_per_item)
