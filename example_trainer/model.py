"""Load the trained model, run its forward pass, and save it atomically.

Trained weights are float32 (in bfloat16, AdamW at 1e-5 loses its updates); the forward pass reads copies in the
configured dtype (`World.shard`), which saved weights and frozen ones also have. Dropout is off, because the trainer's
logprobs must match the engine's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.utils.generic import is_flash_attention_requested

from atroposlib.errors import AtroposError, ConfigError, require
from atroposlib.utils.files import sync_to_disk
from atroposlib.utils.model_choice import check_model_path, torch_device
from example_trainer.adapters import ADAPTER, add_adapters, freeze_other_layers, merged_weights
from example_trainer.config import TrainerConfig
from example_trainer.contract import checkpoint_form, shapes_in, write_checksums
from example_trainer.data import MicroBatch
from example_trainer.head import head_logprobs, logits_logprobs
from example_trainer.parallel import ALONE, World, host_copy, whole

IGNORE_BORDERS = {"afmoe", "biogpt", "bloom", "gpt_oss", "granitemoehybrid", "mpt", "opt", "xglm"}
"""Model types whose attention mask does not depend on the positions (transformers 5.24)."""


class PolicyOutput(NamedTuple):
    """Values of one forward pass at the trained positions of a micro-batch; float32, differentiable."""

    logprobs_N: Tensor
    """Logprobs of the labels."""
    entropy_N: Tensor
    teacher_NK: Tensor | None
    """Logprobs of the tokens that a teacher lists; None without a teacher."""
    router_loss: Tensor | None
    """Load-balancing loss of the experts; None if it is not asked for."""


class PolicyModule(nn.Module):
    """The forward pass of training: hidden states, then log-probabilities at trained positions.

    Logits of whole sequences are computed only if the model's head is more than a matrix (`has_plain_head`).
    """

    def __init__(self, causal: Any, *, balance: Any = None) -> None:
        """`balance`: the function of the experts' load-balancing loss, if that is asked for."""
        super().__init__()
        self.causal = causal
        self.balance = balance

    def forward(self, micro_batch: MicroBatch) -> PolicyOutput:
        positions = micro_batch.positions
        inputs = {"input_ids": micro_batch.tokens_BT, "use_cache": False}
        if micro_batch.borders is not None:
            # Attention finds the borders between sequences where positions restart at 0. Flash attention gets them
            # directly: finding them would synchronise with the device in every layer.
            inputs["position_ids"] = micro_batch.position_ids_BT
            if uses_flash(self.causal):
                inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), micro_batch.borders)
                inputs |= dict.fromkeys(("max_length_q", "max_length_k"), micro_batch.longest)
        if self.balance is not None:
            inputs["output_router_logits"] = True
        ids_NK = positions.labels_N[:, None]
        if positions.teacher_ids_NK is not None:
            ids_NK = torch.cat([ids_NK, positions.teacher_ids_NK], dim=1)
        asked = {"ids_NK": ids_NK, "temperature_N": positions.temperature_N}
        if has_plain_head(self.causal):
            outputs = base_model(self.causal).get_decoder()(**inputs)
            hidden_NH = outputs.last_hidden_state.flatten(0, 1)[micro_batch.trained_N]
            head = base_model(self.causal).get_output_embeddings()
            out = head_logprobs(hidden_NH, head.weight, head.bias, **asked)
        else:
            outputs = self.causal(**inputs)
            out = logits_logprobs(outputs.logits.flatten(0, 1)[micro_batch.trained_N], **asked)
        # Copies: FSDP's hooks are on the outputs, and an operation in place on a view would drop them.
        teacher_NK = None if positions.teacher_ids_NK is None else out.logprobs_NK[:, 1:].clone()
        router_loss = None
        if self.balance is not None:
            model = base_model(self.causal)
            sizes = (model.num_experts, model.num_experts_per_tok)
            router_loss = self.balance(outputs.router_logits, *sizes, micro_batch.is_token_BT)
        return PolicyOutput(out.logprobs_NK[:, 0].clone(), out.entropy_N, teacher_NK, router_loss)


