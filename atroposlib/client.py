"""Clients of the hub: `HubClient` (async) for environments, `TrainerClient` (sync) for any trainer.

Both speak packed groups to our hub and JSON to an original server. `HubClient` makes one attempt
per call: retries belong to the environment runtime. `TrainerClient` retries its control calls
itself; `batch()` is one attempt.

    HubUnavailable     nobody answered, or 5xx: the same call may succeed later
    HubRejected        the hub refused: the same call will not succeed
    |- UnknownEnvironment     register the environment again
    `- TrainerNotRegistered   register the trainer again
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import httpx
import msgspec
import tenacity
from pydantic import BaseModel, TypeAdapter, ValidationError

from atroposlib.api.schemas import (
    EnvRegistration,
    EnvStatus,
    HubInfo,
    HubStatus,
    Registration,
    RegistrationReply,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.errors import ConfigError, HubError, HubRejected, HubUnavailable
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
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
    "EnvRegistration",
    "EnvStatus",
    "HubClient",
    "HubInfo",
    "HubStatus",
    "SendReceipt",
    "TrainerClient",
    "TrainerNotRegistered",
    "TrainerRegistration",
    "UnknownEnvironment",
    "WandbInfo",
]

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_OFFLOAD_TOKENS = 20_000
"""Groups with more tokens than this are encoded in a thread."""
_RETRYABLE = frozenset({408, 425, 429})
"""4xx that say "later", not "never"."""


class UnknownEnvironment(HubRejected):
    """The hub does not know the environment id, for example after its restart."""


class TrainerNotRegistered(HubRejected):
    """The hub has no trainer, for example after its restart."""


class TrainerRegistration(Registration):
    """What a trainer announces; without wandb the two names are empty."""

    wandb_group: str = ""
    wandb_project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReceipt:
    """The hub's answer to a `send`."""

    status: str
    """`received`, or `buffered` for a single group that waits for others."""
    buffered: int = 0
    """Groups of this call that were buffered."""
    buffer_size: int = 0
    """Sequences the hub buffers for the environment after the last of them."""


