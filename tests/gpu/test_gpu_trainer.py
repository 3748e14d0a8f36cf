"""What only a CUDA device can show of the trainer: bfloat16, flash attention over packed rows, memory, kernels.

`pytest -m gpu tests/gpu`; flash_attn is used where it is installed.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks._trainer_head import head_memory
from example_trainer.config import TrainerConfig
from example_trainer.data import Batch, make_batch
from example_trainer.gap import LogprobGap
from example_trainer.head import head_logprobs
from example_trainer.model import Policy, load_policy
from example_trainer.optim import make_optimizer
from example_trainer.parallel import whole
from example_trainer.step import StepResult, data_options, take_step
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_trainer import make_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(300),  # Triton compiles kernels on first use
]
needs_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="flash_attn is not installed"
)
GROUPS = [make_group([1.0, 0.0, 0.3, 0.8], seed=s, length=9 + 40 * s) for s in range(3)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=128)


def config_for(model_dir: Path, tmp_path: Path, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {"attention": "sdpa", "dtype": "bfloat16", "lr": 1e-3} | changes
    return TrainerConfig(
        model_name=str(model_dir), device="cuda", save_path=tmp_path / "saved", **fields
    )


def logprobs(policy: Policy, batch: Batch) -> Tensor:
    """Return the log-probability of every trained token, in an order that no layout changes."""
    found = []
    for micro_batch in batch.micro_batches:
        micro_batch = micro_batch.to(policy.device)
        own_N = policy.logprobs(micro_batch).logprobs_N
        lengths = torch.bincount(micro_batch.positions.sequence_N).tolist()
        labels = micro_batch.positions.labels_N.split(lengths)
        found += [(tuple(a.tolist()), b) for a, b in zip(labels, own_N.split(lengths), strict=True)]
    return torch.cat([own for _, own in sorted(found, key=lambda pair: pair[0])])


def one_step(policy: Policy, config: TrainerConfig) -> StepResult:
    options = data_options(config)
    gap = LogprobGap(policy, limit=None)
    optimizer = make_optimizer(policy, config)
    return take_step(policy, optimizer, make_batch(GROUPS, options), config, 0, gap)


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"packing": "on"}])
def test_a_bfloat16_step_has_the_loss_and_gradient_of_float32(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    wide = config_for(model_dir, tmp_path, dtype="float32")
    expected = one_step(load_policy(wide), wide)
    config = config_for(model_dir, tmp_path, **changes)
    policy = load_policy(config)
    before = [whole(p.detach()).clone() for p in policy.model.parameters()]
    found = one_step(policy, config)
    assert found.loss == pytest.approx(expected.loss, rel=0.05, abs=0.02)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    after = [whole(p.detach()) for p in policy.model.parameters()]
    assert {p.dtype for p in after} == {torch.float32}
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "attention", ["sdpa", pytest.param("flash_attention_2", marks=needs_flash)]
)
def test_packed_rows_give_the_logprobs_and_gradients_of_padded_ones(
    model_dir: Path, tmp_path: Path, attention: str
) -> None:
    results = []
    for packing in ("off", "on"):
        config = config_for(model_dir, tmp_path, attention=attention, packing=packing)
        policy = load_policy(config)
        batch = make_batch(GROUPS, data_options(config))
        assert {each.borders is not None for each in batch.micro_batches} == {packing == "on"}
        own = logprobs(policy, batch)
        own.sum().backward()
        gradient = torch.cat([whole(p.grad).flatten() for p in policy.model.parameters()])
        results.append((own.detach(), gradient))
    (padded, padded_gradient), (packed, packed_gradient) = results
    torch.testing.assert_close(packed, padded, rtol=0, atol=0.05)
    assert (packed - padded).abs().mean() < 5e-3
    cosine = torch.nn.functional.cosine_similarity(packed_gradient, padded_gradient, dim=0)
    assert cosine > 0.999


def test_logprobs_of_a_large_vocabulary_need_less_than_one_tensor_of_logits() -> None:
    found = head_memory(8192, 152_000, hidden=896, device="cuda")
    # Two copies of the weight's gradient are no part of what the positions cost.
    assert found.peak_bytes < 4 * 8192 * 152_000


@pytest.mark.parametrize("chunk_size", [100, 4096])
def test_the_compiled_bfloat16_head_sums_its_gradients_in_float32(
    chunk_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    hidden = torch.tensor(rng.normal(size=(1000, 64)), dtype=torch.bfloat16)
    weight = torch.tensor(rng.normal(0, 0.2, (3000, 64))).bfloat16().double()
    ids = torch.from_numpy(rng.integers(0, 3000, (1000, 1)))
    weights = torch.from_numpy(rng.normal(size=(1000, 1)))
    gradients, values = [], []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        states = hidden.to(device, torch.float64 if device == "cpu" else torch.bfloat16)
        head = weight.to(device, dtype).requires_grad_()
        out = head_logprobs(
            states,
            head,
            None,
            ids_NK=ids.to(device),
            temperature_N=torch.ones(1000, device=device, dtype=dtype),
            chunk_size=chunk_size,
        )
        (out.logprobs_NK * weights.to(device, dtype)).sum().backward()
        assert head.grad is not None
        values.append(out.logprobs_NK.detach().cpu().double())
        gradients.append(head.grad.cpu().double())
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0.05)
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < 5e-3
    assert "could not be compiled" not in caplog.text


def test_compiled_layers_give_the_same_logprobs(model_dir: Path, tmp_path: Path) -> None:
    found = []
    for compile_layers in (False, True):
        config = config_for(model_dir, tmp_path, compile_layers=compile_layers)
        policy = load_policy(config)
        batch = make_batch(GROUPS, data_options(config))
        found.append(logprobs(policy, batch).detach())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.05)
    assert (found[1] - found[0]).abs().mean() < 5e-3
