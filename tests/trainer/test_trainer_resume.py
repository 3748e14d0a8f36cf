"""A run that is stopped and resumed gives the same weights as one that was not stopped."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.api.server import create_app
from atroposlib.errors import ConfigError
from example_trainer.checkpointing import Checkpoints
from example_trainer.config import TrainerConfig
from example_trainer.model import Policy, load_policy
from example_trainer.optim import BLOCK, make_optimizer
from example_trainer.parallel import ALONE
from example_trainer.records import MetricsLog
from example_trainer.training import train
from example_trainer.weights import WeightsDirectory
from tests.api.helpers_api import serving
from tests.builders.rows import rows_in
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import recorded_engine
from tests.trainer.helpers_run import Configure, config_for, ledger_of, send
from tests.trainer.helpers_trainer import one_step, pairs

NUM_STEPS = 4


def run(model_dir: Path, out: Path, *, stop_after: int | None, **changes: Any) -> TrainerConfig:
    """Train on ten groups; stopped by a signal after a step and resumed if `stop_after` is given."""
    with serving(create_app()) as hub_url, recorded_engine() as engine:
        send(hub_url, pairs(2 * NUM_STEPS))
        settings = {"hub_url": hub_url, "engine_url": engine.url, "num_steps": NUM_STEPS}
        config = config_for(model_dir, out, **settings, checkpoint_interval=2, **changes)
        if stop_after is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MetricsLog, "write", signalling(MetricsLog.write, stop_after))
                train(config)
            assert checkpoints(config.save_path).steps()[-1] == stop_after
            assert not (config.save_path / "final_model").exists()
            config = config.model_copy(update={"resume": True})
        train(config)
        assert ledger_of(hub_url) == {"trained": 2 * NUM_STEPS}
        assert engine.versions[-1] == str(NUM_STEPS)
        if stop_after is not None:
            # Published, and again at the restart.
            assert engine.versions.count(str(stop_after)) == 2
    return config


def signalling(real: Any, step: int) -> Any:
    def write(self: MetricsLog, record: dict[str, Any]) -> None:
        real(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return write


def metrics_of(config: TrainerConfig) -> list[tuple[float, ...]]:
    records = rows_in(config.save_path / "metrics.jsonl")
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["ratio_mean"]) for r in records]


@pytest.mark.parametrize(
    ("stop_after", "changes"),
    [
        (3, {"warmup_steps": 4, "dtype": "bfloat16"}),
        (2, {"warmup_steps": 1, "lr_schedule": "cosine"}),
        pytest.param(
            *(2, {"optimizer": "adamw_8bit", "train_layer_indices": "1"}),
            marks=pytest.mark.other_trainers,
        ),
        (2, {"lora": True, "kl_coef": 0.1, "gradient_checkpointing": True}),
        (3, {"kl_coef": 0.5, "reference_refresh": 2, "dtype": "bfloat16"}),
    ],
)
def test_a_stopped_run_resumes_to_the_same_weights_and_the_same_record(
    model_dir: Path, tmp_path: Path, stop_after: int, changes: dict[str, Any]
) -> None:
    if "optimizer" in changes:
        model_dir = make_tiny_model(tmp_path / "wide", hidden_size=BLOCK)
    with torch.compiler.set_stance("force_eager"):  # torchao's step would compile for a minute
        whole = run(model_dir, tmp_path / "whole", stop_after=None, **changes)
        parts = run(model_dir, tmp_path / "parts", stop_after=stop_after, **changes)
    final = "final_adapter/adapter_model" if whole.lora else "final_model/model"
    expected = load_file(whole.save_path / f"{final}.safetensors")
    found = load_file(parts.save_path / f"{final}.safetensors")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert metrics_of(parts) == metrics_of(whole)
    if whole.reference_refresh:  # the policy becomes the reference, and its KL starts at zero again
        kl = [row["kl_mean"] or 0.0 for row in rows_in(whole.save_path / "metrics.jsonl")]
        assert (kl[0], kl[2]) == (0.0, 0.0)
        assert min(kl[1], kl[3]) > 0.0


def test_a_reference_that_no_checkpoint_holds_is_the_initial_model(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, kl_coef=0.1)
    policy, optimizer = stepped(config)
    path = checkpoints(tmp_path / "saved").take(policy, optimizer, 1)()
    refreshed = config.model_copy(update={"reference_refresh": 2})
    fresh, fresh_optimizer = loaded(refreshed)
    reference = load_policy(refreshed, is_frozen=True)
    saved = Checkpoints(save_path=tmp_path / "saved", world=ALONE, reference=reference)
    saved.load(path, fresh, fresh_optimizer)
    initial = load_policy(config).model.state_dict()
    for name, value in reference.model.state_dict().items():
        assert torch.equal(value, initial[name])


@pytest.mark.parametrize("changes", [{"lora": True, "kl_coef": 0.1}, {}], ids=str)
def test_a_refresh_without_a_reference_of_its_own_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--reference_refresh needs --kl_coef"):
        TrainerConfig(model_name="m", reference_refresh=5, **changes)


class Stepped(NamedTuple):
    policy: Policy
    optimizer: torch.optim.Optimizer


def loaded(config: TrainerConfig) -> Stepped:
    policy = load_policy(config)
    return Stepped(policy, make_optimizer(policy, config))


def stepped(config: TrainerConfig) -> Stepped:
    """Return policy and optimizer after one step."""
    policy, optimizer = loaded(config)
    one_step(policy, config, pairs(1), optimizer=optimizer)
    return Stepped(policy, optimizer)


def checkpoints(directory: Path, *, keep_last: int | None = None) -> Checkpoints:
    return Checkpoints(save_path=directory, world=ALONE, keep_last=keep_last)


def test_a_checkpoint_holds_masters_optimizer_and_random_states(tmp_path: Path) -> None:
    """Tied matrices stay tied; a parameter that never had a gradient, such as an idle expert's, has no state."""
    tied = make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    config = config_for(tied, tmp_path)
    policy, optimizer = stepped(config)
    idle = policy.model.model.layers[1].mlp.down_proj.weight
    del optimizer.state[idle]
    saved = checkpoints(tmp_path / "saved")
    path = saved.take(policy, optimizer, 1)()
    draw = torch.rand(3)
    fresh, fresh_optimizer = loaded(config)
    assert saved.load(path, fresh, fresh_optimizer).step == 1
    assert torch.equal(torch.rand(3), draw)
    assert fresh.model.lm_head.weight is fresh.model.model.embed_tokens.weight
    for a, b in zip(policy.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)
        before, after = optimizer.state.get(a, {}), fresh_optimizer.state.get(b, {})
        assert before.keys() == after.keys()
        assert bool(after) == (a is not idle)
        for name, value in before.items():
            assert torch.equal(value, after[name])


