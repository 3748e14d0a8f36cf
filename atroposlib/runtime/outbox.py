"""Outgoing groups of an environment: `check_group`, the drop rules, the line in the JSONL file, and sending to the hub.

Invariant: a group is either counted as dropped with a reason, or it keeps its group id and stays here until the hub
stores it or refuses it permanently. The outbox alone retries `HubClient.send`. It does not decide when to start work;
`hub_link.py` and `items.py` read `num_held` and `hub_unavailable` for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from atroposlib.client import AnotherExperiment, EnvStatus, HubClient, UnknownEnvironment
from atroposlib.envs.author_groups import (
    Dropped,
    drop_rule,
    in_thread_if_large,
    one_message,
    plain_group,
)
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import GroupError, HubRejected, HubUnavailable
from atroposlib.inference.servers.sampling_notes import (
    ItemRecord,
    SamplingNotes,
    item_notes,
    noting_sampling,
    recorded,
)
from atroposlib.patience import Backoff, wait_for_first
from atroposlib.runtime.group_log import ALWAYS_WRITTEN, group_line
from atroposlib.runtime.group_rows import Provenance, item_json, text_messages
from atroposlib.runtime.losses import is_logged, listed, sample
from atroposlib.samples import are_supervised, completion_mask, num_trained, rollout_scores
from atroposlib.scored_data import FIELD, ScoredDataGroup, ScoredGroup, Strictness, check_group
from atroposlib.utils.tracing import note_group

logger = logging.getLogger(__name__)

Reregister = Callable[[int], Awaitable[None]]
"""Registers again unless the given id was already replaced; returns once registered."""

MAX_GROUPS_PER_SEND = 16
MAX_TOKENS_PER_SEND = 1_000_000
"""About 12 MB: well below a hub's body limit, and the most that a lost answer makes us send again."""

MAX_ITEM_BYTES = 1_000_000
"""Rows of larger items are written without item and requests."""

REST = "in no group"
"""What became of sampled tokens that no group of their item trains: left out, masked, or a judge's."""

LOCKED_OUT_STATUSES = frozenset({401, 403})
"""The hub refuses the bearer token, not a group."""


class Lines(Protocol):
    """Receives the JSON of each accepted group: a `GroupLog`, or the list of a replay."""

    def write(self, line: bytes) -> None: ...


