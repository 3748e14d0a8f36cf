"""Estimate the GPU memory of a step before the first one, and name the flags that reduce it if it does not fit.

A pure function of sizes, testable without a GPU. An estimate only causes a warning. Called by `training.py`, and by
`grpo.py` for `--plan`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from atroposlib.utils.model_choice import check_model_path
from example_trainer.config import TrainerConfig
from example_trainer.model import (
    Policy,
    build_model,
    choose_dtype,
    naming_the_model,
    transformer_layers,
)
from example_trainer.parallel import World
from example_trainer.step import data_options
from example_trainer.vllm_process import shares_gpu

GIB = 2**30

HEAD_BYTES = 3 * 2**29
"""A block of float32 logits (`head.GPU_CHUNK_BYTES`) and their gradient in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Quantities that determine how much memory a step needs on one GPU."""

    num_parameters: int
    num_trained: int
    num_root: int
    """Parameters outside the decoder's layers: embeddings, head, last norm."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_processes: int = 1
    computes_bytes: int = 2
    """Bytes per value of the forward pass: 2 in bfloat16."""
    frozen_bytes: int = 4
    """Bytes per value that is not trained."""
    state_bytes: int = 8
    """Optimizer bytes per trained value: 8 (adamw), 2 (adamw_8bit)."""
    has_reference: bool = False
    offloads: bool = False
    """Whether weights, gradients and optimizer are in host memory."""
    saves_on_host: bool = False
    """Whether activations wait for the backward pass in host memory."""
    checkpoints: bool = False
    """Whether gradient checkpointing is on."""
    microbatch_tokens: int
    longest: int = 0
    """Tokens that a sequence may have; a micro-batch holds at least one."""
    engine_share: float = 0.0
    """Fraction of the GPU that an engine takes; 0 if the engine has its own GPU."""


def sizes_of(policy: Policy, config: TrainerConfig, *, shares_gpu: bool) -> Sizes:
    parameters = list(policy.model.parameters())
    settings = policy.model.config.get_text_config()
    layers = {id(p) for layer in transformer_layers(policy.model) for p in layer.parameters()}
    mlp = getattr(settings, "moe_intermediate_size", None) or getattr(
        settings, "intermediate_size", 4 * settings.hidden_size
    )
    return Sizes(
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        num_root=sum(p.numel() for p in parameters if id(p) not in layers),
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        intermediate_size=mlp * (getattr(settings, "num_experts_per_tok", None) or 1),
        num_processes=policy.world.size,
        computes_bytes=policy.dtype.itemsize,
        frozen_bytes=min(p.element_size() for p in parameters),
        state_bytes=2 if config.optimizer == "adamw_8bit" else 8,
        has_reference=config.kl_coef > 0 and not policy.is_adapted,
        offloads=config.cpu_offload,
        saves_on_host=config.activation_offload,
        checkpoints=config.gradient_checkpointing,
        microbatch_tokens=max(config.seq_len, data_options(config, policy).max_tokens),
        longest=config.seq_len,
        engine_share=config.gpu_memory_utilization if shares_gpu else 0.0,
    )


def needs(sizes: Sizes, gpu_bytes: int) -> dict[str, int]:
    """Return the peak memory of one step on one GPU: bytes by purpose.

    "weights" are trained ones in float32 and frozen ones in their own dtype. "gathered" is whole in every process: the
    root group from the first layer to the end of the backward pass, a layer and the one fetched ahead, and the
    gradients of both groups, which are copied to float32 before they are summed.
    """
    trained, frozen = sizes.num_trained, sizes.num_parameters - sizes.num_trained
    sharded = {
        "weights": 4 * trained + frozen * sizes.frozen_bytes,
        "gradients": 4 * trained,
        "optimizer": sizes.state_bytes * trained,
        "reference": sizes.num_parameters * sizes.computes_bytes if sizes.has_reference else 0,
    }
    parts = 0 if sizes.offloads else 1
    layer = (sizes.num_parameters - sizes.num_root) // sizes.num_layers
    gathered = (sizes.num_root + 2 * layer) * sizes.computes_bytes
    if not frozen:
        gathered += (sizes.num_root + layer) * (sizes.computes_bytes + 4)
    is_whole = sizes.num_processes == 1 and sizes.computes_bytes == 4 and not sizes.offloads
    return {name: parts * size // sizes.num_processes for name, size in sharded.items()} | {
        "gathered": 0 if is_whole else gathered,
        "activations": sizes.microbatch_tokens * bytes_per_token(sizes),
        "logits": HEAD_BYTES,
        "engine": int(sizes.engine_share * gpu_bytes),
    }


