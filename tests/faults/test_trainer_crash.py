"""A trainer that is killed at any moment and started again is the trainer that was never killed."""

from __future__ import annotations

import json
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atroposlib.scored_data import ScoredGroup
from example_trainer.checkpointing import Checkpoints
from example_trainer.parallel import ALONE
from tests.builders.rows import rows_in
from tests.faults.drivers import HubProcess, hub_process
from tests.faults.trainer_lives import Ended, Life, nursery
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import RecordedEngine, recorded_engine
from tests.trainer.helpers_run import closed_ledger, send
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
    sampled: dict[str, int] = field(default_factory=dict)
    """The sampled tokens of each group that was sent."""
    seconds: float = 0.0

    @property
    def save_path(self) -> Path:
        return self.directory / "saved"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    def send(self, groups: Sequence[ScoredGroup], *, prefix: str = "g") -> None:
        self.sampled |= send(self.hub.url, groups, prefix=prefix)

    @property
    def ledger(self) -> dict[str, int]:
        """Which places of the hub hold groups, after a life that was not killed."""
        return closed_ledger(self.hub.url, self.save_path, self.sampled)

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
        assert ended.codes == [0], self.said[-4000:]
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
        return rows_in(self.save_path / "metrics.jsonl")

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
        log = Path(f"{self.journal}.log")
        return log.read_text() if log.exists() else ""

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
        assert self.ledger == {"trained": 2 * self.num_steps}
        assert self.engine.versions[-1] == str(self.num_steps)
        last = [self.num_steps - 2, self.num_steps][-KEEP_LAST:]
        assert sorted(path.name for path in self.save_path.iterdir()) == sorted(
            ["final_model", "group_fates.jsonl", "metrics.jsonl", "trained_groups.jsonl"]
            + [f"step_{step}" for step in last]
        )


Begin = Callable[..., AbstractContextManager[Course]]


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, forge: Run) -> Iterator[Begin]:
    """Return a function that begins a course with an emptied hub and an engine of its own.

    No batch is set aside as dead: the kills may all hit trainers that hold the first one.
    """
    flags = ("--max-deliveries", str(len(POINTS) + 1))

    @contextmanager
    def begin(
        directory: Path, groups: Sequence[ScoredGroup], *, num_steps: int
    ) -> Iterator[Course]:
        hub.forget()
        with recorded_engine() as engine:
            course = Course(directory, model_dir, num_steps, forge, hub, engine)
            course.send(groups)
            yield course

    with hub_process(tmp_path_factory.mktemp("hub"), *flags) as hub:
        yield begin


@pytest.fixture(scope="module")
def uncrashed(tmp_path_factory: pytest.TempPathFactory, begin: Begin) -> Iterator[Course]:
    directory = tmp_path_factory.mktemp("uncrashed")
    with begin(directory, groups_for(NUM_STEPS), num_steps=NUM_STEPS) as whole:
        whole.seconds = whole.live_to_the_end().seconds
        yield whole


@pytest.fixture
def crashed(tmp_path: Path, begin: Begin) -> Iterator[Course]:
    with begin(tmp_path, groups_for(NUM_STEPS), num_steps=NUM_STEPS) as started:
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
    assert len(phases) >= 3
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
        assert crashed.ledger.keys() == {"queued", "trained"}
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
    tmp_path: Path, begin: Begin, ranks: int
) -> None:
    with begin(tmp_path, [], num_steps=1) as empty:
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


@pytest.mark.timeout(240)
def test_a_process_that_fails_takes_the_others_with_it(tmp_path: Path, begin: Begin) -> None:
    planned, cut_off = "as planned: ", "onnection (closed|reset) by peer|Broken pipe"
    deeds = {
        ("before leasing", 2, "raise 0"): planned,
        ("before following", 2, "raise 1"): planned,
        ("after the update", 2, "raise 1"): planned,
        ("before shards", 2, "raise 0"): planned,
        ("before shards", 2, "raise 1"): planned,
        ("before leasing", 2, "kill"): cut_off,
    }
    with begin(tmp_path, groups_for(14), num_steps=14) as run:  # two have nothing to train
        for deed, words in deeds.items():
            before = len(run.said)
            ended = run.live(ranks=2, deeds=[deed])
            assert 0 not in ended.codes, deed
            assert ended.seconds < 90  # gloo would wait half an hour for a process that is gone
            assert re.search(words, run.said[before:]), deed
        assert run.live(ranks=2).codes == [0, 0]
        assert [m["step"] for m in run.metrics if m["loss"] is None] == [6, 13]
        assert run.ledger == {"trained": 28}


@pytest.mark.timeout(60)
def test_a_signal_to_one_process_stops_both_after_the_same_step(
    tmp_path: Path, begin: Begin
) -> None:
    with begin(tmp_path, groups_for(4), num_steps=4) as run:
        ended = run.live(ranks=2, deeds=[("before following", 3, "terminate")])  # the second
        assert ended.codes == [0, 0]
        assert run.checkpoints == [2]
        assert run.ledger == {"queued": 4, "trained": 4}
        assert run.live(ranks=2).codes == [0, 0]
        assert run.ledger == {"trained": 8}


@pytest.mark.timeout(60)
def test_two_processes_end_together_where_the_engine_has_other_weights(
    tmp_path: Path, begin: Begin
) -> None:
    with begin(tmp_path, groups_for(2), num_steps=2) as run:
        ended = run.live({"max_logprob_gap": 1e-3}, ranks=2)
        assert ended.codes == [1, 1]
        assert run.said.count("max_logprob_gap 0.001") >= 2
        assert run.checkpoints == []


@pytest.mark.timeout(120)
def test_two_processes_follow_one_hub_through_the_first_as_one_does(
    tmp_path: Path, begin: Begin
) -> None:
    """Without the groups that cannot be trained on; one process gets micro-batches with `ref_logprobs`, one without."""
    bad = make_group([1.0, 0.0], seed=8).replace(inference_logprobs=None)
    poison = make_group([1.0, 0.0], seed=9)
    poison = poison.replace(advantages=np.full(len(poison.tokens), 3e38))  # an infinite gradient
    rows = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    groups = [make_group(scores, seed=seed) for seed, scores in enumerate(rows)]
    for index in (0, 4):
        given = [[-1.5] * int(n) for n in groups[index].lengths]
        groups[index] = make_group(rows[index], seed=index, ref_logprobs=given)
    flags = {"kl_coef": 0.2, "reference_refresh": 2, "max_microbatch_tokens": 8}
    finals, traces = [], []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        with begin(tmp_path / str(ranks), [], num_steps=3) as run:
            run.send([bad, poison], prefix="bad")
            run.send(groups)
            assert run.live(flags, ranks=ranks).codes == [0] * ranks
            assert run.ledger == {"trained": 6, "dead": 2}
            assert run.engine.versions == ["0", "1", "2", "3"]
            assert "managed_server" in run.said
            finals.append(load_file(run.save_path / "final_model/model.safetensors"))
            traces.append(rows_in(run.save_path / "trained_groups.jsonl"))
    assert [line["group_id"] for line in traces[1]] == [f"g{i}" for i in range(6)]
    assert_close(traces[1], traces[0])
    assert_close(finals[1], finals[0])


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict | list):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_close(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert found == pytest.approx(expected, abs=1e-5)
