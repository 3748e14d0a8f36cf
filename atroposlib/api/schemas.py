"""Bodies of the hub's control endpoints, shared by server and client; the hub parses no token arrays with them.

Field names and their order are the original's wire contract (README.md). Unknown fields are ignored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, field_validator

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(max_length=4096)]
"""Stored with the run. The bound also refuses lone surrogates, which cannot be encoded."""
Epoch = Annotated[int, Field(ge=0, lt=2**63)] | None
"""The trainer's incarnation, if it knows it; a call with an epoch other than the current one is refused."""
MAX_LOSSES, MAX_REASON_CHARS = 32, 64
Losses = Annotated[
    dict[Annotated[str, Field(max_length=MAX_REASON_CHARS)], Annotated[Int64, Field(ge=0)]],
    Field(max_length=MAX_LOSSES),
]
"""Counts of an environment by reason, as of what came to nothing since its start."""
EXPERIMENT_HEADER = "Atropos-Experiment"
"""Sent with groups: the experiment that they were sampled for."""
REPLICA_HEADER = "Atropos-Replica"
"""In the answer to a native client's request that was forwarded: the id of the process that answered, a space, and the
URL of the run there. In answers of `/healthz`: the id alone."""
MAX_ENV_NAME_CHARS = 128
MAX_TTL_S = 86_400.0
MAX_BATCH_SIZE = 16_384
"""Sequences. In the worst case, 100,000 groups of even sizes and then one of odd size for an odd batch, planning grows
with its square: 0.1 s of CPU time at this bound (measured at commit 5d0753c)."""


class Resume(StrEnum):
    """What happens to batches that were trained after the checkpoint that a trainer resumes from."""

    REPLAY = "replay"
    """Delivered again, unchanged and in order."""
    REQUEUE = "requeue"
    """Their groups go back to the queue."""
    DISCARD = "discard"
    """Their groups are dropped, and counted."""


class Registration(BaseModel):
    """A trainer announces its run. `batch_size` counts sequences, not groups."""

    wandb_group: Text
    wandb_project: Text
    batch_size: int = Field(ge=1, le=MAX_BATCH_SIZE)
    max_token_len: Int64
    checkpoint_dir: Text
    save_checkpoint_interval: Int64
    starting_step: int = Field(ge=-(2**62), lt=2**62)
    """Steps counted from here still fit 64 bits."""
    num_steps: Int64
    max_staleness: int | None = Field(default=None, ge=0, lt=2**62)
    """Groups sampled more than this many policy versions ago are not delivered; None: the hub's setting."""


ExperimentId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")]
"""Chosen by the trainer at random; printable ASCII, because it travels in a header."""


class RegisterTrainer(Registration):
    """A registration on the wire. An original client sends none of these fields; see `experiments.entry_to`."""

    experiment: ExperimentId | None = None
    """The training that this trainer begins or, with `resume_step`, resumes."""
    resume_step: int | None = Field(default=None, ge=0, lt=2**62)
    """Resume from the checkpoint of this step."""
    resume: Resume = Resume.REPLAY


class RegistrationReply(BaseModel):
    """`uuid` has 128 bits: more than a JSON number holds in some languages. Other fields are for native clients."""

    uuid: int
    epoch: int | None = None
    """Counts the trainer's incarnations; leases of earlier ones are void."""
    experiment: str | None = None
    """The experiment of this trainer."""
    set_aside: str | None = None
    """Name of the run that now keeps the previous experiment."""
    step: int | None = None
    replayed: int | None = None
    """Groups that are delivered again in their old batches."""
    requeued: int | None = None
    discarded: int | None = None
    forgotten_steps: int | None = None
    """Steps after `resume_step` whose batches are no longer held: their groups cannot come again."""
    unknown_steps: int | None = None
    """Steps before `resume_step` that the hub has no record of, as after a restore: their groups may come again."""
    max_staleness: int | None = None
    """The bound in force, in policy versions; None: none is."""


class RegisterEnv(BaseModel):
    """The registration of an environment."""

    max_token_length: Int64
    desired_name: Annotated[str, Field(max_length=MAX_ENV_NAME_CHARS)]
    weight: FiniteFloat
    group_size: int = Field(ge=1, lt=2**31)
    min_batch_allocation: Annotated[float, Field(ge=0, le=1000)] | None = None
    """Share of each batch, 0 to 1, that this environment must supply. The original accepts more than 1 too, which no
    batch can honour; the bound keeps the computed floor finite."""
    env_uid: str | None = Field(default=None, min_length=1, max_length=128)
    """Chosen by the environment's process: registering again with it returns the same `env_id`."""

    @field_validator("desired_name", mode="before")
    @classmethod
    def _name_the_nameless(cls, name: Any) -> Any:
        """Clients of the original send null unless `wandb_name` is set."""
        return "env" if name is None else name


