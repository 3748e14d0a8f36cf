"""The proxy as a user runs it: a process between OpenAI's SDK and an engine with a real (tiny) model."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM

from atroposlib.scored_data import IGNORE_INDEX
from tests.processes import answers, engine_argv, free_port, running, wait_for
from tests.tiny_model import make_tiny_model, make_tiny_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(240)]

TOKEN = "let-me-in"
PROXY = "atroposlib.proxy.command"


def call(method: str, url: str, body: Any = None, *, key: str = TOKEN) -> Any:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_agent_talks_to_a_model_through_the_proxy_and_its_tokens_are_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine_port, proxy_port = free_port(), free_port()
    config = tmp_path / "proxy.json"
    engine = {"base_url": f"http://127.0.0.1:{engine_port}/v1"}
    config.write_text(json.dumps({"model_name": str(model), "servers": [engine]}))
    proxy_argv = ["-m", PROXY, f"--config={config}", f"--port={proxy_port}"]
    monkeypatch.setenv("ATROPOS_PROXY_TOKEN", TOKEN)
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://127.0.0.1:9")  # for environments, not for it
    url = f"http://127.0.0.1:{proxy_port}"
    with (
        running(
            "engine", engine_argv(model, engine_port), log_path=tmp_path / "engine.log"
        ) as engine_process,
        running("proxy", proxy_argv, log_path=tmp_path / "proxy.log") as proxy,
    ):
        for process, port in ((engine_process, engine_port), (proxy, proxy_port)):
            health = f"http://127.0.0.1:{port}/health"
            wait_for(lambda at=health: answers(at), timeout_s=120, process=process)  # type: ignore[misc]
        uuid = call("POST", f"{url}/sessions/create", {"max_tokens": 12})["uuid"]
        with OpenAI(base_url=f"{url}/v1", api_key=uuid, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(3):
                completion = client.chat.completions.create(model="any", messages=messages)
                answer = completion.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "and?"},
                ]
            with pytest.raises(BadRequestError) as refused:
                client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "x" * 600}]
                )
        assert refused.value.code == "context_length_exceeded"
        (node,) = call("GET", f"{url}/{uuid}/nodes")["nodes"]
        assert call("DELETE", f"{url}/{uuid}")["status"] == "deleted"
        assert proxy.stop() == 0, proxy.log()
    check_node(node, model)


def check_node(node: dict[str, Any], model: Path) -> None:
    """Three turns of sampled tokens with the model's own logprobs, between what the template writes."""
    tokens, labels, logprobs = node["tokens"], node["masked_tokens"], node["logprobs"]
    trained = [i for i, label in enumerate(labels) if label != IGNORE_INDEX]
    assert all(labels[i] == tokens[i] for i in trained)
    turns = sum(i - 1 not in trained for i in trained)
    assert turns == 3
    decode = make_tiny_tokenizer().decode
    assert decode(tokens[: trained[0]]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    reference = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits.float(), dim=-1)
    for i in trained:
        assert logprobs[i] == pytest.approx(float(expected[i - 1, tokens[i]]), abs=1e-3)