def saved_on_host() -> torch.autograd.graph.saved_tensors_hooks:
    """Keep what autograd saves for the backward pass in pinned host memory; weights stay, because FSDP frees them."""

    def pack(value: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        base = value if value._base is None else value._base
        if isinstance(base, nn.Parameter) or not value.is_floating_point():
            return value
        on_host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        return value.device, on_host.copy_(value, non_blocking=True)

    def unpack(saved: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, on_host = saved
        return on_host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def base_model(causal: Any) -> Any:
    """Return the transformers model inside a peft wrapper, or the model itself."""
    return causal.get_base_model() if hasattr(causal, "peft_config") else causal


def uses_flash(causal: Any) -> bool:
    """Whether attention is a kind of flash attention, which takes the borders between sequences."""
    return bool(is_flash_attention_requested(base_model(causal).config))


def has_plain_head(causal: Any) -> bool:
    """Whether logits are `hidden @ weight.T + bias`: no soft cap (Gemma), no scale (Cohere, Granite), no adapter."""
    model = base_model(causal)
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    changed = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    return type(head) is nn.Linear and not any(getattr(config, name, None) for name in changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A causal language model, its tokenizer, and the precision it computes in."""

    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    module: nn.Module
    """`PolicyModule` over `model`, with weights sharded and cast by `World.shard`."""
    world: World = ALONE
    saves_on_host: bool = False
    """Whether activations wait for the backward pass in host memory."""
    leaves_adapters_out: bool = False
    """Whether this is the frozen model under an adapted policy, a reference without a second copy."""

    def logprobs(self, micro_batch: MicroBatch) -> PolicyOutput:
        """Run the forward pass. Right padding needs no attention mask in a causal model."""
        nothing = contextlib.nullcontext()
        with (
            saved_on_host() if self.saves_on_host else nothing,
            self.model.disable_adapter() if self.leaves_adapters_out else nothing,
        ):
            output: PolicyOutput = self.module(micro_batch)
        return output

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return hasattr(self.model, "peft_config")

    def save(self, target: Path, *, merged: bool = False) -> None:
        """Gather the weights and `put` them into `target`; every process must call it."""
        weights = self.gather(merged=merged)
        if self.world.is_main:
            self.put(target, weights, merged=merged, is_durable=True)
        self.world.barrier()

    def put(
        self, target: Path, weights: dict[str, Tensor], *, merged: bool, is_durable: bool
    ) -> None:
        """Write gathered weights into a temporary directory and move that to `target`.

        Unless `is_durable`, files are not flushed to disk, and a crash of the machine may damage them. Raises
        AtroposError if they cannot be written.
        """
        try:
            with written_directory(target, ALONE, is_durable=is_durable) as directory:
                self.write(directory, weights, merged=merged)
        except (OSError, SafetensorError) as error:
            raise AtroposError(f"{target} could not be written: {error}") from error

    def gather(self, *, merged: bool = False) -> dict[str, Tensor]:
        """Return a copy of the weights to write, on the CPU of the first process; {} in the others.

        With adapters, those of the adapter, or with `merged` of the whole model. Every process must call it.
        """
        only_adapter = self.is_adapted and not merged
        copies: dict[int, Tensor] = {}  # tied parameters are gathered once and stay tied
        state: dict[str, Tensor] = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            is_adapter = self.is_adapted and ".lora_" in name
            if not value.is_floating_point() or (only_adapter and not is_adapter):
                continue
            if id(value) not in copies:
                own = value.detach()
                own = whole(own if is_adapter else own.to(self.dtype))  # cast first: less traffic
                copies[id(value)] = host_copy(own) if self.world.is_main else own.new_empty(0)
            state[name] = copies[id(value)]
        if not self.world.is_main:
            return {}
        return merged_weights(state, self.model) if self.is_adapted and merged else state

    def write(self, directory: Path, weights: dict[str, Tensor], *, merged: bool = False) -> None:
        """Write gathered weights, config and tokenizer; any thread may call it while the model is trained.

        An adapter is written in peft's format.
        """
        self.tokenizer.save_pretrained(directory)
        if self.is_adapted and not merged:
            self.model.save_pretrained(directory, state_dict=weights)
            # The names in an adapter's file lack the adapter's.
            plain = {name.replace(f".{ADAPTER}", ""): value for name, value in weights.items()}
            write_checksums(directory, plain)
            return
        model = base_model(self.model)
        weights = checkpoint_form(weights, model)
        model.save_pretrained(directory, state_dict=dict(weights), save_original_format=False)
        found = shapes_in(directory)  # without the other name of a tied tensor
        write_checksums(directory, {name: weights[name] for name in found})
        path = directory / "config.json"  # save_pretrained writes the dtype of the master weights
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def reference_of(policy: Policy, config: TrainerConfig) -> Policy:
    """Return the initial model as a KL term's reference: a frozen copy, or the policy without its adapters."""
    if policy.is_adapted:
        return replace(policy, leaves_adapters_out=True)
    return load_policy(config, policy.world, is_frozen=True)


@torch.no_grad()
def refresh(reference: Policy, policy: Policy) -> None:
    """Copy the policy's weights, in the reference's precision; every process must call it."""
    for frozen, trained in zip(
        reference.model.parameters(), policy.model.parameters(), strict=True
    ):
        frozen.copy_(trained if isinstance(frozen, DTensor) else whole(trained))


def load_policy(
    config: TrainerConfig, world: World | None = None, *, is_frozen: bool = False
) -> Policy:
    """Load model and tokenizer, sharded over the processes of `world`; raise ConfigError if loading fails.

    Of several processes only the first holds a whole model, on the CPU in the checkpoint's precision. `is_frozen`: as
    a reference.
    """
    device = torch_device(config.device) if world is None else world.device
    world = world or ALONE
    dtype = choose_dtype(config, device)
    kept = dtype if is_frozen or config.lora else torch.float32  # adapters are float32 in any case
    check_model_path(config.model_name, flag="--model_name")
    with naming_the_model(config):
        tokenizer = AutoTokenizer.from_pretrained(config.model_name)
        if world.size == 1:
            read = model = build_model(config, dtype=kept)
        else:
            read = build_model(config, dtype="auto") if world.is_main else None
            with torch.device("meta"):
                model = build_model(config, dtype=kept, has_weights=False)
            if read is not None:  # how the checkpoint names and shapes its tensors
                base_model(model)._weight_conversions = base_model(read)._weight_conversions
    model.train()
    balance = None
    if config.router_aux_coef and not is_frozen:
        kind = type(base_model(model))
        balance = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)
        if balance is None:
            raise ConfigError(f"--router_aux_coef: {kind.__name__} has no load-balancing loss")
    module = PolicyModule(model, balance=balance)
    if not config.cpu_offload and world.size == 1:
        model.to(device)
    # A process alone that computes in its weights' dtype has nothing to shard and nothing to cast.
    casts = any(p.dtype != dtype for p in model.parameters())
    if world.size > 1 or config.cpu_offload or casts:
        settings = {"offloads": config.cpu_offload, "is_frozen": is_frozen}
        world.shard(module, transformer_layers(model), dtype, **settings)
    if world.size > 1:
        module.to_empty(device="cpu" if config.cpu_offload else device)
        world.fill(model, read)
    if is_frozen:
        model.requires_grad_(False)
    return Policy(
        model=model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        module=module,
        world=world,
        saves_on_host=config.activation_offload,
    )


@contextlib.contextmanager
def naming_the_model(config: TrainerConfig) -> Iterator[None]:
    """Turn the errors of a model that cannot be loaded into ConfigError with its name."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"--model_name {config.model_name} cannot be loaded: {reason}") from error


def build_model(config: TrainerConfig, *, dtype: Any, has_weights: bool = True) -> Any:
    """Return the model with adapters, checkpointing and compiled layers as configured, on the CPU.

    Without weights, it is on the context's device. With dtype "auto" weights keep the checkpoint's dtype; `World.fill`
    converts them.
    """
    name = config.model_name
    settings = AutoConfig.from_pretrained(name)
    for key, value in vars(settings).items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, 0.0)
    chosen = {"dtype": dtype, "attn_implementation": attention_kernel(config, settings)}
    if has_weights:
        model = AutoModelForCausalLM.from_pretrained(name, config=settings, **chosen)
    else:
        model = AutoModelForCausalLM.from_config(settings, **chosen)
    is_blind = settings.model_type in IGNORE_BORDERS and not uses_flash(model)
    if config.packing == "on" and (is_blind or model._is_stateful):
        cause = (
            "their mask ignores borders" if is_blind else "they hand a state on from token to token"
        )
        raise ConfigError(
            f"--packing on: in layers of {type(model).__name__} sequences in one row would read each other, because "
            f"{cause}; use --packing off{' or flash attention' if is_blind else ''}"
        )
    if config.liger:
        use_liger(model)
    if config.lora:
        model = add_adapters(model, config)
    elif config.train_layer_indices is not None:
        freeze_other_layers(model, config.train_layer_indices, transformer_layers(model))
    if config.gradient_checkpointing:
        # Renamed in transformers 5.x: later versions warn of the old name, earlier ones lack the new one.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if config.compile_layers:
        for layer in transformer_layers(model):
            layer.compile()
    return model


def use_liger(model: Any) -> None:
    """Replace the forward passes for which liger-kernel has fused ones; raise ConfigError if it has none."""
    liger = require("liger_kernel.transformers.monkey_patch", extra="gpu")
    if model.config.model_type not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"--liger: liger-kernel has nothing for {type(model).__name__}")
    losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    liger._apply_liger_kernel_to_instance(model=model, **losses)


def attention_kernel(config: TrainerConfig, settings: Any) -> str | None:
    """Return the kernel for a model with these settings; None: sdpa, or eager for models without it."""
    if config.attention != "auto":
        return config.attention
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
    has_flash = config.device != "cpu" and importlib.util.find_spec("flash_attn") is not None
    # Some models, such as gpt-oss, need a flash attention of their own, which would be downloaded.
    fits = kind and kind._supports_flash_attn and not kind._compatible_flash_implementations
    return "flash_attention_2" if has_flash and fits else None


def adapter_rank(config: TrainerConfig) -> int:
    """Return the largest rank of the adapters: peft raises it where a model fuses matrices, as those of experts."""
    with torch.device("meta"):
        settings = build_model(config, dtype=torch.bfloat16, has_weights=False).peft_config[ADAPTER]
    return max(settings.r, *settings.rank_pattern.values(), 0)


def transformer_layers(model: Any) -> list[nn.Module]:
    """Return the decoder's blocks, which are compiled and sharded one by one."""
    layers = getattr(base_model(model).get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(model).__name__} has no `layers`: they can be neither split over processes nor compiled"
        )
    return list(layers)


def choose_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


@contextlib.contextmanager
def written_directory(target: Path, world: World, *, is_durable: bool = True) -> Iterator[Path]:
    """Yield a directory for all processes to fill, which then replaces `target`; after an error it is removed.

    A reader sees the old directory, for an instant none, or the new one, never part of one. Files are flushed to disk
    before if it must be durable.
    """
    name = ""
    if world.is_main:
        target.parent.mkdir(parents=True, exist_ok=True)
        name = tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)
        Path(name).chmod(0o755)
    directory = Path((world.broadcast(name.encode()) or b"").decode())
    try:
        yield directory
        world.barrier()
        if world.is_main:
            for path in [*directory.rglob("*"), directory] if is_durable else ():
                sync_to_disk(path)
            old = directory.with_name(directory.name + ".old")
            with contextlib.suppress(FileNotFoundError):
                target.rename(old)
            directory.rename(target)
            if is_durable:
                sync_to_disk(target.parent)
            remove_directory(old)
    finally:
        if world.is_main:
            remove_directory(directory)
    world.barrier()


def remove_directory(path: Path) -> None:
    """Remove a directory, or a link to one without what it leads to; do nothing if that fails."""
    with contextlib.suppress(OSError):
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