def test_only_the_last_checkpoints_are_kept(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer = loaded(config_for(model_dir, tmp_path))
    saved = checkpoints(tmp_path / "saved", keep_last=2)
    for step in (1, 2, 10):
        saved.take(policy, optimizer, step)()
    assert saved.steps() == [1, 2, 10]
    saved.remove_old()
    assert saved.steps() == [2, 10]


def test_a_matrix_that_lies_in_memory_by_columns_is_saved(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer = loaded(config_for(model_dir, tmp_path))
    head = policy.model.get_output_embeddings().weight
    head.data = head.data.T.contiguous().T
    path = checkpoints(tmp_path / "saved").take(policy, optimizer, 1)()
    stored = load_file(path / "training/rank_0.safetensors")
    assert torch.equal(stored["model.lm_head.weight"], head)
    assert torch.equal(load_file(path / "model.safetensors")["lm_head.weight"], head)


@pytest.mark.parametrize(
    ("num_layers", "optimizer"),
    [(3, "adamw"), pytest.param(2, "adamw_8bit", marks=pytest.mark.other_trainers)],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    tmp_path: Path, num_layers: int, optimizer: str
) -> None:
    model_dir = make_tiny_model(tmp_path / "wide", hidden_size=BLOCK)
    saved = checkpoints(tmp_path / "saved")
    path = saved.take(*stepped(config_for(model_dir, tmp_path)), 1)()
    other_dir = make_tiny_model(tmp_path / "other", hidden_size=BLOCK, num_layers=num_layers)
    other = loaded(config_for(other_dir, tmp_path, optimizer=optimizer))
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ConfigError, match="another model or optimizer"),
    ):
        saved.load(path, *other)


