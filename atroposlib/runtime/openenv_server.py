"""An environment as an OpenEnv server: `atropos-env openenv NAME`.

OpenEnv's own server carries the protocol. A session (one WebSocket) is a series of stepped episodes
(`atroposlib.envs.stepwise`); all sessions share the environment's data. `reset(seed=k)` starts the k-th item, an
observation is the next request to the policy, an action is its answer. Anyone who reaches the port may use the server.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import asdict
from typing import Any

from pydantic import Field
from starlette.types import ASGIApp

from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.stepwise import Answer, EpisodeEnd, Request, SteppedEnv
from atroposlib.errors import ConfigError, require
from atroposlib.runtime.signals import on_signals
from atroposlib.utils.local_server import LocalServer, listening


async def serve_openenv(env: EnvHooks, *, host: str, port: int, max_sessions: int) -> None:
    """Serve until SIGTERM or Ctrl-C; port 0 is any free one. Prints the URL once connections are accepted."""
    try:
        listener = listening(host, port)
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror or e}") from e
    with listener:
        stepped = SteppedEnv(env)
        server = LocalServer(create_app(stepped, max_sessions=max_sessions), shutdown_s=2)
        async with stepped:
            shown = f"[{host}]" if ":" in host else host
            print(
                f"{env.registered_name} as an OpenEnv server:"
                f" http://{shown}:{listener.getsockname()[1]}",
                flush=True,
            )
            with on_signals(server.stop, signal.SIGTERM, signal.SIGINT):
                await server.serve(sockets=[listener])


def create_app(stepped: SteppedEnv, *, max_sessions: int) -> ASGIApp:
    """Return OpenEnv's application, which serves once the environment is set up; call it in the environment's loop."""
    openenv = require("openenv.core.env_server", extra="openenv")
    loop = asyncio.get_running_loop()

    class Action(openenv.Action):  # type: ignore[name-defined,misc]
        """The policy's completion: `token_ids` where they are known, else `text`."""

        text: str = ""
        token_ids: list[int] | None = None
        logprobs: list[float] | None = None
        finish_reason: str = "stop"

    class Observation(openenv.Observation):  # type: ignore[name-defined,misc]
        """The next request, or the end of the episode; the fields are those of `Request` and `EpisodeEnd`."""

        messages: list[dict[str, Any]] = Field(default_factory=list)
        prompt: str = ""
        prompt_ids: list[int] = Field(default_factory=list)
        tools: list[dict[str, Any]] = Field(default_factory=list)
        sampling: dict[str, Any] = Field(default_factory=dict)
        group: dict[str, Any] | None = None
        reason: str = ""

    class OpenEnvSession(openenv.Environment):  # type: ignore[name-defined,misc]
        """The episodes of one connection, one after another."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.episode = stepped.episode()
            self.current = openenv.State()

        async def reset_async(
            self, seed: int | None = None, episode_id: str | None = None
        ) -> Observation:
            self.current = openenv.State(episode_id=episode_id)
            return observed(await self.episode.reset(seed))

        async def step_async(self, action: Action) -> Observation:
            answer = Answer(
                text=action.text,
                token_ids=action.token_ids,
                logprobs=action.logprobs,
                finish_reason=action.finish_reason,
            )
            self.current.step_count += 1
            return observed(await self.episode.step(answer))

        def reset(self, *args: Any, **kwargs: Any) -> Observation:
            raise NotImplementedError("the server calls reset_async")

        def step(self, *args: Any, **kwargs: Any) -> Observation:
            raise NotImplementedError("the server calls step_async")

        @property
        def state(self) -> Any:
            return self.current

        def get_metadata(self) -> Any:
            env = stepped.env
            return openenv.types.EnvironmentMetadata(
                name=env.registered_name, description=type(env).__doc__ or env.registered_name
            )

        def close(self) -> None:
            """Abandon the episode without waiting: some routes close in the event loop, others in a thread."""
            asyncio.run_coroutine_threadsafe(self.episode.close(), loop)

    def observed(turn: Request | EpisodeEnd) -> Observation:
        return Observation(done=isinstance(turn, EpisodeEnd), **asdict(turn))

    app: ASGIApp = openenv.create_fastapi_app(
        OpenEnvSession,
        Action,
        Observation,
        max_concurrent_envs=max_sessions,
        env_name=stepped.env.registered_name,
    )
    return app
