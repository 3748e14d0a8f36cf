"""What a trainer's registration does: begin an experiment, join the live one, or resume one.

An *experiment* is one training from its first step on, across restarts of the trainer and the hub. A run holds one
experiment at a time; `Hub` sets the earlier one aside under its own name.
"""

from __future__ import annotations

import enum
import logging
import math
import secrets
import uuid

from atroposlib.api.run.state import RunState
from atroposlib.api.run.types import RunFinished
from atroposlib.api.schemas import RegisterTrainer, Registration, RegistrationReply, Resume
from atroposlib.api.stores.base import Fate, Place

TRAINER_TIMEOUT_S = 60.0
"""After this long without a call, a trainer no longer prevents an original one from beginning an experiment."""


class Entry(enum.Enum):
    BEGIN = "begin"
    """A new, empty experiment; the current one, if there is one, is set aside."""
    JOIN = "join"
    """The live experiment, unchanged."""
    RESUME = "resume"
    """The experiment it names, else the current one, from a checkpoint."""


def entry_to(run: RunState, asked: RegisterTrainer, *, now: float) -> Entry:
    """Decide how a trainer enters a run.

    Native trainers say what they want. An original one joins if another trainer is alive; otherwise `starting_step` 0
    begins and a higher one resumes.
    """
    if asked.resume_step is not None:
        return Entry.RESUME
    if asked.experiment is not None:
        # Its own experiment: the answer to the first registration was lost.
        return Entry.JOIN if asked.experiment == run.experiment else Entry.BEGIN
    if run.experiment is None:  # no trainer has registered yet
        return Entry.BEGIN
    if run.trainer_seen is not None and now - run.trainer_seen < TRAINER_TIMEOUT_S:
        return Entry.JOIN
    return Entry.RESUME if asked.starting_step > 0 else Entry.BEGIN


def register(run: RunState, asked: RegisterTrainer, *, now: float) -> RegistrationReply:
    """Register the trainer of this run's experiment: the first one, one that joins, or one that resumes.

    Raises `RunFinished` for one that would join after the last step.
    """
    entry = entry_to(run, asked, now=now)
    counts: dict[str, int] = {}
    if entry is Entry.JOIN:
        _check_unfinished(run, asked, now=now)
        _note_conflicts(run, asked)
    else:
        mode = asked.resume
        if run.trainer is None:
            run.leases.last_step = asked.starting_step
        elif mode is Resume.REPLAY and asked.batch_size != run.batch_size:
            mode = Resume.REQUEUE
        if entry is Entry.RESUME:
            step = asked.starting_step if asked.resume_step is None else asked.resume_step
            counts = _resume(run, step, mode)
            counts["step"] = run.current_step
        run.trainer = Registration.model_validate(
            asked.model_dump(include=set(Registration.model_fields))
        )
        run.experiment = asked.experiment or run.experiment or secrets.token_hex(16)
        run.conflicts = []
        run.note_trainer()
        run.bury_oversized()
        run.log.info(
            "trainer registered: batch_size %d, step %d of %d",
            asked.batch_size,
            run.current_step,
            asked.num_steps,
        )
    run.trainer_seen = now
    if asked.experiment is None and asked.resume_step is None:
        return RegistrationReply(uuid=uuid.uuid4().int)  # an original trainer
    return RegistrationReply(
        uuid=uuid.uuid4().int,
        epoch=run.leases.epoch,
        experiment=run.experiment,
        max_staleness=run.max_staleness,
        **counts,
    )


def _check_unfinished(run: RunState, asked: RegisterTrainer, *, now: float) -> None:
    assert run.trainer is not None
    num_steps = run.trainer.num_steps
    if asked.experiment is None and 0 < num_steps <= run.current_step:
        assert run.trainer_seen is not None, "only a live run is joined"
        left_s = math.ceil(run.trainer_seen + TRAINER_TIMEOUT_S - now)
        raise RunFinished(
            f"run {run.name!r} is at step {run.current_step} of {num_steps} of a trainer that has called in the last"
            f" minute: register again in {left_s} s to begin another experiment, or with another run (/runs/NAME)"
        )


def _note_conflicts(run: RunState, asked: RegisterTrainer) -> None:
    """Record the settings that a joining trainer requested and does not get."""
    assert run.trainer is not None
    conflicts = [
        f"{name}: {stays!r} stays, {getattr(asked, name)!r} was asked for"
        for name, stays in run.trainer
        if name != "starting_step" and getattr(asked, name) != stays
    ]
    run.conflicts = conflicts or run.conflicts
    run.log.warning(
        "a second trainer registered and joins the live run at step %d%s",
        run.current_step,
        f"; not changed for it: {'; '.join(conflicts)}" if conflicts else "",
    )


def _resume(run: RunState, step: int, mode: Resume) -> dict[str, int]:
    """Void all leases; replay, requeue or discard every batch that was not trained at or before `step`.

    Return the counts for the reply. The policy version stays until the trainer publishes one: it does not count steps.
    A checkpoint newer than the run, as after a restore, is only reported: an original trainer may count other steps.
    """
    unknown_steps = 0 if run.trainer is None else max(0, step - run.leases.known_step)
    run.unknown_steps += unknown_steps
    was_leased = set(run.leases.leased)
    counts = dict.fromkeys(("replayed", "requeued", "discarded"), 0)
    for batch in run.leases.undo(step):
        alive = list(batch.headers)
        if mode is Resume.DISCARD:
            run.end(alive, Fate.DISCARDED)
            counts["discarded"] += len(alive)
        elif batch.row.number in was_leased:
            alive = run.count_failure(alive)
        # A batch that lost a member is not the batch that was trained on.
        if mode is Resume.REPLAY and len(alive) == len(batch.headers):
            run.leases.replay(batch)
            run.note_batch(batch, Place.REPLAY)
            counts["replayed"] += len(alive)
            continue
        run.note_end(batch)
        if mode is not Resume.DISCARD:
            run.enqueue(alive)
            counts["requeued"] += len(alive)
    counts["forgotten_steps"] = max(0, run.leases.freed_step - step)
    counts["unknown_steps"] = unknown_steps
    run.log.log(
        logging.WARNING if any(counts.values()) else logging.INFO,
        "a trainer resumes at step %d (epoch %d): %s",
        step,
        run.leases.epoch,
        ", ".join(f"{name} {count}" for name, count in counts.items()),
    )
    return counts
