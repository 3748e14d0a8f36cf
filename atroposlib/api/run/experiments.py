"""What a trainer's registration means: begin an experiment, join the live one, or resume one. Pure.

An *experiment* is one training from its first step on, across restarts of the trainer and the hub. A run holds one
experiment at a time; the earlier one is set aside under a name of its own. `Hub` carries out what `choose` says.
"""

from __future__ import annotations

import enum

from atroposlib.api.schemas import RegisterTrainer

TRAINER_TIMEOUT_S = 60.0
"""A trainer not heard from for this long no longer keeps an original client from beginning an experiment."""


class Entry(enum.Enum):
    """How a trainer enters a run."""

    BEGIN = "begin"
    """A new, empty experiment; the current one, if there is one, is set aside."""
    JOIN = "join"
    """The live experiment, which stays as it is."""
    RESUME = "resume"
    """The experiment it names, else the current one, from a checkpoint."""


def choose(asked: RegisterTrainer, *, current: str | None, is_trainer_alive: bool) -> Entry:
    """Say how a trainer enters a run whose experiment is `current`; None: no trainer has registered yet.

    Our own trainers say what they want. One of the original cannot: it joins while another trainer was heard from
    lately; otherwise `starting_step` 0 begins and a higher one resumes.
    """
    if asked.resume_step is not None:
        return Entry.RESUME
    if asked.experiment is not None:
        # Its own experiment: the answer to the first registration was lost.
        return Entry.JOIN if asked.experiment == current else Entry.BEGIN
    if current is None:
        return Entry.BEGIN
    if is_trainer_alive:
        return Entry.JOIN
    return Entry.RESUME if asked.starting_step > 0 else Entry.BEGIN
