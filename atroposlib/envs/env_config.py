"""Settings every environment has. Environments subclass `BaseEnvConfig` and add their own fields.

Unknown keys are ignored with a warning that names them: environments in the wild pass keys of their own making.
"""

from __future__ import annotations

import enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atroposlib.config import unknown_keys, warn_unknown_keys


class EvalHandlingEnum(enum.Enum):
    """What training does while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    """Start no training items; those in flight finish."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """Use `eval_limit_ratio` of the workers."""
    NONE = "NONE"
    """Nothing."""


class BaseEnvConfig(BaseModel):
    """Settings of one environment process."""

    model_config = ConfigDict(
        extra="ignore", use_attribute_docstrings=True, protected_namespaces=()
    )

    group_size: int = Field(default=4, ge=1)
    """Sequences per group."""
    max_num_workers: int = -1
    """Items in flight; -1 means max_num_workers_per_node for every server."""
    max_eval_workers: int = 16
    """Concurrency hint for `evaluate`; the runtime does not enforce it."""
    max_num_workers_per_node: int = 8
    """Items in flight per server, where max_num_workers is -1."""
    steps_per_eval: int = 100
    """Training steps between evaluations; 0 or less means none."""
    max_token_length: int = 2048
    """Generation length hint; announced to the hub, which weighs environments by it."""
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.STOP_TRAIN
    """What training does while an evaluation runs."""
    eval_limit_ratio: float = 0.5
    """Share of the workers that trains during an evaluation under LIMIT_TRAIN."""
    inference_weight: float = 1.0
    """Relative share of the inference servers."""
    batch_size: int = -1
    """Sequences per training batch; replaced by the hub's value once it is known."""
    max_batches_offpolicy: int = 3
    """Batches that may wait or be in flight ahead of the trainer; 0 or less means no bound."""
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    """Name or path of the tokenizer, loaded when the environment is constructed."""
    use_wandb: bool = True
    """Log to Weights & Biases (extra `wandb`)."""
    rollout_server_url: str = "http://localhost:8000"
    """The hub."""
    total_steps: int = 1000
    """Training steps to serve; -1 takes the trainer's number. With `process`: groups to produce."""
    wandb_name: str | None = None
    """Name in the hub and in run names; default: the environment's name."""
    num_rollouts_to_keep: int = 32
    """Groups kept for the rollout table."""
    num_rollouts_per_group_for_logging: int = 1
    """Sequences of each group shown in the rollout table; -1 means all."""
    ensure_scores_are_not_same: bool = True
    """Drop groups whose scores are all equal: they carry no gradient."""
    data_path_to_save_groups: str | None = None
    """JSONL file that receives every accepted group; an existing file is never overwritten."""
    data_dir_to_save_evals: str | None = None
    """Directory of evaluation results."""
    min_items_sent_before_logging: int = 2
    """Groups that must have been sent since the last wandb log; 0 or less logs at every step."""
    include_messages: bool = False
    """Put readable messages into what is sent and saved."""
    min_batch_allocation: float | None = None
    """Share of every batch this environment must fill."""
    worker_timeout: float = 600
    """Seconds one item may take; 0 or less means no limit."""
    thinking_mode: bool = False
    """Ask the model for reasoning."""
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high or xhigh."""
    max_reasoning_tokens: int | None = Field(default=None, ge=1024, le=32000)
    """Token budget of the reasoning."""
    custom_thinking_prompt: str | None = None
    """Read only by environments."""
    max_item_attempts: int = Field(default=3, ge=1)
    """How often a failing item is tried before it is given up."""
    max_consecutive_failures: int = Field(default=16, ge=1)
    """Failures of one type, without a success in between, that end the run; not where all were under way at once."""

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            warn_unknown_keys(cls, unknown_keys(cls, map(str, data)))
        return data


def max_workers(*, configured: int, per_node: int, num_servers: int) -> int:
    """Return the worker bound; `configured` -1 means `per_node` for each server."""
    return configured if configured > 0 else max(1, per_node * num_servers)
