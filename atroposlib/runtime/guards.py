"""Compare the configuration with the engines at the start of a run: model name, context length, tokenizer.

Of the extra servers (a judge, a teacher) only the model name is compared.
Every question is optional: an engine that does not answer it, or answers nonsense, is not at fault. A fault is one
warning with its cure. A run ends only if its training would certainly be wrong: token ids of another vocabulary, or
none at all. Called by `runtime.env_command`, not by `check`.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from atroposlib.envs.collecting import close_connections
from atroposlib.envs.constants import OPENAI_NAMESPACE
from atroposlib.envs.hooks import EnvHooks
from atroposlib.errors import ConfigError
from atroposlib.inference.manager import TEXT_ONLY
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.openai_routes import HttpServer, OpenAIRoutesServer
from atroposlib.inference.servers.token_ids import TokenServer
from atroposlib.utils.wording import without_users

logger = logging.getLogger(__name__)

START_S = 2.0
"""Limit of the delay of a start. Engines that are down or slow are checked when they answer, during the run."""

SAMPLE = "The quick brown fox: def f(x): return {'answer': 1729, \"key\": [3.14, -2]}  # tokenizers differ"
"""Text with words, code and digits, which tokenizers split differently and number differently."""

NUM_SHOWN = 3
"""Names of models in a message."""


@asynccontextmanager
async def engines_checked(env: EnvHooks, mode: str) -> AsyncIterator[None]:
    """Check the engines, for at most START_S before the block and then during it.

    Raises ConfigError, and cancels the block, if the run's training would be wrong.
    """
    if mode == "serve" and env.needs_token_ids and not env.server.gives_token_ids:
        raise ConfigError(f"--openai.server_type: {TEXT_ONLY}")
    run = asyncio.current_task()
    checking = asyncio.create_task(_check_engines(env, mode), name="guards")

    def end_run(ended: asyncio.Task[None]) -> None:
        if run is not None and _has_failed(ended):
            run.cancel()

    try:
        await asyncio.wait([checking], timeout=START_S)
        if checking.done():
            checking.result()
        checking.add_done_callback(end_run)
        yield
    except asyncio.CancelledError:
        if run is not None and _has_failed(checking) and run.uncancel() == 0:
            checking.result()
        raise
    finally:
        checking.remove_done_callback(end_run)
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)
        await close_connections(env)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _check_engines(env: EnvHooks, mode: str) -> None:
    """Check all engines concurrently; the same fault of several engines is logged once."""
    logged: set[str] = set()

    async def check(namespace: str, server: APIServer) -> None:
        if not isinstance(server, HttpServer):
            return
        await server.first_answer()
        await server.healthy_again()
        for fault in await _faults_of(server, namespace, env, mode):
            if fault not in logged:
                logged.add(fault)
                url = without_users(server.config.base_url or "the OpenAI API")
                logger.warning("%s: %s", url, fault)

    managers = dict(env.extra_managers)
    if not env.server.use_proxy:  # which knows the policy's engines
        managers[OPENAI_NAMESPACE] = env.server
    each = ((name, server) for name, manager in managers.items() for server in manager.servers)
    await asyncio.gather(*(check(name, server) for name, server in each))


async def _faults_of(server: HttpServer, namespace: str, env: EnvHooks, mode: str) -> list[str]:
    faults = []
    is_policy = namespace == OPENAI_NAMESPACE
    if isinstance(server, OpenAIRoutesServer):
        faults.append(model_fault(server, await server.list_models(), namespace))
        if is_policy:
            faults.append(context_fault(server, env))
    if (
        is_policy
        and isinstance(server, TokenServer)
        and await _has_other_vocabulary(server, env.tokenizer)
    ):
        fault = (
            f"the engine's token ids are not those of the tokenizer {env.config.tokenizer_name!r};"
            " set --env.tokenizer_name to the tokenizer of the engine's model"
        )
        if mode == "serve" or env.needs_token_ids:
            raise ConfigError(f"{server.config.base_url}: {fault}")
        faults.append(fault)
    return [fault for fault in faults if fault]


def model_fault(server: OpenAIRoutesServer, models: list[str], namespace: str) -> str | None:
    """Return the fault if the configured model is not among those that the engine lists."""
    name = server.config.model_name
    if not models or name in models or not server.reads_model_name:
        return None
    shown = difflib.get_close_matches(name, models, n=NUM_SHOWN, cutoff=0.0)
    rest = f" and {len(models) - NUM_SHOWN} more" if len(models) > NUM_SHOWN else ""
    adapter = ", unless the trainer loads an adapter of that name"
    return (
        f"the engine does not serve the model {name!r} but {', '.join(map(repr, shown))}{rest};"
        f" set --{namespace}.model_name{adapter if namespace == OPENAI_NAMESPACE else ''}"
    )


def context_fault(server: OpenAIRoutesServer, env: EnvHooks) -> str | None:
    """Return the fault if an answer of `max_token_length` leaves no room for a prompt."""
    wanted, context_len = env.config.max_token_length, server.context_len
    if context_len is None or wanted < context_len:
        return None
    return (
        f"the engine's context is {context_len} tokens, prompt included, and max_token_length is {wanted}:"
        " answers will be cut off; lower --env.max_token_length or start the engine with a longer context"
    )


async def _has_other_vocabulary(server: TokenServer, tokenizer: Any) -> bool:
    """Whether the engine's ids of a text are other text to the tokenizer; False if the engine does not tell."""
    theirs = await server.tokenize(SAMPLE)
    if not theirs:
        return False
    try:
        text = tokenizer.decode(
            tokenizer.encode(SAMPLE, add_special_tokens=False), skip_special_tokens=True
        )
    except Exception:  # boundary: the author's tokenizer
        logger.debug("the tokenizer cannot be compared with the engine's", exc_info=True)
        return False
    try:
        # The same vocabulary may split a text in several ways, or add a BOS.
        return bool(tokenizer.decode(theirs, skip_special_tokens=True).strip() != text.strip())
    except Exception:  # noqa: BLE001 - ids outside of the vocabulary
        return True
