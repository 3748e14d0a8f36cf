"""The whole trainer against a real hub and a fake engine, in this process."""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atroposlib.client import (
    LeasedBatch,
    TrainerClient,
    TrainerRegistration,
    TrainerSuperseded,
)
from atroposlib.errors import AtroposError, EngineError, GroupError, HubUnavailable
from atroposlib.scored_data import ScoredGroup
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.feed import Leader
from example_trainer.model import Policy, load_policy
from example_trainer.step import data_options, take_step
from example_trainer.training import train
from tests.builders.rows import rows_in
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import RecordedEngine
from tests.trainer.helpers_run import Configure, closed_ledger, config_for, ledger_of, send
from tests.trainer.helpers_trainer import PROMPT, make_group, one_step, pairs


def registration_of(config: TrainerConfig) -> TrainerRegistration:
    return TrainerRegistration(
        batch_size=config.sequences_per_step,
        max_token_len=config.seq_len,
        checkpoint_dir="",
        save_checkpoint_interval=1,
        starting_step=0,
        num_steps=config.num_steps,
    )


def steps_of(config: TrainerConfig) -> list[dict[str, Any]]:
    return rows_in(config.save_path / "metrics.jsonl")


def test_a_run_trains_publishes_saves_and_records(
    configure: Configure,
    tmp_path: Path,
    hub_url: str,
    engine: RecordedEngine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = configure(num_steps=3, checkpoint_interval=2, warmup_steps=2, lr_schedule="constant")
    policy = load_policy(config)
    groups = pairs(4, model=policy.model)
    groups += [make_group([1.0, 1.0], seed=seed, model=policy.model) for seed in (8, 9)]
    send(hub_url, groups)
    train(config)
    with TrainerClient(hub_url) as hub:
        assert hub.status().policy_version == 3
        assert hub.status().current_step == 3
    assert ledger_of(hub_url) == {"trained": 6}
    steps = steps_of(config)
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert [s["lr"] for s in steps] == [5e-4, 1e-3, 1e-3]
    assert [s["num_sequences"] for s in steps] == [4, 4, 4]
    assert steps[0]["logprob_gap_max"] < 1e-4
    assert [s["staleness_max"] for s in steps] == [0, 1, 2]
    assert "groups of an older policy" not in caplog.text
    # Sampled by version 0, which the model has moved on from: not compared.
    assert steps[1]["logprob_gap_max"] is None
    assert steps[0]["grad_norm"] > 0
    # A batch in which every reward is equal: counted, no number is invented.
    assert steps[2]["num_skipped_zero_advantage"] == 4
    assert steps[2]["loss"] is None
    assert engine.versions == ["0", "1", "2", "3"]
    saved = {path.name for path in config.save_path.iterdir()}
    records = {"metrics.jsonl", "group_fates.jsonl", "trained_groups.jsonl"}
    assert saved == {"final_model", "step_2", "step_3"} | records
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {"version_2", "version_3"}
    final = load_policy(config_for(config.save_path / "final_model", tmp_path))
    moved = [
        (a - b).abs().max().item()
        for a, b in zip(policy.model.parameters(), final.model.parameters(), strict=True)
    ]
    assert max(moved) > 1e-4
    assert final.tokenizer.eos_token == policy.tokenizer.eos_token


def test_stale_groups_without_a_clip_are_warned_of_once(
    configure: Configure, hub_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(hub_url, pairs(6))
    train(configure(num_steps=3, surrogate="reinforce"))
    [found] = [r.getMessage() for r in caplog.records if "has no clip" in r.getMessage()]
    assert found.startswith("step 2:")


@pytest.mark.parametrize(("dual_clip", "is_warned"), [("inf", True), ("3", False)])
def test_a_token_that_is_most_of_a_step_is_warned_of_with_its_group(
    configure: Configure,
    hub_url: str,
    caplog: pytest.LogCaptureFixture,
    dual_clip: str,
    is_warned: bool,
) -> None:
    config = configure(num_steps=1, dual_clip=dual_clip)
    model = load_policy(config).model
    plain, odd = pairs(2, model=model)
    # The policy has come to like a token of the worse answer 230 times more than its sampler did.
    odd.inference_logprobs[-2] -= math.log(230)  # type: ignore[index]
    send(hub_url, [plain], prefix="plain")
    send(hub_url, [odd], prefix="odd")
    train(config)
    [step] = steps_of(config)
    assert step["ratio_max"] == pytest.approx(230, rel=1e-3)
    num_tokens = step["num_trained_tokens"]
    # All others have a ratio of 1 and an advantage of 1 or -1.
    share = 230 / (230 + num_tokens - 1) if is_warned else 1 / (num_tokens - 1)
    assert step["token_share_max"] == pytest.approx(share, rel=1e-3)
    assert ("one token of group odd0 of environment" in caplog.text) == is_warned


def test_a_checkpoint_lets_the_hub_forget_what_was_trained_before_it(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, Path]] = []
    real = TrainerClient.checkpoint

    def note(self: TrainerClient, step: int, path: Any = None) -> int:
        told.append((step, path))
        assert path.is_dir()
        return real(self, step, path)

    monkeypatch.setattr(TrainerClient, "checkpoint", note)
    send(hub_url, pairs(6))
    config = configure(num_steps=3, checkpoint_interval=2)
    train(config)
    with TrainerClient(hub_url) as hub:
        resumed = hub.register(registration_of(config), resume_step=0, resume="requeue")
    assert told == [(2, config.save_path / "step_2"), (3, config.save_path / "step_3")]
    assert resumed.requeued == 0  # nothing is held any more


def test_a_run_begun_again_starts_empty_and_says_where_the_earlier_one_is(
    configure: Configure, hub_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(hub_url, pairs(6))
    config = configure(num_steps=1)
    with TrainerClient(hub_url) as earlier:
        earlier.register(registration_of(config), experiment="earlier")
        assert earlier.lease_batch() is not None
    started = threading.Thread(target=train, args=[config])
    started.start()
    while ledger_of(hub_url):
        time.sleep(0.05)
    assert ledger_of(f"{hub_url}/runs/default.1") == {"queued": 4, "leased": 2}
    send(hub_url, pairs(2, first_seed=6))
    started.join()
    assert ledger_of(hub_url) == {"trained": 2}
    assert "set its earlier experiment aside as 'default.1'" in caplog.text


def test_a_run_resumed_before_its_first_checkpoint_trains_on_the_same_batches(
    configure: Configure, hub_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer before it died without a checkpoint, while it held its second batch."""
    send(hub_url, pairs(4))
    config = configure(num_steps=2, resume=True)
    with TrainerClient(hub_url) as dead:
        dead.register(registration_of(config))
        first = dead.lease_batch()
        assert first is not None
        dead.ack(first)
        assert dead.lease_batch() is not None
    train(config)
    assert "4 groups that were trained on after step 0 come again" in caplog.text
    assert [s["num_lost_leases"] for s in steps_of(config)] == [0, 0]
    assert ledger_of(hub_url) == {"trained": 4}


def untrainable(field: str, value: float) -> dict[str, Any]:
    """Return a group whose second sequence has an impossible token, or logprob of its first trained token."""
    group = make_group([1.0, 0.0], seed=9).to_dict()
    group[field][1][PROMPT if field == "inference_logprobs" else 0] = value
    return group


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        # An environment of the original sends it, and the hub has to take it.
        (untrainable("inference_logprobs", 0.5), f"sequences[1].inference_logprobs[{PROMPT}]: 0.5"),
        (untrainable("tokens", 50_000), "id 50000 in a group of environment"),
    ],
    ids=["positive", "vocabulary"],
)
def test_a_group_that_cannot_be_trained_on_costs_itself_alone(
    configure: Configure,
    hub_url: str,
    caplog: pytest.LogCaptureFixture,
    bad: dict[str, Any],
    reason: str,
) -> None:
    groups = pairs(4)
    send(hub_url, groups[:1])
    httpx.post(f"{hub_url}/scored_data", json=bad).raise_for_status()
    send(hub_url, groups[1:], prefix="later")
    train(configure(num_steps=2))
    assert ledger_of(hub_url) == {"trained": 4, "dead": 1}
    assert httpx.get(f"{hub_url}/explain").json()["dead"] == {"rejected by the trainer": 1}
    [dead] = httpx.get(f"{hub_url}/dead").json()["groups"]
    assert reason in dead["reason"]
    assert "1 groups of batch 0 cannot be trained on and are rejected" in caplog.text


def infinite(seed: int) -> ScoredGroup:
    """Return a group whose gradient is not finite."""
    group = make_group([1.0, 0.0], seed=seed)
    return group.replace(advantages=np.full(len(group.tokens), 3e38))


def test_a_group_whose_gradient_is_not_finite_costs_itself_alone(
    configure: Configure, hub_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(num_steps=2)
    groups = pairs(4)
    sampled = send(hub_url, groups[:1])
    sampled |= send(hub_url, [infinite(9)], prefix="poison")
    sampled |= send(hub_url, groups[1:], prefix="later")
    train(config)
    assert "poison" in caplog.text
    assert closed_ledger(hub_url, config.save_path, sampled) == {"trained": 4, "dead": 1}
    [dead] = httpx.get(f"{hub_url}/dead").json()["groups"]
    assert "the gradient of this group is not finite" in dead["reason"]
    assert [s["step"] for s in steps_of(config)] == [1, 2]


def test_a_model_that_is_not_finite_ends_the_run_and_keeps_the_groups(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Policy:
        policy = load_policy(*args)
        next(policy.model.parameters()).data.fill_(torch.nan)
        return policy

    monkeypatch.setattr("example_trainer.training.load_policy", broken)
    send(hub_url, pairs(4))
    with pytest.raises(AtroposError, match="step 1: the gradient of every group is not finite"):
        train(configure(num_steps=2))
    assert ledger_of(hub_url) == {"queued": 4}


def test_a_lost_lease_is_counted_and_the_run_goes_on(
    configure: Configure,
    hub_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    leased: list[LeasedBatch | None] = []
    lease_batch = TrainerClient.lease_batch

    def noted(self: TrainerClient, *args: Any, **kwargs: Any) -> LeasedBatch | None:
        leased.append(lease_batch(self, *args, **kwargs))
        return leased[-1]

    def lose() -> None:
        assert leased[-1] is not None
        with TrainerClient(hub_url) as other:
            other.release(leased[-1])

    monkeypatch.setattr(TrainerClient, "lease_batch", noted)
    send(hub_url, pairs(4))
    during_first_step(monkeypatch, lose)
    config = configure(num_steps=2)
    train(config)
    assert [s["num_lost_leases"] for s in steps_of(config)] == [1, 1]
    assert "they may be trained twice" in caplog.text
    assert ledger_of(hub_url) == {"queued": 2, "trained": 2}


def test_a_trainer_that_another_one_supersedes_ends_and_takes_no_more(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(hub_url, pairs(4))
    config = configure(num_steps=2)

    def take_over() -> None:
        with TrainerClient(hub_url) as other:
            reply = other.register(registration_of(config), resume_step=0, resume="requeue")
            assert reply.requeued == 2

    during_first_step(monkeypatch, take_over)
    with pytest.raises(TrainerSuperseded, match="another trainer has taken this run over"):
        train(config)
    assert ledger_of(hub_url) == {"queued": 4}


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_hub_that_forgets_during_a_step_is_given_the_run_again(
    configure: Configure,
    hub_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_finite: bool,
) -> None:
    """Also if the batch is to be given back."""

    def forget() -> None:
        with TrainerClient(hub_url) as hub:
            hub.reset()
        send(hub_url, pairs(2))

    send(hub_url, pairs(2) if is_finite else [infinite(9), *pairs(1)])
    during_first_step(monkeypatch, forget)
    num_before = int(is_finite)
    config = configure(num_steps=num_before + 1)
    train(config)
    with TrainerClient(hub_url) as hub:
        status = hub.status()
    assert "the hub no longer knows its batch" in caplog.text
    assert f"registering again at step {num_before}" in caplog.text
    assert (status.current_step, status.policy_version) == (num_before + 1,) * 2
    assert {s["num_lost_leases"] for s in steps_of(config)} == {0}
    assert ledger_of(hub_url) == {"trained": 2}


@pytest.mark.parametrize("report", ["announce", "checkpointed"])
def test_no_thread_reports_under_the_epoch_that_a_registration_replaces(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    send(hub_url, pairs(2))
    calls, reported = TrainerClient._control, threading.Event()
    threads: list[threading.Thread] = []

    def call(self: TrainerClient, method: str, path: str, **options: Any) -> Any:
        reply = calls(self, method, path, **options)
        if path == "/register" and threads:  # the hub has another epoch, this client not yet
            threads[0].start()
            assert not reported.wait(0.3)
        return reply

    def forget() -> None:
        with TrainerClient(hub_url) as hub:
            hub.reset()
        send(hub_url, pairs(2))
        [leader] = leaders
        arguments = (1,) if report == "announce" else (1, Path("step_1"))

        def run() -> None:
            getattr(leader, report)(*arguments)
            reported.set()

        threads.append(threading.Thread(target=run))

    leaders: list[Leader] = []
    begins = Leader.begin
    monkeypatch.setattr(
        Leader, "begin", lambda self, **options: (leaders.append(self), begins(self, **options))
    )
    monkeypatch.setattr(TrainerClient, "_control", call)
    during_first_step(monkeypatch, forget)
    train(configure(num_steps=2))
    threads[0].join(20)
    assert reported.is_set()


def test_a_step_longer_than_the_lease_keeps_it(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(hub_url, pairs(2))
    during_first_step(monkeypatch, lambda: time.sleep(0.5))
    config = configure(num_steps=1, lease_s=0.2)
    train(config)
    assert ledger_of(hub_url) == {"trained": 2}
    assert steps_of(config)[0]["num_lost_leases"] == 0


def during_first_step(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> None:
    """Let `event` happen while the trainer computes its first step."""
    events = [event]

    def step_with_event(*args: Any) -> Any:
        if events:
            events.pop()()
        return take_step(*args)

    monkeypatch.setattr("example_trainer.training.take_step", step_with_event)


def test_an_engine_on_other_weights_stops_the_run_before_it_learns_from_them(
    configure: Configure, tmp_path: Path, hub_url: str
) -> None:
    other = load_policy(config_for(make_tiny_model(tmp_path / "other", seed=5), tmp_path))
    send(hub_url, pairs(2, model=other.model))
    with pytest.raises(EngineError, match=r"policy version 0 differ.*max_logprob_gap 0.001"):
        train(configure(max_logprob_gap=1e-3))


def test_a_run_whose_groups_are_all_untrainable_ends_with_a_cure(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("example_trainer.feed.BATCH_WAIT_S", 0.1)
    send(hub_url, [group.replace(inference_logprobs=None) for group in pairs(16)])
    with pytest.raises(GroupError, match="managed_server"):
        train(configure())
    assert ledger_of(hub_url) == {"dead": 16}


def test_the_trainer_waits_for_a_hub_that_is_away(
    configure: Configure, hub_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TrainerClient.lease_batch
    failures = [1, 1]

    def flaky(self: TrainerClient, *args: Any, **kwargs: Any) -> LeasedBatch | None:
        if failures:
            failures.pop()
            raise HubUnavailable("gone")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(TrainerClient, "lease_batch", flaky)
    late = threading.Timer(0.1, send, (hub_url, pairs(2)))
    late.start()
    config = configure(num_steps=1)
    train(config)
    late.join()
    assert len(steps_of(config)) == 1


def gradients(policy: Policy, config: TrainerConfig) -> list[torch.Tensor]:
    """Return the parameters after one plain SGD step, which are linear in the gradient."""
    groups = [make_group([1.0, 0.0, 0.3], seed=s, length=6 + 4 * s) for s in range(3)]
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    one_step(policy, config, groups, optimizer=optimizer)
    return [p.detach().clone() for p in policy.model.parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"packing": "on", "attention": "eager"},
        {"packing": "on", "gradient_checkpointing": True},
    ],
)
def test_the_update_does_not_depend_on_how_it_is_computed(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """`test_trainer_update.py` has the layouts."""
    plain = config_for(model_dir, tmp_path, batch_size=100)
    other = config_for(model_dir, tmp_path, **{"batch_size": 100} | changes)
    expected = gradients(load_policy(plain), plain)
    found = gradients(load_policy(other), other)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("enabled", [False, True])
def test_gradient_checkpointing_runs_each_layer_again(
    model_dir: Path, tmp_path: Path, enabled: bool
) -> None:
    config = config_for(model_dir, tmp_path, gradient_checkpointing=enabled)
    policy = load_policy(config)
    calls: list[int] = []
    policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = make_batch([make_group([1.0, 0.0])], data_options(config))
    policy.logprobs(batch.micro_batches[0]).logprobs_N.sum().backward()
    assert len(calls) == (2 if enabled else 1)
    policy.save(tmp_path / "saved")  # use_cache is off in training only
    assert json.loads((tmp_path / "saved/config.json").read_text())["use_cache"] is True


def test_bfloat16_checkpoints_keep_float32_masters_and_tied_embeddings_once(
    tmp_path: Path,
) -> None:
    tied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    policy = load_policy(config_for(tied, tmp_path, dtype="bfloat16"))
    policy.save(tmp_path / "saved")
    assert next(policy.model.parameters()).dtype == torch.float32
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"
    assert "lm_head.weight" not in load_file(tmp_path / "saved/model.safetensors")


def test_a_failed_save_leaves_the_previous_checkpoint(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(config_for(model_dir, tmp_path))
    policy.save(tmp_path / "saved")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(policy.tokenizer, "save_pretrained", full)
    with pytest.raises(AtroposError, match="saved could not be written: disk full"):
        policy.save(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