class Outbox:
    """Checks, records and sends the groups of one environment."""

    def __init__(
        self,
        env: EnvHooks,
        *,
        log: Lines | None = None,
        backoff: Backoff | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._env = env
        self._environment = env.registered_name
        self._log = log
        self._provenance = Provenance(env)
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self._held: deque[_Held] = deque()
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._num_repaired = 0
        self._has_warned_of_temperatures = False
        self._num_restored = 0
        self._on_restored: Callable[[], None] = lambda: None
        self.author_sends: Callable[[Any], Awaitable[None]] | None = None
        """The environment's own `_send_scored_data_to_api`; None if it keeps the default."""
        self.on_status: Callable[[EnvStatus], None] = lambda _: None
        """Called with the status in a hub's answer; it counts every group in `num_stored`."""
        self.experiment: str | None = None
        """The trainer's current experiment, as given by the hub; None from an original hub."""
        self.hub_unavailable = False
        """Whether the hub was unavailable at the last attempt."""
        self.num_accepted = 0
        """Groups that passed `check_group` and the drop rules."""
        self.num_tokens_trained = 0
        """Trained positions of these groups."""
        self.tokens: Counter[str] = Counter()
        """Tokens sampled for ended items, by what became of them: `trained`, the reason for which their group was
        dropped, REST, `failed`, `unfinished`. The sum is the number sampled, so REST is negative if more tokens are
        trained than were sampled. Items without sampled tokens are not counted."""
        self._open_items: set[SamplingNotes] = set()
        self._has_warned_of_tokens = False
        self._score_sum, self._num_scores = 0.0, 0
        self.num_equal_scores = 0
        """Accepted groups that teach nothing: all scores are the same, and nothing else says what to learn."""
        self.num_stored = 0
        """Groups the hub has confirmed."""
        self.dropped: Counter[str] = Counter()
        """Groups that will never be sent, by reason."""
        self.samples: dict[str, str] = {}
        """The first group of each reason in `dropped`."""

    @property
    def num_held(self) -> int:
        """Groups not yet stored by the hub, including those being sent."""
        return len(self._held)

    @property
    def held(self) -> list[ScoredGroup]:
        """The held groups, oldest first."""
        return [held.group for held in self._held]

    def notes_of(self, item: Any) -> SamplingNotes:
        """Return the notes for sampling an item in `serve`; with a file for the groups, its requests are recorded."""
        if self._log is not None:
            json = item_json(item)
            if len(bytes(json)) <= MAX_ITEM_BYTES:
                return ItemRecord(item=json, takes_text=False)
        return SamplingNotes()

    @contextlib.contextmanager
    def item(self, notes: SamplingNotes) -> Iterator[None]:
        """Note what is sampled in the block for one item, and count at its end what became of the tokens."""
        self._open_items.add(notes)
        rest = "failed"
        try:
            with noting_sampling(notes):
                yield
            rest = REST
        except asyncio.CancelledError:
            rest = "unfinished"
            raise
        finally:
            self._open_items.discard(notes)
            if notes.num_sampled:
                self.tokens.update(notes.fates)
                self.tokens[rest] += notes.num_sampled - notes.fates.total()
                self._check_tokens()

    @property
    def num_tokens_not_sampled(self) -> int:
        """Trained positions beyond the tokens that were sampled."""
        # An item may train what another one sampled, also one that failed or is in flight.
        others = sum(notes.num_sampled for notes in self._open_items)
        others += self.tokens["failed"] + self.tokens["unfinished"]
        return max(0, -self.tokens[REST] - others)

    def _check_tokens(self) -> None:
        if self.num_tokens_not_sampled and not self._has_warned_of_tokens:
            self._has_warned_of_tokens = True
            logger.warning(
                "environment %r sends %d trained tokens more than it sampled: sequences that have a turn in common"
                " train it twice (keep it in one of them with sequences.train_once), or their text was tokenised again"
                " (send the nodes' tokens, or mark sequences that were not sampled with the override sft)",
                self._environment,
                self.num_tokens_not_sampled,
            )

    def restore(self, groups: Sequence[ScoredGroup], on_stored: Callable[[], None]) -> None:
        """Queue groups of an earlier process before all others; call `on_stored` once the hub has answered them all."""
        self._held.extendleft(_Held(group, self.experiment) for group in reversed(groups))
        self._num_restored, self._on_restored = len(groups), on_stored
        self._drained.clear()
        self._changed.set()

    async def accept(
        self,
        scored_data: ScoredDataGroup | Sequence[ScoredDataGroup | None] | None,
        item: Any = None,
        *,
        send: bool = True,
        abort_on_max_length: bool = True,
    ) -> int:
        """Check, record and (with `send`) queue one group or a list; return how many were accepted.

        A malformed group is dropped and logged. If every group of an item is malformed, the item failed: raises the
        first `GroupError`. Groups sent without an item (for example from `env_step_checks`) never raise it.
        """
        groups = [scored_data] if isinstance(scored_data, Mapping) else list(scored_data or [])
        accepted, errors, num_judged = 0, [], 0
        for_author: list[dict[str, Any]] = []
        for given in groups:
            if given is None:
                self._drop("none", "the list of groups has a None", item)
                continue
            num_judged += 1
            group = plain_group(given)
            try:
                checked = await self._judge(group, abort_on_max_length)
            except Dropped as verdict:
                self._drop(verdict.reason, str(verdict), item)
                continue
            except GroupError as error:
                errors.append(error)
                self._drop("malformed", str(error), item)
                continue
            await self._record(group, checked, item)
            scores, _ = rollout_scores(checked.scores, checked.rollout)
            note_group(
                checked.group_id,
                {
                    "atropos.score_mean": float(scores.mean()),
                    "atropos.num_sequences": checked.num_sequences,
                    "atropos.policy_version": checked.policy_version,
                },
            )
            accepted += 1
            self.num_accepted += 1
            self._score_sum += float(scores.sum())
            self._num_scores += len(scores)
            self.num_equal_scores += bool((scores == scores[0]).all()) and not (
                checked.advantages is not None
                or checked.distill_token_ids is not None
                or are_supervised(checked).any()
            )
            if not send:
                continue
            self._env.items_sent_this_step += 1
            if self.author_sends is None:
                self._hold(checked)
            else:
                for_author.append(self._as_sent(group, checked))
        if self.author_sends is not None and for_author:
            is_one = isinstance(scored_data, Mapping)
            await self.author_sends(for_author[0] if is_one else for_author)
        if errors and item is not None and len(errors) == num_judged:
            raise errors[0]
        return accepted

    async def post(self, scored_data: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Hold the groups that an overridden `_send_scored_data_to_api` passes to the default."""
        groups = [scored_data] if isinstance(scored_data, Mapping) else scored_data
        for group in map(plain_group, groups):
            self._hold(await in_thread_if_large(group, self._check, group))

    async def run(self, hub: HubClient, *, reregister: Reregister) -> None:
        """Send held groups until cancelled; retry while the hub is unavailable, register again if it lost the id.

        Raises `HubRejected` when the hub refuses the token; unsent groups stay held.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            size = MAX_GROUPS_PER_SEND
            while self._held:
                size = await self._send_some(hub, min(size, len(self._held)), reregister)
            self._drained.set()

    async def flush(self, timeout_s: float, skip_wait: asyncio.Event | None = None) -> int:
        """Wait until nothing is held, `timeout_s` is over or `skip_wait` is set; return the number still held."""
        events = (self._drained, skip_wait) if skip_wait else (self._drained,)
        await wait_for_first([event.wait() for event in events], timeout_s=timeout_s)
        if self._held:
            logger.warning("%d groups are not delivered yet", self.num_held)
        return self.num_held

    @property
    def mean_score(self) -> float | None:
        """Mean of the scores of all accepted groups; None before the first."""
        return self._score_sum / self._num_scores if self._num_scores else None

    def summary(self) -> str:
        """Return one line: groups accepted, stored, held, and dropped by reason."""
        return (
            f"{self.num_accepted} groups accepted, {self.num_stored} stored by the hub, "
            f"{self.num_held} held; dropped: {listed(self.dropped)}"
        )

    async def _send_some(self, hub: HubClient, size: int, reregister: Reregister) -> int:
        """Try to send the oldest groups, at most `size`; return the size of the next attempt."""
        known_id = self._env.env_id or 0
        experiment = self._held[0].experiment
        groups = [group.replace(env_id=known_id) for group in self._oldest(size)]
        size = len(groups)
        try:
            receipt = await hub.send(groups, experiment=experiment)
        except AnotherExperiment as error:
            self._settle(size)
            for _ in groups:
                self._drop("another_run", str(error))
            if self.experiment == experiment:
                await reregister(known_id)
            return MAX_GROUPS_PER_SEND
        except UnknownEnvironment:
            logger.warning("the hub does not know this environment any more; registering again")
            await reregister(known_id)
            return size
        except HubUnavailable as error:
            await self._wait_for_hub(error)
            return size
        except HubRejected as error:
            if error.status in LOCKED_OUT_STATUSES:
                raise
            if size > 1:  # find the refused one
                self._settle(0)
                return 1
            self._settle(1)
            self._drop(f"rejected_{error.status}", f"the hub refused it: {error}")
            return MAX_GROUPS_PER_SEND
        self._settle(size)
        self.num_stored += size
        if receipt.env_status is not None and (self._env.env_id or 0) == known_id:
            self.on_status(receipt.env_status)
        return min(2 * size, MAX_GROUPS_PER_SEND)

    def _hold(self, group: ScoredGroup) -> None:
        self._held.append(_Held(group, _experiment_of_item.get() or self.experiment))
        self._drained.clear()
        self._changed.set()

    def _as_sent(self, group: Mapping[str, Any], checked: ScoredGroup) -> dict[str, Any]:
        """Return the author's dict as the original passes it to `_send_scored_data_to_api`."""
        defaults = dict.fromkeys(ALWAYS_WRITTEN)
        own = {**defaults, **group, "group_id": checked.group_id, "env_id": self._env.env_id}
        return own if checked.messages is None else {**own, "messages": checked.messages}

    def _settle(self, count: int) -> None:
        """Record that the hub is available; remove the oldest groups, which it has stored or refused."""
        for _ in range(count):
            self._held.popleft()
        if self._num_restored > 0:
            self._num_restored -= count
            if self._num_restored <= 0:
                self._on_restored()
        if self.hub_unavailable:
            self._backoff.reset()
            self.hub_unavailable = False
            logger.info("the hub is available again; %d groups still held", self.num_held)

    def _oldest(self, size: int) -> list[ScoredGroup]:
        """Return the oldest groups of one experiment, at most `size` and `MAX_TOKENS_PER_SEND` (at least one group)."""
        groups: list[ScoredGroup] = []
        num_tokens = 0
        for group, experiment in itertools.islice(self._held, size):
            num_tokens += group.num_tokens
            is_too_much = num_tokens > MAX_TOKENS_PER_SEND
            if groups and (is_too_much or experiment != self._held[0].experiment):
                break
            groups.append(group)
        return groups

    async def _wait_for_hub(self, error: HubUnavailable) -> None:
        if not self.hub_unavailable:
            self.hub_unavailable = True
            logger.warning("the hub is unavailable; holding %d groups: %s", self.num_held, error)
        await self._sleep(self._backoff.next(asked_s=error.retry_after_s))

    def _drop(self, reason: str, detail: str, item: Any = None) -> None:
        self.dropped[reason] += 1
        note_group(None, {"atropos.dropped": reason})
        count = self.dropped[reason]
        if is_logged(count):
            shown = sample(detail, item)
            self.samples.setdefault(reason, shown)
            logger.warning("group dropped (%s, %d so far): %s", reason, count, shown)

    async def _judge(self, group: Mapping[str, Any], abort_on_max_length: bool) -> ScoredGroup:
        """Apply `check_group`, then the drop rules in the original's order."""
        checked = await in_thread_if_large(group, self._check, group)
        config = self._env.config
        verdict = drop_rule(
            checked,
            config=config,
            max_token_len=self._env.max_token_len,
            abort_on_max_length=abort_on_max_length,
        )
        lengths = num_trained(checked, completion_mask(checked))
        if verdict is None or verdict.reason == "too_long":
            self._env.completion_lengths.extend(lengths.tolist())
        if (notes := item_notes.get()) is not None:
            fate = "trained" if verdict is None else verdict.reason
            notes.fates[fate] += int(lengths[~are_supervised(checked)].sum())
        if verdict is not None:
            raise verdict
        self.num_tokens_trained += int(lengths.sum())
        if config.include_messages and checked.messages is None:
            checked = await in_thread_if_large(group, self._with_text, checked)
        return checked

    def _with_notes(self, checked: ScoredGroup, group: Mapping[str, Any]) -> ScoredGroup:
        """Add the item's policy version and sampling temperature where the author gives none."""
        notes = item_notes.get()
        if notes is None:
            return checked
        if "policy_version" not in group:
            checked = checked.replace(policy_version=notes.oldest)
        if checked.weight_versions is None and notes.has_several_versions:
            tokens = checked.to_dict(["tokens"])["tokens"]
            checked = checked.replace(weight_versions=notes.versions_in(tokens))
        if notes.temperatures <= {1.0} or _gives_temperature(checked):
            return checked
        if len(notes.temperatures) == 1:
            found = {"temperature": min(notes.temperatures)}
            return checked.replace(generation_params={**(checked.generation_params or {}), **found})
        if not self._has_warned_of_temperatures:
            self._has_warned_of_temperatures = True
            logger.warning(
                "environment %r sampled one item at temperatures %s, and its groups do not give theirs: the trainer "
                "assumes 1. Put `temperature` into `overrides`, one dict per sequence; sample untrained text "
                'with split="eval"',
                self._environment,
                ", ".join(f"{temperature:g}" for temperature in sorted(notes.temperatures)),
            )
        return checked

    def _with_text(self, checked: ScoredGroup) -> ScoredGroup:
        """Add one message per sequence that holds all of its text."""
        record = recorded()
        texts = text_messages(checked, record) if record is not None else None
        return checked.replace(
            messages=texts
            or [
                one_message(self._env.decode_tokens(checked.sequence(i).tokens.tolist()))
                for i in range(checked.num_sequences)
            ],
            empty_fields=checked.empty_fields - {"messages"},
        )

    def _check(self, group: Mapping[str, Any]) -> ScoredGroup:
        """Apply `check_group` and add the group's id and what is noted of its item."""
        checked = check_group(group, strictness=Strictness.MEANING, environment=self._environment)
        if checked.repairs:
            if self._num_repaired == 0:
                logger.warning(
                    "masks of 0 and 1 are read as labels (%s); write -100 or the token itself",
                    ", ".join(checked.repairs),
                )
            self._num_repaired += 1
        checked = checked.replace(group_id=checked.group_id or uuid.uuid4().hex)
        return self._with_notes(checked, group)

    async def _record(self, group: Mapping[str, Any], checked: ScoredGroup, item: Any) -> None:
        """Add the group to the rollout table and write its JSONL line."""
        readable = {**group, "messages": checked.messages} if checked.messages else dict(group)
        try:
            await self._env.add_rollouts_for_wandb(readable, item)
        except Exception:
            logger.exception("add_rollouts_for_wandb failed; the group is kept")
        if self._log is None:
            return
        fields = await in_thread_if_large(group, checked.to_dict, FIELD)
        more: dict[str, Any] = {"group_id": checked.group_id, "environment": self._environment}
        if (notes := item_notes.get()) is not None and notes.broken_prefixes:
            more |= {"turns_not_continued": dict(notes.broken_prefixes)}
        if (record := recorded()) is not None:
            more |= self._provenance.of(fields["tokens"], item, record)
        line = await in_thread_if_large(group, group_line, group, fields, more)
        self._log.write(line)


def _gives_temperature(group: ScoredGroup) -> bool:
    """Whether the author gives every sequence a temperature, in one of the three places that a trainer reads."""

    def gives(source: Mapping[str, Any] | None) -> bool:
        return (source or {}).get("temperature") is not None

    whole_group = gives(group.generation_params) or gives(group.group_overrides)
    return whole_group or (bool(group.overrides) and all(map(gives, group.overrides or ())))


class _Held(NamedTuple):
    """A group that the hub has not stored yet."""

    group: ScoredGroup
    experiment: str | None
    """The experiment it was sampled for; None if unknown."""


_experiment_of_item: ContextVar[str | None] = ContextVar("experiment_of_item", default=None)


@contextlib.contextmanager
def sampling_for(experiment: str | None) -> Iterator[None]:
    """Mark groups queued inside the block as sampled for `experiment`."""
    token = _experiment_of_item.set(experiment)
    try:
        yield
    finally:
        _experiment_of_item.reset(token)
