"""A trainer that is killed at any moment and started again is the trainer that was never killed."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atroposlib.scored_data import ScoredGroup
from example_trainer.checkpointing import Checkpoints
from example_trainer.parallel import ALONE
from tests.faults.drivers import HubProcess, hub_process
from tests.faults.trainer_lives import Ended, Life, nursery
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine
from tests.trainer.helpers_run import ledger_of, send
from tests.trainer.helpers_trainer import make_group

Run = Callable[[Life], Ended]
KILLED = -9
NUM_KILLS = 10
NUM_WRITES_CUT = 8
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
    engine: RecordedEngine
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
        assert ended.codes == [0], self.hub.process
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

    @property
    def leftovers(self) -> list[str]:
        """Directories that are half written or half removed."""
        return [path.name for path in self.save_path.iterdir() if path.name.startswith(".")]

    @property
    def said(self) -> str:
        """What the lives of this course have logged."""
        return Path(f"{self.journal}.log").read_text()

    def note_the_hub(self) -> None:
        Path(f"{self.journal}.hub").write_text(str(self.hub.pid))

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
            ["final_model", "group_fates.jsonl", "metrics.jsonl", "trained_groups.jsonl"]
            + [f"step_{step}" for step in last]
        )


@contextmanager
def course(
    directory: Path, model_dir: Path, run: Run, *, num_steps: int, num_groups: int | None = None
) -> Iterator[Course]:
    """Begin a course with a hub process and an engine of its own; its groups are there.

    No batch is set aside as dead: the kills may all hit trainers that hold the first one.
    """
    flags = ("--max-deliveries", str(len(POINTS) + 1))
    with hub_process(directory, *flags) as hub, recorded_engine() as engine:
        send(hub.url, groups_for(num_steps)[:num_groups])
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
    with course(tmp_path, model_dir, forge, num_steps=NUM_STEPS) as started:
        yield started


@pytest.mark.timeout(300)
def test_a_trainer_killed_at_random_moments_ends_as_if_it_had_not_been(
    uncrashed: Course, crashed: Course
) -> None:
    step_s = sum(m["wall_s"] for m in uncrashed.metrics) / NUM_STEPS
    start_s = uncrashed.seconds - NUM_STEPS * step_s
    rng = random.Random(6)
    phases: Counter[str] = Counter()
    newest = 0
    at_the_latest = [("before leasing", 3, "kill")]  # so that no life gets far, however fast it is
    for number in range(NUM_KILLS):
        from_start = number % 5 == 4
        kill_after_s = (start_s if from_start else 3 * step_s) * rng.random()
        ended = crashed.live(kill_after_s=kill_after_s, from_start=from_start, deeds=at_the_latest)
        assert ended.codes == [KILLED]
        phases[ended.phase] += 1
        crashed.assert_checkpoints_are_whole()
        before, newest = newest, (crashed.checkpoints or [0])[-1]
        assert newest >= before, "a checkpoint was lost"
        assert len(crashed.checkpoints) <= KEEP_LAST + 1
    assert newest < NUM_STEPS
    crashed.live_to_the_end()
    assert len(phases) >= 4
    crashed.assert_is(uncrashed)


@pytest.mark.timeout(300)
def test_a_trainer_killed_at_any_moment_of_a_write_resumes_from_the_checkpoint_before_it(
    uncrashed: Course, crashed: Course
) -> None:
    rng = random.Random(9)
    seen: Counter[str] = Counter()
    newest = 0
    for number in range(NUM_WRITES_CUT):
        kill = f"kill in {0.3 * rng.random():.3f}"
        deeds = [("before writing", 1, "slow the disk"), ("before writing", 1 + number % 2, kill)]
        ended = crashed.live(deeds=deeds)
        assert ended.codes == [KILLED]
        crashed.assert_checkpoints_are_whole()
        before, newest = newest, (crashed.checkpoints or [0])[-1]
        assert newest >= before, "a checkpoint was lost"
        assert len(crashed.leftovers) <= 1, "those of the life before are removed"
        if crashed.leftovers:
            seen[ended.phase] += 1
    assert newest < NUM_STEPS
    assert seen["training"], seen
    assert seen.total() >= NUM_WRITES_CUT / 2, seen
    crashed.live_to_the_end()
    crashed.assert_is(uncrashed)


POINTS = [
    ("before leasing", 2),
    ("after leasing", 2),
    ("after training", 3),
    ("after acking", 3),
    ("after publishing", 3),
    ("before serving", 3),
    ("after serving", 3),
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
        ended = crashed.live(deeds=[(point, count, "kill")])
        assert ended.codes == [KILLED], point
        crashed.assert_checkpoints_are_whole()
        before, newest = newest, (crashed.checkpoints or [0])[-1]
        assert newest >= before, f"a checkpoint was lost {point}"
    assert newest < NUM_STEPS
    crashed.live_to_the_end()
    crashed.assert_is(uncrashed)


@pytest.mark.timeout(120)
def test_a_trainer_that_is_told_to_stop_saves_and_at_a_second_signal_ends_at_once(
    uncrashed: Course, crashed: Course
) -> None:
    for point in ("before leasing", "before training", "before publishing", "before saving"):
        ended = crashed.live(deeds=[(point, 3, "terminate")])
        assert ended.codes == [0], point
        assert crashed.checkpoints[-1] == crashed.metrics[-1]["step"]
        assert ledger_of(crashed.hub.url).keys() == {"queued", "trained"}
        assert not crashed.leftovers
    ended = crashed.live(deeds=[("after training", 2, "terminate")] * 2)
    assert ended.codes == [143]
    assert not crashed.leftovers
    last = crashed.checkpoints[-1]
    ended = crashed.live(deeds=[("after shards", 2, "terminate twice")])
    assert ended.codes == [143]
    assert crashed.checkpoints[-1] == last + 2
    assert len(crashed.leftovers) == 1  # it does not wait for the disk
    crashed.assert_checkpoints_are_whole()
    crashed.live_to_the_end()
    crashed.assert_is(uncrashed)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_waits_for_a_batch_stops_when_it_is_told_to(
    tmp_path: Path, model_dir: Path, forge: Run, ranks: int
) -> None:
    with course(tmp_path, model_dir, forge, num_steps=1, num_groups=0) as empty:
        ended = empty.live(kill_after_s=0.2, signal=signal.SIGTERM, ranks=ranks)
        assert ended.codes == [0] * ranks
        assert ended.seconds < 15  # the hub holds a request for five
        assert (empty.metrics, empty.checkpoints) == ([], [])


@pytest.mark.timeout(120)
def test_a_hub_killed_while_the_trainer_holds_a_lease_costs_no_group(
    uncrashed: Course, crashed: Course
) -> None:
    deeds = [
        ("after leasing", 3, "kill the hub"),
        ("before acking", 9, "kill the hub"),
        ("before telling the hub", 7, "kill the hub"),
    ]
    with ThreadPoolExecutor(1) as pool:
        crashed.note_the_hub()
        life = pool.submit(crashed.live, deeds=deeds)
        for _ in deeds:
            assert crashed.hub.process is not None
            assert crashed.hub.process.popen.wait(60) == KILLED
            crashed.hub.start()
            crashed.note_the_hub()
        assert life.result().codes == [0]
    crashed.assert_is(uncrashed)
    assert {m["num_lost_leases"] for m in crashed.metrics} == {0}


@pytest.mark.timeout(120)
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    uncrashed: Course, crashed: Course
) -> None:
    for point, last in (("before saving", 2), ("before shards", 4)):
        ended = crashed.live(deeds=[(point, 2, "fill the disk")])
        assert ended.codes == [1], point
        assert crashed.checkpoints[-1] == last
        crashed.assert_checkpoints_are_whole()
        assert not crashed.leftovers
        assert f"the checkpoint of step {last + 2} could not be written" in crashed.said
        assert f"step_{last}" in crashed.said
    crashed.live_to_the_end()
    crashed.assert_is(uncrashed)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (("before leasing", 2, "raise 0"), "as planned"),
        (("before following", 2, "raise 1"), "as planned"),
        (("after the update", 2, "raise 1"), "as planned"),
        (("before shards", 2, "raise 0"), "as planned"),
        (("before shards", 2, "raise 1"), "as planned"),
        (("before leasing", 2, "kill"), "onnection (closed|reset) by peer|Broken pipe"),
    ],
)
def test_a_process_that_fails_takes_the_others_with_it(
    tmp_path: Path, model_dir: Path, forge: Run, deed: tuple[str, int, str], said: str
) -> None:
    with course(tmp_path, model_dir, forge, num_steps=7) as run:  # the sixth has nothing to train
        ended = run.live(ranks=2, deeds=[deed])
        assert 0 not in ended.codes
        assert (
            ended.seconds < 90
        )  # none waits for a process that is gone, as gloo would for half an hour
        assert re.search(said, run.said)
        assert run.live(ranks=2).codes == [0, 0]
        assert [m["step"] for m in run.metrics if m["loss"] is None] == [6]
        assert ledger_of(run.hub.url) == {"trained": 14}


@pytest.mark.timeout(60)
def test_a_signal_to_one_process_stops_both_after_the_same_step(
    tmp_path: Path, model_dir: Path, forge: Run
) -> None:
    with course(tmp_path, model_dir, forge, num_steps=4) as run:
        ended = run.live(ranks=2, deeds=[("before following", 3, "terminate")])  # the second
        assert ended.codes == [0, 0]
        assert run.checkpoints == [2]
        assert ledger_of(run.hub.url) == {"queued": 4, "trained": 4}
        assert run.live(ranks=2).codes == [0, 0]
        assert ledger_of(run.hub.url) == {"trained": 8}


@pytest.mark.timeout(60)
def test_two_processes_end_together_where_the_engine_has_other_weights(
    tmp_path: Path, model_dir: Path, forge: Run
) -> None:
    with course(tmp_path, model_dir, forge, num_steps=2, num_groups=0) as run:
        send(run.hub.url, groups_for(2))
        ended = run.live({"max_logprob_gap": 1e-3}, ranks=2)
        assert ended.codes == [1, 1]
        assert run.said.count("max_logprob_gap 0.001") >= 2
        assert run.checkpoints == []


@pytest.mark.timeout(60)
def test_two_processes_train_without_the_groups_that_cannot_be_trained_on(
    tmp_path: Path, model_dir: Path, forge: Run
) -> None:
    with course(tmp_path, model_dir, forge, num_steps=2, num_groups=0) as run:
        bad = make_group([1.0, 0.0], seed=9).replace(inference_logprobs=None)
        send(run.hub.url, [bad, *groups_for(2)])
        assert run.live(ranks=2).codes == [0, 0]
        assert ledger_of(run.hub.url) == {"trained": 4, "dead": 1}
        assert "managed_server" in run.said


@pytest.mark.timeout(60)
def test_two_processes_ask_the_reference_for_a_batch_that_brings_half_of_it(
    tmp_path: Path, model_dir: Path, forge: Run
) -> None:
    """One process gets micro-batches with `ref_logprobs`, the other those without."""
    rows = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    groups = [make_group(scores, seed=seed) for seed, scores in enumerate(rows)]
    for index in (0, 4):
        given = [[-1.5] * int(n) for n in groups[index].lengths]
        groups[index] = make_group(rows[index], seed=index, ref_logprobs=given)
    finals = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        with course(tmp_path / str(ranks), model_dir, forge, num_steps=3, num_groups=0) as run:
            send(run.hub.url, groups)
            flags = {"kl_coef": 0.2, "max_microbatch_tokens": 8, "num_steps": 3}
            assert run.live(flags, ranks=ranks).codes == [0] * ranks
            finals.append(load_file(run.save_path / "final_model/model.safetensors"))
            assert ledger_of(run.hub.url) == {"trained": 6}
    for name, value in finals[0].items():
        torch.testing.assert_close(finals[1][name], value, rtol=0, atol=1e-5)
