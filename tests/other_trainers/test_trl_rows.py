"""TRL's trainers take the rows of `atropos-sft-gen` and `atropos-dpo-gen` as they are: two steps of each."""

from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli import dpo, sft
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.runtime.process import process
from tests.runtime.test_group_rows import Adding, Guessing, harnessed
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.filterwarnings("ignore"),  # TRL's and accelerate's own
    pytest.mark.timeout(600),
]
trl = pytest.importorskip(
    "trl",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)


class Rated(Guessing):
    """Two turns; every other episode is rated better."""

    num_rated = 0

    def final_score(self, episode: Episode) -> float:
        self.num_rated += 1
        return float(self.num_rated % 2)


async def stored_rows(folder: Path) -> list[str]:
    """Run `process` for an environment of one turn and one of two; return the files."""
    files = []
    for env_cls in (Adding, Rated):
        result = await process(harnessed(env_cls, folder / env_cls.__name__, total_steps=2))
        files.append(str(result.path))
    return files


def steps_of(trainer_class: Any, config_class: Any, rows: Path, folder: Path) -> list[float]:
    """Train two steps on the rows; return the loss of each."""
    from datasets import load_dataset

    config = config_class(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=256,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trainer_class(
        model=str(make_tiny_model(folder / "model")),
        args=config,
        train_dataset=load_dataset(
            "json", data_files=str(rows), split="train", cache_dir=str(folder / "cache")
        ),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


async def test_the_sft_trainer_takes_the_rows(tmp_path: Path) -> None:
    rows = tmp_path / "sft.jsonl"
    stored = await stored_rows(tmp_path)
    assert sft.main([str(rows), "--from-file", *stored, "--format=chat"]) == 0
    losses = steps_of(trl.SFTTrainer, trl.SFTConfig, rows, tmp_path)
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)


async def test_the_dpo_trainer_takes_the_rows(tmp_path: Path) -> None:
    rows = tmp_path / "dpo.jsonl"
    stored = await stored_rows(tmp_path)
    assert dpo.main([str(rows), "--from-file", *stored, "--format=chat"]) == 0
    losses = steps_of(trl.DPOTrainer, trl.DPOConfig, rows, tmp_path)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the policy is still its own reference
    assert len(losses) == 2
