"""Every setting of the trainer, in one pydantic model that `atroposlib.config` reads from flags and YAML.

The original trainer's flag names also work (`--model`, `--atropos-url`, `--training-steps`, ...).
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    field_validator,
    model_validator,
)

from atroposlib.samples import StandardDeviation
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
    RolloutWeight,
    Surrogate,
)

logger = logging.getLogger(__name__)

_MODES = {
    "none": ("restart", False),
    "shared_vllm": ("reload", False),
    "lora_only": ("lora", True),
    "lora_restart": ("restart", True),
}
"""The original's `--weight-bridge-mode` -> `bridge`, and whether adapters are trained."""

_IGNORED = "Accepted and ignored."
_WHY_IGNORED = (
    "torchrun starts several processes, engines take weights without shared memory, there is no Adafactor, and "
    "metrics.jsonl has times and memory"
)


class TrainerConfig(BaseModel):
    """Settings of one training run. Times are in seconds."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, use_attribute_docstrings=True)

    # Model
    model_name: str = Field(
        validation_alias=AliasChoices("model_name", "model", "model_name_or_path")
    )
    """Checkpoint directory, or a name on the Hugging Face hub."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto: cuda if available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass and of published weights; auto: bfloat16 on cuda, else float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    activation_offload: bool = False
    """Keep what the backward pass needs in host memory; with gradient_checkpointing, the inputs of the layers."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer in host memory: on the GPU only what a layer computes with; slower.
    With --optimizer adamw only."""
    compile_layers: bool = False
    """torch.compile each decoder layer: less memory traffic; the first steps take a minute or more to compile."""
    liger: bool = False
    """Take liger-kernel's fused norms, rotary embedding and MLP (Triton): less memory traffic and memory."""
    threads: int | None = Field(None, ge=1)
    """Torch CPU threads; None: 1 on at most two cores, else torch's default."""
    seed: int = 0
    """Random seed of torch, and of the groups that are drawn for trace_groups."""

    plan: bool = False
    """Print the memory that each of plan_gpus GPUs needs and the flags that make it fit, and exit; loads no weights."""
    plan_gpus: int = Field(8, ge=1)
    """Number of GPUs for plan."""
    plan_gpu_gb: float = Field(80.0, gt=0)
    """Memory of one of them, in GiB."""

    # Hub
    hub_url: str = Field(
        "http://localhost:8000", validation_alias=AliasChoices("hub_url", "atropos_url")
    )
    """Address of the hub (run-api)."""
    hub_token: str | None = None
    """Bearer token of the hub, if it requires one; None: ATROPOS_HUB_TOKEN."""
    lease_s: float | None = Field(None, gt=0)
    """Seconds without renewal after which the hub hands a leased batch out again; None: the hub's default (15 min)."""

    # Training
    num_steps: int = Field(10, ge=1, validation_alias=AliasChoices("num_steps", "training_steps"))
    """Optimizer steps in total, including those before a resume."""
    batch_size: int = Field(64, ge=1)
    """Sequences per padded micro-batch; times gradient_accumulation_steps: sequences per step."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Sequences per step, in multiples of batch_size."""
    max_microbatch_tokens: int | None = Field(None, ge=1)
    """Maximum positions per micro-batch, padding included; None: 32768, or 8192 on cuda without
    gradient_checkpointing."""
    seq_len: int = Field(2048, ge=2)
    """Maximum sequence length in tokens; longer sequences are skipped and counted."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Put several sequences in one row instead of padding each; auto: only with flash attention."""
    attention: str = "auto"
    """Attention kernel by transformers' name: eager, sdpa, flash_attention_2 (or _3), flex_attention, or one on the hub
    (org/name). auto: flash_attention_2 if installed and device is not cpu, else sdpa, else eager, as the model has."""
    pad_to_multiple_of: int = Field(8, ge=1)
    """Round the width of a micro-batch up to a multiple of this."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear learning-rate warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """Learning rate after the warm-up: constant, or falling over num_steps (linear, cosine) or over the last fifth of
    them (wsd)."""
    lr_min_fraction: float = Field(0.0, ge=0, le=1)
    """Share of lr towards which the schedule falls."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps its moments in 8 bits: a quarter of the memory; it needs torchao."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta1."""
    adam_beta2: float = Field(0.99, ge=0, lt=1)
    """AdamW beta2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Clip the gradient norm to this."""

    # Adapters
    lora: bool = False
    """Train LoRA adapters on a frozen model."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: int = Field(32, ge=1)
    """Scale adapters by lora_alpha / lora_r."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters; the engine has none, so logprobs will differ."""
    lora_target_modules: list[str] = ["all-linear"]
    """Names of the modules that get an adapter; all-linear alone: every linear layer but the head, experts excluded."""
    lora_layer_indices: str | None = None
    """Layers that get adapters, such as 0-3,28-31; None: all."""
    train_layer_indices: str | None = None
    """Decoder layers to train, with all else frozen; None: the whole model."""

    # Objective
    objective: ObjectiveName = "grpo"
    """Published combination of the settings below; settings given explicitly override it."""
    baseline: Baseline = "group"
    """Baseline of the scores: the group's mean (group), the mean of the others in the group (rloo), the batch's mean
    (batch), the group's mean with the batch's scale (group_batch), or none."""
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation (false: Dr. GRPO)."""
    advantage_std: StandardDeviation = "population"
    """Which standard deviation: with population advantages are 15.5 % larger in groups of 4, 6.9 % in groups of 8, than
    with sample, which TRL takes."""
    surrogate: Surrogate = "clip"
    """clip: PPO's minimum; cispo: the clipped ratio as a constant weight; reinforce: no ratio."""
    ratio_level: RatioLevel = "token"
    """Ratio per token, or of the whole sequence (GSPO)."""
    clip_eps: float = Field(0.2, gt=0, le=1)
    """Clip the ratio below at 1 - clip_eps."""
    clip_eps_high: float | None = Field(None, gt=0)
    """Clip the ratio above at 1 + clip_eps_high; None: clip_eps."""
    dual_clip: float = Field(3.0, ge=1)
    """Clip the ratio above at this where the advantage is negative (surrogate clip); inf: do not."""
    correction: Correction = "none"
    """Weight w of the tokens that the clip lets through, w = exp(own - sampled logprob). none: the ratio; tis: w, at
    most the cap; mis: w, 0 above the cap; icepop: w, 0 outside floor and cap; decoupled: w. The clip is on the ratio to
    the sampled logprobs with each."""
    correction_level: RatioLevel = "token"
    """Correction weight per token, or the product over the sequence."""
    correction_cap: float = Field(2.0, gt=0)
    """Upper limit of the correction weight."""
    correction_floor: float = Field(0.5, ge=0)
    """Lower limit of the correction weight (icepop)."""
    reject_mean_ratio: float | None = Field(None, gt=1)
    """Drop sequences whose ratio, as a geometric mean over their tokens, is above this or below 1 / this; None: off."""
    veto_ratio: float | None = Field(None, gt=0, lt=1)
    """Drop sequences with a token whose ratio is below this, such as 1e-4; None: off."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference: the groups' ref_logprobs, else the initial model."""
    reference_refresh: int = Field(0, ge=0)
    """Steps after which the policy becomes the reference, again and again; 0: never. Not with adapters."""
    kl_estimator: KlEstimator = "k3"
    """Value that the KL adds to the loss: exp(d) - d - 1 (k3) or d * d / 2 (k2), with d = reference - own logprob. The
    gradient of both is that of the KL."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    router_aux_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, per micro-batch."""
    distill_coef: float = Field(0.0, ge=0)
    """Weight of distillation from the groups' teacher logprobs."""
    distill_loss: DistillLoss = "forward_kl"
    """forward_kl: over the tokens that the teacher lists; reverse_kl: on the sampled token, as an advantage."""
    loss_mean: LossMean = "token"
    """Mean over all trained tokens (token), over the sequences' token means (sequence), or over the sequences' token
    sums divided by loss_constant (constant)."""
    rollout_weight: RolloutWeight = "rollout"
    """Each of a rollout's k sequences counts 1/k in that mean (rollout), or as much as any other (token)."""
    loss_constant: float | None = Field(None, gt=0)
    """Divisor in tokens for --loss_mean constant; None: seq_len."""
    overlong_max: int = Field(0, ge=0)
    """Trained tokens at which the length penalty on the score reaches 1; 0: no penalty."""
    overlong_buffer: int = Field(1, ge=1)
    """Tokens before overlong_max over which the penalty grows linearly from 0."""
    logprobs_mode: Literal["auto", "raw", "processed"] = "auto"
    """Logprobs that engines report: raw (before temperature, vLLM's default) or processed; auto: processed if the
    trainer starts vLLM, else raw."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """Stop when sampled and own logprobs of the current policy differ by more nats on average; None: only warn, above
    1e-3 in float32 and 0.1 in bfloat16."""

    # Checkpoints and records
    save_path: Path = Path("trained_model_checkpoints")
    """Directory of step_<N>/ and final_model/."""
    checkpoint_interval: int = Field(20, ge=0)
    """Steps between checkpoints; 0: only if the run stops early."""
    keep_last: int | None = Field(2, ge=1)
    """Number of checkpoints to keep; None: all."""
    resume: bool = False
    """Resume from the newest checkpoint in save_path; start a new run if there is none."""
    resume_from: Path | None = None
    """Resume from this step_<N> directory instead of the newest."""
    metrics_path: Path | None = None
    """JSON lines file with one object per step; None: <save_path>/metrics.jsonl."""
    trace_groups: int = Field(4, ge=0)
    """Groups per step, drawn at random, whose tokens get the trainer's values in <save_path>/trained_groups.jsonl."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str | None = None
    """Weights & Biases project; use_wandb requires it."""
    wandb_group: str | None = None
    """Weights & Biases group; None: eight random characters."""

    # Weights to the engines
    bridge: Literal["restart", "reload", "transfer", "lora"] = "restart"
    """How engines get new weights. restart: the trainer restarts its own engine; reload: running engines load a
    checkpoint in place; transfer: over NCCL or CUDA IPC, with vllm installed beside the trainer; lora: running engines
    swap the adapter."""
    weight_bridge_mode: Literal["none", "shared_vllm", "lora_only", "lora_restart"] | None = None
    """The original's name for bridge: none = restart, shared_vllm = reload, lora_only = lora, lora_restart = restart
    with --lora."""
    publish_interval: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("publish_interval", "vllm_restart_interval")
    )
    """Steps between publications of weights; None: 3 for restart, else 1."""
    weights_dir: Path | None = None
    """Directory for published weights; None: in /dev/shm if it has room, else <save_path>/weights."""
    engine_url: str = ""
    """Reload, transfer and lora: engine addresses, comma-separated; empty: port vllm_port on this machine."""
    engine_api_key: str | None = None
    """Reload, transfer and lora: API key of the engines, if required; None: ATROPOS_ENGINE_API_KEY."""
    engine_timeout_s: float = Field(600.0, gt=0)
    """Seconds for an engine to start or to take weights."""
    engine_retry_s: float = Field(600.0, ge=0)
    """Reload and lora: seconds to retry an unreachable engine; a run without a batch ends after an engine was
    unreachable for this long."""
    lora_name: str = Field("policy", min_length=1)
    """Lora: the adapter's name in the engines; environments use it as model_name."""
    transfer_backend: Literal["nccl", "ipc"] | None = None
    """Transfer: nccl between GPUs, ipc on one shared GPU; None: ipc if engine and trainer share a GPU."""
    transfer_bucket_mb: int = Field(512, ge=1)
    """Transfer: megabytes of weights to send at a time."""

    # The engine that the trainer starts itself
    engine: Literal["vllm", "local"] = "vllm"
    """Engine that the trainer starts; local is atropos-engine."""
    vllm_python: str | None = None
    """Python interpreter of the environment with vLLM; None: this one."""
    vllm_port: int = Field(9001, ge=1, le=65535)
    """Port of the engine."""
    vllm_gpu: list[NonNegativeInt] | None = None
    """CUDA devices of the engine, numbered as the trainer sees them; None: leave CUDA_VISIBLE_DEVICES unchanged."""
    engine_args: str = ""
    """More flags for the engine, as in a shell, such as --engine_args="--tensor-parallel-size 2"."""
    gpu_memory_utilization: float = Field(
        0.45,
        gt=0,
        le=1,
        validation_alias=AliasChoices("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    )
    """Fraction of the GPU memory that vLLM takes."""
    max_model_len: int = Field(4096, ge=1)
    """Maximum sequence length of the engine, in tokens."""
    log_dir: Path = Path("logs")
    """Directory of the engine's log."""

    # Flags of the original that have no effect
    vllm_config_path: str | None = Field(None, description=_IGNORED)
    adafactor_scale_parameter: bool = Field(False, description=_IGNORED)
    adafactor_relative_step: bool = Field(False, description=_IGNORED)
    trainer_rank: int = Field(0, description=_IGNORED)
    world_size: int = Field(1, description=_IGNORED)
    init_method: str = Field("env://", description=_IGNORED)
    num_inference_nodes: int = Field(0, description=_IGNORED)
    debug_loading: bool = Field(False, description=_IGNORED)
    single_copy: bool = Field(False, description=_IGNORED)
    benchmark: bool = Field(False, description=_IGNORED)

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

    @field_validator("vllm_gpu", mode="before")
    @classmethod
    def _list_gpus(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("engine_url", mode="before")
    @classmethod
    def _join_engines(cls, value: Any) -> Any:
        return ",".join(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _name_ignored(self) -> Self:
        fields = type(self).model_fields
        ignored = [n for n in sorted(self.model_fields_set) if fields[n].description == _IGNORED]
        if ignored:
            logger.warning("ignored: %s; %s", ", ".join(f"--{n}" for n in ignored), _WHY_IGNORED)
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
        if self.cpu_offload and self.optimizer != "adamw":
            raise ValueError(
                f"--optimizer {self.optimizer} computes on the GPU, and --cpu_offload keeps the optimizer off it"
            )
        if self.reference_refresh and (self.lora or not self.kl_coef):
            raise ValueError(
                "--reference_refresh needs --kl_coef, and a model trained without --lora"
            )
        if self.lora and self.train_layer_indices is not None:
            raise ValueError("--train_layer_indices is for full weights; use --lora_layer_indices")
        for url in self.engine_urls:
            _http_url(url)
        return self

    @model_validator(mode="after")
    def _warn_of_clips(self) -> Self:
        smallest = min(self.clip_eps, self.clip_eps_high or self.clip_eps)
        is_clipped = self.surrogate != "reinforce" and self.ratio_level == "sequence"
        if is_clipped and smallest < NOISE_OF_A_SEQUENCE:
            logger.warning(
                "--clip_eps %g with --ratio_level sequence: the ratio is to the engine's logprobs, whose rounding "
                "alone is more than that in bfloat16; most sequences would have no gradient",
                smallest,
            )
        return self

    @property
    def reports_processed(self) -> bool:
        """Whether engines report logprobs after temperature."""
        if self.logprobs_mode == "auto":
            return self.bridge == "restart" and self.engine == "vllm"
        return self.logprobs_mode == "processed"

    @property
    def starts_engine(self) -> bool:
        """Whether the engine is started here, and not by someone else."""
        return self.bridge == "restart"

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the engines, without a trailing slash or `/v1`."""
        urls = [url.strip() for url in self.engine_url.split(",") if url.strip()]
        urls = urls or [f"http://127.0.0.1:{self.vllm_port}"]
        return [url.rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]

    @property
    def sequences_per_step(self) -> int:
        """Batch size that the trainer registers at the hub."""
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
