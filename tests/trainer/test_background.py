"""Files are written while the next step is trained, from a copy of the state that the step left."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.api.run.hub import Hub
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.server import create_app
from atroposlib.errors import AtroposError, EngineError
from example_trainer import checkpointing
from example_trainer.background import Background
from example_trainer.feed import Leader
from example_trainer.model import Policy
from example_trainer.step import take_step
from example_trainer.training import train
from tests.api.helpers_api import serving
from tests.builders.rows import rows_in, tokens_by_fate
from tests.trainer.helpers_engine import RecordedEngine
from tests.trainer.helpers_run import Configure, ledger_of, send
from tests.trainer.helpers_trainer import make_group, pairs

WAIT_S = 20.0


class Steps:
    """Lets a test wait for a step of the loop, and keeps the weights that each step left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self._taken = threading.Condition()
        monkeypatch.setattr("example_trainer.training.take_step", self._take)

    def _take(self, policy: Policy, *args: Any) -> Any:
        result = take_step(policy, *args)
        with self._taken:
            self.weights.append({n: p.detach().clone() for n, p in policy.model.named_parameters()})
            self._taken.notify_all()
        return result

    def were(self, count: int, *, within_s: float = WAIT_S) -> bool:
        """Wait for so many steps; return whether they were taken."""
        with self._taken:
            return self._taken.wait_for(lambda: len(self.weights) >= count, within_s)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_a_step_is_trained_while_the_files_of_the_one_before_are_written(
    configure: Configure, hub_url: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlapped: list[str] = []
    real_write, real_put = checkpointing._write_parts, Policy.put

    def write_late(path: Path, parts: Any) -> None:
        if path.parts[-3].startswith(".step_1-") and steps.were(2):
            overlapped.append("checkpoint")
        real_write(path, parts)

    def put_late(self: Policy, target: Path, *args: Any, **options: Any) -> None:
        if target.name == "version_1" and steps.were(2):
            overlapped.append("publication")
        real_put(self, target, *args, **options)

    monkeypatch.setattr(checkpointing, "_write_parts", write_late)
    monkeypatch.setattr(Policy, "put", put_late)
    send(hub_url, pairs(6))
    config = configure(num_steps=3, checkpoint_interval=1, keep_last=None)
    train(config)
    assert sorted(overlapped) == ["checkpoint", "publication"]
    published = load_file(config.weights_dir / "version_2/model.safetensors")
    for step, expected in enumerate(steps.weights, start=1):
        directory = config.save_path / f"step_{step}"
        masters = load_file(directory / "training/rank_0.safetensors")
        model = load_file(directory / "model.safetensors")
        for name, value in expected.items():
            assert torch.equal(masters[f"model.{name}"], value)
            assert torch.equal(model[name], value)
            assert step != 2 or torch.equal(published[name], value)
    rows = rows_in(config.save_path / "metrics.jsonl")
    # The wait for the files of step 1 is part of step 2, at whose end the next ones begin.
    assert rows[0]["publication_s"] is rows[0]["checkpoint_s"] is None
    assert rows[1]["publication_s"] > 0
    assert rows[2]["checkpoint_s"] > 0


def test_where_no_staleness_is_allowed_the_next_batch_waits_for_the_publication(
    configure: Configure, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the hub would deliver groups of the version before, the last one that it knows."""
    order: list[str] = []
    announce, next_groups = Leader.announce, Leader.next_groups
    hub = Hub(policy=RunPolicy(max_staleness=0))

    def late(self: Leader, version: int | None = None) -> None:
        steps.were(len(steps.weights) + 1, within_s=0.2)  # time for the step that must not come
        announce(self, version)
        order.append(f"announced {version}")
        groups = [group.replace(policy_version=version) for group in pairs(2)]
        send(hub_url, groups, prefix=f"of {version} ")

    def ask(self: Leader, step: int) -> Any:
        order.append(f"asked for {step + 1}")
        return next_groups(self, step)

    monkeypatch.setattr(Leader, "announce", late)
    monkeypatch.setattr(Leader, "next_groups", ask)
    with serving(create_app(hub)) as hub_url:
        train(configure(num_steps=2, hub_url=hub_url))
    assert order == ["announced 0", "asked for 1", "announced 1", "asked for 2", "announced 2"]


def test_a_group_with_usable_tokens_is_delivered_and_the_others_get_no_gradient(
    configure: Configure,
) -> None:
    spans = [
        {"start": 0, "num_tokens": 5, "weight_version": "0"},
        {"start": 5, "num_tokens": 3, "weight_version": "1"},
    ]
    old, mixed = (
        [make_group([1.0, 0.0], seed=seed, length=8, policy_version=0, **more) for seed in seeds]
        for seeds, more in (((1, 2, 3), {}), ((4, 5), {"weight_versions": [spans] * 2}))
    )
    with serving(create_app(Hub(policy=RunPolicy(max_staleness=0)))) as hub_url:
        send(hub_url, [*old, *mixed])
        config = configure(num_steps=2, hub_url=hub_url)
        train(config)
        assert ledger_of(hub_url) == {"trained": 4, "expired": 1}
    fates = rows_in(config.save_path / "group_fates.jsonl")
    # Tokens 3 and 4 of both sequences, and token 8, which no span covers.
    assert [fate.get("too_old_tokens") for fate in fates] == [None, None, 5, 5]
    steps = rows_in(config.save_path / "metrics.jsonl")
    assert (steps[1]["num_too_old_tokens"], steps[1]["staleness_max"]) == (10, 0)
    assert tokens_by_fate(steps) == {"trained": 4 * mixed[0].num_trained - 10, "too_old": 10}


def test_a_checkpoint_that_fails_ends_the_run_before_the_next_step(
    configure: Configure, hub_url: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, parts: Any) -> None:
        assert steps.were(2)
        raise OSError("disk full")

    monkeypatch.setattr(checkpointing, "_write_parts", full)
    send(hub_url, pairs(8))
    config = configure(num_steps=4, checkpoint_interval=1)
    with pytest.raises(AtroposError, match="checkpoint of step 1 could not be written.*disk full"):
        train(config)
    assert len(steps.weights) == 2
    assert not [path for path in config.save_path.iterdir() if path.is_dir()]
    assert ledger_of(hub_url) == {"queued": 4, "trained": 4}


def test_a_publication_that_fails_ends_a_run_that_waits_for_a_batch(
    configure: Configure, hub_url: str, engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*args: Any) -> Any:
        engine.faults["/collective_rpc"] = (400, b"refused")
        return take_step(*args)

    monkeypatch.setattr("example_trainer.training.take_step", step)
    monkeypatch.setattr("example_trainer.feed.BATCH_WAIT_S", 0.1)
    send(hub_url, pairs(2))
    with pytest.raises(EngineError, match="/collective_rpc answered 400: refused"):
        train(configure(num_steps=4))
    assert ledger_of(hub_url) == {"trained": 2}


def test_without_memory_for_a_copy_training_waits_for_the_checkpoint(
    configure: Configure,
    hub_url: str,
    steps: Steps,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[int] = []
    real = checkpointing._write_parts

    def write(path: Path, parts: Any) -> None:
        begun.append(len(steps.weights))
        real(path, parts)

    monkeypatch.setattr(checkpointing, "_write_parts", write)
    monkeypatch.setattr(checkpointing, "free_host_bytes", lambda: 1000)
    send(hub_url, pairs(4))
    config = configure(num_steps=2, checkpoint_interval=1)
    train(config)
    assert begun == [1, 2]
    assert "training waits for the checkpoint of step 1: a copy of 0.0 GiB is" in caplog.text
    for step, expected in enumerate(steps.weights, start=1):
        masters = load_file(config.save_path / f"step_{step}/training/rank_0.safetensors")
        assert all(torch.equal(masters[f"model.{n}"], value) for n, value in expected.items())


def test_the_next_job_waits_for_the_one_before_and_raises_its_error() -> None:
    ended: list[str] = []
    first_may_end = threading.Event()

    def first() -> None:
        assert first_may_end.wait(WAIT_S)
        ended.append("first")
        raise AtroposError("of the first")

    with Background() as background:
        background.start(first)
        background.check()
        assert background.is_busy
        first_may_end.set()
        with pytest.raises(AtroposError, match="of the first"):
            background.start(lambda: ended.append("second"))
        background.start(lambda: ended.append("third"))
    assert ended == ["first", "third"]


def test_the_end_of_a_run_waits_for_its_last_job_and_the_first_error_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise AtroposError("of the job")

    with pytest.raises(AtroposError, match="of the job"), Background() as background:
        background.start(fail)
    background = Background()
    background.start(fail)
    with pytest.raises(ValueError, match="of the loop"), background:
        raise ValueError("of the loop")
    assert "of the job" in caplog.text


def test_an_interruption_does_not_wait_for_the_job() -> None:
    never = threading.Event()
    background = Background()
    background.start(lambda: never.wait(WAIT_S))
    with pytest.raises(SystemExit), background:
        raise SystemExit(143)
    assert background.is_busy
    never.set()