def test_what_is_no_checkpoint_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    config = config_for(model_dir, tmp_path, resume_from=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="nothing cannot be resumed from"):
        train(config)


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    (tmp_path / "step_7/training").mkdir(parents=True)
    (tmp_path / ".step_9-abc/training").mkdir(parents=True)
    (tmp_path / ".step_9-abc/training/state.json").write_text("{}")
    assert saved.steps() == []


def test_a_checkpoint_half_removed_is_none(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = loaded(config_for(model_dir, tmp_path))
    saved = checkpoints(tmp_path / "saved", keep_last=1)
    for step in (1, 2):
        saved.take(policy, optimizer, step)()

    def killed(path: Path, **options: Any) -> None:
        if path.is_dir():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("example_trainer.checkpointing.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            saved.remove_old()
    assert saved.steps() == [2]
    saved.begin(2)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step_2"]


def test_links_to_checkpoints_are_removed_and_what_they_lead_to_stays(
    model_dir: Path, tmp_path: Path
) -> None:
    """A user moved two checkpoints to a larger disk, and the whole directory before that."""
    policy, optimizer = loaded(config_for(model_dir, tmp_path))
    (tmp_path / "disk").mkdir()
    (tmp_path / "saved").symlink_to("disk")
    saved = checkpoints(tmp_path / "saved", keep_last=1)
    for step in (1, 2):
        saved.take(policy, optimizer, step)()
        saved.directory(step).rename(tmp_path / f"moved_{step}")
        saved.directory(step).symlink_to(tmp_path / f"moved_{step}")
    saved.remove_old()
    saved.take(policy, optimizer, 2)()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step_2"]
    assert all((tmp_path / f"moved_{step}/config.json").is_file() for step in (1, 2))


def test_a_directory_in_which_nothing_can_be_set_aside_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "earlier_run_1").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"--save_path {tmp_path}: File exists"):
        checkpoints(tmp_path).begin(0)


