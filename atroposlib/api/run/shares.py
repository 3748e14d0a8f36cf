"""Which share of a batch the hub wants from each environment, so that shares are kept over many batches.

An environment whose groups a batch could have used but did not, because others had queued theirs earlier, is behind and
is asked for more until it has caught up; one that is ahead for less. What an environment cannot supply is divided among
the others, and given back as soon as it can. Pure: `RunState` reports deliveries, environments read their share from
their status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean

NUM_BATCHES = 12
"""Recent batches that count."""
GAIN = 4.0
"""How strongly an environment that is behind is asked for more, in its mean lag per batch.

In 100 random settings, 0, 1, 4 and 6 keep the shares of 60, 76, 94 and 92 within one group (simulated at commit
050caf8).
"""


class Shares:
    """What recent batches took from each environment, compared with its fair share."""

    def __init__(self) -> None:
        self._batches: dict[int, dict[int, tuple[float, float]]] = {}
        """Of recent batches, oldest first: each environment's fair share and the share taken."""
        self._means: dict[int, tuple[float, float]] = {}
        """The same, averaged, of each environment that had a share of the last batch."""

    def deliver(
        self,
        number: int,
        own: Mapping[int, float],
        *,
        taken: Counter[int | None],
        left: Mapping[int, int],
        batch_size: int,
    ) -> None:
        """Record a batch: sequences `taken` from each environment of `own`, and those `left` in the queue.

        A batch that is replayed replaces its earlier record.
        """
        self.forget(number)
        able = {
            env_id: (taken[env_id] + left[env_id]) / batch_size
            + max(0.0, share - self.wanted(env_id, own=share))  # what it was asked to hold back
            for env_id, share in own.items()
        }
        fair = fair_shares(own, able)
        self._batches[number] = {e: (share, taken[e] / batch_size) for e, share in fair.items()}
        if len(self._batches) > NUM_BATCHES:
            del self._batches[next(iter(self._batches))]
        self._update_means()

    def forget(self, number: int) -> None:
        """Remove the record of a batch that is delivered again or whose groups were given back."""
        if self._batches.pop(number, None) is not None:
            self._update_means()

    def wanted(self, env_id: int, *, own: float) -> float:
        """Return the share of a batch, 0 to 1, that an environment with this share of its own should supply."""
        if env_id not in self._means:
            return min(1.0, own)
        fair, taken = self._means[env_id]
        return min(1.0, max(0.0, max(own, fair) + GAIN * (fair - taken)))

    def _update_means(self) -> None:
        batches = list(self._batches.values())
        for_last = batches[-1] if batches else {}
        self._means = {env_id: _mean(env_id, batches) for env_id in for_last}


def _mean(env_id: int, batches: Iterable[Mapping[int, tuple[float, float]]]) -> tuple[float, float]:
    fairs, takens = zip(*(batch[env_id] for batch in batches if env_id in batch), strict=True)
    return fmean(fairs), fmean(takens)


def fair_shares(own: Mapping[int, float], able: Mapping[int, float]) -> dict[int, float]:
    """Divide a batch by the environments' `own` shares; what one is not able to supply, the others do in proportion.

    >>> fair_shares({0: 0.5, 1: 0.25, 2: 0.25}, {0: 0.1, 1: 1.0, 2: 1.0})
    {0: 0.1, 1: 0.45, 2: 0.45}
    """
    shares: dict[int, float] = {}
    rest = {env_id: share for env_id, share in own.items() if share > 0}
    left = 1.0
    while rest:
        scale = left / sum(rest.values())
        short = [env_id for env_id, share in rest.items() if able[env_id] < share * scale]
        if not short:
            return shares | {env_id: share * scale for env_id, share in rest.items()}
        for env_id in short:
            del rest[env_id]
            shares[env_id] = able[env_id]
            left -= able[env_id]
    return shares
