"""Clients of the hub: `HubClient` (async) for environments, `TrainerClient` (sync) for any trainer.

`samples(batch)` gives a trainer one record of numpy arrays per sequence, with its advantages.

Both send packed groups to this project's hub and JSON to an original server. The header `Atropos-Client` tells the hub
that it may answer 429 and that the client supports leases. Of several hubs on one database, clients go to the one that
serves their run (`hub_address.py`). Calls raise `HubUnavailable` (the same call may succeed later) or `HubRejected`,
whose subclasses below say what to do.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import io
import logging
import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import aiohttp
import httpx
import msgspec
import tenacity
import zstandard
from pydantic import BaseModel, ValidationError

from atroposlib import __version__
from atroposlib.api.schemas import (
    EXPERIMENT_HEADER,
    MAX_LOSSES,
    MAX_REASON_CHARS,
    REPLICA_HEADER,
    AckReply,
    CheckpointReply,
    EnvRegistration,
    EnvStatus,
    Explanation,
    HeartbeatReply,
    HubInfo,
    HubStatus,
    Ledger,
    Registration,
    RegistrationReply,
    Resume,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.errors import ConfigError, GroupError, HubError, HubRejected, HubUnavailable
from atroposlib.http_guard import is_loopback_url
from atroposlib.hub_address import CHECK_S, SILENCE_S, HubAddress, Owner
from atroposlib.patience import Backoff, is_transient_status, read_retry_after
from atroposlib.samples import Sample, samples
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from atroposlib.utils.off_loop import off_loop
from atroposlib.utils.wording import without_users
from atroposlib.wire import (
    CONTENT_TYPE_JSON,
    CONTENT_TYPE_PACKED,
    encode_json,
    join_packed,
    pack_group,
    split_packed,
    unpack_group,
)

__all__ = [
    "AnotherExperiment",
    "EnvRegistration",
    "EnvStatus",
    "HubClient",
    "HubInfo",
    "HubStatus",
    "LeaseExpired",
    "LeasedBatch",
    "RegistrationReply",
    "Resume",
    "Sample",
    "SendReceipt",
    "TrainerClient",
    "TrainerNotRegistered",
    "TrainerRegistration",
    "TrainerSuperseded",
    "UnknownEnvironment",
    "WandbInfo",
    "samples",
]

logger = logging.getLogger(__name__)

_check = functools.partial(check_group, strictness=Strictness.MEANING)
_unpack = functools.partial(unpack_group, strictness=Strictness.MEANING)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

TOKEN_VARIABLE = "ATROPOS_HUB_TOKEN"
"""Environment variable with the bearer token used if no `token` is given."""

_OFFLOAD_TOKENS = 20_000
"""Groups with more tokens than this are encoded in a thread."""
_COMPRESS_FROM_BYTES = 64 * 1024
"""Sending smaller bodies takes less time than compressing them."""
_KEEP_ALIVE_S = 4.0
"""Idle connections are closed before the server closes them (uvicorn: after 5 s), so that no call fails on one."""


class UnknownEnvironment(HubRejected):
    """The hub does not know the environment id, for example after its restart: register the environment again."""


class AnotherExperiment(HubRejected):
    """The groups were sampled for an experiment that the run no longer holds: they will not be trained on."""


class TrainerNotRegistered(HubRejected):
    """The hub has no registered trainer, for example after its restart: register again."""


class TrainerSuperseded(HubRejected):
    """Another trainer has resumed the run since this one registered: this one must stop."""


class LeaseExpired(HubRejected):
    """The lease ended (by time, release or a newer incarnation of the trainer): the batch may go to another trainer."""


class TrainerRegistration(Registration):
    """What a trainer registers; without wandb the two names are empty."""

    wandb_group: str = ""
    wandb_project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReceipt:
    """The hub's answer to a `send`."""

    status: str
    """`received`; for a single group also `buffered` (until others complete its group size) or `duplicate`."""
    buffered: int = 0
    """Groups of this call that were buffered."""
    buffer_size: int = 0
    """Sequences the hub buffers for the environment after the last of them."""
    duplicates: int = 0
    """Groups of this call that the hub already had."""
    env_status: EnvStatus | None = None
    """The current answer of `status_env`; None from an original server or for an unknown environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedBatch:
    """A batch that the hub keeps for this trainer until it is acknowledged, released or the lease ends.

    From an original server, which has no leases, everything but `groups` is None.
    """

    groups: list[ScoredGroup]
    batch_id: int | str | None = None
    lease_id: str | None = None
    epoch: int | None = None
    """The trainer's incarnation that the hub leased it to."""
    step: int | None = None
    """The hub's `current_step` after this delivery: 1 for the first batch of a run."""
    expires_in_s: float | None = None
    """Seconds from the answer until the lease ends without a heartbeat."""