class HubClient:
    """One environment's connection to the hub. One attempt per call, one session per client.

    Open it with `async with`. Every call raises `HubUnavailable` or `HubRejected`, or `HubError`
    when the answer makes no sense.
    """

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        self._base_url = _checked_url(base_url)
        self._headers = _authorization(token)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._speaks_packed = True

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def wandb_info(self) -> WandbInfo:
        return _parse(WandbInfo, await self._call("GET", "/wandb_info"))

    async def info(self) -> HubInfo:
        return _parse(HubInfo, await self._call("GET", "/info"))

    async def register_env(
        self,
        *,
        desired_name: str,
        max_token_length: int,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
    ) -> EnvRegistration | None:
        """Register; None while the trainer has not started (ask again in a second)."""
        body = {
            "max_token_length": max_token_length,
            "desired_name": desired_name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        reply = await self._call("POST", "/register-env", json=body)
        parsed = _parse_either(reply)
        return parsed if isinstance(parsed, EnvRegistration) else None

    async def status_env(self, env_id: int) -> EnvStatus:
        """Raises `UnknownEnvironment` when the hub did not give out this id."""
        try:
            reply = await self._call("GET", "/status-env", json={"env_id": env_id})
        except HubRejected as e:
            if e.status == 404:
                raise UnknownEnvironment(str(e), status=e.status, detail=e.detail) from e
            raise
        return _parse(EnvStatus, reply)

    async def disconnect_env(self, env_id: int) -> None:
        """Leave: the environment no longer counts in weights and minimums."""
        reply = msgspec.json.decode(
            await self._call("POST", "/disconnect-env", json={"env_id": env_id})
        )
        if isinstance(reply, dict) and reply.get("status") == "failure":
            detail = str(reply.get("error"))
            raise UnknownEnvironment(f"POST /disconnect-env: {detail}", status=200, detail=detail)

    async def send(self, groups: Sequence[ScoredGroup]) -> SendReceipt:
        """Send groups, all or none.

        Each carries a `group_id`: sending again what may have arrived is safe.
        """
        missing = [index for index, group in enumerate(groups) if group.group_id is None]
        if missing:
            raise ValueError(f"groups[{missing[0]}].group_id: None; a retry would store it twice")
        if self._speaks_packed:
            try:
                return await self._send(groups, _packed_body, CONTENT_TYPE_PACKED)
            except HubRejected as e:
                # An original server cannot read the encoding; ours marks a refusal of the content.
                if e.status not in (400, 415, 422) or "group_error" in e.detail:
                    raise
            receipt = await self._send(groups, _json_body, CONTENT_TYPE_JSON)
            self._speaks_packed = False
            return receipt
        return await self._send(groups, _json_body, CONTENT_TYPE_JSON)

    async def _send(
        self,
        groups: Sequence[ScoredGroup],
        encode: Callable[[Sequence[ScoredGroup]], bytes],
        content_type: str,
    ) -> SendReceipt:
        if sum(group.num_tokens for group in groups) > _OFFLOAD_TOKENS:
            body = await asyncio.to_thread(encode, groups)
        else:
            body = encode(groups)
        path = "/scored_data" if len(groups) == 1 else "/scored_data_list"
        reply = msgspec.json.decode(
            await self._call("POST", path, data=body, headers={"Content-Type": content_type})
        )
        if not isinstance(reply, dict) or reply.get("status") not in ("received", "buffered"):
            raise HubError(f"POST {path}: unexpected answer {reply!r:.200}")
        if reply["status"] == "buffered":
            return SendReceipt(status="buffered", buffered=1, buffer_size=reply["buffer_size"])
        return SendReceipt(
            status="received",
            buffered=reply.get("buffered", 0),
            buffer_size=reply.get("last_buffer_size", 0),
        )

    async def _call(self, method: str, path: str, **request: Any) -> bytes:
        if self._session is None:
            raise RuntimeError("HubClient is closed; open it with `async with`")
        url = self._base_url + path
        try:
            async with self._session.request(method, url, **request) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise HubUnavailable(f"{method} {url}: {_reason(e)}") from e
        _raise_for_status(response.status, body, f"{method} {url}")
        return body


class TrainerClient:
    """A trainer's connection to the hub.

    Control calls are retried here, for up to `retry_for_s`, while the hub is unavailable; `batch()`
    is one attempt per call.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        retry_for_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._base_url = _checked_url(base_url)
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            base_url=self._base_url,
            headers=_authorization(token),
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
        )
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(HubUnavailable),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=5.0),
            stop=tenacity.stop_after_delay(retry_for_s),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def register(self, registration: Registration) -> int:
        """Begin the run and return the trainer's id.

        If a run is live, the hub keeps it and ignores `registration`.
        """
        body = self._control("POST", "/register", json=registration.model_dump())
        return _parse(RegistrationReply, body).uuid

    def status(self) -> HubStatus:
        return _parse(HubStatus, self._control("GET", "/status"))

    def publish_policy(self, version: int) -> None:
        """Announce the policy version whose weights the engines now serve."""
        self._control("POST", "/policy", json={"version": version})

    def reset(self) -> None:
        """Erase the hub's run: queue, environments, step."""
        self._control("GET", "/reset_data")

    def batch(self, wait_s: float = 0.0) -> list[ScoredGroup] | None:
        """Return the next batch; None when there is none within `wait_s`.

        One attempt: raises `HubUnavailable`, `TrainerNotRegistered`, or `GroupError` for a group
        that fails the trainer's gate.
        """
        began = time.monotonic()
        response = self._request(
            "GET",
            "/batch",
            params={"wait": wait_s} if wait_s > 0 else None,
            headers={
                "Accept": f"{CONTENT_TYPE_PACKED}, {CONTENT_TYPE_JSON}",
                "Accept-Encoding": "identity",
            },
            timeout=self._timeout_s + wait_s,
        )
        if CONTENT_TYPE_PACKED in response.headers.get("content-type", ""):
            blobs = split_packed(response.content).blobs
            return [unpack_group(blob, strictness=Strictness.MEANING) for blob in blobs]
        groups = _read_json_batch(response.content)
        if groups is None and (left := wait_s - (time.monotonic() - began)) > 0:
            # An original server answers at once, whatever `wait` says.
            time.sleep(min(left, 1.0))
        return groups

    def _control(self, method: str, path: str, **request: Any) -> bytes:
        """Send a call that is safe to repeat; the owner of its retries."""
        return self._retrying(lambda: self._request(method, path, **request).content)

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        where = f"{method} {self._base_url}{path}"
        try:
            response = self._client.request(method, path, **request)
        except httpx.TransportError as e:
            raise HubUnavailable(f"{where}: {_reason(e)}") from e
        _raise_for_status(response.status_code, response.content, where)
        return response


def _read_json_batch(body: bytes) -> list[ScoredGroup] | None:
    try:
        reply = msgspec.json.decode(body)
    except msgspec.DecodeError as e:
        raise HubError(f"GET /batch: not JSON: {body[:200]!r}") from e
    if not isinstance(reply, dict) or "batch" not in reply:
        raise HubError(f"GET /batch: unexpected answer {body[:200]!r}")
    if reply.get("status") == "error":
        message = str(reply.get("message"))
        raise TrainerNotRegistered(f"GET /batch: {message}", status=200, detail=message)
    if reply["batch"] is None:
        return None
    return [check_group(group, strictness=Strictness.MEANING) for group in reply["batch"]]


def _packed_body(groups: Sequence[ScoredGroup]) -> bytes:
    return join_packed([pack_group(group) for group in groups], {})


def _json_body(groups: Sequence[ScoredGroup]) -> bytes:
    if len(groups) == 1:
        return encode_json(groups[0])
    return b"[" + b",".join(map(encode_json, groups)) + b"]"


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"hub address {url!r}: expected http://HOST:PORT")
    return url.rstrip("/")


def _authorization(token: str | None) -> Mapping[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _raise_for_status(status: int, body: bytes, where: str) -> None:
    if status < 400:
        return
    detail = body.decode("utf-8", "replace")
    message = f"{where}: {status} {detail:.500}"
    if status >= 500 or status in _RETRYABLE:
        raise HubUnavailable(message)
    raise HubRejected(message, status=status, detail=detail)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parse(model: type[M], body: bytes) -> M:
    try:
        return model.model_validate_json(body)
    except ValidationError as e:
        raise HubError(f"this is not a hub's {model.__name__}: {body[:200]!r}") from e


_registered_or_wait: TypeAdapter[EnvRegistration | WaitForTrainer] = TypeAdapter(
    EnvRegistration | WaitForTrainer
)


def _parse_either(body: bytes) -> EnvRegistration | WaitForTrainer:
    try:
        return _registered_or_wait.validate_json(body)
    except ValidationError as e:
        raise HubError(f"POST /register-env: unexpected answer {body[:200]!r}") from e
