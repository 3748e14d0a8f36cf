"""Work off the event loop: one thread, in order, errors and all."""

import asyncio
import threading
import time
from contextvars import ContextVar

import pytest

from atroposlib.utils.off_loop import off_loop


async def test_pieces_of_work_run_one_after_another_in_one_thread() -> None:
    running: list[int] = []
    most: list[int] = []
    done: list[tuple[int, int]] = []

    def work(number: int) -> int:
        running.append(number)
        time.sleep(0.002)  # gives the interpreter's lock back: a second thread would come in here
        most.append(len(running))
        running.remove(number)
        done.append((number, threading.get_ident()))
        return number

    assert await asyncio.gather(*(off_loop(work, i) for i in range(10))) == list(range(10))
    assert most == [1] * 10
    assert [number for number, _ in done] == list(range(10))
    assert {thread for _, thread in done} != {threading.get_ident()}
    assert len({thread for _, thread in done}) == 1


async def test_an_error_is_the_callers_and_later_work_goes_on() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await off_loop(int, "x")
    assert await off_loop(int, "7") == 7


async def test_work_sees_the_context_variables_of_its_caller() -> None:
    item: ContextVar[int] = ContextVar("item")

    async def caller(number: int) -> int:
        item.set(number)
        return await off_loop(item.get)

    assert await asyncio.gather(caller(1), caller(2)) == [1, 2]
