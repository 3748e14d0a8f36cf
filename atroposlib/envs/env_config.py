"""Settings of every environment. Environments subclass `BaseEnvConfig` and add their own fields.

Unknown keys are ignored with a warning that names them: existing environments pass undeclared keys.
"""

from __future__ import annotations

import enum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from atroposlib.config import warn_unknown_keys


class EvalHandlingEnum(enum.Enum):
    """How an evaluation limits training while it runs."""

    STOP_TRAIN = "STOP_TRAIN"
    """Start no training items; those in flight finish."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """Use `eval_limit_ratio` of the workers for training."""
    NONE = "NONE"
    """No limit."""


class BaseEnvConfig(BaseModel):
    model_config = ConfigDict(
        extra="ignore", use_attribute_docstrings=True, protected_namespaces=()
    )

    group_size: int = Field(default=4, ge=1)
    """Sequences per group."""
    max_num_workers: int = -1
    """Limit of items in flight; -1 means max_num_workers_per_node for every server. With neither set, `serve` keeps as
    many in flight as the trainer needs."""
    max_eval_workers: int = 16
    """Items that `evaluate_items` measures at a time."""
    max_num_workers_per_node: int = 8
    """Limit of items in flight per server if max_num_workers is -1."""
    steps_per_eval: int = 100
    """Training steps between evaluations; 0 or less means none."""
    max_token_length: int = 2048
    """Generation length hint; sent to the hub, which weights environments by it."""
    eval_handling: EvalHandlingEnum = EvalHandlingEnum.STOP_TRAIN
    """How an evaluation limits training while it runs."""
    eval_limit_ratio: float = 0.5
    """Share of the workers used for training during an evaluation with LIMIT_TRAIN."""
    inference_weight: float = 1.0
    """Relative share of the inference servers."""
    batch_size: int = -1
    """Sequences per training batch; replaced by the hub's value once it is known."""
    max_batches_offpolicy: int = 3
    """Limit of batches queued or in flight ahead of the trainer; 0 or less means no limit. Unless workers are
    set, items older than as many steps do not count: what the servers take limits them."""
    tokenizer_name: str = "NousResearch/DeepHermes-3-Llama-3-3B-Preview"
    """Name or path of the tokenizer, loaded when the environment is constructed."""
    use_wandb: bool = True
    """Log to Weights & Biases (extra `wandb`)."""
    rollout_server_url: str = "http://localhost:8000"
    """URL of the hub."""
    total_steps: int = 1000
    """Training steps to serve; -1 takes the trainer's number. With `process`: groups to write."""
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
    """Groups sent since the last wandb log before the next one; 0 or less logs at every step."""
    include_messages: bool = False
    """Include readable messages in sent and saved groups."""
    min_batch_allocation: float | None = None
    """Share of every batch reserved for this environment."""
    worker_timeout: float = 600
    """Seconds one item may take; 0 or less means no limit."""
    thinking_mode: bool = False
    """Request reasoning from the model."""
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high or xhigh."""
    max_reasoning_tokens: int | None = Field(default=None, ge=1024, le=32000)
    """Token budget of the reasoning."""
    custom_thinking_prompt: str | None = None
    """Read only by environments."""
    max_item_attempts: int = Field(default=3, ge=1)
    """Attempts before a failing item is given up."""
    max_consecutive_failures: int = Field(default=16, ge=1)
    """Failures of one type without a success in between that end the run, unless all of them ran concurrently."""

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            warn_unknown_keys(cls, map(str, data))
        return data


class ProcessOptions(BaseModel):
    """Flags that only `process` has."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    append: bool = False
    """Add to an existing file: skip the items it holds, until it has total_steps groups or `epochs` are complete."""
    epochs: int | None = Field(default=None, ge=1)
    """Sample every training row this many times, instead of making total_steps groups; for environments with rows
    (`DatasetEnv`). Rows held out for evaluation are not sampled: --env.num_eval_rows 0 holds out none."""


WORKER_FIELDS: Final = frozenset({"max_num_workers", "max_num_workers_per_node"})


def workers_are_set(config: BaseEnvConfig) -> bool:
    """Whether the author or user chose the number of items in flight; else it follows the trainer's demand."""
    return not WORKER_FIELDS.isdisjoint(config.model_fields_set) or any(
        getattr(config, name) != BaseEnvConfig.model_fields[name].default for name in WORKER_FIELDS
    )


def max_workers(config: BaseEnvConfig, *, num_servers: int) -> int:
    """Return the limit of items in flight; without max_num_workers it is that of a node for each server."""
    per_node = config.max_num_workers_per_node
    return config.max_num_workers if config.max_num_workers > 0 else max(1, per_node * num_servers)
