"""Short rounds of the loop leave nothing out, and rarer garbage collection still finds new cycles."""

import asyncio
import socket

from atroposlib.utils.event_loop import EVENTS_PER_ROUND, loop_with_short_rounds
from tests.builders.programs import run_python


def test_many_answers_at_once_are_taken_a_few_in_each_round() -> None:
    num_answers = 4 * EVENTS_PER_ROUND
    rounds: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(num_answers)]
        num_rounds = 0
        all_read = loop.create_future()

        def count() -> None:
            nonlocal num_rounds
            num_rounds += 1
            if not all_read.done():
                loop.call_soon(count)

        def read(here: socket.socket) -> None:
            assert here.recv(1) == b"x"
            loop.remove_reader(here)
            rounds.append(num_rounds)
            if len(rounds) == num_answers:
                all_read.set_result(None)

        for here, there in pairs:
            there.send(b"x")
            loop.add_reader(here, read, here)
        loop.call_soon(count)
        await all_read
        for pair in pairs:
            for end in pair:
                end.close()

    with asyncio.Runner(loop_factory=loop_with_short_rounds) as runner:
        runner.run(asyncio.wait_for(main(), 10))
    assert len(rounds) == num_answers
    assert max(rounds.count(each) for each in set(rounds)) <= EVENTS_PER_ROUND


CODE = """
import gc
from atroposlib.utils.event_loop import THRESHOLDS, collect_less_often
before = gc.get_threshold()
collect_less_often()
class Knot: pass
def tie():
    knot = Knot()
    knot.itself = knot
import weakref
knot = Knot(); knot.itself = knot
seen = weakref.ref(knot)
del knot
for _ in range(THRESHOLDS[0] + 1):
    tie()
print(before != gc.get_threshold() == THRESHOLDS, gc.get_freeze_count() > 1000, seen() is None)
"""


def test_what_is_imported_is_left_alone_and_new_cycles_are_still_found() -> None:
    assert run_python("-c", CODE).split() == ["True", "True", "True"]
