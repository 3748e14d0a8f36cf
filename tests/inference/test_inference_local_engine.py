"""VLLMServer and managed sessions against the project's own engine: token for token, logprob for logprob."""

from __future__ import annotations

import string
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


async def test_a_stop_of_texts_and_token_ids_ends_generation_at_the_local_engine(
    manager: ServerManager,
) -> None:
    tokenizer = make_tiny_tokenizer()
    every_letter = [token for token in range(260) if tokenizer.decode([token]).isalpha()]
    messages = [{"role": "user", "content": "abc"}]
    async with manager.managed_server(tokenizer=tokenizer) as managed:
        reply = await managed.chat_completion(
            messages=messages, n=8, max_tokens=40, stop=["never", *every_letter, 5]
        )
        nodes = managed.get_state()["nodes"]
    ended = [c for c in reply.choices if isinstance(c.model_dump().get("stop_reason"), int)]
    assert len(ended) > 4
    for choice in ended:
        assert choice.stop_reason in {*every_letter, 5}
        assert not set(choice.message.content) & set(string.ascii_letters)
        assert choice.stop_reason in [node.tokens[-1] for node in nodes]