def test_checkpoints_of_an_abandoned_run_are_set_aside_and_pruning_spares_this_one(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else `keep_last` would remove the step 1 of this run, and `resume` go on from step 9 of the other."""
    policy, optimizer = loaded(config_for(model_dir, tmp_path))
    saved = checkpoints(tmp_path / "saved", keep_last=1)
    for step in (6, 9):
        saved.take(policy, optimizer, step)()
    for name in ("metrics.jsonl", "trained_groups.jsonl"):
        (tmp_path / "saved" / name).write_text("{}\n")
    (tmp_path / "saved/earlier_run_1").mkdir()
    saved.begin(0)
    saved.take(policy, optimizer, 1)()
    saved.remove_old()
    assert saved.steps() == [1]
    aside = tmp_path / "saved/earlier_run_2"
    names = ["metrics.jsonl", "step_6", "step_9", "trained_groups.jsonl"]
    assert sorted(path.name for path in aside.iterdir()) == names
    assert checkpoints(aside).steps() == [6, 9]
    assert "step_6, step_9 (--resume" in caplog.text


def test_the_records_of_a_run_without_checkpoints_are_kept_when_it_begins_again(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    checkpoints(tmp_path).begin(0)
    kept = tmp_path / "earlier_run_1/metrics.jsonl"
    assert kept.read_text() == metrics.read_text()
    metrics.write_text("")
    checkpoints(tmp_path).begin(0)
    assert not (tmp_path / "earlier_run_2").exists()


def test_a_run_that_falls_behind_what_the_hub_still_holds_says_so_and_goes_on(
    configure: Configure, hub_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    send(hub_url, pairs(12))
    config = configure(num_steps=4, checkpoint_interval=2)
    train(config)
    train(config.model_copy(update={"resume_from": config.save_path / "step_2"}))
    expected = "0 groups that were trained on after step 2 come again, and 2 steps are"
    assert expected in caplog.text
    assert ledger_of(hub_url) == {"trained": 12}
    assert [step for step, *_ in metrics_of(config)] == [1, 2, 3, 4]
    left = {path.name for path in config.save_path.iterdir()}
    files = {"metrics.jsonl", "group_fates.jsonl", "trained_groups.jsonl"}
    assert left == {"earlier_run_1", "final_model", "step_2", "step_4"} | files


def test_the_record_goes_on_after_the_step_of_the_checkpoint(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, metrics_path=tmp_path / "m.jsonl")
    config.metrics_path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')

    def steps() -> list[int]:
        return [row["step"] for row in rows_in(config.metrics_path)]

    with MetricsLog(config, start=2):
        assert steps() == [1, 2]
    with MetricsLog(config, start=3, last={"step": 3, "loss": float("nan")}):
        assert steps() == [1, 2, 3]
    with MetricsLog(config, start=3, last={"step": 3}) as log:
        log.write({"step": 4})
        assert steps() == [1, 2, 3, 4]
    with MetricsLog(config, start=0, last=None):
        assert steps() == []


def test_a_file_that_is_no_record_is_not_cut(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not lose this\n")
    config = config_for(model_dir, tmp_path, metrics_path=path)
    with pytest.raises(
        ConfigError, match=r"notes.txt was not written by this trainer.*do not lose"
    ):
        MetricsLog(config, start=2)
    assert path.read_text() == "do not lose this\n"


def test_a_resumed_run_goes_on_in_the_same_chart(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        opened.append(options)
        name = options["id"] or f"run{len(opened)}"
        return SimpleNamespace(id=name, log=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = config_for(model_dir, tmp_path, use_wandb=True, wandb_project="p", hub_token="secret")
    groups = []
    for start in (0, 3, 0):
        with MetricsLog(config, start=start) as log:
            groups.append(log.wandb_group)
    assert [o["id"] for o in opened] == [None, "run1", None]
    assert [o["resume"] for o in opened] == [None, "allow", None]
    assert groups[0] == groups[1] != groups[2]
    assert "secret" not in repr(opened)


def test_a_run_resumed_beyond_its_last_step_leaves_its_final_model(
    configure: Configure, hub_url: str
) -> None:
    send(hub_url, pairs(4))
    config = configure(num_steps=2, checkpoint_interval=1)
    train(config)
    final = config.save_path / "final_model/model.safetensors"
    weights = final.read_bytes()
    final.unlink()
    train(config.model_copy(update={"num_steps": 1, "resume": True}))
    assert final.read_bytes() == weights


def test_weights_that_a_killed_trainer_left_in_memory_are_removed_those_of_a_living_one_stay(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    (shared / "atropos-weights-of-another").mkdir(parents=True)
    monkeypatch.setattr("example_trainer.weights._SHARED_MEMORY", shared)
    config = config_for(model_dir, tmp_path, weights_dir=None)
    policy = load_policy(config)
    killed, living = WeightsDirectory(config, policy), WeightsDirectory(config, policy)
    for weights in (killed, living):
        weights.take(1)()
    assert killed.path.parent == shared
    assert killed._lock is not None
    os.close(killed._lock)  # as the kernel does for a process that is gone
    with WeightsDirectory(config, policy) as weights:
        found = {path.name for path in shared.iterdir()}
        assert found == {"atropos-weights-of-another", living.path.name, weights.path.name}
        assert (living.path / "version_1/model.safetensors").is_file()
    living.__exit__(None, None, None)
    assert [path.name for path in shared.iterdir()] == ["atropos-weights-of-another"]


def test_versions_of_an_earlier_life_are_removed_once_there_is_a_newer_one(
    model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path)
    policy = load_policy(config)
    WeightsDirectory(config, policy).take(9)()
    (tmp_path / "weights/.version_10-abc").mkdir()
    (tmp_path / "weights/notes").mkdir()
    weights = WeightsDirectory(config, policy)
    assert (tmp_path / "weights/version_9").is_dir()
    weights.take(8)()
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["notes", "version_8"]
