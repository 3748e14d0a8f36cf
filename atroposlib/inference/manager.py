"""All inference servers of an environment behind one object, `BaseEnv.server`.

Each call goes to the best server (`admission.best`): among the healthy ones with a free slot and no recent failure, the
one whose load, times its recent seconds per token, is least. Equally fast servers thus get equally many requests, and
one that is four times slower a quarter of that. Load counts at once, speed only when answers show it, so a burst is
spread as well.

The manager also splits calls for many completions and opens managed sessions. A session stays on one server, and the
sessions of an item on the same one while it has room (`admission.NEARNESS`), so that their prefix stays cached; if it
fails a health check, a session moves to another with the same model. Any other failed call is retried on another
server, within its retry limit, never on two at once.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from atroposlib.errors import ConfigError
from atroposlib.inference.config import (
    ENGINES,
    APIServerConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from atroposlib.inference.harness import ServerHarness, answer_from_hash
from atroposlib.inference.servers.admission import choose, start_turn
from atroposlib.inference.servers.api_server import APIServer, TokenCompletions, call
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.openai_routes import part_of, split_n
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.sampling_notes import item_notes, recorded, run_together
from atroposlib.inference.servers.vllm import VLLMServer
from atroposlib.inference.sessions.managed_server import ManagedServer
from atroposlib.inference.sessions.text_sessions import DummyManagedServer, TextSession
from atroposlib.inference.slurm import inference_urls, list_hostnames
from atroposlib.patience import wait_for_first
from atroposlib.utils.wording import without_users

if TYPE_CHECKING:
    from atroposlib.inference.tools.parsers.style import ToolCallParser

logger = logging.getLogger(__name__)

DEFAULT_PORTS = (9004, 9005, 9006, 9007)
"""Where the original looks for local servers when none are configured."""

DEFAULT_TOOL_PARSER = "hermes"
"""Tool call parser of proxy sessions when none is given."""

ALLOW_DUMMY_VARIABLE = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"

TEXT_ONLY = (
    "server_type 'openai' returns no token ids, so its completions cannot be trained on. Use"
    f" server_type 'vllm', or set {ALLOW_DUMMY_VARIABLE}=1 to try the environment with made-up tokens"
)

Configs = ServerBaseline | Sequence[APIServerConfig]


class ServerManager:
    """The servers of one environment.

    `configs` is a list with one entry per server, or one `APIServerConfig`, or a bare `ServerBaseline`, which means
    local servers on ports 9004 to 9007 (or those of the SLURM job).
    """

    # Tests of existing environments create a manager without its constructor and set `servers`.
    proxy_url: str | None = None
    tool_parser: str | None = None
    _has_warned_of_text = False
    _warned_about_dummy = False
    session_class: type[ManagedServer] = ManagedServer
    """Of the sessions at servers that return token ids."""

    def __init__(
        self,
        configs: Configs,
        server_class: type[APIServer] = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.tool_parser = tool_parser
        self.proxy_url = proxy_url or os.environ.get("ATROPOS_PROXY_URL") or None
        if use_proxy and not self.proxy_url:
            raise ConfigError("use_proxy is set; give proxy_url or set ATROPOS_PROXY_URL as well")
        self.servers: list[APIServer]
        if testing:
            config = _first(configs)
            self.servers = [ServerHarness(config, reasoning_config, respond=answer_from_hash)]
            return
        entries = expand_configs(configs, slurm=slurm)
        if inspect.isabstract(server_class):
            server_class = ENGINES.load(entries[0].server_type)
        self.servers = [
            server_class(config, reasoning_config=reasoning_config) for config in entries
        ]
        for server in self.servers:
            server.fleet = self.servers

    @property
    def gives_token_ids(self) -> bool:
        """Whether `managed_server` can be used."""
        return (
            self.use_proxy
            or _allows_dummy_tokens()
            or not all(isinstance(server, OpenAIServer) for server in self.servers)
        )

    @property
    def context_len(self) -> int | None:
        """The shortest known context of the servers, in tokens; None: unknown."""
        known = [server.context_len for server in self.servers if server.context_len is not None]
        return min(known, default=None)

    @property
    def use_proxy(self) -> bool:
        """Whether managed sessions are opened at a proxy."""
        return bool(self.proxy_url)

    # Calls.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Return a `ChatCompletion`. `split` is "train" or "eval"; `timeout` is in seconds."""
        return await self._split_call("chat_completion", kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        """Return a `Completion`. `split` is "train" or "eval"; `timeout` is in seconds."""
        return await self._split_call("completion", kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokenCompletions:
        """Return (prompt_tokens, output_tokens, output_logprobs, finish_reasons) for `input_ids` or `prompt`."""
        parts = await self._parts("tokens_and_logprobs_completion", kwargs)
        answers = [TokenCompletions.of(part) for part in parts]
        return TokenCompletions(
            answers[0].prompt_tokens,
            [tokens for answer in answers for tokens in answer.output_tokens],
            [logprobs for answer in answers for logprobs in answer.output_logprobs],
            [reason for answer in answers for reason in answer.finish_reasons],
            weight_versions=[spans for answer in answers for spans in answer.weight_versions],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the top logprobs at every position of a prompt, from one server."""
        answer: dict[str, Any] = await self._call_one("get_logprobs", kwargs)
        return answer

    async def _split_call(self, method: str, kwargs: dict[str, Any]) -> Any:
        parts = await self._parts(method, kwargs)
        whole = parts[0]
        for part in parts[1:]:
            whole.choices.extend(part.choices)
            if whole.usage is not None and part.usage is not None:
                whole.usage.prompt_tokens += part.usage.prompt_tokens
                whole.usage.completion_tokens += part.usage.completion_tokens
                whole.usage.total_tokens += part.usage.total_tokens
        if len(parts) > 1:
            for i, choice in enumerate(whole.choices):
                choice.index = i
        return whole

    async def _parts(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Make the calls that together return `n` completions, each on the server that is least loaded then."""
        n = int(kwargs.get("n") or 1)
        if n <= self.max_n_completions:
            return [await self._call_one(method, kwargs)]
        parts = split_n(n, at_most=self.max_n_completions)
        return await run_together([self._call_one(method, part_of(kwargs, p)) for p in parts])

    async def _call_one(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Make one call on the least loaded server, and on others if it fails there."""
        if len(self.servers) == 1:
            return await getattr(self.servers[0], method)(**kwargs)
        return await call(self.servers, method, kwargs)

    # Choosing.

    async def _choose(self) -> APIServer:
        """Return the server of a session; the only one even if it is down, because its requests wait for it.

        The sessions of an item have the beginning of their prompts in common, so they are put together.
        """
        if len(self.servers) == 1:
            return self.servers[0]
        notes = item_notes.get()
        together: list[APIServer] = [] if notes is None else notes.servers
        server = await choose(self.servers, near=together)
        if server not in together:
            together.append(server)
        return server

    def down(self) -> list[str]:
        """Return the URLs of the servers that were asked and do not answer, without passwords."""
        return [
            without_users(str(server.config.base_url))
            for server in self.servers
            if server.is_known and not server.server_healthy
        ]

    async def wait_for_sem(self, is_training: bool) -> None:
        """Return when a server has a free training (else evaluation) slot; the slot is not taken."""

        async def wait_at(server: APIServer) -> None:
            async with server.sem if is_training else server.eval_sem:
                pass

        await wait_for_first([wait_at(server) for server in self.servers])

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """Yield one server for several calls, which meanwhile counts one more request."""
        server = await self._choose()
        with server.assigned("train"):
            yield server

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
        *,
        tool_call_parser: str | ToolCallParser | None = None,
        tool_parser: str | None = None,
        track_tree: bool = False,
    ) -> AsyncIterator[Any]:
        """Yield a `ManagedServer` bound to one server (the one at `base_url`, if given); reset it afterwards.

        `tool_call_parser` is a name or an object with `parse(text)`. With a proxy, which takes names only, yield a
        `ProxyManagedServer` and delete its session afterwards. Raises NotImplementedError for an API without token ids,
        except in `process`, which records text, or if ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set.
        """
        parser = tool_call_parser or tool_parser or self.tool_parser
        if self.proxy_url:
            if parser is not None and not isinstance(parser, str):
                raise ConfigError("a proxy's tool call parser is chosen by its name")
            async with self._proxy_session(base_url, parser, track_tree) as session:
                yield session
            return
        await start_turn()
        server = self._at(base_url) if base_url else await self._choose()
        managed: ManagedServer | DummyManagedServer
        if isinstance(server, OpenAIServer):
            managed = self._text_session(server, tokenizer=tokenizer, track_tree=track_tree)
        else:
            managed = self.session_class(
                server,
                tokenizer=tokenizer,
                track_tree=track_tree,
                tool_parser=parser,
                preserve_think_blocks=preserve_think_blocks,
            )
        try:
            with server.assigned("train"):
                yield managed
        finally:
            managed.reset()

    def _text_session(self, server: OpenAIServer, **options: Any) -> DummyManagedServer:
        if (record := recorded()) is not None and record.takes_text:
            if not self._has_warned_of_text:
                self._has_warned_of_text = True
                logger.warning(
                    "%s returns no token ids: the rows hold text alone and cannot be trained on token-exactly",
                    server.config.base_url or "the OpenAI API",
                )
            return TextSession(server, record, **options)
        if not _allows_dummy_tokens():
            raise NotImplementedError(TEXT_ONLY)
        if not self._warned_about_dummy:
            self._warned_about_dummy = True
            logger.warning(
                "%s is set: token ids and logprobs are made up and must not be trained on",
                ALLOW_DUMMY_VARIABLE,
            )
        return DummyManagedServer(server, **options)

    @asynccontextmanager
    async def _proxy_session(
        self, base_url: str | None, tool_parser: str | None, track_tree: bool
    ) -> AsyncIterator[Any]:
        # Only environments that use a proxy need its client.
        from atroposlib.inference.sessions.proxy_client import create_proxy_session

        session = await create_proxy_session(
            proxy_url=str(self.proxy_url),
            base_url=base_url,
            tool_parser=tool_parser or DEFAULT_TOOL_PARSER,
            track_tree=track_tree,
            model_name=self.servers[0].config.model_name,
            counts=self.servers[0].broken_prefixes,
        )
        try:
            yield session
        finally:
            await session.cleanup()

    def _at(self, base_url: str) -> APIServer:
        for server in self.servers:
            if (server.config.base_url or "").rstrip("/") == base_url.rstrip("/"):
                return server
        known = ", ".join(str(server.config.base_url) for server in self.servers)
        raise ConfigError(f"no server at base_url {base_url!r}; there are: {known}")

    async def update_weight(self, weight: float) -> None:
        """Set this environment's share of every server, 0 to 1."""
        for server in self.servers:
            await server.update_weight(weight)

    async def wandb_metrics(self, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add every server's figures to `metrics`, under `server/server_<i>_...`."""
        metrics = {} if metrics is None else metrics
        for i, server in enumerate(self.servers):
            metrics = await server.wandb_metrics(metrics, f"server_{i}")
        return metrics

    async def close(self) -> None:
        """Close the sessions of all servers."""
        for server in self.servers:
            await server.close()


def _allows_dummy_tokens() -> bool:
    return os.environ.get(ALLOW_DUMMY_VARIABLE, "").strip().lower() in ("1", "true", "yes")


def expand_configs(configs: Configs, *, slurm: bool) -> list[APIServerConfig]:
    """Return one config per server (`ServerManager` lists the forms of `configs`)."""
    if isinstance(configs, ServerBaseline):
        if isinstance(configs, APIServerConfig) and configs.base_url:
            return [configs]
        hostnames = list_hostnames()
        urls = [f"http://localhost:{port}/v1" for port in DEFAULT_PORTS]
        if len(hostnames) >= 2:
            urls = inference_urls(hostnames)
        return [_at_url(configs, url) for url in urls]
    entries = list(configs)
    if not entries:
        raise ConfigError("server_configs is empty; give at least one APIServerConfig")
    if slurm:
        hostnames = list_hostnames()
        if len(hostnames) >= 2:
            return [_at_url(entries[0], url) for url in inference_urls(hostnames)]
        logger.warning("slurm is set but there are fewer than 2 nodes; using the servers as given")
    return entries


def _at_url(config: ServerBaseline, url: str) -> APIServerConfig:
    # "x": servers configured without a key get the original's placeholder.
    values = {"api_key": "x", **config.model_dump(), "base_url": url}
    values["api_key"] = values["api_key"] or "x"
    return APIServerConfig(**values)


def _first(configs: Configs) -> APIServerConfig:
    first = configs if isinstance(configs, ServerBaseline) else next(iter(configs), None)
    if isinstance(first, APIServerConfig):
        return first
    return APIServerConfig(**(first or ServerBaseline()).model_dump())


__all__ = [
    "APIServer",
    "APIServerConfig",
    "OpenAIServer",
    "ReasoningConfig",
    "ServerBaseline",
    "ServerHarness",
    "ServerManager",
    "ServerManagerConfig",
    "VLLMServer",
]
