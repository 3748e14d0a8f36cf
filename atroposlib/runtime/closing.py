"""Close an environment and its wandb run, however the command that uses it ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from atroposlib.envs.collecting import close
from atroposlib.envs.hooks import EnvHooks
from atroposlib.runtime.metrics import finish_wandb

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def closed_at_end(env: EnvHooks) -> AsyncIterator[None]:
    """Close after the block. If the block and the author's `close` raise, the latter's exception is logged only."""
    try:
        yield
    except BaseException:
        try:
            await close(env)
        except Exception:
            logger.exception("close() raised after the error that ended the run")
        raise
    else:
        await close(env)
    finally:
        finish_wandb(env)
