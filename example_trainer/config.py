"""Every setting of the trainer: one model, read from flags and YAML by `atroposlib.config`.

Names and spellings of the original trainer keep working (`--model`, `--atropos-url`, `--training-steps`, ...).
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from example_trainer.objective import (
    NOISE_OF_A_SEQUENCE,
    OBJECTIVES,
    Baseline,
    Correction,
    DistillLoss,
    KlEstimator,
    LossMean,
    ObjectiveName,
    RatioLevel,
    Surrogate,
)

logger = logging.getLogger(__name__)

_MODES = {
    "none": ("restart", False),
    "shared_vllm": ("reload", False),
    "lora_only": ("lora", True),
    "lora_restart": ("restart", True),
}
"""The original's `--weight-bridge-mode` -> our bridge, and whether adapters are trained."""


_UNUSED = frozenset(
    {
        "vllm_config_path",
        "adafactor_scale_parameter",
        "adafactor_relative_step",
        "trainer_rank",
        "world_size",
        "init_method",
        "num_inference_nodes",
        "debug_loading",
        "single_copy",
    }
)
_WHY_UNUSED = "torchrun starts several processes, engines take weights without shared memory, and there is no Adafactor"


class TrainerConfig(BaseModel):
    """Settings of one training run; counts of sequences, tokens and steps, times in seconds."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, use_attribute_docstrings=True)

    # Model
    model_name: str = Field(
        validation_alias=AliasChoices("model_name", "model", "model_name_or_path")
    )
    """Checkpoint directory, or a name on the Hugging Face hub."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward pass and of the published weights; auto: bfloat16 on cuda, float32 on cpu. Master weights are
    always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile_layers: bool = False
    """torch.compile for each decoder layer: all work between matrix products then reads and writes a quarter of the
    bytes (counted on 0.5B); a minute or more of compiling in the first steps."""
    threads: int | None = Field(None, ge=1)
    """Torch CPU threads; None: torch's choice, or 1 on two cores or fewer."""
    seed: int = 0
    """Of torch, numpy and python."""

    # Hub
    hub_url: str = Field(
        "http://localhost:8000", validation_alias=AliasChoices("hub_url", "atropos_url")
    )
    """Address of run-api."""
    hub_token: str | None = None
    """Bearer token of the hub, where it asks for one; None: that in ATROPOS_HUB_TOKEN."""
    lease_s: float | None = Field(None, gt=0)
    """Time without a sign of life after which the hub hands this trainer's batch out again; None: the hub's default,
    15 minutes."""

    # Training
    num_steps: int = Field(10, ge=1, validation_alias=AliasChoices("num_steps", "training_steps"))
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Sequences per padded micro-batch; times gradient_accumulation_steps = sequences per step."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """See batch_size."""
    max_microbatch_tokens: int | None = Field(None, ge=1)
    """Positions per micro-batch, padding included; bounds memory. None: 32768, or 8192 on cuda without
    gradient_checkpointing."""
    seq_len: int = Field(2048, ge=2)
    """Longest sequence in tokens; longer ones are skipped and counted."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Several sequences in one row, without padding between them; auto: where flash attention runs."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = "auto"
    """Attention kernel; auto: flash_attention_2 where it is installed, else sdpa."""
    pad_to_multiple_of: int = Field(8, ge=1)
    """Micro-batch width is rounded up to this."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit needs bitsandbytes and a single process."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm is clipped to this."""

    # Adapters
    lora: bool = False
    """Train adapters on a frozen model."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """Adapters are scaled by this / lora_r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Makes the trainer differ from the engine."""
    lora_target_modules: list[str] = ["q_proj", "v_proj"]
    """Names of the matrices that get an adapter."""
    lora_layer_indices: str | None = None
    """Layers that get adapters, such as 0-3,28-31; None: all."""
    train_layer_indices: str | None = None
    """Layers that are trained, all else being frozen; None: the whole model."""

    # Objective
    objective: ObjectiveName = "grpo"
    """A published combination of the settings below; one of them given by itself wins."""
    baseline: Baseline = "group"
    """What scores are compared with: the group's mean, the mean of the others in it (rloo), the batch's mean (batch),
    the group's mean but scaled over the batch (group_batch), nothing (none)."""
    scale_advantages: bool = True
    """Divide advantages by the group's std (false: Dr. GRPO)."""
    surrogate: Surrogate = "clip"
    """Clip: PPO's minimum; cispo: clipped ratio as a constant weight; reinforce: no ratio."""
    ratio_level: RatioLevel = "token"
    """The ratio of each token, or of the whole sequence (GSPO)."""
    clip_eps: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped to 1 - this."""
    clip_eps_high: float | None = Field(None, gt=0)
    """The ratio is clipped to 1 + this; None: clip_eps."""
    correction: Correction = "none"
    """What is done about engines that sample from another policy than the trainer's: none: the ratio is to the sampled
    logprobs; else it is to the trainer's own, and weights are truncated (tis), masked above (mis), masked on both
    sides (icepop) or left as they are (decoupled)."""
    correction_level: RatioLevel = "token"
    """Weights of each token, or their product over the sequence."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest weight."""
    correction_floor: float = Field(0.5, ge=0)
    """Smallest weight of icepop."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference: the groups' ref_logprobs, else a frozen copy of the model."""
    kl_estimator: KlEstimator = "k3"
    """Exp(d) - d - 1 (k3) or d * d / 2 (k2), d = reference - own logprob."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of distillation from the teacher's logprobs in the groups."""
    distill_loss: DistillLoss = "forward_kl"
    """forward_kl: over the tokens the teacher named; reverse_kl: on the sampled token, as an advantage."""
    loss_mean: LossMean = "token"
    """Mean over all trained tokens; over sequences of their token means; or, constant, over sequences of their token
    sums divided by loss_constant."""
    loss_constant: float | None = Field(None, gt=0)
    """Tokens, for --loss_mean constant; None: seq_len."""
    overlong_max: int = Field(0, ge=0)
    """Trained tokens at which a sequence's score is lowered by 1; 0: never."""
    overlong_buffer: int = Field(1, ge=1)
    """Tokens before overlong_max over which the score is lowered gradually."""
    logprobs_mode: Literal["auto", "raw", "processed"] = "auto"
    """What the engines report: raw (before temperature; vLLM's default) or processed logprobs; auto: processed where
    vLLM is started here, so that ratios are those of the samples at any temperature, else raw."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """Nats: stop when sampled and own logprobs of the current policy differ by more in the mean; None: only warn,
    above 1e-3 in float32 and 0.1 in bfloat16."""

    # Checkpoints and records
    save_path: Path = Path("trained_model_checkpoints")
    """step_<N>/ and final_model/ are written here."""
    checkpoint_interval: int = Field(3, ge=0)
    """Steps between checkpoints; 0: only the final one."""
    keep_last: int | None = Field(None, ge=1)
    """Checkpoints to keep; None: all of them."""
    resume: bool = False
    """Resume from the newest checkpoint in save_path, or start a new run where there is none."""
    resume_from: Path | None = None
    """Resume from this step_<N> directory instead of the newest."""
    metrics_path: Path | None = None
    """JSON lines, one object per step; None: <save_path>/metrics.jsonl."""
    use_wandb: bool = False
    """Log to Weights & Biases as well."""
    wandb_project: str | None = None
    """Needed with use_wandb."""
    wandb_group: str | None = None
    """None: eight random characters."""

    # Weights to the engines
    bridge: Literal["restart", "reload", "transfer", "lora"] = "restart"
    """Restart: the trainer starts an engine and restarts it on new weights; reload: running engines load new weights
    in place, from disk; transfer: over NCCL or CUDA IPC, by the vllm beside the trainer; lora: running engines swap
    the adapter."""
    weight_bridge_mode: Literal["none", "shared_vllm", "lora_only", "lora_restart"] | None = None
    """The original's name for bridge: none = restart, shared_vllm = reload, lora_only = lora, lora_restart = restart
    with --lora."""
    publish_interval: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("publish_interval", "vllm_restart_interval")
    )
    """Steps between hand-overs of weights; None: 3 for restart, else 1."""
    weights_dir: Path | None = None
    """Where weights are handed over; None: /dev/shm if there is room, else save_path."""
    engine_url: str = ""
    """Reload, transfer and lora: addresses of the engines, comma-separated; empty: port vllm_port here."""
    engine_api_key: str | None = None
    """Reload, transfer and lora: key that the engines ask for; None: that in ATROPOS_ENGINE_API_KEY."""
    engine_timeout_s: float = Field(600.0, gt=0)
    """For an engine to start, or to take weights."""
    engine_retry_s: float = Field(600.0, ge=0)
    """Reload and lora: for an engine that cannot be reached to be back; while no batch comes, the run ends after this
    long without an engine."""
    lora_name: str = Field("policy", min_length=1)
    """Lora: what the engines call the adapter; the environments' model_name."""
    transfer_backend: Literal["nccl", "ipc"] | None = None
    """Transfer: nccl between GPUs; ipc on one and the same GPU; None: ipc where engine and trainer share one."""
    transfer_bucket_mb: int = Field(512, ge=1)
    """Transfer: MB of weights that are handed over at a time."""

    # The engine that the trainer starts itself
    engine: Literal["vllm", "local"] = "vllm"
    """Local is atropos-engine."""
    vllm_python: str | None = None
    """Interpreter of the environment that has vLLM; None: this one."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the engine."""
    vllm_gpu: int | None = Field(None, ge=0)
    """CUDA device of the engine; None: unchanged."""
    gpu_memory_utilization: float = Field(
        0.45,
        gt=0,
        le=1,
        validation_alias=AliasChoices("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    )
    """Share of the GPU that vLLM takes."""
    max_model_len: int = Field(4096, ge=1)
    """Longest sequence of the engine."""
    log_dir: Path = Path("logs")
    """The engine's log goes here."""

    # The original's flags without a use here
    vllm_config_path: str | None = None
    """Accepted and ignored."""
    adafactor_scale_parameter: bool = False
    """Accepted and ignored."""
    adafactor_relative_step: bool = False
    """Accepted and ignored."""
    trainer_rank: int = 0
    """Accepted and ignored."""
    world_size: int = 1
    """Accepted and ignored."""
    init_method: str = "env://"
    """Accepted and ignored."""
    num_inference_nodes: int = 0
    """Accepted and ignored."""
    debug_loading: bool = False
    """Accepted and ignored."""
    single_copy: bool = False
    """Accepted and ignored."""
    benchmark: bool = False
    """Log a summary of times and memory at the end."""

    @field_validator("hub_url")
    @classmethod
    def _hub_is_http(cls, value: str) -> str:
        return _http_url(value)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _no_adafactor(cls, value: Any) -> Any:
        if value == "adafactor":
            raise ValueError("adafactor is not offered; adamw_8bit saves about as much memory")
        return value

    @field_validator("engine_url", mode="before")
    @classmethod
    def _join_engines(cls, value: Any) -> Any:
        return ",".join(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _name_unused(self) -> Self:
        unused = sorted(self.model_fields_set & _UNUSED)
        if unused:
            logger.warning("ignored: %s; %s", ", ".join(f"--{n}" for n in unused), _WHY_UNUSED)
        return self

    @model_validator(mode="after")
    def _apply_objective(self) -> Self:
        for name, value in OBJECTIVES[self.objective].items():
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)
        return self

    @model_validator(mode="after")
    def _settle(self) -> Self:
        if self.weight_bridge_mode is not None:
            chosen, trains_adapters = _MODES[self.weight_bridge_mode]
            if "bridge" in self.model_fields_set and self.bridge != chosen:
                raise ValueError(
                    f"--bridge {self.bridge} contradicts --weight_bridge_mode {self.weight_bridge_mode}"
                )
            self.bridge = chosen  # type: ignore[assignment]
            self.lora = self.lora or trains_adapters
        if self.bridge == "lora":
            self.lora = True
        if self.lora and self.train_layer_indices is not None:
            raise ValueError("--train_layer_indices is for full weights; use --lora_layer_indices")
        for url in self.engine_urls:
            _http_url(url)
        return self

    @model_validator(mode="after")
    def _warn_of_clips(self) -> Self:
        if self.surrogate == "reinforce":
            return self
        sets_clip = {"clip_eps", "clip_eps_high"} & (
            self.model_fields_set | OBJECTIVES[self.objective].keys()
        )
        if self.correction != "none" and sets_clip:
            logger.warning(
                "--correction %s: the ratio is to the trainer's own logprobs and 1 in value, so that --%s does nothing",
                self.correction,
                " and --".join(sorted(sets_clip)),
            )
        smallest = min(self.clip_eps, self.clip_eps_high or self.clip_eps)
        if (
            self.ratio_level == "sequence"
            and self.correction == "none"
            and smallest < NOISE_OF_A_SEQUENCE
        ):
            logger.warning(
                "--clip_eps %g with --ratio_level sequence: the ratio is to the engine's logprobs, whose rounding "
                "alone is more than that in bfloat16; most sequences would have no gradient",
                smallest,
            )
        return self

    @property
    def reports_processed(self) -> bool:
        """Whether the engines' logprobs are those after temperature."""
        if self.logprobs_mode == "auto":
            return self.bridge == "restart" and self.engine == "vllm"
        return self.logprobs_mode == "processed"

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the engines, without a trailing slash or `/v1`."""
        urls = [url.strip() for url in self.engine_url.split(",") if url.strip()]
        urls = urls or [f"http://127.0.0.1:{self.vllm_port}"]
        return [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]

    @property
    def attention_kernel(self) -> str:
        """The attention that transformers is asked for."""
        if self.attention != "auto":
            return self.attention
        has_flash = self.device != "cpu" and importlib.util.find_spec("flash_attn") is not None
        return "flash_attention_2" if has_flash else "sdpa"

    @property
    def packs_sequences(self) -> bool:
        """Whether several sequences share a row."""
        if self.packing == "auto":
            return self.attention_kernel == "flash_attention_2"
        return self.packing == "on"

    @property
    def sequences_per_step(self) -> int:
        """What the trainer registers at the hub as its batch size."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def steps_per_publish(self) -> int:
        return self.publish_interval or (3 if self.bridge == "restart" else 1)

    @property
    def num_threads(self) -> int | None:
        """torch CPU threads to set; None leaves torch's choice."""
        if self.threads is not None:
            return self.threads
        return 1 if (os.cpu_count() or 1) <= 2 else None


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"{value!r} is not an http:// or https:// address")
    return value.rstrip("/")
