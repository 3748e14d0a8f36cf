"""A managed server with the surface of `openai.AsyncOpenAI`, for libraries that expect a client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class _Creator:
    def __init__(self, create: Any) -> None:
        self._create = create

    async def create(self, **kwargs: Any) -> Any:
        # The openai package marks "not given" with sentinel objects.
        given = {
            key: value
            for key, value in kwargs.items()
            if type(value).__name__ not in ("NotGiven", "Omit")
        }
        return await self._create(**given)


class ManagedServerAdapter:
    """A managed server with the surface of `openai.AsyncOpenAI`, for libraries that expect a client."""

    def __init__(self, managed_server: Any, base_url: str = "") -> None:
        self.managed = managed_server
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=_Creator(managed_server.chat_completion))
        self.completions = _Creator(managed_server.completion)

    def with_options(self, **options: Any) -> ManagedServerAdapter:
        """Return this client: retries and timeouts come from the server's config."""
        return self

    def post(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a managed server has no other routes")

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a managed server cannot be copied")
