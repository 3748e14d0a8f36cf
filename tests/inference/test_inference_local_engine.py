"""VLLMServer and managed sessions against the project's own engine: token for token, logprob for logprob."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import load
from atroposlib.engine.server import create_app
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager
from atroposlib.utils.local_server import serve_locally
from tests.tiny_model import make_tiny_model, make_tiny_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture
async def manager(model_dir: Path) -> AsyncIterator[ServerManager]:
    loaded = load(EngineConfig(model=str(model_dir), device="cpu", weight_version="4"))
    loaded.engine.start()
    async with serve_locally(create_app(loaded)) as url:
        config = APIServerConfig(base_url=url, model_name=loaded.model_name, server_type="vllm")
        manager = ServerManager(config)
        yield manager
        await manager.close()
    loaded.engine.close()


async def test_managed_turns_on_the_local_engine_are_token_exact(
    manager: ServerManager, model_dir: Path
) -> None:
    tokenizer = make_tiny_tokenizer()
    messages = [{"role": "user", "content": "abc"}]
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        first = await managed.chat_completion(messages=messages, n=3, max_tokens=12)
        assert len(managed.get_state()["nodes"]) == len(first.choices) == 3
        before = managed.get_state()["nodes"][1].tokens
        reply = first.choices[1].message
        await managed.chat_completion(
            messages=[*messages, reply, {"role": "user", "content": "more"}], max_tokens=9
        )
        nodes = managed.get_state()["nodes"]
    assert sum(node.tokens[: len(before)] == before for node in nodes) >= 1
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    longest = max(nodes, key=lambda node: len(node.tokens))
    assert longest.full_text.count("<|im_start|>assistant") == 2
    for node in nodes:
        with torch.no_grad():
            logits = model(torch.tensor([node.tokens])).logits[0, :-1]
        expected = logits.log_softmax(-1)
        for position, label in enumerate(node.masked_tokens):
            if label != -100:
                gap = abs(float(expected[position - 1, label]) - node.logprobs[position])
                assert gap < 1e-4, (position, gap)
        assert node.metadata["policy_version"] == 4