class EnvRegistration(BaseModel):
    """What a registered environment needs to start; `starting_step` is the current step."""

    status: Literal["success"] = "success"
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    experiment: str | None = None
    """Experiment of the groups sampled from now on. None from an original server."""


class WaitForTrainer(BaseModel):
    """The trainer has not asked for its first batch yet; ask again."""

    status: Literal["wait for trainer to start"] = "wait for trainer to start"


class EnvIdentifier(BaseModel):
    env_id: Int64


class LeavingEnv(EnvIdentifier):
    """An environment disconnects; an original client sends `env_id` alone."""

    env_uid: Annotated[str, Field(max_length=128)] | None = None
    """Refuse if the id now belongs to another process."""


class StatusQuery(EnvIdentifier):
    """An environment's status request; an original client sends `env_id` alone."""

    wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds to hold the answer while the step is `seen_step` and the policy version `seen_policy`."""
    seen_step: Int64 | None = None
    seen_policy: Int64 | None = None
    env_uid: Annotated[str, Field(max_length=128)] | None = None
    """Refuse if the id belongs to another process."""
    experiment: ExperimentId | None = None
    """Experiment that the environment registered for; refuse if the run holds another one."""
    items_in_flight: Annotated[Int64, Field(ge=0)] | None = None
    oldest_item_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Seconds since the oldest item in flight began."""
    over_age: Json[Losses] | None = None
    """Of the items in flight, those older than the staleness bound, by what they wait for."""
    losses: Json[Losses] | None = None
    groups_kept: Annotated[Int64, Field(ge=0)] | None = None
    """Groups made since its start, without those that it dropped."""


class BatchQuery(BaseModel):
    """A trainer's request for a batch; an original one sends no parameters."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    wait: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds to wait for a batch."""
    lease: bool = False
    """Hold the batch until it is acknowledged."""
    ttl: float | None = Field(default=None, gt=0, le=MAX_TTL_S, allow_inf_nan=False)
    """Duration of the lease, seconds."""
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    """A repeated request with the same id gets the same batch."""
    epoch: Epoch = None
    """Checked only with a lease."""


class ScoredData(BaseModel):
    """A group as it is on the wire, for callers that check or describe one; the hub decodes groups without it."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | list[float] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    """Each message has a `role` and a `content`."""
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None

    @field_validator("messages")
    @classmethod
    def _have_role_and_content(
        cls, conversations: list[list[dict[str, Any]]] | None
    ) -> list[list[dict[str, Any]]] | None:
        for i, conversation in enumerate(conversations or ()):
            for j, message in enumerate(conversation):
                if missing := {"role", "content"} - message.keys():
                    raise ValueError(f"[{i}][{j}] has no {' and no '.join(sorted(missing))}")
        return conversations


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


class ReplicaStatus(BaseModel):
    """A hub process on a shared database."""

    address: str
    """Where the others forward requests to."""
    runs: list[str]
    """The runs that it owns, of those that the token is for."""
    is_alive: bool
    """Whether it renewed its membership lately."""


class HubStatus(BaseModel):
    current_step: int
    """Batches delivered, counted from the trainer's `starting_step`."""
    queue_size: int
    """Groups."""
    policy_version: int | None = None
    """The version last published by the trainer; left out of the reply before that."""
    replicas: list[ReplicaStatus] | None = None
    """Hub processes that share the database; left out of the reply by a hub without one."""


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
    trainer_step_s: float | None = None
    """Seconds that the trainer needs for a batch, without waiting: lower quartile of its last steps. None: unknown."""
    trainer_waits_s: float | None = None
    """Seconds that the trainer has waited for a batch; None if it has one or has not asked."""
    wanted_share: float = 1.0
    """Share of a batch that this environment should supply, so that shares are kept and no batch is short."""
    trainer_wait_share: float | None = None
    """Share of its last steps, 0 to 1, that the trainer waited for batches. None: unknown."""
    staleness: float | None = None
    """Mean number of policy versions that the groups of the last batches lay behind at delivery. None: no batch yet."""


NATIVE_STATUS_FIELDS = {
    *("trainer_step_s", "trainer_waits_s", "trainer_wait_share", "wanted_share", "staleness")
}
"""Fields of `EnvStatus` that original clients do not get."""


class PolicyUpdate(BaseModel):
    """The policy version whose weights the engines now serve."""

    version: int = Field(ge=0, lt=2**63)
    epoch: Epoch = None


class LeaseRef(BaseModel):
    lease_id: str = Field(max_length=128)


class AckRequest(LeaseRef):
    step: int | None = Field(default=None, ge=0, lt=2**63)
    """The step that trained on the batch; None: the batch's own."""


class RejectRequest(LeaseRef):
    """Groups of a leased batch that the trainer cannot train on."""

    groups: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(
        min_length=1, max_length=10_000, fail_fast=True
    )
    """Positions in the batch, from 0."""
    reason: str = Field(min_length=1, max_length=500)


