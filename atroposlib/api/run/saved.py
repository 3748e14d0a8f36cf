"""Restore a run from its store; `RunState.take_change` writes what is read here."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from atroposlib.api.run.leases import HeldBatch
from atroposlib.api.run.state import ENVIRONMENT_FACT, TRAINER_FACT, RunState
from atroposlib.api.schemas import MAX_ENV_NAME_CHARS, Registration
from atroposlib.api.stores.base import Place, SavedRun, UnreadableRun
from atroposlib.scored_data import GroupHeader


def restore(run: RunState, saved: SavedRun, *, now: float) -> None:
    """Restore the state; changes made on the way stay pending for the store. Raises `UnreadableRun`."""
    try:
        if saved.document is not None:
            facts = {name: msgspec.json.decode(fact) for name, fact in saved.facts.items()}
            _restore_document(run, msgspec.json.decode(saved.document), facts, now=now)
        _restore_groups(run, saved, now=now)
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as e:
        raise UnreadableRun(f"the stored state of run {run.name!r} cannot be read: {e!r}") from e


def _restore_document(
    run: RunState, document: Mapping[str, Any], facts: Mapping[str, Any], *, now: float
) -> None:
    trainer = facts.get(TRAINER_FACT)
    environments = [fact for name, fact in facts.items() if name.startswith(ENVIRONMENT_FACT)]
    is_without_facts = "environments" in document
    if is_without_facts:  # written by an older version, which accepted names of any length
        trainer, environments = document["trainer"], document["environments"]
        for each in environments:
            registration = each["registration"]
            registration["desired_name"] = registration["desired_name"][:MAX_ENV_NAME_CHARS]
    run.experiment = document.get("experiment")
    run.environments.restore(environments, now=now)
    if trainer is not None:
        run.trainer = Registration.model_validate(trainer)
        # None: written by an older version, without experiment ids.
        run.experiment = run.experiment or secrets.token_hex(16)
    if is_without_facts:
        run.note_trainer()
        for environment in run.environments:
            run.note_environment(environment)
    run.has_started = document["has_started"]
    run.policy_version = document["policy_version"]
    run.leases.restore(document)
    run.rejected = Counter(document["rejected"])
    run.num_duplicates = document["duplicates"]


def _restore_groups(run: RunState, saved: SavedRun, *, now: float) -> None:
    run.next_number = saved.next_number
    run.num_accepted = len(saved.groups) + saved.ended.total()
    run.ended = Counter(saved.ended)
    members: dict[int, list[GroupHeader]] = {row.number: [] for row in saved.batches}
    buffered: list[GroupHeader] = []
    for group in saved.groups:
        number = group.header.number
        if group.deliveries:
            run.deliveries[number] = group.deliveries
        if group.batch is not None:
            members[group.batch].append(group.header)
        elif group.place is Place.DEAD:
            run.dead.add(group.header, group.reason or "")
        elif group.place is Place.BUFFERED:
            buffered.append(group.header)
        else:
            run.queue.add(group.header)
            run.latest = number
    batches = [HeldBatch(row=row, headers=members[row.number]) for row in saved.batches]
    run.leases.restore_batches(batches, now=now)
    for batch in list(run.leases.leased.values()):
        # A plain delivery's connection died with the process, before the body was confirmed.
        if batch.row.is_plain:
            run.take_back(batch, is_failure=False)
    for header in buffered:
        run.buffer(header)
