"""A trainer that is killed at any moment and started again is the trainer that was never killed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from atroposlib.scored_data import ScoredGroup
from example_trainer.checkpointing import Checkpoints
from example_trainer.parallel import ALONE
from tests.faults.drivers import HubProcess, hub_process
from tests.faults.trainer_lives import Ended, Life, nursery
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_reload import FakeEngine, fake_engine
from tests.trainer.helpers_trainer import make_group
from tests.trainer.test_trainer_loop import ledger_of, send

Run = Callable[[Life], Ended]
KILLED = -9
NUM_KILLS = 20
NUM_STEPS = 40
KEEP_LAST = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Run]:
    with nursery(tmp_path_factory.mktemp("nursery") / "lives.log", model_dir) as run:
        yield run


def groups_for(num_steps: int) -> list[ScoredGroup]:
    """Two groups per step; in every seventh step there is nothing to train."""
    return [
        make_group([1.0, 1.0] if seed // 2 % 7 == 5 else [1.0, 0.0], seed=seed)
        for seed in range(2 * num_steps)
    ]


@dataclass
class Course:
    """One training run of several lives, from a full queue to the final model."""

    directory: Path
    model_dir: Path
    num_steps: int
    run: Run
    hub: HubProcess
    engine: FakeEngine
    seconds: float = 0.0

    @property
    def save_path(self) -> Path:
        return self.directory / "saved"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def live(self, flags: dict[str, Any] | None = None, **plan: Any) -> Ended:
        settings = {
            "model_name": self.model_dir,
            "device": "cpu",
            "threads": 1,
            "bridge": "reload",
            "hub_url": self.hub.url,
            "engine_url": self.engine.url,
            "engine_timeout_s": 10,
            "num_steps": self.num_steps,
            "batch_size": 4,
            "lr": 1e-3,
            "warmup_steps": 5,
            "checkpoint_interval": 2,
            "keep_last": KEEP_LAST,
            "save_path": self.save_path,
            "weights_dir": self.directory / "weights",
            "resume": True,
        } | (flags or {})
        settings = {name: str(value) for name, value in settings.items()}
        return self.run(Life(settings, str(self.journal), **plan))

    def live_to_the_end(self) -> Ended:
        ended = self.live()
        assert ended.code == 0, self.hub.process
        return ended

    @property
    def delivered(self) -> dict[int, set[str]]:
        """Every batch that a step was ever made of, over all lives."""
        found: dict[int, set[str]] = {}
        for line in self.journal.read_text().splitlines():
            step, _, ids = line.partition(" ")
            found.setdefault(int(step), set()).add(ids)
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.save_path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def checkpoints(self) -> list[int]:
        return Checkpoints(save_path=self.save_path, world=ALONE).steps()

    @property
    def final_model(self) -> bytes:
        return (self.save_path / "final_model/model.safetensors").read_bytes()

    def assert_checkpoints_are_whole(self) -> None:
        for step in self.checkpoints:
            directory = self.save_path / f"step_{step}"
            assert json.loads((directory / "training/state.json").read_text())["step"] == step
            shards = [directory / "model.safetensors", *(directory / "training").glob("*.safe*")]
            assert len(shards) == 2
            for shard in shards:
                with safe_open(shard, "pt") as file:
                    assert [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118

    def assert_is(self, uncrashed: Course) -> None:
        """The same batches in the same steps, the same numbers, the same weights, and nothing left lying about."""
        assert self.delivered == uncrashed.delivered
        assert all(len(batches) == 1 for batches in self.delivered.values())
        assert [m["step"] for m in self.metrics] == list(range(1, self.num_steps + 1))
        names = ("loss", "grad_norm", "lr", "ratio_mean", "entropy_mean", "reward_mean")
        found, wanted = ([[m[n] for n in names] for m in c.metrics] for c in (self, uncrashed))
        assert found == wanted
        assert self.final_model == uncrashed.final_model
        assert ledger_of(self.hub.url) == {"trained": 2 * self.num_steps}
        assert self.engine.versions[-1] == str(self.num_steps)
        last = [self.num_steps - 2, self.num_steps][-KEEP_LAST:]
        assert sorted(path.name for path in self.save_path.iterdir()) == sorted(
            ["final_model", "metrics.jsonl", *(f"step_{step}" for step in last)]
        )


@contextmanager
def course(directory: Path, model_dir: Path, run: Run, *, num_steps: int) -> Iterator[Course]:
    """Begin a course with a hub process and an engine of its own."""
    with hub_process(directory) as hub, fake_engine() as engine:
        send(hub.url, groups_for(num_steps))
        yield Course(directory, model_dir, num_steps, run, hub, engine)


@pytest.fixture(scope="module")
def uncrashed(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, forge: Run
) -> Iterator[Course]:
    directory = tmp_path_factory.mktemp("uncrashed")
    with course(directory, model_dir, forge, num_steps=NUM_STEPS) as whole:
        whole.seconds = whole.live_to_the_end().seconds
        yield whole


@pytest.fixture
def crashed(tmp_path: Path, model_dir: Path, forge: Run) -> Iterator[Course]:
    with course(tmp_path, model_dir, forge, num_steps=NUM_STEPS) as begun:
        yield begun


@pytest.mark.timeout(300)
def test_a_trainer_killed_at_twenty_random_moments_ends_as_if_it_had_not_been(
    uncrashed: Course, crashed: Course
) -> None:
    step_s = sum(m["wall_s"] for m in uncrashed.metrics) / NUM_STEPS
    start_s = uncrashed.seconds - NUM_STEPS * step_s
    rng = random.Random(6)
    phases: Counter[str] = Counter()
    newest = 0
    for number in range(NUM_KILLS):
        if number % 5 == 4:
            ended = crashed.live(kill_after_s=start_s * rng.random())
        else:
            ended = crashed.live(kill_after_s=4 * step_s * rng.random(), kill_from="leasing")
        assert ended.code == KILLED
        phases[ended.phase] += 1
        crashed.assert_checkpoints_are_whole()
        before, newest = newest, (crashed.checkpoints or [0])[-1]
        assert newest >= before, "a checkpoint was lost"
        assert len(crashed.checkpoints) <= KEEP_LAST + 1
    assert newest < NUM_STEPS
    crashed.live_to_the_end()
    print(
        f"{NUM_KILLS} kills, in these phases: {dict(phases)}; at step {newest} of {NUM_STEPS} after the last;"
        f" {len(crashed.journal.read_text().splitlines())} batches delivered for {NUM_STEPS} steps;"
        f" {start_s:.2f} s to start, {step_s:.2f} s a step"
    )
    assert len(phases) >= 4
    crashed.assert_is(uncrashed)


POINTS = [
    ("before leasing", 2),
    ("after leasing", 2),
    ("after training", 3),
    ("after acking", 3),
    ("after publishing", 3),
    ("after shards", 1),
    ("after shards", 2),
    ("before rename", 2),
    ("after rename", 2),
    ("after telling the hub", 2),
    ("half removed", 1),
    ("before recording", 2),
    ("half a line", 3),
    ("after recording", 4),
    ("after tidying", 1),
    ("after opening the record", 1),
    ("after registering", 1),
]


@pytest.mark.timeout(300)
def test_a_trainer_killed_at_every_point_where_state_changes_ends_as_if_it_had_not_been(
    uncrashed: Course, crashed: Course
) -> None:
    newest = 0
    for point, count in POINTS:
        ended = crashed.live(kill_at=point, kill_count=count)
        assert ended.code == KILLED, point
        crashed.assert_checkpoints_are_whole()
        before, newest = newest, (crashed.checkpoints or [0])[-1]
        assert newest >= before, f"a checkpoint was lost {point}"
    assert newest < NUM_STEPS
    crashed.live_to_the_end()
    print(f"{len(POINTS)} kills; at step {newest} of {NUM_STEPS} after the last")
    crashed.assert_is(uncrashed)
