"""A scripted environment without a model, and a hub on a loopback port that can be stopped and started."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.types import Message, Receive, Scope, Send

from atroposlib.api.run.coordinator import Coordinator
from atroposlib.api.run.hub import DEFAULT_RUN, Hub
from atroposlib.api.run.types import RunPolicy
from atroposlib.api.schemas import RegisterEnv, RegisterTrainer
from atroposlib.api.server import create_app
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from atroposlib.runtime.serve import serve
from atroposlib.runtime.timings import Timings
from tests.builders.environments import Offline
from tests.processes import free_port

_PAUSE = b"retry-after"

FAST = Timings(
    tick_s=0.02,
    poll_wait_s=0.1,
    control_refill_s=0.02,
    register_s=0.02,
    backoff_first_s=0.02,
    backoff_cap_s=0.05,
)


async def until(claim: Callable[[], bool]) -> None:
    """Wait until `claim` holds."""
    async with asyncio.timeout(40):
        while not claim():  # noqa: ASYNC110 - watches other objects
            await asyncio.sleep(0.01)


def make_group(num_sequences: int = 2, *, scores: list[float] | None = None) -> dict[str, Any]:
    """Three tokens per sequence, the last two trained."""
    return {
        "tokens": [[5, 6, 7 + i] for i in range(num_sequences)],
        "masks": [[-100, 6, 7 + i] for i in range(num_sequences)],
        "scores": scores or [float(i) for i in range(num_sequences)],
        "inference_logprobs": [[1.0, -0.5, -0.25]] * num_sequences,
    }


class ScriptedEnv(Offline, BaseEnv):
    """Hands out 0, 1, 2, ...; `answer(item)` is what an item becomes."""

    name = "scripted"

    def __init__(
        self,
        config: BaseEnvConfig | None = None,
        server_configs: Any = None,
        slurm: bool = False,
        testing: bool = True,
        *,
        answer: Callable[[int], Any] | None = None,
        num_items: int | None = None,
        **fields: Any,
    ) -> None:
        values = {"group_size": 2, "use_wandb": False, "max_num_workers": 4, **fields}
        super().__init__(
            config or BaseEnvConfig(**values), server_configs or [APIServerConfig()], slurm, testing
        )
        self.answer = answer or (lambda item: make_group(self.config.group_size))
        self.num_items = num_items
        self.num_given = 0
        self.started: list[int] = []
        self.num_cleanups = 0
        self.num_evaluations = 0

    @classmethod
    def config_init(cls) -> Any:
        return BaseEnvConfig(group_size=2, max_num_workers=4), [
            APIServerConfig(base_url="http://localhost:9001/v1", model_name="m", api_key="secret")
        ]

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> int | None:
        if self.num_items is not None and self.num_given >= self.num_items:
            return None
        self.num_given += 1
        return self.num_given - 1

    async def collect_trajectories(self, item: int) -> Any:
        self.started.append(item)
        await asyncio.sleep(0)
        answer = self.answer(item)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer, []

    async def cleanup(self) -> None:
        self.num_cleanups += 1

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.num_evaluations += 1


class LoopbackHub:
    """A hub on a loopback port; stopping it keeps its run, as a durable hub does over a restart."""

    def __init__(
        self,
        *,
        batch_size: int = 4,
        num_steps: int = 1000,
        max_token_len: int = 100,
        max_queued_sequences: int | None = None,
        is_original: bool = False,
    ) -> None:
        self._hub = Hub(policy=RunPolicy(max_queued_sequences=max_queued_sequences))
        self._app = create_app(self._hub)
        self._is_original = is_original
        """Take no notice of what the original does not know: our client's mark, query parameters."""
        self.calls: Counter[str] = Counter()
        """Requests by path."""
        self.registration = RegisterTrainer(
            wandb_group="",
            wandb_project="",
            batch_size=batch_size,
            max_token_len=max_token_len,
            checkpoint_dir="",
            save_checkpoint_interval=-1,
            starting_step=0,
            num_steps=num_steps,
            experiment="loopback",  # registering again at a hub that forgot everything is the same one
        )
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def coordinator(self) -> Coordinator:
        return self._hub.runs[DEFAULT_RUN]

    @property
    def num_control_calls(self) -> int:
        """Requests that carry no groups."""
        return sum(count for path, count in self.calls.items() if "scored_data" not in path)

    async def start_trainer(self, **changes: Any) -> None:
        """Register a trainer and let environments in."""
        registration = self.registration.model_copy(update=changes)
        await self._hub.register(DEFAULT_RUN, registration)
        delivery = await self.coordinator.deliver()
        if delivery is not None:
            await self.coordinator.give_back(delivery.row)

    async def start_stranger(self) -> int:
        """Register another environment; return its id."""
        about = RegisterEnv(max_token_length=9, desired_name="stranger", weight=1.0, group_size=2)
        registered = await self.coordinator.register_env(about)
        assert registered is not None
        return registered.env_id

    async def take_batch(self) -> int:
        """Take a batch as a trainer without leases does; return the number of groups, 0 without a batch."""
        delivery = await self.coordinator.deliver()
        if delivery is None:
            return 0
        await self.coordinator.end_plain(delivery.row)
        self.coordinator.note_receipt(delivery.row)
        return len(delivery.payloads)

    def serve(
        self, env_cls: type[ScriptedEnv] = ScriptedEnv, *, timings: Timings = FAST, **fields: Any
    ) -> AbstractAsyncContextManager[ScriptedEnv]:
        """Serve an environment to this hub during the block."""
        return serving(env_cls(rollout_server_url=self.url, **fields), timings=timings)

    async def train(self, num_steps: int) -> None:
        """Take batches until the trainer is at step `num_steps`."""
        while self.coordinator.status().current_step < num_steps:
            await self.take_batch()
            await asyncio.sleep(0.01)

    async def __aenter__(self) -> LoopbackHub:
        await self.start()
        await self.start_trainer()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hub.stop_waiting()
        await self.stop()
        await self._app.state.services.codec.close()  # its process has started if a body was heavy

    async def start(self) -> None:
        await self._hub.open()
        config = uvicorn.Config(
            self._count,
            interface="asgi3",  # of a bound method uvicorn would think otherwise
            host="127.0.0.1",
            port=self.port,
            log_level="error",
            timeout_graceful_shutdown=1,
            lifespan="off",
        )
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server._serve())  # serve() would take our signals
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls[scope["path"]] += 1
        if self._is_original:
            headers = [(name, value) for name, value in scope["headers"] if b"atropos" not in name]
            scope = {**scope, "headers": headers, "query_string": b""}

        async def ask_for_no_pause(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = [(name, value) for name, value in message["headers"] if name != _PAUSE]
                paused = len(sent) < len(message["headers"])
                message = {**message, "headers": sent + [(_PAUSE, b"0")] * paused}
            await send(message)

        await self._app(scope, receive, ask_for_no_pause)


def produced(hub: LoopbackHub) -> int:
    return hub.coordinator.ledger().produced


E = TypeVar("E", bound=BaseEnv)


@asynccontextmanager
async def serving(env: E, *, timings: Timings = FAST) -> AsyncIterator[E]:
    """Serve `env` during the block, then let the run end; a run that fails ends the block."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(env, timings=timings, stop=stop))
        yield env
        stop.set()
