"""One trainer process of several: some steps on made-up groups, from a model or a checkpoint."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from example_trainer.checkpointing import Checkpoints
from example_trainer.config import TrainerConfig
from example_trainer.data import MicroBatch, make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import load_policy, transformer_layers
from example_trainer.optim import make_optimizer, stored_parts
from example_trainer.parallel import World, processes, whole
from example_trainer.step import data_options, take_step
from example_trainer.training import resume
from tests.trainer.helpers_trainer import make_group


class Watching(LogprobGap):
    """Notes how many bytes of gradients this process holds before each backward pass."""

    held_bytes: list[int]

    def observe(self, micro_batch: MicroBatch, logprobs_N: Tensor, version: int) -> None:
        super().observe(micro_batch, logprobs_N, version)
        gradients = (p.grad for p in self._policy.model.parameters())
        self.held_bytes.append(sum(whole_or_part(g).nbytes for g in gradients if g is not None))


class Gathered(TorchDispatchMode):
    """Counts the bytes that this process has after they were gathered from all."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.num_bytes += out.nbytes
        return out


def whole_or_part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def run(config: TrainerConfig, world: World, *, save_at: int | None = None) -> list[float | None]:
    """Train to `config.num_steps`, save in between if asked and at the end, return the losses and gradient norms.

    The last step's gradient is in `gradient.safetensors`.
    """
    policy = load_policy(config, world)
    optimizer = make_optimizer(policy, config)
    saved = Checkpoints(save_path=config.save_path, world=world)
    start = resume(config, saved, policy, optimizer).step
    gradient: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradient.update(
            {n: whole(p.grad) for n, p in policy.model.named_parameters() if p.grad is not None}
        )
    )
    options = data_options(config)
    numbers: list[float | None] = []
    gap = Watching(policy, limit=None)
    gap.held_bytes = []
    computes_in: set[str] = set()
    transformer_layers(policy.model)[0].register_forward_pre_hook(
        lambda layer, _: computes_in.update(str(p.dtype) for p in layer.parameters())
    )
    for step in range(start, config.num_steps):
        # Three micro-batches for two processes, so that one of them has a filler.
        groups = [
            make_group([1.0, 0.0, 0.3], seed=10 * step + s, length=6 + 4 * s) for s in range(2)
        ]
        batch = make_batch(groups, options)
        result = take_step(policy, optimizer, batch, config, step, gap)
        numbers += [result.loss, result.grad_norm, result.sums["ratio_sum"], result.gap.maximum]
        numbers += [*result.peak[:-1], *result.peak.group_shares]
        if step + 1 == save_at:
            saved.take(policy, optimizer, save_at)()
    if world.is_main:
        config.save_path.mkdir(parents=True, exist_ok=True)
        save_file(gradient, config.save_path / "gradient.safetensors")
    with Gathered() as gathered:
        policy.save(config.save_path / "final_model")
    measured = {
        "computes_in": sorted(computes_in),
        "gathered": gathered.num_bytes,
        "gradients": gap.held_bytes,
        "optimizer": sum(
            part.nbytes
            for state in optimizer.state.values()
            for value in state.values()
            for part in map(whole_or_part, stored_parts(value).values())
        ),
        "weights": sum(whole_or_part(p).nbytes for p in policy.model.parameters()),
    }
    (config.save_path / f"measured_{world.rank}.json").write_text(json.dumps(measured))
    return numbers


def main(runs: Sequence[dict[str, Any]]) -> int:
    """Train with the settings of each run; `save_at` among them is a step whose checkpoint is kept."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # 8-bit AdamW would compile for a minute
    with processes(torch.device("cpu")) as world:
        for settings in runs:
            save_at = settings.pop("save_at", None)
            config = TrainerConfig(**settings)
            numbers = run(config, world, save_at=save_at)
            if world.is_main:
                (config.save_path / "numbers.json").write_text(json.dumps(numbers))
    return 0