class RejectReply(Acknowledgement):
    dead: int
    requeued: int


class AckReply(Acknowledgement):
    step: int


class HeartbeatReply(Acknowledgement):
    expires_in_s: float


class Checkpoint(BaseModel):
    """The trainer can resume from its checkpoint of this step: batches up to it are no longer needed."""

    step: int = Field(ge=0, lt=2**63)
    path: Text | None = None
    epoch: Epoch = None


class CheckpointReply(Acknowledgement):
    committed: int
    """Batches whose bytes were freed by this call."""


class DeadGroup(BaseModel):
    """A group that was set aside and is not delivered."""

    number: int
    """Arrival number in the run."""
    env_id: int | None
    reason: str
    deliveries: int
    """Times it was leased and not acknowledged."""
    num_sequences: int
    num_tokens: int


class DeadGroups(BaseModel):
    groups: list[DeadGroup]


class DeadNumbers(BaseModel):
    # The first fault is enough: a hundred thousand of them take most of a second to describe.
    numbers: list[int] = Field(max_length=100_000, fail_fast=True)


class Requeued(Acknowledgement):
    requeued: int


class Ready(BaseModel):
    status: Literal["ready", "degraded"]
    """`degraded`: batches are delivered, and groups are refused for want of space."""
    durability: str
    """What an accepted group survives: `power`, `process` or `memory`."""


class Ledger(BaseModel):
    """Groups by place: `produced` always equals the sum of the other counts except `duplicates`."""

    produced: int
    queued: int
    """Ready to be delivered, including those to be replayed."""
    buffered: int
    """Odd-sized; they wait for others of their environment."""
    leased: int
    """Handed to a trainer that has not acknowledged them."""
    trained: int
    delivered_unconfirmed: int = 0
    """Sent without a lease, and maybe not received: the connection or the hub broke, or it is too early to tell."""
    expired: int
    """Too old to train on."""
    dead: int
    """Damaged, rejected by the trainer, larger than the batch, or leased too often without an acknowledgement."""
    dead_reasons: dict[str, int] | None = None
    """The dead groups whose payload is still held, by reason; left out of the reply when there are none."""
    discarded: int
    """Dropped at a trainer's request."""
    rejected: dict[str, int]
    """By reason. A refused request whose groups could not be counted counts as one."""
    duplicates: int
    """Groups received again under a known `group_id`; not part of `produced`."""


class EnvironmentView(BaseModel):
    """One environment in an explanation."""

    env_id: int
    name: str
    state: Literal["active", "silent", "disconnected"]
    last_seen_s: float
    queued_sequences: int
    buffered_sequences: int
    floor: int
    """Sequences of every batch that it must supply."""
    items_in_flight: int | None = None
    """At its last status request; None from an original client."""
    oldest_item_s: float | None = None
    """Seconds since the oldest of these items began."""
    over_age: Losses | None = None
    """Those older than `max_batches_offpolicy` steps, by what they wait for; None if there is none."""
    losses: Losses | None = None
    """Dropped groups, failed attempts, turns not continued and the like, as of then; None from an original client."""


DEFAULT_PAGE = 100
"""Environments in one answer of `GET /explain`, unless asked for otherwise."""
MAX_PAGE = 1000


class ExplainQuery(BaseModel):
    """Which environments an explanation lists."""

    offset: Annotated[int, Field(ge=0, lt=2**31)] = 0
    limit: Annotated[int, Field(ge=0, le=MAX_PAGE)] = DEFAULT_PAGE


class Explanation(BaseModel):
    """Why there is, or is not, a batch."""

    batch: Literal["ready", "none"]
    blocker: str | None = None
    """`no_trainer`, `too_few`, `minimum` or `sizes`."""
    reason: str
    refusal: str | None = None
    """Why groups are refused now, and the flag that changes it; None: they are not."""
    env_id: int | None = None
    """The environment that must queue more."""
    have: int | None = None
    need: int | None = None
    batch_size: int | None = None
    current_step: int
    queued_groups: int
    queued_sequences: int
    leased_batches: int
    replay_batches: int
    dead: dict[str, int]
    """Dead groups by reason; `GET /dead` lists them."""
    conflicts: list[str]
    """What a trainer that joined the live run asked for and does not get."""
    unknown_steps: int = 0
    """Steps of which the hub has no record although trainers resumed after them: their groups may come again."""
    oldest_version: int | None = None
    """Of the queued groups."""
    trainer_waits_s: float | None = None
    """Seconds that the trainer has waited for a batch; None if it has one or has not asked."""
    policy_version: int
    max_staleness: int | None = None
    num_environments: int
    num_active: int
    """Environments that called within the timeout."""
    environments: list[EnvironmentView]
    """A page: first the one that blocks, then silent ones, those that lost most, and disconnected ones."""