class HubClient:
    """One environment's connection to the hub. One attempt per call, one session per client.

    Open it with `async with`. Every call raises `HubUnavailable` or `HubRejected`, or `HubError` for an unusable
    answer. `token` defaults to the variable `ATROPOS_HUB_TOKEN`; `compress` None compresses large bodies unless the
    hub is on this machine, where it costs more than it saves.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        compress: bool | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._address = HubAddress(_checked_url(base_url))
        self._headers = _headers(token)
        self._compresses = not is_loopback_url(base_url) if compress is None else compress
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._speaks_packed = True

    async def __aenter__(self) -> Self:
        # Without the token, which is not for a hub that is yet to be checked.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(keepalive_timeout=_KEEP_ALIVE_S)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def wandb_info(self) -> WandbInfo:
        return _parse(WandbInfo, await self._call("GET", "/wandb_info"))

    async def info(self) -> HubInfo:
        return _parse(HubInfo, await self._call("GET", "/info"))

    async def status(self) -> HubStatus:
        return _parse(HubStatus, await self._call("GET", "/status"))

    async def explain(self, *, offset: int = 0, limit: int) -> Explanation:
        """Return why there is a batch or none, and a page of the environments, those that block first."""
        page = {"offset": offset, "limit": limit}
        return _parse(Explanation, await self._call("GET", "/explain", params=page))

    async def ledger(self) -> Ledger:
        return _parse(Ledger, await self._call("GET", "/ledger"))

    async def register_env(
        self,
        *,
        desired_name: str,
        max_token_length: int,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
        env_uid: str | None = None,
    ) -> EnvRegistration | None:
        """Register; None while the trainer has not started (retry after a second).

        `env_uid` is any string that is constant for this process: registering again with it returns the same id.
        """
        body: dict[str, Any] = {
            "max_token_length": max_token_length,
            "desired_name": desired_name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        if env_uid is not None:
            body["env_uid"] = env_uid
        answer = await self._call("POST", "/register-env", json=body)
        if _json_object(answer, "POST /register-env").get("status") == WaitForTrainer().status:
            return None
        return _parse(EnvRegistration, answer)

    async def status_env(
        self,
        env_id: int,
        *,
        wait_s: float = 0.0,
        seen_step: int | None = None,
        seen_policy: int | None = None,
        env_uid: str | None = None,
        experiment: str | None = None,
        items_in_flight: int | None = None,
        oldest_item_s: float | None = None,
        over_age: Mapping[str, int] | None = None,
        losses: Mapping[str, int] | None = None,
        groups_kept: int | None = None,
    ) -> EnvStatus:
        """Return the work ahead of the environment.

        With `wait_s` the hub answers when its step is no longer `seen_step` (or its policy version no longer
        `seen_policy`), or after `wait_s` seconds; an original server answers at once. Raises `UnknownEnvironment` if
        the id is unknown or belongs to another `env_uid`, or if the hub holds another experiment than `experiment`.
        `GET /explain` names the items in flight, how long ago the oldest began, and the greatest of `losses`; with
        `groups_kept`, the groups made beside them, also that most came to nothing.
        """
        asked: dict[str, str | int | float | None] = {
            "env_id": env_id,
            "wait": wait_s or None,
            "seen_step": seen_step,
            "seen_policy": seen_policy,
            "env_uid": env_uid,
            "experiment": experiment,
            "items_in_flight": items_in_flight,
            "oldest_item_s": oldest_item_s,
            "over_age": _greatest(over_age) if over_age else None,
            "losses": _greatest(losses) if losses else None,
            "groups_kept": groups_kept,
        }
        try:
            reply = await self._call(
                "GET",
                "/status-env",
                params={name: value for name, value in asked.items() if value is not None},
                json={"env_id": env_id},  # an original server reads it here
                wait_s=wait_s,
            )
        except HubRejected as e:
            if e.status == 404:
                raise UnknownEnvironment(str(e), status=e.status, detail=e.detail) from e
            raise
        return _parse(EnvStatus, reply)

    async def disconnect_env(self, env_id: int, *, env_uid: str | None = None) -> None:
        """Disconnect. Raises `UnknownEnvironment`, with `env_uid` also if another process has the id."""
        body = {"env_id": env_id} if env_uid is None else {"env_id": env_id, "env_uid": env_uid}
        answer = await self._call("POST", "/disconnect-env", json=body)
        reply = _json_object(answer, "POST /disconnect-env")
        if reply.get("status") == "failure":
            detail = str(reply.get("error"))
            raise UnknownEnvironment(f"POST /disconnect-env: {detail}", status=200, detail=detail)

    async def send(
        self, groups: Sequence[ScoredGroup], *, experiment: str | None = None
    ) -> SendReceipt:
        """Send groups, all or none. `experiment`: the one they were sampled for; None if unknown.

        Each must have a `group_id`, so that a retry is safe even if the groups have arrived. Raises
        `UnknownEnvironment` when the hub's run was reset meanwhile, and `AnotherExperiment`.
        """
        missing = [index for index, group in enumerate(groups) if group.group_id is None]
        if missing:
            raise ValueError(f"groups[{missing[0]}].group_id: None; a retry would store it twice")
        path = "/scored_data" if len(groups) == 1 else "/scored_data_list"
        is_large = sum(group.num_tokens for group in groups) > _OFFLOAD_TOKENS
        if self._speaks_packed:
            packed = map(pack_group, groups)
            body = await off_loop(join_packed, packed) if is_large else join_packed(packed)
            receipt = None
            is_worth_it = self._compresses and len(body) > _COMPRESS_FROM_BYTES
            if is_worth_it:
                compress = zstandard.ZstdCompressor(level=1).compress
                compressed = await asyncio.to_thread(compress, body)
                receipt = await self._send_native(path, compressed, experiment, coding="zstd")
            if receipt is None:
                receipt = await self._send_native(path, body, experiment)
                self._compresses = self._compresses and not (is_worth_it and receipt is not None)
            if receipt is not None:
                return receipt
        body = await off_loop(_json_body, groups) if is_large else _json_body(groups)
        receipt = await self._send(path, body, {"Content-Type": CONTENT_TYPE_JSON})
        self._speaks_packed = False
        return receipt

    async def _send_native(
        self, path: str, body: bytes, experiment: str | None, *, coding: str | None = None
    ) -> SendReceipt | None:
        """Send a packed body; None when the server refuses the encoding rather than the content."""
        headers = {"Content-Type": CONTENT_TYPE_PACKED}
        if experiment is not None:
            headers[EXPERIMENT_HEADER] = experiment
        if coding is not None:
            headers["Content-Encoding"] = coding
        try:
            return await self._send(path, body, headers)
        except HubRejected as e:
            if e.status in (404, 409):
                kind = AnotherExperiment if '"another_run"' in e.detail else UnknownEnvironment
                raise kind(str(e), status=e.status, detail=e.detail) from e
            # An original server cannot read the encoding; our hub marks a refusal of the content.
            if e.status not in (400, 415, 422) or "group_error" in e.detail:
                raise
            return None

    async def _send(self, path: str, body: bytes, headers: dict[str, str]) -> SendReceipt:
        # As a file: aiohttp then writes a large body in chunks instead of at once.
        answer = await self._call("POST", path, data=io.BytesIO(body), headers=headers)
        reply = _json_object(answer, f"POST {path}")
        if reply.get("status") not in ("received", "buffered", "duplicate"):
            raise HubError(f"POST {path}: unexpected answer {answer[:200]!r}")
        status, env_status = reply["status"], reply.get("env_status")
        return SendReceipt(
            status=status,
            buffered=1 if status == "buffered" else reply.get("buffered", 0),
            buffer_size=reply.get("buffer_size", 0) or reply.get("last_buffer_size", 0),
            duplicates=1 if status == "duplicate" else reply.get("duplicates", 0),
            env_status=None if env_status is None else _parse(EnvStatus, env_status),
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        wait_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        **request: Any,
    ) -> bytes:
        if self._session is None:
            raise RuntimeError("HubClient is closed; open it with `async with`")
        address, url = self._address, self._address.url
        where = f"{method} {url}{path}"
        is_followed = url != address.configured
        silence_s = wait_s + SILENCE_S if is_followed else None
        timeout = aiohttp.ClientTimeout(
            total=self._timeout_s + wait_s, sock_connect=silence_s, sock_read=silence_s
        )
        headers = {**self._headers, **(headers or {})}
        try:
            async with self._session.request(
                method, url + path, headers=headers, timeout=timeout, **request
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as e:
            address.failed(url)
            raise HubUnavailable(f"{where}: {_reason(e)}") from e
        named = response.headers.get(REPLICA_HEADER)
        if is_followed or named is not None:
            owner = address.answered(url, status=response.status, named=named)
            if owner is not None:
                await self._check(owner, self._session)
        if response.status >= 400:
            raise _error_of(response.status, body, where, response.headers.get("Retry-After"))
        return body

    async def _check(self, owner: Owner, session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=CHECK_S)
        try:
            async with session.get(
                f"{owner.url}/healthz", timeout=timeout, allow_redirects=False
            ) as answer:
                self._address.follow(owner, found=answer.headers.get(REPLICA_HEADER))
        except (aiohttp.ClientError, TimeoutError) as e:
            logger.debug("the owner at %s cannot be reached: %s", owner.url, _reason(e))


class TrainerClient:
    """A trainer's connection to the hub. One thread takes batches; any thread may make control calls.

    Control calls are retried here, for up to `retry_for_s`, while the hub is unavailable; `batch()` and
    `lease_batch()` are one attempt per call. `token` defaults to the variable `ATROPOS_HUB_TOKEN`; `compress` None
    requests compressed batches unless the hub is on this machine. An original server has no leases, policies and
    checkpoints: those calls then do nothing, which is logged once.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        compress: bool | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._address = HubAddress(_checked_url(base_url))
        self._compresses = not is_loopback_url(base_url) if compress is None else compress
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            headers=_headers(token),
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
            transport=transport,
            trust_env=False,
            # httpx alone would not read SSL_CERT_FILE. To read the authorities takes 20 ms of CPU: none for http://.
            verify=ssl.create_default_context()
            if base_url.startswith("https://")
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(HubUnavailable),
            wait=_pause_s,
            stop=tenacity.stop_after_delay(retry_for_s),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        self._open_request: str | None = None
        """Id of an unanswered lease request: the hub may have leased a batch to it."""
        self._epoch: int | None = None
        """This trainer's incarnation, once known: the hub refuses its calls after a later one has taken over."""
        self._is_missing_logged = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def register(
        self,
        registration: Registration,
        *,
        experiment: str | None = None,
        resume_step: int | None = None,
        resume: Resume | Literal["replay", "requeue", "discard"] = Resume.REPLAY,
    ) -> RegistrationReply:
        """Begin `experiment`, a fresh random name, or resume it from the checkpoint at `resume_step`.

        Beginning one sets aside the run's earlier experiment; `set_aside` of the reply names it. Registering again
        under the same name changes nothing, so a retry is safe. Resuming restores the experiment if it was set aside;
        without `experiment` it is the run's current one. It voids earlier leases, and `resume` decides what happens to
        batches trained after that step: delivered again unchanged and in order, queued again, or dropped.

        With neither, this trainer joins a live run, which ignores `registration`, as in the original.
        """
        body = registration.model_dump(mode="json", exclude_none=True)
        more: dict[str, Any] = {"experiment": experiment}
        if resume_step is not None:
            more |= {"resume_step": resume_step, "resume": Resume(resume).value}
        body |= {name: value for name, value in more.items() if value is not None}
        reply = _parse(RegistrationReply, self._control("POST", "/register", json=body))
        self._epoch = reply.epoch
        return reply

    def status(self) -> HubStatus:
        return _parse(HubStatus, self._control("GET", "/status"))

    def info(self) -> HubInfo:
        return _parse(HubInfo, self._control("GET", "/info"))

    def explain(self) -> Explanation:
        """Return why there is a batch or none, and the state of the environments."""
        return _parse(Explanation, self._control("GET", "/explain"))

    def latest_example(self) -> ScoredGroup | None:
        """Return the newest queued group without taking it; None before the first."""
        group = _json_object(self._control("GET", "/latest_example"), "GET /latest_example")
        if not group.get("tokens"):
            return None
        return _check(group)

    def publish_policy(self, version: int) -> None:
        """Announce the policy version whose weights the engines now serve."""
        self._native("/policy", {"version": version})

    def reset(self) -> None:
        """Erase the hub's run: queue, environments, step."""
        self._control("GET", "/reset_data")

    def batch(self, wait_s: float = 0.0) -> list[ScoredGroup] | None:
        """Return the next batch; None when there is none within `wait_s`.

        The batch counts as trained once it has been sent; use `lease_batch` if that is too early. One attempt: raises
        `HubUnavailable`, `TrainerNotRegistered`, or `GroupError` for a group that fails the trainer's gate.
        """
        batch, faults = self._take({}, wait_s)
        for fault in faults.values():
            raise fault
        return None if batch is None else batch.groups

    def lease_batch(
        self,
        wait_s: float = 0.0,
        *,
        ttl_s: float | None = None,
        check: Callable[[ScoredGroup], None] | None = None,
    ) -> LeasedBatch | None:
        """Lease the next batch for `ttl_s` (None: the hub's default); None when there is none within `wait_s`.

        Groups that fail the trainer's gate, or for which `check` raises GroupError, are rejected: the hub sets them
        aside, and the next batch is requested. Otherwise one attempt; raises `HubUnavailable`, `TrainerNotRegistered`,
        `TrainerSuperseded`. If the answer is lost, the next call gets the same batch.
        """
        deadline = time.monotonic() + wait_s
        left_s = wait_s
        while True:
            self._open_request = self._open_request or uuid.uuid4().hex
            asked = {"ttl": ttl_s, "epoch": self._epoch}
            params: dict[str, str | float] = {"lease": 1, "request_id": self._open_request}
            params |= {name: value for name, value in asked.items() if value is not None}
            batch, faults = self._take(params, left_s, check)
            if batch is not None and batch.lease_id is None:
                self._log_missing("GET /batch?lease=1")
            elif batch is not None:
                self._epoch = batch.epoch
            if batch is None or not faults:
                self._open_request = None
                return batch
            position, fault = next(iter(faults.items()))
            logger.error(
                "%d groups of batch %s cannot be trained on and are rejected; the first: groups[%d]: %s",
                len(faults),
                batch.batch_id,
                position,
                fault,
            )
            if batch.lease_id is None:
                raise fault  # an original server, which has no rejection
            try:
                self.reject(batch, list(faults), reason=str(fault))
            except LeaseExpired as e:
                logger.warning("the lease of batch %s has ended: %s", batch.batch_id, e)
            # Only now: until it is rejected, a retry must get the same batch.
            self._open_request = None
            left_s = max(0.0, deadline - time.monotonic())

    def heartbeat(self, batch: LeasedBatch) -> float | None:
        """Renew the lease; return how long it lasts now, in seconds. Raises `LeaseExpired`."""
        reply = self._control_lease("heartbeat", batch)
        return None if reply is None else _parse(HeartbeatReply, reply).expires_in_s

    def ack(self, batch: LeasedBatch, *, step: int | None = None) -> int | None:
        """Report that the batch was trained as `step` (None: the batch's own); return that step.

        Safe to repeat. Raises `LeaseExpired` when the lease has ended: the batch may be trained twice; `HubRejected`
        with status 404 at a hub that lost its run.
        """
        more = {} if step is None else {"step": step}
        reply = self._control_lease("ack", batch, **more)
        return None if reply is None else _parse(AckReply, reply).step

    def reject(self, batch: LeasedBatch, positions: Sequence[int], *, reason: str) -> None:
        """Give the batch back to the hub without the groups at `positions`, as delivered, which cannot be trained on.

        The hub sets those aside as dead, for `reason`, and delivers the others again at once. Raises `LeaseExpired`.
        """
        self._control_lease("reject", batch, groups=list(positions), reason=reason[:500])

    def release(self, batch: LeasedBatch) -> None:
        """Give the batch back to the hub untrained: its groups are delivered next."""
        self._control_lease("release", batch)

    def checkpoint(self, step: int, path: str | os.PathLike[str] | None = None) -> int:
        """Report a checkpoint; return how many batches up to `step` the hub discarded. Raises `TrainerSuperseded`."""
        body = {"step": step, "path": None if path is None else os.fspath(path)}
        reply = self._native("/checkpoints", body)
        return 0 if reply is None else _parse(CheckpointReply, reply).committed

    @contextmanager
    def holding(self, batch: LeasedBatch) -> Iterator[None]:
        """Renew the lease in a thread while the block runs, three times per lease duration.

        Never raises: a lease that is lost meanwhile is logged, and `ack` raises.
        """
        if batch.lease_id is None:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._keep_lease, args=(batch, is_over), name="lease", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _keep_lease(self, batch: LeasedBatch, is_over: threading.Event) -> None:
        pause_s = _until_renewal(batch.expires_in_s)
        while not is_over.wait(pause_s):
            timeout_s = min(self._timeout_s, max(1.0, pause_s))
            try:
                reply = self._lease_call("heartbeat", batch, timeout_s=timeout_s)
                pause_s = _until_renewal(_parse(HeartbeatReply, reply).expires_in_s)
            except HubUnavailable as e:
                logger.warning("the lease of batch %s is not renewed yet: %s", batch.batch_id, e)
                pause_s = min(5.0, pause_s)
            except HubError as e:
                logger.warning("the lease of batch %s is lost: %s", batch.batch_id, e)
                return

    def _take(
        self,
        params: dict[str, str | float],
        wait_s: float,
        check: Callable[[ScoredGroup], None] | None = None,
    ) -> tuple[LeasedBatch | None, dict[int, GroupError]]:
        """Request a batch once; return it with the groups that pass the gate, and the others' faults by position."""
        began = time.monotonic()
        if wait_s > 0:
            params = params | {"wait": wait_s}
        response = self._request(
            "GET",
            "/batch",
            params=params or None,
            headers={
                "Accept": f"{CONTENT_TYPE_PACKED}, {CONTENT_TYPE_JSON}",
                "Accept-Encoding": "zstd" if self._compresses else "identity",
            },
            wait_s=wait_s,
        )
        if CONTENT_TYPE_PACKED in response.headers.get("content-type", ""):
            envelope = split_packed(response.content)
            meta = envelope.meta
            groups, faults = _through_the_gate(envelope.blobs, _unpack, check)
        else:
            received, meta = _read_json_batch(response.content)
            if received is None:
                if (left := wait_s - (time.monotonic() - began)) > 0:
                    # An original server ignores `wait` and answers at once.
                    time.sleep(min(left, 1.0))
                return None, {}
            groups, faults = _through_the_gate(received, _check, check)
        has_lease = meta.get("lease_id") is not None
        lease = _parse(_Lease, meta).model_dump() if has_lease else {}
        return LeasedBatch(groups=groups, **lease), faults

    def _control_lease(self, what: str, batch: LeasedBatch, **more: Any) -> bytes | None:
        """Call a route of the batch, with retries; None if the batch has no lease."""
        if batch.lease_id is None:
            self._log_missing(f"POST /batches/{{batch_id}}/{what}")
            return None
        return self._retrying(lambda: self._lease_call(what, batch, **more))

    def _lease_call(
        self, what: str, batch: LeasedBatch, *, timeout_s: float | None = None, **more: Any
    ) -> bytes:
        body = {"lease_id": batch.lease_id, **more}
        path = f"/batches/{batch.batch_id}/{what}"
        try:
            return self._request("POST", path, json=body, timeout_s=timeout_s).content
        except HubRejected as e:
            if e.status == 409:
                raise LeaseExpired(str(e), status=e.status, detail=e.detail) from e
            raise

    def _native(self, path: str, body: dict[str, Any]) -> bytes | None:
        """Post `body`, with the epoch, to a route that an original server lacks; None from such a server."""
        if self._epoch is not None:
            body = body | {"epoch": self._epoch}
        try:
            return self._control("POST", path, json=body)
        except HubRejected as e:
            if e.status == 405 or (e.status == 404 and '"Not Found"' in e.detail):
                self._log_missing(f"POST {path}")
                return None
            raise

    def _log_missing(self, what: str) -> None:
        if not self._is_missing_logged:
            self._is_missing_logged = True
            logger.warning(
                "%s has no leases, policies or checkpoints (%s): a batch that this trainer loses is lost",
                without_users(self._address.configured),
                what,
            )

    def _control(self, method: str, path: str, **request: Any) -> bytes:
        """Send a call that is safe to repeat, with retries."""
        return self._retrying(lambda: self._request(method, path, **request).content)

    def _request(
        self,
        method: str,
        path: str,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        **request: Any,
    ) -> httpx.Response:
        address, url = self._address, self._address.url
        where = f"{method} {url}{path}"
        longest_s = (timeout_s or self._timeout_s) + wait_s
        is_followed = url != address.configured
        silence_s = min(longest_s, wait_s + SILENCE_S) if is_followed else longest_s
        timeout = httpx.Timeout(longest_s, connect=silence_s, read=silence_s)
        try:
            response = self._client.request(method, url + path, timeout=timeout, **request)
        except (httpx.TransportError, httpx.DecodingError) as e:
            address.failed(url)
            raise HubUnavailable(f"{where}: {_reason(e)}") from e
        status, named = response.status_code, response.headers.get(REPLICA_HEADER)
        if is_followed or named is not None:
            owner = address.answered(url, status=status, named=named)
            if owner is not None:
                self._check(owner)
        if status >= 400:
            raise _error_of(status, response.content, where, response.headers.get("Retry-After"))
        return response

    def _check(self, owner: Owner) -> None:
        timeout = {"timeout": httpx.Timeout(CHECK_S).as_dict()}
        try:
            # As it is, without the headers of this client, which hold the token.
            request = httpx.Request("GET", f"{owner.url}/healthz", extensions=timeout)
            answer = self._client.send(request)
            self._address.follow(owner, found=answer.headers.get(REPLICA_HEADER))
        except (httpx.TransportError, httpx.DecodingError, httpx.InvalidURL) as e:
            logger.debug("the owner at %s cannot be reached: %s", owner.url, _reason(e))


