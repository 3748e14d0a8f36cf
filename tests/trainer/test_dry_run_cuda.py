"""Forward pass, losses, gap check and metrics on CUDA tensors that are only pretended, with torch's CUDA build.

`FakeTensorMode` checks shapes, types and devices as the CUDA kernels would, bfloat16 included, and needs no device.
`.ci/cuda_env.sh` makes the environment: `pytest -m cuda_wheel tests/trainer/test_dry_run_cuda.py`.

What this cannot reach: the backward pass and the optimizer's step (autograd asks the driver for the device; the meta
dry run has both), numbers, memory, speed, kernels of flash attention and Triton, streams, NCCL, several processes.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import _trainer_ours
from benchmarks._trainer_measure import Meter
from benchmarks._trainer_work import Spec, build_model
from example_trainer import head
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy, load_policy
from example_trainer.optim import make_optimizer
from example_trainer.parallel import World
from example_trainer.step import data_options, describe_result, take_step
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_dry_run import (
    CASES_OF_A_GPU,
    CORRECTIONS,
    EVERY_TERM,
    LAYOUTS,
    STEPS,
    WAYS,
    OneDevice,
    config_for_dry_run,
    make_groups,
    policy_of,
    trace_of,
)

pytestmark = [
    pytest.mark.cuda_wheel,
    pytest.mark.skipif(torch.version.cuda is None, reason="torch is not a CUDA build"),
    pytest.mark.filterwarnings("ignore"),
]


class Loaded(NamedTuple):
    policy: Policy
    reference: Policy
    mode: FakeTensorMode


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, torch.dtype], Loaded]:
    """Models without numbers are not changed by a step: one of each serves every test."""
    model_dir = make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found = {}
    for way, changes in WAYS.items():
        for dtype in (torch.float32, torch.bfloat16):
            config = config_for_dry_run(model_dir, model_dir, **changes)
            policy, reference = (on_cuda(load_policy(config), dtype, mode) for _ in range(2))
            assert {p.device.type for p in policy.model.parameters()} == {"cuda"}
            found[way, dtype] = Loaded(policy, reference, mode)
    return found


def on_cuda(policy: Policy, dtype: torch.dtype, mode: FakeTensorMode) -> Policy:
    """Return the model that FSDP gathers for a forward pass: every parameter in `dtype`."""
    policy.model.to(dtype)
    with mode:
        policy.model.to_empty(device="cuda")
    return dataclasses.replace(policy, device=torch.device("cuda:0"), dtype=dtype)


@pytest.fixture(autouse=True)
def pretended_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks the driver says yes; the backward pass, which would not run without one, is left out."""
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)


def take_one_step(model: Loaded, **changes: Any) -> None:
    config = config_for_dry_run(Path("model"), Path("out"), **changes)
    policy, reference = model.policy, model.reference
    with model.mode, OneDevice("cuda"):
        optimizer = make_optimizer(policy, config)
        options = data_options(config, policy)
        batch = make_batch(make_groups(), options)
        assert len(batch.micro_batches) > 1
        gap = LogprobGap(policy, limit=None)
        frozen = reference if config.kl_coef else None
        trace = trace_of(policy, batch)
        result = take_step(policy, optimizer, batch, config, 1, gap, frozen, trace)
        # Its `lines` copy the values to the CPU, where these have none; test_dry_run_meta.py calls it.
        assert trace._values_3M.device.type == "cuda"
        described = describe_result(result, batch)
    assert described["loss"] is not None
    assert described["logprob_gap_max"] is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "layout", "way"), STEPS)
