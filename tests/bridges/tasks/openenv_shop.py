"""An OpenEnv environment with MCP tools: look for the price of a fruit, then buy it for exactly this price."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class ShopEnvironment(MCPEnvironment):
    """Buying for the right price ends the episode with a reward of 1, for another one with -1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: Any = FastMCP("shop")
        self.price = 0

        @server.tool
        def price() -> int:
            """Return the price of an apple."""
            return self.price

        @server.tool
        def buy(amount: int) -> str:
            """Buy an apple for an amount."""
            return "sold" if amount == self.price else "refused"

        super().__init__(server)
        self._state = State()

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        self.price = 10 + (seed or 0)
        return Observation(done=False, reward=0.0)

    def step(self, action: Action, **options: Any) -> Observation:
        return self._judged(action, super().step(action, **options))

    async def step_async(self, action: Action, **options: Any) -> Observation:
        return self._judged(action, await super().step_async(action, **options))

    def _judged(self, action: Action, seen: Observation) -> Observation:
        if isinstance(action, CallToolAction) and action.tool_name == "buy":
            right = action.arguments.get("amount") == self.price
            return seen.model_copy(update={"reward": 1.0 if right else -1.0, "done": True})
        return seen

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError(f"no such action: {action}")

    @property
    def state(self) -> State:
        return self._state


app = create_app(
    ShopEnvironment, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=2
)