def _through_the_gate(
    received: Sequence[T],
    read: Callable[[T], ScoredGroup],
    check: Callable[[ScoredGroup], None] | None,
) -> tuple[list[ScoredGroup], dict[int, GroupError]]:
    """Read a batch; return the groups that pass the trainer's gate, and the faults of others by position."""
    groups: list[ScoredGroup] = []
    faults: dict[int, GroupError] = {}
    for position, each in enumerate(received):
        try:
            group = read(each)
            if check is not None:
                check(group)
        except GroupError as e:
            faults[position] = e
        else:
            groups.append(group)
    return groups, faults


class _Lease(BaseModel):
    """The hub's fields of a leased batch."""

    batch_id: int | str
    lease_id: str
    epoch: int
    step: int
    expires_in_s: float


def _until_renewal(expires_in_s: float | None) -> float:
    """Return a third of the lease: two renewals may fail before it ends."""
    return max(0.05, (expires_in_s or 0.0) / 3)


def _read_json_batch(body: bytes) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the groups of a batch, None if there is none, and the other fields of the reply."""
    reply = _json_object(body, "GET /batch")
    if "batch" not in reply:
        raise HubError(f"GET /batch: unexpected answer {body[:200]!r}")
    if reply.get("status") == "error":
        message = str(reply.get("message"))
        raise TrainerNotRegistered(f"GET /batch: {message}", status=200, detail=message)
    return reply.pop("batch"), reply


def _greatest(losses: Mapping[str, int]) -> str:
    """Return the greatest counts that a status request may carry, as JSON."""
    short = [(reason[:MAX_REASON_CHARS], count) for reason, count in losses.items()]
    greatest = heapq.nlargest(MAX_LOSSES, short, key=lambda pair: pair[1])
    return msgspec.json.encode(dict(greatest)).decode()


def _json_object(body: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise HubError(f"{where}: unexpected answer {body[:200]!r}") from e


def _json_body(groups: Sequence[ScoredGroup]) -> bytes:
    if len(groups) == 1:
        return encode_json(groups[0])
    return b"[" + b",".join(map(encode_json, groups)) + b"]"


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"hub address {url!r}: expected http://HOST:PORT")
    return url.rstrip("/")


def _headers(token: str | None) -> Mapping[str, str]:
    token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
    headers = {"Atropos-Client": f"atroposlib/{__version__}"}
    return headers | {"Authorization": f"Bearer {token}"} if token else headers


def _error_of(status: int, body: bytes, where: str, retry_after: str | None) -> HubError:
    """Return the error that a status of 400 or more stands for."""
    detail = body.decode("utf-8", "replace")
    hint = f"; is {TOKEN_VARIABLE} set to one of its tokens?" * (status == 401)
    hint += "; is this a hub?" * (not detail.startswith("{"))
    message = f"{where}: {status} {' '.join(detail.split()):.500}{hint}"
    if is_transient_status(status):
        return HubUnavailable(message, retry_after_s=read_retry_after(retry_after))
    kind = TrainerSuperseded if status == 409 and '"superseded"' in detail else HubRejected
    return kind(message, status=status, detail=detail)


def _pause_s(state: tenacity.RetryCallState) -> float:
    """Return the pause before the next attempt, in seconds."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, HubUnavailable) else None
    return Backoff(cap_s=5.0, num_failed=state.attempt_number - 1).next(asked_s=asked_s)


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:
        return os.strerror(number)  # the error's own text repeats the address twice
    return str(error) or type(error).__name__


def _parse(model: type[M], reply: Any) -> M:
    """Validate a reply: a JSON body, or a part of one that was decoded."""
    try:
        is_text = isinstance(reply, bytes)
        return model.model_validate_json(reply) if is_text else model.model_validate(reply)
    except ValidationError as e:
        raise HubError(f"this is not a hub's {model.__name__}: {reply!r:.200}") from e
