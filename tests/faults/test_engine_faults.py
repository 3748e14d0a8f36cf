"""Groups against failing inference servers: whole and right, or failed and counted; never half, wrong or hanging.

The engines' samples are a function of prompt, choice and weight version, so every token and logprob of a group can be
checked. Only sampling is repeated after a lost answer, since the sample reached no client. The tests assert that no
other call and no answered call is repeated.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from atroposlib.errors import EngineError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.scripted_engine import (
    ByteTokenizer,
    Fault,
    Latency,
    Script,
    ScriptedEngine,
    ServedRequest,
    made_up_logprobs,
    made_up_tokens,
)
from atroposlib.inference.scripted_engine.generation import PRINTABLE
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.sglang import SGLangServer
from atroposlib.inference.servers.vllm import VLLMServer
from atroposlib.inference.sessions.sequences import SequenceNode
from tests.faults.drivers import eventually
from tests.processes import answers, free_port, running, wait_for

GROUP_SIZE = 4
NUM_TOKENS = 16
NUM_TURNS = 3
TOKENS_ROUTE = "/inference/v1/generate"


class FastVLLM(VLLMServer):
    max_backoff_s = 0.2
    health_poll_s = 0.02


class FastSGLang(SGLangServer):
    max_backoff_s = 0.2
    health_poll_s = 0.02


class Group(NamedTuple):
    """A group that came to its end."""

    nodes: list[SequenceNode]
    error: EngineError | None


@asynccontextmanager
async def manager_of(
    urls: Sequence[str], *, server_class: type[APIServer] = FastVLLM
) -> AsyncIterator[ServerManager]:
    config = APIServerConfig(model_name="scripted", timeout=10, health_wait_s=30)
    manager = ServerManager(
        [config.model_copy(update={"base_url": f"{url}/v1"}) for url in urls],
        server_class=server_class,
    )
    try:
        yield manager
    finally:
        await manager.close()


async def collect(manager: ServerManager, name: str, *, num_turns: int) -> Group:
    """One group: `GROUP_SIZE` answers to a question, or one conversation of several turns."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {name}"}]
    try:
        async with manager.managed_server(tokenizer=ByteTokenizer()) as managed:
            for turn in range(num_turns):
                answer = await managed.chat_completion(
                    messages=messages, n=GROUP_SIZE if num_turns == 1 else 1, max_tokens=NUM_TOKENS
                )
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": f"and {turn}"},
                ]
            return Group(managed.get_state()["nodes"], None)
    except EngineError as e:
        return Group([], e)


async def collect_all(
    manager: ServerManager, num_groups: int, *, name: str = "", num_turns: int = 1
) -> list[Group]:
    """Collect groups at the same time; `name` keeps their questions apart from those of other calls."""
    async with asyncio.timeout(50):
        return await asyncio.gather(
            *(collect(manager, f"{name}{i}", num_turns=num_turns) for i in range(num_groups))
        )


def check(group: Group, *, num_turns: int = 1, version: str = "default") -> None:
    """Fail unless the group is whole and every sampled token and logprob is the engine's under this version."""
    assert len(group.nodes) == (GROUP_SIZE if num_turns == 1 else 1)
    for choice, node in enumerate(group.nodes):
        runs = sampled_runs(node)
        assert [end - start for start, end in runs] == [NUM_TOKENS] * num_turns
        spans = [(version, NUM_TOKENS)]
        for start, end in runs:
            prompt, sampled = node.tokens[:start], node.tokens[start:end]
            assert node.masked_tokens[start:end] == sampled
            assert sampled == made_up_tokens(
                prompt, seed=0, choice=choice, spans=spans, alphabet=PRINTABLE
            )
            assert node.logprobs[start:end] == made_up_logprobs(prompt, sampled, spans=spans)


def check_all(groups: Sequence[Group], *, num_turns: int = 1) -> None:
    for group in groups:
        assert group.error is None
        check(group, num_turns=num_turns)


def sampled_runs(node: SequenceNode) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for i, label in enumerate(node.masked_tokens):
        if label == -100:
            continue
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def attempts_by_prompt(
    served: Sequence[ServedRequest],
) -> dict[tuple[int, ...], list[ServedRequest]]:
    found: dict[tuple[int, ...], list[ServedRequest]] = defaultdict(list)
    for each in served:
        keys = ("token_ids", "prompt", "input_ids")
        prompt = next(each.body[key] for key in keys if key in each.body)
        found[tuple(prompt)].append(each)
    return found


