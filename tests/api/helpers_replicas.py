"""Several hubs on one database in this process, each on a loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn

from atroposlib.api.http.connections import HubProtocol
from atroposlib.api.http.limits import HubLimits
from atroposlib.api.http.security import TokenSet
from atroposlib.api.run.replica import Replica
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.server import create_app
from atroposlib.cli.hub_database import replica_of
from atroposlib.utils.local_server import listening


class ReplicaServer:
    """One of the hubs, and a client of it."""

    def __init__(
        self, url: str, *, limits: HubLimits | None = None, tokens: TokenSet | None = None
    ) -> None:
        self._listener = listening("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.replica: Replica = replica_of(url, policy=RunPolicy(), address=self.address)
        self.app = create_app(self.replica.hub, limits=limits, tokens=tokens, replica=self.replica)
        settings = uvicorn.Config(
            self.app, http=HubProtocol, log_config=None, ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(settings)
        self.http = httpx.AsyncClient(base_url=self.address, timeout=20)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ReplicaServer]:
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            while not self._server.started:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.01)
            yield self
        finally:
            await self.http.aclose()
            self._server.should_exit = True
            await serving
            self._listener.close()


@asynccontextmanager
async def two_replicas(
    url: str, *, limits: HubLimits | None = None, tokens: TokenSet | None = None
) -> AsyncIterator[tuple[ReplicaServer, ReplicaServer]]:
    """Two hubs on one database: the first owns the default run."""
    async with (
        ReplicaServer(url, limits=limits, tokens=tokens).running() as owner,
        ReplicaServer(url, limits=limits, tokens=tokens).running() as other,
    ):
        await owner.replica.renew()  # both know both
        yield owner, other
