"""The outbox: every group is stored or counted as dropped with a reason."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.client import AnotherExperiment, EnvStatus, SendReceipt, UnknownEnvironment
from atroposlib.errors import GroupError, HubRejected, HubUnavailable
from atroposlib.frontend.view_groups import view_of_row
from atroposlib.inference.harness import ServerHarness
from atroposlib.inference.servers.sampling_notes import (
    ItemRecord,
    SamplingNotes,
    note_sampling,
    noting_sampling,
)
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.outbox import MAX_ITEM_BYTES, Outbox
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from tests.runtime.helpers_runtime import ScriptedEnv, make_group
from tests.runtime.test_group_rows import Adding, hosted


class FakeHub:
    """Answers `send` from a script of errors; an empty script stores, and answers what `on_stored` returns."""

    def __init__(
        self,
        *script: Exception | None,
        refuse: set[str] | None = None,
        on_stored: Callable[[Sequence[ScoredGroup]], EnvStatus | None] = lambda groups: None,
    ) -> None:
        self.script = list(script)
        self.refuse = refuse or set()
        self.on_stored = on_stored
        self.stored: list[ScoredGroup] = []
        self.num_attempts = 0

    async def send(
        self, groups: Sequence[ScoredGroup], *, experiment: str | None = None
    ) -> SendReceipt:
        self.num_attempts += 1
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        if any(group.group_id in self.refuse for group in groups):
            raise HubRejected("422 no", status=422, detail="no")
        self.stored += groups
        return SendReceipt(status="received", env_status=self.on_stored(groups))


async def deliver(outbox: Outbox, hub: Any, *, env: ScriptedEnv | None = None) -> None:
    async def reregister(old_id: int) -> None:
        if env is not None:
            env.env_id = old_id + 1

    sender = asyncio.create_task(outbox.run(hub, reregister=reregister))
    await outbox.flush(2.0)
    sender.cancel()


def make_outbox(
    env: ScriptedEnv, log: GroupLog | None = None, naps: list[float] | None = None
) -> Outbox:
    async def sleep(seconds: float) -> None:
        (naps if naps is not None else []).append(seconds)

    return Outbox(env, log=log, sleep=sleep)


def sampled(*, num_sampled: int = 0, then: BaseException | None = None) -> None:
    """Sample the two answers of `make_group(2)`, four tokens, and `num_sampled` that are only counted."""
    outputs = [[6, 7], [6, 8]]
    note_sampling({}, [None] * 2, prompt=[5], outputs=outputs, num_sampled=num_sampled)
    if then is not None:
        raise then


async def test_sampled_tokens_are_counted_by_what_became_of_them() -> None:
    outbox = make_outbox(ScriptedEnv(group_size=2))
    with outbox.item(SamplingNotes()):
        sampled()
        sampled(num_sampled=3)
        await outbox.accept(make_group())
    with outbox.item(SamplingNotes()):
        sampled()
        await outbox.accept(make_group(scores=[1.0, 1.0]))
    with pytest.raises(GroupError), outbox.item(SamplingNotes()):
        sampled(then=GroupError("no"))
    with pytest.raises(asyncio.CancelledError), outbox.item(SamplingNotes()):
        sampled(then=asyncio.CancelledError())
    with outbox.item(SamplingNotes()):
        await outbox.accept(make_group())  # given text
    assert outbox.tokens == {
        "trained": 4,
        "in no group": 7,
        "equal_scores": 4,
        "failed": 4,
        "unfinished": 4,
    }
    assert outbox.num_tokens_not_sampled == 0


async def test_tokens_trained_twice_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = make_outbox(ScriptedEnv(group_size=2))
    notes, other = SamplingNotes(), SamplingNotes()
    for _ in range(2):
        with outbox.item(notes if not outbox.tokens else other):
            sampled()
            await outbox.accept([make_group(), make_group()])
            supervised = make_group() | {"overrides": [{"sft": True}] * 2}
            await outbox.accept(supervised)
    assert outbox.num_tokens_not_sampled == 8
    assert caplog.text.count("sends 4 trained tokens more than it sampled") == 1


async def test_groups_of_several_items_train_what_the_others_sampled() -> None:
    outbox = make_outbox(ScriptedEnv(group_size=2))
    with outbox.item(SamplingNotes()):
        sampled()
        with outbox.item(SamplingNotes()):
            sampled()
            await outbox.accept([make_group(), make_group()])
        assert outbox.num_tokens_not_sampled == 0  # the outer item is in flight
    assert outbox.tokens == {"trained": 8, "in no group": 0}


async def test_an_item_may_train_what_a_failed_attempt_sampled() -> None:
    outbox = make_outbox(ScriptedEnv(group_size=2))
    with pytest.raises(GroupError), outbox.item(SamplingNotes()):
        sampled(then=GroupError("no"))
    with outbox.item(SamplingNotes()):
        sampled()
        await outbox.accept([make_group(), make_group()])
    assert outbox.num_tokens_not_sampled == 0


@pytest.mark.parametrize(
    ("reason", "fields", "group"),
    [
        ("group_size", {"group_size": 3}, make_group(2)),
        ("equal_scores", {}, make_group(scores=[1.0, 1.0])),
        ("group_size", {}, make_group(4, scores=[1.0, 0.0, 0.0, 0.0]) | {"rollout": [0, 1, 2, 2]}),
        ("equal_scores", {}, make_group(3, scores=[1.0, 0.0, 0.5]) | {"rollout": [5, 5, 2]}),
        ("too_long", {}, make_group() | {"tokens": [[1] * 9] * 2, "masks": [[1] * 9] * 2, "inference_logprobs": None}),
        ("none", {}, None),
    ],
)  # fmt: skip
async def test_drop_rule_is_counted(reason: str, fields: dict[str, Any], group: Any) -> None:
    env = ScriptedEnv(**fields)
    env.max_token_len = 9
    outbox = make_outbox(env)
    assert await outbox.accept([group]) == 0
    assert outbox.dropped == {reason: 1}
    assert outbox.num_held == 0


@pytest.mark.parametrize(
    "change",
    [
        {"group_overrides": {"group_size": 2}},
        {"group_overrides": None, "_fields": {"group_size": 2}},
        {"scores": [1.0, 1.0], "_fields": {"group_size": 2, "ensure_scores_are_not_same": False}},
    ],
)
async def test_rule_that_does_not_apply_lets_the_group_pass(change: dict[str, Any]) -> None:
    env = ScriptedEnv(**{"group_size": 7, **change.pop("_fields", {})})
    assert await make_outbox(env).accept(make_group() | change) == 1


async def test_malformed_group_in_a_list_costs_only_itself() -> None:
    bad = make_group() | {"masks": [[1]]}
    outbox = make_outbox(ScriptedEnv())
    assert await outbox.accept([bad, make_group()]) == 1
    assert outbox.dropped == {"malformed": 1}
    with pytest.raises(GroupError, match="masks: 1 entries for 2 sequences"):
        await outbox.accept([bad], 7)
    assert await outbox.accept([bad]) == 0  # sent by a hook: no item is to blame


async def test_texts_in_place_of_messages_are_one_message_each() -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    outbox = make_outbox(ScriptedEnv())
    await outbox.accept(make_group() | {"messages": ["whole text", talk]})
    assert outbox.held[0].messages == [[{"role": "user", "content": "whole text"}], talk]


async def test_numpy_values_and_policy_version_arrive() -> None:
    group = make_group() | {"policy_version": 7}
    group["tokens"] = [np.array(row, dtype=np.int64) for row in group["tokens"]]
    group["scores"] = np.array([0.5, 1.0], dtype=np.float32)
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub()
    await outbox.accept(group)
    await deliver(outbox, hub)
    assert hub.stored[0].policy_version == 7
    assert hub.stored[0].scores.tolist() == [0.5, 1.0]
    assert hub.stored[0].env_id == 0


class Tensor:
    """Stands for torch's tensor, which this suite does not load: what `plain_group` uses of it."""

    def __init__(self, values: Any, *, is_narrow: bool = False) -> None:
        self.values, self.is_narrow = np.asarray(values), is_narrow

    def detach(self) -> Tensor:
        return self

    cpu = detach

    def is_floating_point(self) -> bool:
        return bool(self.values.dtype.kind == "f")

    def element_size(self) -> int:
        return 2 if self.is_narrow else 8

    def float(self) -> Tensor:
        return Tensor(self.values)

    def numpy(self) -> Any:
        if self.is_narrow:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


