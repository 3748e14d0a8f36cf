"""Our tool parsers read what vLLM's read, and vLLM's are there for the names that we have none for."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from atroposlib.inference.tools.parsers import STYLES
from tests.inference.tool_samples import DS, SAMPLED, TOOLS
from tests.processes import ROOT
from tests.vllm.helpers_vllm import vllm_python

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from atroposlib.inference.tools.translator import ToolCallTranslator
from atroposlib.inference.tools.parsers.borrowed import vllm_names, vllm_style

asked = json.load(sys.stdin)

class Tokenizer:
    eos_token = "</s>"
    def __init__(self, tokens):
        self.vocab = {token: i for i, token in enumerate(tokens)}
    def get_vocab(self):
        return self.vocab
    def encode(self, text, **options):
        return [ord(c) for c in text]
    def decode(self, tokens, **options):
        return "".join(map(chr, tokens))

answers = []
for name, tokens, text in asked["texts"]:
    content, calls = vllm_style(name, Tokenizer(tokens)).parse(text, asked["tools"])
    answers.append([content, [[call.name, json.loads(call.arguments)] for call in calls]])
translator = ToolCallTranslator(Tokenizer([]), "pythonic")
content, calls, reason = translator.parse_model_output('[weather(city="Paris", days=2)]', tools=asked["tools"])
own = [content, [call.model_dump() for call in calls], reason]
print(json.dumps({"names": vllm_names(), "answers": answers, "own": own}))
"""

MARKS = [*DS.values(), "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]


def ask_vllm(texts: list[tuple[str, list[str], str]]) -> Any:
    asked = json.dumps({"texts": texts, "tools": TOOLS})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [vllm_python(), "-c", SCRIPT],
        input=asked,
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(180)
def test_our_parsers_read_what_those_of_vllm_read() -> None:
    texts = []
    for name, sample in SAMPLED.items():
        # vLLM tells the generations of Mistral apart by the tokenizer.
        tokens = [*MARKS, "[TOOL_CALLS]", *(["[ARGS]"] if name == "mistral_v11" else [])]
        theirs = "mistral" if name == "mistral_v11" else name
        shown = [sample, "Plain text."]
        shown += [f"Look.\n{sample}"] if name != "llama3_json" else []  # theirs drops the text
        texts += [(name, theirs, tokens, text) for text in shown]
    found = ask_vllm([(theirs, tokens, text) for _, theirs, tokens, text in texts])
    ours = []
    for name, _, _, text in texts:
        content, calls = STYLES[name].parse(text, TOOLS)
        ours.append([content, [[call.name, json.loads(call.arguments)] for call in calls]])
    theirs = [[content.strip(), calls] for content, calls in found["answers"]]
    assert ours == theirs
    assert sum(len(calls) for _, calls in ours) == 13
    assert set(SAMPLED) - {"mistral_v11"} <= set(found["names"])
    content, [call], reason = found["own"]
    assert (content, reason) == (None, "tool_calls")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}
