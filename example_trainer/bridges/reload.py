"""The reload bridge: running engines load new weights in place, over vLLM's development routes.

Guarantee: when `publish` returns, every engine samples from the new checkpoint; requests in flight were frozen, not
lost, and go on under the new weights. An engine is resumed whatever happens between. The engines belong to somebody
else: this bridge never starts or stops one. It owns the retries of its calls: an engine that cannot be reached is
tried again until `timeout_s`; an answer other than 2xx is final.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable

logger = logging.getLogger(__name__)

DETAIL_CHARS = 300


class _Unreachable(EngineUnavailable):
    """No HTTP answer, or not healthy yet: the failures that are tried again."""


class _NoSuchRoute(EngineRejected):
    """404: an older engine, or one without development routes."""


class ReloadBridge:
    """`CheckpointEngines` that run already; `urls` are their addresses without `/v1`."""

    name = "reload"

    def __init__(self, *, urls: Sequence[str], timeout_s: float = 600.0) -> None:
        self._urls = list(urls)
        self._timeout_s = timeout_s
        self._without_version: set[str] = set()
        """Engines that lack /update_weight_version, told about once."""
        self._http = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=False)

    def start(self, checkpoint_dir: Path, version: int) -> None:
        """Wait until every engine is healthy and load the initial weights.

        Loading it also repairs an engine that still holds the weights of an earlier run.
        """
        self._for_each_engine(lambda url: self._call("GET", url, "/health"))
        self.publish(checkpoint_dir, version)

    def publish(self, checkpoint_dir: Path, version: int) -> None:
        """Load `checkpoint_dir`, a directory that the engines can read, into every engine at once.

        Raises EngineRejected or EngineUnavailable naming the engine, the route and its answer.
        """
        self._for_each_engine(lambda url: self._update(url, checkpoint_dir.resolve(), version))

    def close(self) -> None:
        """Close the connections; the engines keep running."""
        self._http.close()

    def _for_each_engine(self, action: Callable[[str], Any]) -> None:
        if len(self._urls) == 1:  # in this thread, where Ctrl-C can end it
            self._retrying()(action, self._urls[0])
            return
        with ThreadPoolExecutor(max_workers=len(self._urls)) as pool:
            pending = [pool.submit(self._retrying(), action, url) for url in self._urls]
        for future in pending:
            future.result()

    def _retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(_Unreachable),
            wait=wait_exponential(multiplier=0.2, max=5.0),
            stop=stop_after_delay(self._timeout_s),
            before_sleep=_say_once,
            reraise=True,
        )

    def _update(self, url: str, checkpoint_dir: Path, version: int) -> None:
        self._call("POST", url, "/pause", params={"mode": "keep"})
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint_dir)}}
            self._call("POST", url, "/collective_rpc", json=body)
            # Frozen requests are recomputed under the new weights; without this vLLM keeps the old prefix cache
            # while any request is in flight, and answers 200 with success false.
            reset = self._call(
                "POST", url, "/reset_prefix_cache", params={"reset_running_requests": "true"}
            )
            if b'"success":false' in reset.content.replace(b" ", b""):
                raise EngineProtocolError(
                    f"engine {url}: /reset_prefix_cache failed, cached keys and values are of older weights"
                )
            self._tell_version(url, version)
        finally:
            self._call("POST", url, "/resume")

    def _tell_version(self, url: str, version: int) -> None:
        if url in self._without_version:
            return
        # vLLM 0.32 reads `new_version` here; its other weight routes call the same thing `weight_version`.
        body = {"new_version": str(version), "weight_version": str(version)}
        try:
            self._call("POST", url, "/update_weight_version", json=body)
        except _NoSuchRoute:
            self._without_version.add(url)
            logger.info("engine %s keeps no weight version; its samples carry none", url)

    def _call(self, method: str, url: str, route: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, url + route, **request)
        except httpx.TransportError as error:
            raise _Unreachable(
                f"engine {url}: {route} got no answer ({error!r}); is an engine running there? "
                "--engine_url names the engines of the reload bridge"
            ) from error
        if answer.is_success:
            return answer
        detail = (
            f"engine {url}: {route} answered {answer.status_code}: {answer.text[:DETAIL_CHARS]}"
        )
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise _NoSuchRoute(f"{detail} (vLLM has it only with VLLM_SERVER_DEV_MODE=1)")
        if answer.is_client_error:
            raise EngineRejected(detail)
        raise (_Unreachable if route == "/health" else EngineUnavailable)(detail)


def _say_once(state: RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        logger.warning("%s; trying again", state.outcome.exception())