Tensor.__module__ = "torch"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": Tensor([[5, 6, 7], [5, 6, 8]]), "masks": Tensor([[-100, 6, 7], [-100, 6, 8]])},
        {"tokens": [Tensor([5, 6, 7]), Tensor([5, 6, 8])]},
        {"scores": Tensor([0.0, 1.0], is_narrow=True)},
        {"scores": [Tensor(0.0), Tensor(1.0, is_narrow=True)]},
        {"scores": [False, True]},
        {"scores": [np.bool_(False), np.float32(1.0)]},
        {"scores": np.array([False, True])},
        {"inference_logprobs": Tensor([[1.0, -0.5, -0.25]] * 2, is_narrow=True)},
        {"advantages": [Tensor([0.0, 0.0, 0.0]), np.zeros(3)]},
    ],
)
async def test_tensors_and_booleans_arrive_as_numbers(change: dict[str, Any]) -> None:
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub()
    assert await outbox.accept(make_group() | change) == 1
    await deliver(outbox, hub)
    group = hub.stored[0].to_dict()
    assert (group["tokens"], group["scores"]) == ([[5, 6, 7], [5, 6, 8]], [0.0, 1.0])
    assert group["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 2


async def test_a_group_is_one_line_with_numbers_where_the_author_put_tensors(
    tmp_path: Path,
) -> None:
    log = GroupLog.open(tmp_path / "g.jsonl")
    said = [[{"role": "assistant", "content": f"a{separator}b"}] for separator in "\u2028\x85"]
    values = {"scores": [Tensor(0.0), Tensor(1.0)], "seed": np.int64(4), "messages": said}
    await make_outbox(ScriptedEnv(), log).accept(make_group() | values)
    log.write({"text": "a\u2029b", "scores": np.ones(1)})
    log.close()
    first, second = map(json.loads, (tmp_path / "g.jsonl").read_text().splitlines())
    assert (first["scores"], first["seed"], first["messages"]) == ([0.0, 1.0], 4, said)
    assert second == {"text": "a\u2029b", "scores": [1.0]}


async def test_restored_groups_are_sent_first_and_reported_once_when_stored() -> None:
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub(refuse={"bad"})
    told: list[int] = []
    old = [
        check_group(make_group() | {"group_id": name}, strictness=Strictness.MEANING)
        for name in ("old", "bad")
    ]
    await outbox.accept(make_group() | {"group_id": "new"})
    outbox.restore(old, lambda: told.append(len(hub.stored)))
    await deliver(outbox, hub)
    assert [group.group_id for group in hub.stored] == ["old", "new"]
    assert (told, outbox.dropped) == ([1], {"rejected_422": 1})


async def test_group_keeps_its_id_over_retries() -> None:
    def lose_two_replies(groups: Sequence[ScoredGroup]) -> None:
        if hub.num_attempts < 3:
            raise HubUnavailable("reset by peer")

    naps: list[float] = []
    outbox, hub = make_outbox(ScriptedEnv(), naps=naps), FakeHub(on_stored=lose_two_replies)
    await outbox.accept(make_group())
    await deliver(outbox, hub)
    assert len(hub.stored) == 3
    assert len({group.group_id for group in hub.stored}) == 1
    assert len(naps) == 2
    assert naps[1] > 0.5 * naps[0]


async def test_large_groups_are_sent_in_bodies_a_hub_takes() -> None:
    sizes: list[list[int]] = []
    hub = FakeHub(on_stored=lambda groups: sizes.append([group.num_tokens for group in groups]))
    outbox = make_outbox(ScriptedEnv(group_size=1, ensure_scores_are_not_same=False))
    for num_tokens in (600_000, 300_000, 200_000, 1_500_000, 3):
        row = [[7] * num_tokens]
        group = {"tokens": row, "masks": row, "scores": [1.0]}
        await outbox.accept(group, abort_on_max_length=False)
    await deliver(outbox, hub)
    assert sizes == [[600_000, 300_000], [200_000], [1_500_000], [3]]
    assert outbox.num_stored == 5


async def test_refused_group_is_counted_and_the_others_are_stored() -> None:
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub(refuse={"bad"})
    for group_id in ("a", "bad", "c"):
        await outbox.accept(make_group() | {"group_id": group_id})
    await deliver(outbox, hub)
    assert [group.group_id for group in hub.stored] == ["a", "c"]
    assert outbox.dropped == {"rejected_422": 1}
    assert (outbox.num_accepted, outbox.num_stored, outbox.num_held) == (3, 2, 0)


@pytest.mark.parametrize(
    "refusal", [HubRejected("no", status=422), AnotherExperiment("over", status=409)]
)
async def test_hub_that_is_back_and_refuses_all_that_is_held_is_not_away(
    refusal: HubRejected, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub(HubUnavailable("503"), refusal)
    await outbox.accept(make_group())
    with caplog.at_level("INFO"):
        await deliver(outbox, hub)
    assert (outbox.num_stored, outbox.num_held, outbox.dropped.total()) == (0, 0, 1)
    assert not outbox.hub_unavailable  # otherwise no item would ever be started again
    assert "the hub is available again" in caplog.text


async def test_hub_that_says_when_is_asked_again_then() -> None:
    naps: list[float] = []
    busy = [HubUnavailable("429", retry_after_s=seconds) for seconds in (7.0, 0.0, 9000.0)]
    outbox, hub = make_outbox(ScriptedEnv(), naps=naps), FakeHub(*busy)
    await outbox.accept(make_group())
    await deliver(outbox, hub)
    assert (naps[0], naps[2]) == (7.0, 60.0)
    assert 0 < naps[1] <= 1.0  # never less than the backoff
    assert (outbox.num_stored, outbox.dropped, outbox.hub_unavailable) == (1, {}, False)


@pytest.mark.parametrize("status", [401, 403])
async def test_refused_token_ends_the_run_and_drops_nothing(status: int) -> None:
    outbox, hub = make_outbox(ScriptedEnv()), FakeHub(HubRejected("no", status=status))
    for _ in range(3):
        await outbox.accept(make_group())
    with pytest.raises(HubRejected):
        await outbox.run(hub, reregister=None)  # type: ignore[arg-type]
    assert (outbox.num_held, outbox.num_stored, outbox.dropped) == (3, 0, {})


def env_status(**changes: Any) -> EnvStatus:
    values = {"current_step": 1, "queue_size": 2, "self_queue_size": 2, "max_group_size": 2}
    return EnvStatus(**values | {"unallocated_fraction": 1.0, "env_weight": 1.0} | changes)


async def test_status_that_rides_on_an_answer_is_handed_on_after_the_groups_are_counted() -> None:
    hub = FakeHub(on_stored=lambda groups: env_status(queue_size=len(hub.stored)))
    outbox = make_outbox(ScriptedEnv())
    told: list[tuple[int, int]] = []
    outbox.on_status = lambda status: told.append((status.queue_size, outbox.num_stored))
    for _ in range(3):
        await outbox.accept(make_group())
    await deliver(outbox, hub)
    assert told == [(3, 3)]


async def test_status_of_an_id_that_was_given_up_meanwhile_is_not_handed_on() -> None:
    env = ScriptedEnv()

    def register_again(groups: Sequence[ScoredGroup]) -> EnvStatus:
        env.env_id = 4  # by the watcher, while the answer is on its way
        return env_status()

    outbox = make_outbox(env)
    told: list[EnvStatus] = []
    outbox.on_status = told.append
    await outbox.accept(make_group())
    await deliver(outbox, FakeHub(on_stored=register_again))
    assert (told, outbox.num_stored) == ([], 1)


async def test_lost_registration_is_renewed_and_the_group_sent_under_the_new_id() -> None:
    env, hub = ScriptedEnv(), FakeHub(UnknownEnvironment("gone", status=404))
    env.env_id = 3
    outbox = make_outbox(env)
    await outbox.accept(make_group())
    await deliver(outbox, hub, env=env)
    assert [group.env_id for group in hub.stored] == [4]


async def test_flush_gives_up_after_its_time_and_says_how_many_remain() -> None:
    outbox = make_outbox(ScriptedEnv())
    await outbox.accept(make_group())
    assert await outbox.flush(0.01) == 1


async def test_a_group_of_several_versions_is_sent_and_written_with_its_spans(
    tmp_path: Path,
) -> None:
    log = GroupLog.open(tmp_path / "g.jsonl")
    outbox = make_outbox(ScriptedEnv(), log)
    for versions in ([[("3", 2)], [("3", 2)]], [[("3", 1), ("4", 1)], [("4", 2)]]):
        with noting_sampling():
            note_sampling({}, versions, prompt=[5], outputs=[[6, 7], [6, 8]])
            await outbox.accept(make_group())
    log.close()
    one, several = outbox.held
    assert one.weight_versions is None
    assert several.weight_versions == [
        [
            {"start": 1, "num_tokens": 1, "weight_version": "3"},
            {"start": 2, "num_tokens": 1, "weight_version": "4"},
        ],
        [{"start": 1, "num_tokens": 2, "weight_version": "4"}],
    ]
    first, second = map(json.loads, (tmp_path / "g.jsonl").read_text().splitlines())
    assert "weight_versions" not in first
    shown = view_of_row(second, name="g")
    assert shown is not None
    assert [sequence["versions"] for sequence in shown["sequences"]] == [[None, 3, 4], [None, 4, 4]]


async def test_log_line_holds_the_checked_group(tmp_path: Path) -> None:
    log = GroupLog.open(tmp_path / "g.jsonl")
    env = ScriptedEnv(include_messages=True)
    outbox = make_outbox(env, log)
    group = make_group() | {"masks": [[0, 1, 1], [0, 1, 1]], "seed": np.int64(4)}
    await outbox.accept(group, send=False)
    log.close()
    line = json.loads((tmp_path / "g.jsonl").read_text())
    assert line["masks"] == [[-100, 6, 7], [-100, 6, 8]]
    assert line["seed"] == 4
    assert line["overrides"] is None
    assert (line["environment"], len(line["group_id"])) == ("scripted", 32)
    assert line["messages"][0] == [{"role": "user", "content": env.decode_tokens([5, 6, 7])}]
    assert env.completion_lengths == [2, 2]


@pytest.mark.parametrize(("num_chars", "is_recorded"), [(9, True), (MAX_ITEM_BYTES, False)])
def test_requests_of_an_item_are_recorded_unless_it_is_large(
    num_chars: int, is_recorded: bool, tmp_path: Path
) -> None:
    env = ScriptedEnv()
    with closing(GroupLog.open(tmp_path / "g.jsonl")) as log:
        notes = make_outbox(env, log).notes_of("x" * num_chars)
    assert isinstance(notes, ItemRecord) == is_recorded
    assert not isinstance(make_outbox(env).notes_of("x"), ItemRecord)


async def test_an_item_that_is_recorded_for_training_takes_no_text(tmp_path: Path) -> None:
    """Made-up token ids must not reach a trainer."""
    env = hosted(Adding, tmp_path)
    with closing(GroupLog.open(tmp_path / "g.jsonl")) as log:
        notes = make_outbox(env, log).notes_of({"a": 1, "b": 1})
    with noting_sampling(notes), pytest.raises(NotImplementedError, match="no token ids"):
        await env.collect_trajectories({"a": 1, "b": 1})


@pytest.mark.parametrize(("num_tokens", "off_loop"), [(100, False), (9000, True)])
async def test_large_groups_are_turned_into_text_off_the_event_loop(
    num_tokens: int, off_loop: bool
) -> None:
    threads: set[bool] = set()

    class Watching(ScriptedEnv):
        def decode_tokens(self, tokens: Sequence[int]) -> str:
            threads.add(threading.current_thread() is not threading.main_thread())
            return f"{len(tokens)} tokens"

    outbox = make_outbox(Watching(include_messages=True))
    rows = [[1] * num_tokens] * 2
    assert await outbox.accept({"tokens": rows, "masks": rows, "scores": [0.0, 1.0]}) == 1
    assert threads == {off_loop}
    text = {"role": "user", "content": f"{num_tokens} tokens"}
    assert outbox.held[0].messages == [[text], [text]]


@pytest.mark.parametrize(
    ("given", "sampled_under", "sent"),
    [({}, "7", 7), ({"policy_version": 3}, "7", 3), ({"policy_version": None}, "7", None), ({}, None, None)],
)  # fmt: skip
async def test_a_group_without_a_version_gets_the_oldest_that_its_item_was_sampled_under(
    given: dict[str, Any], sampled_under: str | None, sent: int | None
) -> None:
    newer = ServerHarness(respond=lambda request: "yes", weight_version="8")
    engine = ServerHarness(respond=lambda request: "yes", weight_version=sampled_under)
    outbox = make_outbox(ScriptedEnv())
    with noting_sampling():
        async with asyncio.TaskGroup() as both:  # what an item's child tasks sample counts
            for server in (newer, engine):
                both.create_task(server.tokens_and_logprobs_completion(prompt="a?", n=2))
        await outbox.accept([make_group() | given])
    await outbox.accept([make_group()])
    assert [group.policy_version for group in outbox.held] == [sent, None]


async def sampled_at(
    *temperatures: float | None, given: dict[str, Any] | None = None, outbox: Outbox | None = None
) -> ScoredGroup:
    """Return the group of an item whose completions were sampled at these temperatures; None: not said."""
    engine = ServerHarness(respond=lambda request: "yes")
    outbox = outbox or make_outbox(ScriptedEnv())
    with noting_sampling():
        async with asyncio.TaskGroup() as all_of_them:
            for temperature in temperatures:
                ask = engine.tokens_and_logprobs_completion(prompt="a?", temperature=temperature)
                all_of_them.create_task(ask)
        await outbox.accept([make_group() | (given or {})])
    return outbox.held[-1]


@pytest.mark.parametrize(
    ("temperatures", "given", "sent"),
    [
        ([0.7, 0.7], {}, {"temperature": 0.7}),
        ([0.7], {"generation_params": {"top_p": 1.0}}, {"top_p": 1.0, "temperature": 0.7}),
        ([0.7], {"generation_params": {"temperature": 0.9}}, {"temperature": 0.9}),
        ([0.7], {"group_overrides": {"temperature": 0.9}}, None),
        ([0.7], {"overrides": [{"temperature": 0.9}, {"temperature": 0.8}]}, None),
        ([0.7], {"overrides": [{"temperature": 0.9}, {}]}, {"temperature": 0.7}),
        ([1, None, 1.0], {}, None),
        ([1.0], {"generation_params": {"top_p": 1.0}}, {"top_p": 1.0}),
        ([], {}, None),
    ],
)
async def test_a_group_without_a_temperature_gets_the_one_that_its_item_was_sampled_at(
    temperatures: list[float | None], given: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    assert (await sampled_at(*temperatures, given=given)).generation_params == sent


async def test_an_item_sampled_at_several_temperatures_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outbox = make_outbox(ScriptedEnv())
    each = {"overrides": [{"temperature": 0.7}, {"temperature": 1.0}]}
    await sampled_at(0.7, 1.0, given=each, outbox=outbox)
    assert not caplog.records
    for _ in range(2):
        assert (await sampled_at(0.7, None, outbox=outbox)).generation_params is None
    (record,) = caplog.records
    assert "environment 'scripted'" in record.message
    assert "0.7, 1" in record.message
    assert "the trainer assumes 1" in record.message


async def test_evaluation_within_an_item_is_no_sampling_of_it() -> None:
    policy = ServerHarness(respond=lambda request: "yes", weight_version="7")
    judge = ServerHarness(respond=lambda request: "fine")
    outbox = make_outbox(ScriptedEnv())
    with noting_sampling():
        await policy.tokens_and_logprobs_completion(prompt="a?", extra_body={"temperature": 0.7})
        await judge.tokens_and_logprobs_completion(prompt="good?", temperature=0.0, split="eval")
        await judge.chat_completion(messages=[{"role": "user", "content": "ok?"}], temperature=0.0)
        await outbox.accept([make_group()])
    assert outbox.held[0].generation_params == {"temperature": 0.7}
    assert outbox.held[0].policy_version == 7


@pytest.mark.parametrize("num_tokens", [100, 9000])
async def test_a_large_group_also_gets_what_was_noted_of_its_item(num_tokens: int) -> None:
    """Large groups are checked in another thread."""
    outbox = make_outbox(ScriptedEnv())
    rows = [[1] * num_tokens] * 2
    with noting_sampling():
        note_sampling({"temperature": 0.7}, [[("7", 1)]])
        assert await outbox.accept({"tokens": rows, "masks": rows, "scores": [0.0, 1.0]}) == 1
    assert outbox.held[0].policy_version == 7
    assert outbox.held[0].generation_params == {"temperature": 0.7}


async def test_a_group_that_the_environment_sends_itself_has_what_was_noted() -> None:
    outbox = make_outbox(ScriptedEnv())
    outbox.author_sends = outbox.post
    assert (await sampled_at(0.7, outbox=outbox)).generation_params == {"temperature": 0.7}


async def test_a_group_that_the_environment_sends_itself_may_have_texts_for_messages() -> None:
    outbox = make_outbox(ScriptedEnv())
    await outbox.post(make_group() | {"messages": ["yes", "no"]})
    assert outbox.held[0].messages == [[{"role": "user", "content": t}] for t in ("yes", "no")]
