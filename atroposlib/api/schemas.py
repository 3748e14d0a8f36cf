"""Bodies of the hub's control endpoints, shared by server and client.

Token arrays never come through here.

Field names and their order are the original's wire contract (README.md). Unknown fields are
ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class Registration(BaseModel):
    """A trainer announces its run. `batch_size` counts sequences, not groups."""

    wandb_group: str
    wandb_project: str
    batch_size: int = Field(ge=1)
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


class RegistrationReply(BaseModel):
    """`uuid` has 128 bits: more than a JSON number holds in some languages."""

    uuid: int


class RegisterEnv(BaseModel):
    """An environment asks to take part."""

    max_token_length: int
    desired_name: str
    weight: FiniteFloat
    group_size: int = Field(ge=1)
    min_batch_allocation: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Share of each batch, 0 to 1, that this environment must supply."""


class EnvRegistration(BaseModel):
    """What a registered environment needs to start; `starting_step` is the current step."""

    status: Literal["success"] = "success"
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class WaitForTrainer(BaseModel):
    """The trainer has not asked for its first batch yet; ask again."""

    status: Literal["wait for trainer to start"] = "wait for trainer to start"


class EnvIdentifier(BaseModel):
    env_id: int


class Acknowledgement(BaseModel):
    status: Literal["success"] = "success"


class Failure(BaseModel):
    status: Literal["failure"] = "failure"
    error: str


class WandbInfo(BaseModel):
    """None before registration; an empty string is a trainer without wandb."""

    group: str | None
    project: str | None


class HubInfo(BaseModel):
    """Both -1 before registration."""

    batch_size: int
    max_token_len: int


class HubStatus(BaseModel):
    current_step: int
    """Batches delivered, counted from the trainer's `starting_step`."""
    queue_size: int
    """Groups."""
    policy_version: int | None = None
    """What the trainer last announced; left out of the reply until it has."""


class EnvStatus(BaseModel):
    current_step: int
    queue_size: int
    """Work ahead of this environment, in its own groups."""
    unallocated_fraction: float
    """Share of a batch that no connected environment's minimum claims."""
    self_queue_size: int
    """This environment's queued sequences, in its own groups."""
    max_group_size: int
    """Largest queued group of any environment, at least 1."""
    env_weight: float
    policy_version: int | None = None


class Policy(BaseModel):
    """The policy version whose weights the engines now serve."""

    version: int = Field(ge=0)


class Ledger(BaseModel):
    """Where every group went: produced = queued + buffered + delivered + all rejected."""

    produced: int
    queued: int
    buffered: int
    delivered: int
    rejected: dict[str, int]
    """By reason. A refused request whose groups could not be counted is one."""
    duplicates: int
    """Groups that came again under a known `group_id`; not part of `produced`."""
