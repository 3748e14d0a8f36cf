"""`group_fates.jsonl`: a line per received group; `trained_groups.jsonl`: each token of a few groups of every step.

A fate is "trained", the reason why most of a group's sequences were skipped, or why the hub got the group back. The
tokens' values come from the training forward. They stay on the device until the step ends and are then copied to the
CPU once. Every process draws the same groups and computes its share of their sequences; the first writes the lines.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Self

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, MicroBatch, Row, SequenceOrigin
from example_trainer.parallel import World
from example_trainer.records import open_after

logger = logging.getLogger(__name__)

FILE_NAME = "trained_groups.jsonl"
FATES_NAME = "group_fates.jsonl"
MAX_STEP_TOKENS = 2**18
"""Trained tokens recorded per step, unless one group alone has more."""
MAX_FILE_BYTES = 2**30
"""Of each file. A trained token takes 30 to 40 bytes, the fate of a group 100 to 140."""
_DIGITS = 6
"""After the decimal point; float32 has no more for a logprob near -1."""


class TrainedGroups:
    """Both files, written by the first process; a context manager. With `--trace_groups 0` no tokens are recorded."""

    def __init__(self, config: TrainerConfig, world: World, *, start: int = 0) -> None:
        """Keep only the lines of the first `start` steps."""
        self._num_groups = config.trace_groups
        self._seed = config.seed
        self._world = world
        self._last_step = start
        self._files: dict[str, BinaryIO] = {}
        names = [FATES_NAME, FILE_NAME] if self._num_groups else [FATES_NAME]
        for name in names if world.is_main else ():
            self._files[name], _ = open_after(config.save_path / name, start, flag="save_path")

    def begin(self, groups: Sequence[ScoredGroup], batch: Batch, *, step: int) -> StepTrace | None:
        """Draw groups with an id to record in `step`, the same in every process; None if there are none."""
        named = [i for i, group in enumerate(groups) if group.group_id is not None]
        num_drawn = min(self._num_groups, len(named))
        drawn: dict[int, ScoredGroup] = {}
        num_tokens = 0
        for i in random.Random(f"{self._seed} {step}").sample(named, num_drawn):
            num_tokens += int(np.count_nonzero(groups[i].masks != IGNORE_INDEX))
            if drawn and num_tokens > MAX_STEP_TOKENS:
                break
            drawn[i] = groups[i]
        return StepTrace(drawn, batch, step=step, world=self._world) if drawn else None

    def write(
        self,
        trace: StepTrace | None,
        groups: Sequence[ScoredGroup],
        batch: Batch,
        loss_shares: Sequence[float],
        *,
        step: int,
    ) -> None:
        """Append the lines of a step; every process must call it."""
        self._append(FILE_NAME, [] if trace is None else trace.lines())
        rows = zip(groups, batch.fates, loss_shares, batch.num_too_old, strict=True)
        self._append(FATES_NAME, [_fate(row[0], step, *row[1:]) for row in rows])
        self._last_step = step

    def refuse(self, group: ScoredGroup, reason: str) -> None:
        """Append the fate of a group of the next step that is not trained and given back to the hub."""
        self._append(FATES_NAME, [_fate(group, self._last_step + 1, reason, 0.0)])

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if name not in self._files:
            return
        file = self._files[name]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        if file.tell() + len(text) > MAX_FILE_BYTES:
            limit_mib = MAX_FILE_BYTES // 2**20
            logger.warning("%s is full (%d MiB): later steps are left out", file.name, limit_mib)
            self._files.pop(name).close()
            return
        file.write(text)
        file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()


def _fate(
    group: ScoredGroup, step: int, fate: str, loss_share: float, num_too_old: int = 0
) -> dict[str, Any]:
    of = {"group": group.group_id, "env_id": group.env_id, "step": step}
    too_old = {"too_old_tokens": num_too_old} if num_too_old else {}
    return of | {"fate": fate, "loss_share": round(loss_share, _DIGITS)} | too_old


class StepTrace:
    """The values of one step at the M trained tokens of the drawn groups."""

    def __init__(
        self, drawn: Mapping[int, ScoredGroup], batch: Batch, *, step: int, world: World
    ) -> None:
        """`drawn`: groups by position in the batch."""
        self._drawn = drawn
        self._skipped = batch.skipped
        self._step = step
        self._world = world
        self._rows = {row.origin: row for row in batch.rows if row.origin.group in drawn}
        ends = [0, *itertools.accumulate(len(row.trained) for row in self._rows.values())]
        self._cuts = {
            origin: slice(*cut)
            for origin, cut in zip(self._rows, itertools.pairwise(ends), strict=True)
        }
        # Logprob, entropy, whether clipped. Tokens that other processes compute stay 0.
        self._values_3M = torch.zeros(3, ends[-1], device=world.device)

    def observe(
        self, micro_batch: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor, clipped_N: Tensor
    ) -> None:
        """Keep the values that a training forward computed for the drawn groups."""
        if self._cuts.keys().isdisjoint(row.origin for row in micro_batch.rows):
            return
        values_3N = torch.stack([logprobs_N, entropy_N, clipped_N]).detach()
        lengths = [len(row.trained) for row in micro_batch.rows]
        parts = values_3N.split(lengths, dim=1)
        for row, part_3N in zip(micro_batch.rows, parts, strict=True):
            if row.origin in self._cuts:
                self._values_3M[:, self._cuts[row.origin]] = part_3N

    def lines(self) -> list[dict[str, Any]]:
        """Gather the values of all processes, each of which must call it; return one object per drawn group."""
        values_3M = self._world.sum(self._values_3M).cpu().numpy()
        return [
            {
                "group_id": group.group_id,
                "step": self._step,
                "policy_version": group.policy_version,
                "env_id": group.env_id,
                "sequences": list(self._sequences(i, group.num_sequences, values_3M)),
            }
            for i, group in sorted(self._drawn.items())
        ]

    def _sequences(
        self, group: int, num_sequences: int, values_3M: NDArray[np.float32]
    ) -> Iterator[dict[str, Any]]:
        for index in range(num_sequences):
            origin = SequenceOrigin(group, index)
            if origin in self._skipped:
                yield {"index": index, "skipped": self._skipped[origin]}
            else:
                values_3N = values_3M[:, self._cuts[origin]]
                yield {"index": index, **_tokens(self._rows[origin], values_3N)}


def _tokens(row: Row, values_3N: NDArray[np.float32]) -> dict[str, Any]:
    """Describe a computed sequence; `at` are indices of its tokens. Supervised tokens have no sampled logprobs."""
    logprobs_N, entropy_N, clipped_N = values_3N.astype(np.float64)
    advantages = _short(row.advantages)
    is_constant = len(set(advantages)) == 1
    gap = None if row.is_supervised else float(np.abs(logprobs_N - row.sampled_logprobs).mean())
    return {
        "advantage": float(row.advantages.mean()),
        "clip_fraction": float(clipped_N.mean()),
        "logprob_gap": gap,
        "at": (row.trained + 1).tolist(),
        "logprobs": _short(logprobs_N),
        "sampled": None if row.is_supervised else _short(row.sampled_logprobs),
        "advantages": advantages[0] if is_constant else advantages,
        "entropies": _short(entropy_N),
        "clipped": clipped_N.astype(int).tolist(),
    }


def _short(values_N: NDArray[np.float64]) -> list[float]:
    return values_N.round(_DIGITS).tolist()
