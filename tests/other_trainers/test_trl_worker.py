"""TRL's AsyncGRPOTrainer makes real optimizer steps on the hub's batches.

`trl_process` has the stand-ins for what needs a GPU. Weights go to the environment in this process instead of vLLM, by
TRL's own `weight_transfer` argument.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from atroposlib.api.server import create_app
from atroposlib.client import TrainerClient, samples
from atroposlib.errors import GroupError
from tests.api.helpers_api import serving
from tests.tiny_model import make_tiny_tokenizer
from tests.trainer.helpers_bandit import (
    BATCH_SIZE,
    BanditEnvironment,
    accuracy,
    make_starting_model,
    registration,
)
from tests.trainer.helpers_run import ledger_of
from tests.trainer.helpers_trainer import make_group

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.filterwarnings("ignore"),  # TRL's and accelerate's own
    pytest.mark.timeout(90),
]
trl = pytest.importorskip(
    "trl.experimental.async_grpo",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)

from datasets import Dataset  # noqa: E402

from example_trainer.other_trainers.trl_worker import HubRolloutWorker, to_rollout  # noqa: E402
from tests.other_trainers.trl_process import STAND_INS  # noqa: E402

NUM_STEPS = 20


class WeightsToEnvironment:
    """TRL's `WeightTransferProtocol`: the environment samples from every policy that is sent."""

    def __init__(self, environment: BanditEnvironment, model: Any) -> None:
        self.environment = environment
        self.model = model
        self.version = 0

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        missing = self.model.load_state_dict(dict(iterator), strict=False)
        assert missing == ([], [])
        self.version += 1

    def resume(self) -> None:
        if self.version > 1:  # before the training begins the hub has no trainer
            self.environment.publish(self.model, self.version)

    def destroy(self) -> None: ...


class WorkerWithEnvironment(HubRolloutWorker):
    """Lets the environment begin with the worker, two batches ahead: TRL takes the next before it trains on one."""

    transfer: WeightsToEnvironment

    def start(self) -> None:
        super().start()
        for _ in range(2):
            self.transfer.environment.publish(self.transfer.model, 1)


def test_steps_of_trl_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in STAND_INS:
        monkeypatch.setattr(*stand_in)
    model_path = make_starting_model(tmp_path / "model")
    policy = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with serving(create_app()) as hub_url, TrainerClient(hub_url) as hub:
        environment = BanditEnvironment(hub_url)
        worker = WorkerWithEnvironment(hub, registration(NUM_STEPS))
        worker.transfer = WeightsToEnvironment(environment, policy)
        trainer = trl.AsyncGRPOTrainer(
            model=str(model_path),
            args=trl.AsyncGRPOConfig(
                output_dir=str(tmp_path / "out"),
                max_steps=NUM_STEPS,
                per_device_train_batch_size=BATCH_SIZE,
                gradient_accumulation_steps=1,
                learning_rate=3e-3,
                weight_sync_steps=1,
                token_budget=0,
                max_staleness=4,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": [""] * 8}),
            processing_class=make_tiny_tokenizer(),
            rollout_worker=worker,
            weight_transfer=worker.transfer,
        )
        trainer.train()
        ledger = ledger_of(hub_url)
    assert trainer.state.global_step == NUM_STEPS
    assert environment.accuracies[0] < 0.25
    assert accuracy(policy) > 0.8, environment.accuracies
    assert ledger["trained"] >= (NUM_STEPS - 2) * 9, ledger
    assert "leased" not in ledger
    assert sum(ledger.values()) == len(environment.accuracies) * 9, ledger


def test_tokens_before_the_bound_are_left_out_and_do_not_cost_the_sequence() -> None:
    spans = [
        {"start": 0, "num_tokens": 5, "weight_version": "1"},
        {"start": 5, "num_tokens": 3, "weight_version": "6"},
    ]
    [sample, _] = samples([make_group([1.0, 0.0], weight_versions=[spans] * 2)])
    rollout = to_rollout(sample, number=0, version=7, oldest=3)
    assert rollout.completion_mask.tolist() == [0] * 5 + [1] * 3
    assert rollout.model_version == 6
    assert to_rollout(sample, number=0, version=7).completion_mask.tolist() == [0] * 3 + [1] * 5


def test_what_trl_cannot_say_is_refused() -> None:
    steps = [[0.0] * 3 + [0.5] * 4 + [1.0]] * 2
    group = make_group([1.0, 0.0], advantages=[steps[0], [*steps[0], 1.0]])
    with pytest.raises(GroupError, match="differ"):
        to_rollout(samples([group])[0], number=0, version=0)
    supervised = make_group([1.0, 0.0], group_overrides={"sft": True})
    with pytest.raises(GroupError, match="sft"):
        to_rollout(samples([supervised])[0], number=0, version=0)
