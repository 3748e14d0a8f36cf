"""Judge mathematical answers in worker processes, for synchronous callers.

math-verify can hang, and its own time limit works only in the main thread; here it runs in a process of
`envs.rewards`, which is killed at the deadline. One pool per Python process, started on first use.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.envs.math_answers import is_equal
from atroposlib.envs.rewards import Canary, JsonValue, RewardFailure, RewardWorkers
from atroposlib.errors import MissingDependency, install_command

NUM_WORKERS = 2
PRELOAD = ("math_verify", "atroposlib.envs.math_answers:warm_up")
CANARY = Canary(is_equal, ("x", "y"), value=False)


class BlockingWorkers:
    """A `RewardWorkers` pool with its own event loop in a thread; ends with the process or by `close()`."""

    def __init__(self, *, num_workers: int = NUM_WORKERS, **options: Any) -> None:
        """Configure the pool by the `options` of `RewardWorkers`."""
        self._pool = RewardWorkers(num_workers=num_workers, **options)
        self._num_batches = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="reward-workers", daemon=True
        )
        self._thread.start()
        # Also runs at interpreter exit; must not refer to self.
        self._finalizer = weakref.finalize(self, _stop, self._pool, self._loop, self._thread)

    def run(
        self,
        function: Callable[..., JsonValue] | str,
        calls: Sequence[Sequence[JsonValue]],
        *,
        timeout_s: float,
    ) -> list[JsonValue | RewardFailure]:
        """Call `function(*arguments)` for every entry of `calls`, one per worker at a time, as calls of one scope."""
        self._num_batches += 1
        scope = f"batch {self._num_batches}"

        async def run_all() -> list[JsonValue | RewardFailure]:
            run = functools.partial(self._pool.run, function, timeout_s=timeout_s, scope=scope)
            each = (run(*args) for args in calls)
            return list(await asyncio.gather(*each))

        return asyncio.run_coroutine_threadsafe(run_all(), self._loop).result()

    def close(self) -> None:
        """Kill the workers and stop the thread."""
        self._finalizer()


def _stop(pool: RewardWorkers, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(pool.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@functools.cache
def math_workers() -> BlockingWorkers:
    """Return this process's pool for `math_answers.is_equal`; raises `MissingDependency` without math-verify."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingDependency(
            f"math_verify is not installed; run: {install_command('math')}", name="math_verify"
        )
    return BlockingWorkers(preload=PRELOAD, canary=CANARY, is_isolated=True)
