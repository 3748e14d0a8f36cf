"""The Tinker client of the SDK makes real optimizer steps on the hub's batches, at a server in this process."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from atroposlib.api.server import create_app
from atroposlib.client import LeasedBatch, TrainerClient
from tests.api.helpers_api import serving
from tests.trainer.helpers_bandit import (
    BanditEnvironment,
    accuracy,
    make_starting_model,
    registration,
)
from tests.trainer.helpers_trainer import make_group

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.timeout(90),
    # The client leaves its connections to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
tinker = pytest.importorskip(
    "tinker",
    reason="TINKER WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)

from example_trainer.other_trainers import tinker_client  # noqa: E402
from tests.other_trainers.tinker_server import TinkerServer, make_app  # noqa: E402

NUM_STEPS = 20


class Connected(NamedTuple):
    server: TinkerServer
    client: tinker.TrainingClient


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[Connected]:
    server = TinkerServer(make_starting_model(tmp_path / "model"), tmp_path / "weights")
    with serving(make_app(server)) as url:
        service = tinker.ServiceClient(base_url=url, api_key="tml-test")
        yield Connected(server, service.create_lora_training_client(base_model="tiny").result())
        service.close("success").result()
    del service
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()  # closes its connections here, so that no later test fails with their ResourceWarning


def test_steps_through_the_tinker_api_learn(connected: Connected) -> None:
    server, client = connected
    with serving(create_app()) as hub_url:
        environment = BanditEnvironment(hub_url)

        def publish(path: str, version: int) -> None:
            saved = server.weights_dir / path.rpartition("/")[2]
            model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
            environment.publish(model, version)

        with TrainerClient(hub_url) as hub:
            adam = tinker.AdamParams(learning_rate=3e-3, beta2=0.999, eps=1e-8)
            tinker_client.train(hub, registration(NUM_STEPS), client, publish, adam=adam)
    assert server.num_steps == NUM_STEPS
    assert set(server.losses) == {"importance_sampling"}
    assert environment.accuracies[0] < 0.25
    assert accuracy(server.model) > 0.8, environment.accuracies


def test_supervised_sequences_are_trained_by_cross_entropy_in_the_same_step(
    connected: Connected,
) -> None:
    server, client = connected
    group = make_group([1.0, 1.0, 0.0], overrides=[{"sft": True}, {}, {}])
    before = server.model.lm_head.weight.clone()
    tinker_client.update(client, LeasedBatch(groups=[group]), adam=tinker.AdamParams())
    assert server.losses == ["importance_sampling", "cross_entropy"]
    assert server.num_steps == 1
    assert not torch.equal(before, server.model.lm_head.weight)
