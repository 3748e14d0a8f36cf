"""`inference-node-wandb-watcher` logs which inference servers of a node answer, once per step of the run.

Invariant: it survives outages of the hub, the servers and wandb, and logs them. Only reads.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.client import HubClient, WandbInfo
from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, HubError, cli_boundary, require
from atroposlib.utils.wording import without_users

logger = logging.getLogger(__name__)

HUB_POLL_S = 1.0
HEALTH_TIMEOUT_S = 30.0
HEALTH_PATHS = ("/health_generate", "/health")
"""SGLang's check that generates a token; then the path of servers that lack it."""


class WatcherConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    api_addr: str
    """Address of the hub."""
    tp: int = Field(ge=1)
    """GPUs per inference server."""
    node_num: int = Field(ge=0)
    """Number of this node in the wandb names."""
    gpus: int = Field(default=8, ge=1)
    """GPUs of this node."""
    first_port: int = Field(default=9000, ge=1, le=65535)
    """Port of the first server; the others follow."""
    interval_s: float = Field(default=60.0, gt=0)
    """Seconds between two checks."""

    @property
    def urls(self) -> list[str]:
        """The servers' addresses."""
        return [f"http://localhost:{self.first_port + i}" for i in range(self.gpus // self.tp)]


def main(argv: Sequence[str] | None = None) -> int:
    """Watch until Ctrl-C; 2 for a wrong flag, 1 without the extra `wandb`."""
    return cli_boundary(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    config = parse_flags(
        WatcherConfig,
        argv,
        prog="inference-node-wandb-watcher",
        description="Log to wandb which inference servers of this node answer.",
    )
    if not config.urls:
        raise ConfigError(f"--tp: {config.tp} is more than the {config.gpus} GPUs of the node")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    wandb = require("wandb", extra="wandb")
    asyncio.run(watch(config, wandb))
    return 0


async def watch(config: WatcherConfig, wandb: Any) -> None:
    """Log until cancelled."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    async with (
        HubClient(config.api_addr) as hub,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        run = await _begin(hub, wandb, config)
        logged_step = 0
        known: list[str | None] = []
        try:
            while True:
                faults = await asyncio.gather(*(_fault_of(http, url) for url in config.urls))
                if faults != known:
                    for url, fault in zip(config.urls, faults, strict=True):
                        logger.info("%s: %s", without_users(url), fault or "healthy")
                    known = faults
                health = {
                    f"server/server_health_{config.node_num}_{i}": int(fault is None)
                    for i, fault in enumerate(faults)
                }
                step = await _current_step(hub)
                if step is not None and step > logged_step:
                    try:
                        await asyncio.to_thread(run.log, health, step=step)
                        logged_step = step
                    except wandb.Error as e:
                        logger.warning("step %d is not logged yet: %s", step, e)
                await asyncio.sleep(config.interval_s)
        finally:
            await asyncio.to_thread(run.finish)


async def _begin(hub: HubClient, wandb: Any, config: WatcherConfig) -> Any:
    """Start a wandb run in the trainer's project; retry until it starts."""
    name = f"inf_node_{config.node_num}"
    while True:
        info = await _wandb_info(hub)
        try:
            return await asyncio.to_thread(
                wandb.init, project=info.project, group=info.group, name=name
            )
        except wandb.Error as e:
            logger.warning("wandb did not start; retrying in %.0f s: %s", config.interval_s, e)
            await asyncio.sleep(config.interval_s)


async def _fault_of(http: aiohttp.ClientSession, url: str) -> str | None:
    """Return a server's fault; None if it is healthy."""
    status = 0
    for path in HEALTH_PATHS:
        try:
            async with http.get(url + path) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as e:
            return str(e) or type(e).__name__
        if status != 404:
            break
    return None if status == 200 else f"status {status}"


async def _wandb_info(hub: HubClient) -> WandbInfo:
    """Wait for a trainer that uses wandb."""
    level = logging.INFO
    while True:
        reason = "the hub has no trainer yet, or one without wandb"
        try:
            info = await hub.wandb_info()
            if info.project:
                return info
        except HubError as e:
            reason = str(e)
        logger.log(level, "waiting: %s", reason)
        level = logging.DEBUG
        await asyncio.sleep(HUB_POLL_S)


async def _current_step(hub: HubClient) -> int | None:
    try:
        return (await hub.status()).current_step
    except HubError as e:
        logger.warning("no step from the hub: %s", e)
        return None


if __name__ == "__main__":
    sys.exit(main())
