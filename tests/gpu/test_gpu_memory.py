"""What saves memory changes no step, and what is written from pinned memory beside a step loads again."""

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer.background import Background
from example_trainer.checkpointing import Checkpoints
from example_trainer.contract import check_files, tensors_in
from example_trainer.model import Policy, load_policy
from example_trainer.optim import make_optimizer, stored_parts
from example_trainer.parallel import ALONE, host_copy, whole
from example_trainer.weights import WeightsDirectory
from tests.gpu.helpers_gpu import DEVICE, ON_GPU, config_for, needs_cuda, steps
from tests.tiny_model import make_tiny_model

pytestmark = ON_GPU
ADAMW_8BIT = pytest.param(
    {"optimizer": "adamw_8bit"},
    marks=pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
    ),
    id="adamw_8bit",
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu_offload": True},
        {"activation_offload": True},
        {"activation_offload": True, "gradient_checkpointing": True},
        {"activation_offload": True, "cpu_offload": True, "gradient_checkpointing": True},
        {"lora": True, "cpu_offload": True},
        ADAMW_8BIT,
    ],
    ids=str,
)
def test_what_saves_memory_takes_the_same_steps(
    changes: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    plain = {"lora": True} if "lora" in changes else {}
    taken = []
    for settings in (plain, changes):
        config = config_for(model_dir, tmp_path, **settings)
        torch.manual_seed(0)  # adapters begin with random numbers
        policy = load_policy(config)
        results = steps(policy, config, make_optimizer(policy, config))
        taken.append([(each.loss, each.grad_norm) for each in itertools.islice(results, 4)])
        home = "cpu" if settings.get("cpu_offload") else DEVICE
        assert {p.device.type for p in policy.model.parameters()} == {home}
    for expected, found in zip(*taken, strict=True):
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)
    assert taken[0][0] != pytest.approx(taken[0][-1], rel=0.05)


def state_of(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a copy of the weights and of the optimizer's state, by name, on the CPU."""
    found = {}
    for name, parameter in policy.model.named_parameters():
        found[name] = parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            found |= {f"{name}.{key}{part}": each for part, each in stored_parts(value).items()}
    return {name: whole(each.detach()).to("cpu", copy=True) for name, each in found.items()}


@pytest.mark.parametrize(
    "changes", [{}, {"cpu_offload": True}, {"lora": True}, ADAMW_8BIT], ids=str
)
def test_files_written_while_training_continues_hold_the_step_before(
    changes: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(model_dir, tmp_path, **changes)
    policy = load_policy(config)
    optimizer = make_optimizer(policy, config)
    results = steps(policy, config, optimizer)
    next(results)
    saved = Checkpoints(save_path=config.save_path, world=ALONE)
    with WeightsDirectory(config, policy) as weights, Background() as files:
        expected = state_of(policy, optimizer)
        write, publish = saved.take(policy, optimizer, 1), weights.take(1)
        files.start(lambda: (write(), publish()))
        for _ in range(5):
            next(results)
        files.wait()
        published = weights.path / "version_1"
        check_files(published)
        kept = dict(tensors_in(published))
    changed = state_of(policy, optimizer)
    again = load_policy(config)
    loaded = make_optimizer(again, config)
    assert saved.load(saved.directory(1), again, loaded).step == 1
    found = state_of(again, loaded)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert any(not torch.equal(changed[name], value) for name, value in expected.items())
    if not config.lora:
        for name, value in kept.items():
            assert torch.equal(value, expected[name].to(value.dtype))


@needs_cuda
def test_copies_for_files_are_in_pinned_memory() -> None:
    assert host_copy(torch.ones(2, device=DEVICE)).is_pinned()
