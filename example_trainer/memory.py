"""Estimate the GPU memory of a step before the first one, and name the flag that reduces it if it does not fit.

A pure function of sizes, testable without a GPU. An estimate only causes a warning. Called by `training.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.config import TrainerConfig
from example_trainer.model import Policy
from example_trainer.step import data_options

GIB = 2**30

HEAD_BYTES = 3 * 2**29
"""A block of float32 logits (`head.GPU_CHUNK_BYTES`) and their gradient in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Quantities that determine how much memory a step needs on one GPU."""

    num_parameters: int
    num_trained: int
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
    checkpoints: bool = False
    """Whether gradient checkpointing is on."""
    microbatch_tokens: int
    engine_share: float = 0.0
    """Fraction of the GPU that an engine takes; 0 if the engine has its own GPU."""


def sizes_of(policy: Policy, config: TrainerConfig, *, shares_gpu: bool) -> Sizes:
    parameters = list(policy.model.parameters())
    settings = policy.model.config.get_text_config()
    return Sizes(
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        intermediate_size=getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size,
        num_processes=policy.world.size,
        computes_bytes=policy.dtype.itemsize,
        frozen_bytes=min(p.element_size() for p in parameters),
        state_bytes=2 if config.optimizer == "adamw_8bit" else 8,
        has_reference=config.kl_coef > 0 and not policy.is_adapted,
        checkpoints=config.gradient_checkpointing,
        microbatch_tokens=data_options(config, policy).max_tokens,
        engine_share=config.gpu_memory_utilization if shares_gpu else 0.0,
    )


def needs(sizes: Sizes, gpu_bytes: int) -> dict[str, int]:
    """Return the peak memory of one step on one GPU: bytes by purpose.

    "weights" are trained ones in float32 and frozen ones in their own dtype.
    """
    trained, frozen = sizes.num_trained, sizes.num_parameters - sizes.num_trained
    reference = sizes.num_parameters * sizes.computes_bytes if sizes.has_reference else 0
    sharded = {
        "weights": 4 * trained + frozen * sizes.frozen_bytes,
        "gradients": 4 * trained,
        "optimizer": sizes.state_bytes * trained,
        "reference": reference,
    }
    return {name: size // sizes.num_processes for name, size in sharded.items()} | {
        "activations": sizes.microbatch_tokens * bytes_per_token(sizes),
        "logits": HEAD_BYTES,
        "engine": int(sizes.engine_share * gpu_bytes),
    }


def bytes_per_token(sizes: Sizes) -> int:
    """Return the bytes of activations that the backward pass needs, per token.

    Counted on Qwen2 in bfloat16 at hidden sizes 896, 3,584 and 4,096: 20.6 to 21.0 bytes per hidden value and layer
    beside the MLP's four tensors. With checkpointing a layer keeps only its input, and one is computed at a time.
    """
    layer = (21 * sizes.hidden_size + 8 * sizes.intermediate_size) * sizes.computes_bytes // 2
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
        f"{_cure(sizes, found, total - gpu_bytes)}"
    )


def _cure(sizes: Sizes, found: dict[str, int], lacking: int) -> str:
    fewer = (found["activations"] - lacking) // bytes_per_token(sizes) // 1024 * 1024
    saved_states = found["optimizer"] * (1 - 2 / sizes.state_bytes)
    if fewer >= 8192:
        return f"use --max_microbatch_tokens {fewer}"
    if not sizes.checkpoints and lacking < 0.8 * found["activations"]:
        return "use --gradient_checkpointing true"
    if fewer >= 1024:
        return f"use --max_microbatch_tokens {fewer}"
    if lacking < found["engine"]:
        return "give the engine a GPU of its own (--vllm_gpu)"
    if saved_states > lacking:
        return "use --optimizer adamw_8bit"
    return "split it over more GPUs (torchrun), or train adapters (--lora true)"