def test_forward_losses_gap_and_metrics_of_every_objective_stay_on_the_gpu(
    models: dict[tuple[str, torch.dtype], Loaded],
    name: str,
    layout: str,
    way: str,
    dtype: torch.dtype,
) -> None:
    changes = {"objective": name} | EVERY_TERM | LAYOUTS[layout] | WAYS[way]
    take_one_step(models[way, dtype], **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_forward_and_losses_of_every_correction_stay_on_the_gpu(
    models: dict[tuple[str, torch.dtype], Loaded], correction: str, layout: str
) -> None:
    changes = {"correction": correction, "distill_coef": 0.3, "distill_loss": "reverse_kl"}
    take_one_step(models["whole", torch.bfloat16], **changes, **LAYOUTS[layout])


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_buffers_of_a_sharded_model_are_on_the_gpu_where_its_weights_may_not_be(
    cpu_offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP brings a layer's parameters to the device, and no buffer."""
    model_dir = make_tiny_model(tmp_path / "model", num_layers=1)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda self: self)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        monkeypatch.setattr("example_trainer.parallel.init_device_mesh", lambda *_: mesh)
        config = config_for_dry_run(model_dir, tmp_path, cpu_offload=cpu_offload)
        world = World(rank=1, size=2, device=torch.device("cuda:0"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = load_policy(config, world).model
    finally:
        dist.destroy_process_group()
    assert {p.device.type for p in model.parameters()} == {"cpu" if cpu_offload else "cuda"}
    assert {b.device.type for b in model.buffers()} == {"cuda"}


class Traffic(TorchDispatchMode):
    """Adds up what operations read and write, and notes what they write by shape and dtype.

    Views, allocations and the few values that are picked out or put in place are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.written: set[tuple[tuple[int, ...], torch.dtype]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        skipped = ("aten::empty", "aten::gather", "aten::scatter", "prim::")
        if not func.is_view and not name.startswith(skipped):
            read = (args, {key: value for key, value in kwargs.items() if key != "out"})
            written = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            tensors = [each for each in tree_leaves(read) if isinstance(each, torch.Tensor)]
            if name == "aten::copy_":
                tensors = tensors[1:]
            self.num_bytes += sum(each.nbytes for each in [*tensors, *written])
            self.written |= {(tuple(each.shape), each.dtype) for each in written}
        return out


class Saved:
    """What autograd keeps from the forward pass to the backward pass: its engine would ask for the device."""

    needs_input_grad = (True, True, False)
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, wanted: bool) -> None:
        assert not wanted


def test_no_product_of_the_head_is_rounded_and_a_logit_costs_as_many_bytes_as_counted() -> None:
    """`head.py` names the figures; what is compiled into one kernel there is counted one by one here."""
    num_positions, vocabulary, size = 8192, 151_936, 896
    rows = head.GPU_CHUNK_BYTES // (4 * vocabulary)
    with FakeTensorMode():
        hidden = torch.empty(num_positions, size, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(vocabulary, size, device="cuda", dtype=torch.bfloat16)
        ids = torch.empty(num_positions, 1, device="cuda", dtype=torch.int64)
        temperature, ones = (
            torch.empty(n, device="cuda") for n in (num_positions, (num_positions, 1))
        )
        saved = Saved()
        with OneDevice("cuda"), Traffic() as forward:
            head._Head.forward(saved, hidden, weight, None, ids, temperature, rows)
        with OneDevice("cuda"), Traffic() as backward:
            found = head._Head.backward(saved, ones, None)
    assert [each.dtype for each in found[:2] if each is not None] == [
        torch.bfloat16,
        torch.bfloat16,
    ]
    logits, gradient = (rows, vocabulary), (vocabulary, size)
    assert {dtype for shape, dtype in forward.written if shape == logits} == {torch.float32}
    assert (gradient, torch.float32) in backward.written
    per_logit = (forward.num_bytes + backward.num_bytes) / (num_positions * vocabulary)
    assert per_logit == pytest.approx(108, abs=1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES_OF_A_GPU, ids=lambda case: case.name)
def test_the_steps_of_the_benchmark_stay_on_the_gpu_in_their_real_sizes(
    case: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fake tensors take no memory: widths, lengths and settings are those of `make gpu`; two layers and one group."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    spec = dataclasses.replace(case, sequences=8, device="cuda", directory=str(tmp_path), steps=0)
    config = _trainer_ours.config_of(spec)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = build_model(spec.shape, num_hidden_layers=2)
    if spec.checkpointing:
        model.gradient_checkpointing_enable()
    policy = on_cuda(policy_of(model, "meta"), torch.bfloat16, mode)
    with mode, OneDevice("cuda"):
        meter = Meter(policy.model, device="cuda")
        _trainer_ours.run_steps(policy, spec, config, meter)
    assert len(meter.result.losses) == 1
    assert meter.result.expected_bytes > 2**30