@pytest.mark.parametrize("server_class", [FastVLLM, FastSGLang])
async def test_five_per_cent_dropped_connections_lose_nothing_and_repeat_only_the_lost(
    server_class: type[APIServer],
) -> None:
    faults = tuple(
        Fault(kind=kind, chance=0.017) for kind in ("drop_before", "drop_after", "drop_in_body")
    )
    script = Script(faults=faults, latency=Latency(first_token_s=0.01))
    async with (
        ScriptedEngine(script) as engine,
        manager_of([engine.url], server_class=server_class) as manager,
    ):
        groups = await collect_all(manager, 200)
        groups += await collect_all(manager, 60, name="long ", num_turns=NUM_TURNS)
    met = sum(engine.counts[fault.kind] for fault in faults)
    assert met >= 5
    check_all(groups[:200])
    check_all(groups[200:], num_turns=NUM_TURNS)
    for attempts in attempts_by_prompt(engine.served).values():
        assert [each.fault is None for each in attempts[:-1]] == [False] * (len(attempts) - 1)
        assert attempts[-1].fault is None
    # Each question is asked once, and once more for each answer that was lost.
    assert len(engine.served) == 200 + 60 * NUM_TURNS + met


@pytest.mark.parametrize("missing", [[], [TOKENS_ROUTE]], ids=["tokens", "completions"])
@pytest.mark.parametrize("kind", ["cut_json", "wrong_lengths"])
async def test_half_replies_fail_their_group_and_no_other(kind: Any, missing: list[str]) -> None:
    fault = Fault(kind=kind, chance=0.1)
    async with ScriptedEngine(Script(faults=(fault,)), missing_paths=missing) as engine:
        async with manager_of([engine.url]) as manager:
            groups = await collect_all(manager, 100)
    failed = [group for group in groups if group.error is not None]
    assert len(failed) == engine.counts[kind] >= 3
    assert all(group.nodes == [] for group in failed)
    for group in groups:
        if group.error is None:
            check(group)
    # The engine did its work and would answer the same again: asking again would hide it.
    assert {len(attempts) for attempts in attempts_by_prompt(engine.served).values()} == {1}


@pytest.mark.parametrize("behaviour", ["hold", "refuse"])
async def test_a_pause_for_new_weights_is_waited_for_and_fails_nothing(behaviour: Any) -> None:
    script = Script(while_paused=behaviour, latency=Latency(first_token_s=0.02))
    async with ScriptedEngine(script) as engine, manager_of([engine.url]) as manager:
        await collect_all(manager, 2, name="before ")
        async with aiohttp.ClientSession() as session:
            await session.post(f"{engine.url}/pause?mode=keep")
            collecting = asyncio.create_task(collect_all(manager, 20))
            await asyncio.sleep(0.5)
            assert not collecting.done()
            await session.post(f"{engine.url}/update_weight_version", json={"new_version": "2"})
            await session.post(f"{engine.url}/resume")
        groups = await collecting
    for group in groups:
        assert group.error is None
        check(group, version="2")
        assert {(node.metadata or {})["policy_version"] for node in group.nodes} == {2}


@pytest.mark.e2e
async def test_an_engine_killed_in_the_middle_of_groups_fails_or_finishes_them_all(
    tmp_path: Path,
) -> None:
    script = '{"latency": {"first_token_s": 0.1, "per_token_s": 0.01, "sigma": 0.3}}'
    port = free_port()
    argv = ["-m", "atroposlib.inference.scripted_engine", f"--port={port}", f"--script={script}"]
    url = f"http://127.0.0.1:{port}"
    async with ScriptedEngine(Script(latency=Latency(first_token_s=0.1))) as steady:
        async with manager_of([steady.url, url]) as manager:
            with running("victim", argv, log_path=tmp_path / "victim.log") as victim:
                wait_for(lambda: answers(f"{url}/health"), timeout_s=30, process=victim)
                collecting = asyncio.create_task(collect_all(manager, 40, num_turns=NUM_TURNS))
                await eventually(
                    lambda: len(steady.served) > GROUP_SIZE, timeout_s=30, what="groups are made"
                )
                victim.stop(signal.SIGKILL)
            await asyncio.sleep(0.5)
            with running("again", argv, log_path=tmp_path / "again.log"):
                groups = await collecting
                for attempt in range(30):  # until both are used again
                    served = len(steady.served)
                    later = await collect_all(manager, 20, name=f"later {attempt} ")
                    if len(steady.served) - served < 20:
                        break
                    await asyncio.sleep(0.5)
                else:
                    pytest.fail("the engine that was started again gets no requests")
    whole = [group for group in groups if group.error is None]
    assert len(whole) >= len(groups) // 2  # those of the other engine felt nothing
    check_all(whole, num_turns=NUM_TURNS)
    check_all(later)
    for attempts in attempts_by_prompt(steady.served).values():
        assert len(attempts) == 1
