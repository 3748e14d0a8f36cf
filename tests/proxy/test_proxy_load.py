"""Hundreds of sessions with thousands of sequences: the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections.abc import Iterator

import pytest
from helpers_proxy import Proxy

from atroposlib.inference.sessions.sequences import SequenceNode, train_once
from atroposlib.proxy import chat
from atroposlib.proxy.sessions import SessionLimits


@contextlib.contextmanager
def callback_times() -> Iterator[list[float]]:
    """Yield the CPU milliseconds of each callback of the event loop, which no other can interrupt.

    Not of a whole round of the loop: the slower the machine, the more callbacks wait for the next round.
    """
    ms: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        ms.append((time.thread_time() - began) * 1000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield ms


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Environments collect garbage between two groups (`utils/event_loop.py`), not within a callback."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("num_sessions", "num_turns"),
    [(200, 5), pytest.param(300, 40, marks=pytest.mark.slow), (3, 150)],
)
async def test_many_sessions_with_many_sequences_keep_callbacks_short(
    num_sessions: int, num_turns: int
) -> None:
    rng = random.Random(0)
    limits = SessionLimits(max_nodes=5000)
    async with Proxy(lambda request: "word " * 40, limits=limits) as proxy:

        async def talk(num: int) -> list[SequenceNode]:
            session = await proxy.sessions.open()
            history = [{"role": "user", "content": "question " * 20}]
            for number in range(num):
                kept = 2 * rng.randrange((min(len(history), 20) + 1) // 2) + 1  # branch anywhere
                ask = chat.read(chat.AgentChatBody(messages=history[:kept]))
                # What tools take: 400 turns a second, which is a third of what this loop can do.
                proxy.engine.delay_s = rng.random() * 0.02
                await asyncio.sleep(rng.random() * num_sessions / 200)
                body = await session.run(session.ask(ask, chat.write))
                said = body["choices"][0]["message"]
                question = {"role": "user", "content": f"{number} " * 20}
                history = [*history[:kept], said, question]
            return session.nodes()

        await talk(1)  # what is imported and looked up once
        with without_collections(), callback_times() as times_ms:
            sessions = await asyncio.gather(*(talk(num_turns) for _ in range(num_sessions)))
    num_nodes = sum(map(len, sessions))
    assert num_nodes >= num_sessions
    busy = sorted(ms for ms in times_ms if ms > 0.1)
    worst = busy[-max(1, len(busy) // 100)]
    print(
        f"{num_nodes} sequences, {len(busy)} callbacks: {worst:.1f} ms, longest {busy[-1]:.1f} ms"
    )
    assert worst < 5
    began = time.thread_time()
    train_once(max(sessions, key=len))
    assert time.thread_time() - began < 0.5
