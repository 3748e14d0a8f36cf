"""One group id leads from an item to the optimizer step: JSONL line, hub, trainer's file and OpenTelemetry spans."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.runtime.serve import serve
from atroposlib.utils import tracing
from atroposlib.wire import json_pieces, pack_group
from example_trainer.training import train
from tests.builders.rows import rows_in
from tests.runtime.helpers_runtime import FAST
from tests.trainer.helpers_run import Configure
from tests.trainer.helpers_trainer import pairs
from tests.utils.test_tracing import start_recorder


def add(request: HarnessRequest) -> str:
    return f"{request.choice}{request.prompt[-2]}"


class Sums(DatasetEnv):
    name = "sums"

    def load_tokenizer(self) -> Any:
        return ByteTokenizer()

    def load_rows(self, split: str) -> Any:
        return list(range(50))

    def prompt(self, row: Any) -> str:
        return f"{row} + 1 = ?"

    def score(self, row: Any, answer: str) -> float:
        return float(answer[0] == "1")


@contextmanager
def served(hub_url: str, path: Path) -> Iterator[None]:
    """Serve the environment in a thread until the block ends."""
    config = Sums.env_config_cls(
        group_size=2,
        use_wandb=False,
        rollout_server_url=hub_url,
        data_path_to_save_groups=str(path),
    )
    stop = threading.Event()

    async def run() -> None:
        env = Sums(config, [APIServerConfig(model_name="policy")], testing=True)
        env.server.servers = [ServerHarness(env.server.servers[0].config, respond=add)]
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(env, timings=FAST, stop=stopping))
            await asyncio.to_thread(stop.wait)
            stopping.set()

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_one_id_leads_from_the_item_to_the_step(
    configure: Configure, hub_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = start_recorder(monkeypatch)
    config = configure(num_steps=3)
    with served(hub_url, tmp_path / "groups.jsonl"):
        train(config)
    written = {line["group_id"]: line for line in rows_in(tmp_path / "groups.jsonl")}
    trained = rows_in(config.save_path / "trained_groups.jsonl")
    assert [line["step"] for line in trained] == [1, 1, 2, 2, 3, 3]
    assert {line["group_id"] for line in trained} <= written.keys()
    for line in trained:
        group = written[line["group_id"]]
        for sequence in line["sequences"]:
            logprobs = group["inference_logprobs"][sequence["index"]]
            at_tokens = [logprobs[i] for i in sequence["at"]]
            assert sequence["sampled"] == pytest.approx(at_tokens, abs=1e-6)

    recorded = finished()
    steps = {span.attributes["atropos.step"]: span for span in recorded if span.name == "step"}
    for line in trained:
        ids = tracing._recorder().root_of(line["group_id"])
        trace = [span for span in recorded if span.context.trace_id == ids.trace_id]
        assert Counter(span.name for span in trace) == Counter(
            ["item", "request", "store", "deliver", "train"]
        )
        by_name = {span.name: span for span in trace}
        item, train_span = by_name.pop("item"), by_name["train"]
        assert item.parent is None
        assert item.context.span_id == ids.span_id
        assert {span.parent.span_id for span in by_name.values()} == {ids.span_id}
        assert item.attributes["atropos.group_id"] == line["group_id"]
        assert item.attributes["atropos.environment"] == "sums"
        assert item.attributes["atropos.score_mean"] == 0.5
        assert item.attributes["atropos.num_sequences"] == 2
        assert by_name["request"].attributes["gen_ai.request.model"] == "policy"
        assert by_name["request"].attributes["gen_ai.usage.output_tokens"] > 0
        assert item.start_time <= by_name["request"].start_time < by_name["request"].end_time
        assert train_span.attributes["atropos.step"] == line["step"]
        step = steps[line["step"]]
        assert [link.context.span_id for link in train_span.links] == [step.context.span_id]
        assert ids.span_id in [link.context.span_id for link in step.links]


def test_a_group_of_an_original_client_gets_an_id_that_the_trainer_shows(
    configure: Configure, hub_url: str
) -> None:
    for group in pairs(2):
        body = b"".join(json_pieces(pack_group(group)))
        assert b"group_id" not in body
        httpx.post(f"{hub_url}/scored_data", content=body).raise_for_status()
    config = configure(num_steps=1)
    train(config)
    ids = {line["group_id"] for line in rows_in(config.save_path / "trained_groups.jsonl")}
    assert len(ids) == 2
    assert all(len(group_id) == 32 for group_id in ids)