def bytes_per_token(sizes: Sizes) -> int:
    """Return the bytes of activations that the backward pass needs, per token.

    Counted on Qwen2 in bfloat16 at hidden sizes 896, 3,584 and 4,096: 20.6 to 21.0 bytes per hidden value and layer
    beside the MLP's four tensors. With checkpointing a layer keeps only its input, and one is computed at a time; in
    host memory, nothing is left but that one.
    """
    layer = (21 * sizes.hidden_size + 8 * sizes.intermediate_size) * sizes.computes_bytes // 2
    if sizes.saves_on_host:
        return layer
    if sizes.checkpoints:
        return sizes.num_layers * sizes.computes_bytes * sizes.hidden_size + layer
    return sizes.num_layers * layer


def what_does_not_fit(sizes: Sizes, gpu_bytes: int) -> str | None:
    """Return one line with a step's needs and a flag that makes it fit; None if it fits."""
    found = needs(sizes, gpu_bytes)
    total = sum(found.values())
    if total <= gpu_bytes:
        return None
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in found.items() if size)
    listed = listed.replace("activations", f"activations of {sizes.microbatch_tokens} tokens")
    return (
        f"a step needs about {total / GIB:.0f} GiB of this GPU's {gpu_bytes / GIB:.0f} ({listed}): "
        f"{cure(sizes, gpu_bytes)}"
    )


CURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--gradient_checkpointing true", {"checkpoints": True}),
    ("--vllm_gpu, so that the engine has a GPU of its own", {"engine_share": 0.0}),
    ("--optimizer adamw_8bit", {"state_bytes": 2}),
    ("--activation_offload true", {"saves_on_host": True}),
    ("--cpu_offload true --optimizer adamw", {"offloads": True}),
)
"""Flags and what they change, the cheapest in time first."""


def cure(sizes: Sizes, gpu_bytes: int) -> str:
    """Return the fewest flags that make a step fit, and of equally many those that cost the least time."""
    useful = [each for each in CURES if dataclasses.replace(sizes, **each[1]) != sizes]
    for chosen in (some for n in range(len(useful) + 1) for some in combinations(useful, n)):
        changes = {name: value for _, each in chosen for name, value in each.items()}
        changed = dataclasses.replace(sizes, **changes)
        tokens = changed.microbatch_tokens
        spare = gpu_bytes - sum(needs(changed, gpu_bytes).values())
        if spare < 0:
            tokens = (tokens + spare // bytes_per_token(changed)) // 1024 * 1024
        if spare >= 0 or tokens >= max(sizes.longest, 4096 if changed.checkpoints else 8192):
            flags = [flag for flag, _ in chosen]
            # With checkpointing the default is higher.
            if spare < 0 or changed.checkpoints != sizes.checkpoints:
                flags.append(f"--max_microbatch_tokens {tokens}")
            return f"use {', '.join(flags)}"
    return "split it over more GPUs (torchrun), or train adapters (--lora true)"


def plan(config: TrainerConfig) -> str:
    """Return the table of `--plan`: what each of `plan_gpus` GPUs holds, and the flags that make it fit.

    Reads the model's config and no weights. Raises ConfigError for a model that cannot be loaded.
    """
    check_model_path(config.model_name, flag="--model_name")
    device = torch.device("cuda")
    dtype = choose_dtype(config, device)
    kept = dtype if config.lora else torch.float32
    with naming_the_model(config), torch.device("meta"):
        model = build_model(config, dtype=kept, has_weights=False)
    world = World(rank=0, size=config.plan_gpus, device=device)
    policy = Policy(
        model=model, tokenizer=None, device=device, dtype=dtype, module=model, world=world
    )
    # Beside several processes an engine needs GPUs of its own.
    is_shared = config.plan_gpus == 1 and shares_gpu(config, num_gpus=1)
    sizes = sizes_of(policy, config, shares_gpu=is_shared)
    gpu_bytes = int(config.plan_gpu_gb * GIB)
    found = needs(sizes, gpu_bytes)
    total = sum(found.values())
    lines = [
        f"{config.model_name}: {sizes.num_parameters / 1e9:.2f}B parameters, {sizes.num_trained / 1e9:.2f}B trained, "
        f"micro-batches of {sizes.microbatch_tokens} tokens; GiB on each of {config.plan_gpus} GPUs",
        *(f"{name:12}{size / GIB:8.1f}" for name, size in found.items()),
        f"{'total':12}{total / GIB:8.1f} of {config.plan_gpu_gb:g}",
        "fits" if total <= gpu_bytes else cure(sizes, gpu_bytes),
    ]
    return "\n".join(lines)
