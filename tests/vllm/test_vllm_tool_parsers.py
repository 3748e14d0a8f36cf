"""Our tool parsers read what vLLM's read, and vLLM's are there for the names that we have none for."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections import Counter
from typing import Any

import pytest

from atroposlib.inference.tools.parsers import STYLES, Call
from tests.inference.tool_samples import DS, SAMPLED, TOOLS
from tests.processes import ROOT
from tests.vllm.helpers_vllm import vllm_python

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from atroposlib.errors import ConfigError
from atroposlib.inference.tools.translator import ToolCallTranslator
from atroposlib.inference.tools.parsers.borrowed import vllm_names
from atroposlib.inference.tools.parsers import style_named

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

def json_or(text):
    try:
        return json.loads(text)
    except ValueError:
        return text

answers = []
for name, tokens, text in asked["texts"]:
    style = style_named("vllm:" + name, tokenizer=Tokenizer(tokens))
    content, calls = style.parse(text, asked["tools"])
    answers.append([content, [[call.name, json_or(call.arguments)] for call in calls]])
translator = ToolCallTranslator(Tokenizer([]), "pythonic")
content, calls, reason = translator.parse_model_output('[weather(city="Paris", days=2)]', tools=asked["tools"])
own = [content, [call.model_dump() for call in calls], reason]
try:
    refused = style_named("vllm:openai", tokenizer=Tokenizer([])).name
except ConfigError as error:
    refused = str(error)
print(json.dumps({"names": vllm_names(), "answers": answers, "own": own, "refused": refused}))
"""

MARKS = [*DS.values(), "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"]
MARKS += [mark for name in ("kimi_k2", "glm45", "minimax_m2") for mark in STYLES[name].markers]

FAMILIES = ("deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "kimi_k2", "minimax_m2")
NUM_CALLS = 700
WORDS = ["Paris", "two words", "d\u00e9j\u00e0 vu", "\U0001f600", "a\nb", 'say "x"', "1 < 2", "{"]


def ask_vllm(texts: list[tuple[str, list[str], str]]) -> Any:
    return run_script(SCRIPT, {"texts": texts, "tools": TOOLS})


def run_script(script: str, asked: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [vllm_python(), "-c", script],
        input=json.dumps(asked),
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
        if name == "gpt_oss":  # vLLM reads it from tokens
            continue
        # vLLM tells the generations of Mistral apart by the tokenizer.
        tokens = [*MARKS, "[TOOL_CALLS]", *(["[ARGS]"] if name == "mistral_v11" else [])]
        theirs = "mistral" if name == "mistral_v11" else name
        shown = [sample, "Plain text."]
        shown += [f"Look.\n{sample}"] if name != "llama3_json" else []  # theirs drops the text
        texts += [(name, theirs, tokens, text) for text in shown]
    cut = SAMPLED["glm45"].removesuffix("\n</tool_call>")
    asked = [(theirs, tokens, text) for _, theirs, tokens, text in texts]
    found = ask_vllm([*asked, ("glm45", MARKS, cut)])
    *answers, (_, repaired) = found["answers"]
    ours = []
    for name, _, _, text in texts:
        content, calls = STYLES[name].parse(text, TOOLS)
        ours.append([content, [[call.name, json.loads(call.arguments)] for call in calls]])
    theirs = [[content.strip(), calls] for content, calls in answers]
    assert ours == theirs
    # A deployed server is followed on request: it repairs what is cut, which is no call here.
    assert STYLES["glm45"].parse(cut, TOOLS).calls == ()
    assert repaired == [["weather", {"city": "Paris", "days": 2}]]
    assert sum(len(calls) for _, calls in ours) == 21
    assert set(SAMPLED) - {"mistral_v11", "gpt_oss"} | {"openai"} <= set(found["names"])
    assert "'openai' cannot read the text of an answer" in found["refused"]
    content, [call], reason = found["own"]
    assert (content, reason) == (None, "tool_calls")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'}


def made_up(rng: random.Random) -> Call:
    """Return a call of `weather` as a model may write it, with values of the types that its schema has."""
    arguments: dict[str, Any] = {"city": " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))}
    if rng.random() < 0.7:
        arguments["days"] = rng.randint(-3, 10**9)
    return Call("weather", json.dumps(arguments, ensure_ascii=rng.random() < 0.5))


DIFFERENT = {
    "deepseek_v3": (13, 193),
    "deepseek_v31": (5, 207),
    "deepseek_v32": (409, 345),
    "glm45": (460, 347),
    "kimi_k2": (335, 284),
    "minimax_m2": (347, 267),
}
"""Of NUM_CALLS cut and of as many changed answers, how many vLLM 0.32.0 reads otherwise."""


@pytest.mark.timeout(300)
def test_thousands_of_answers_are_read_as_vllm_reads_them() -> None:
    """Whole answers without exception. Of a cut one only whole calls are read here; vLLM repairs."""
    asked: list[tuple[str, str, str, list[Call]]] = []
    for family in FAMILIES:
        rng = random.Random(family)
        for _ in range(NUM_CALLS):
            calls = [made_up(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
            before = rng.choice(["", "Let me look.\n", "<think>Hm.</think>\n"])
            text = before + STYLES[family].render(calls)
            at = rng.randrange(len(text)) if text else 0
            other = rng.choice(["", *"x<>{|\n"])
            asked.append((family, "whole", text, calls))
            asked.append((family, "cut", text[:at], calls))
            asked.append((family, "changed", text[:at] + other + text[at + 1 :], calls))
    found = ask_vllm([(family, MARKS, text) for family, _, text, _ in asked])["answers"]
    different: Counter[tuple[str, str]] = Counter()
    for (family, kind, text, calls), (_, theirs) in zip(asked, found, strict=True):
        read = STYLES[family].parse(text, TOOLS).calls
        ours, written = (
            [[call.name, json.loads(call.arguments)] for call in each] for each in (read, calls)
        )
        different[family, kind] += ours != theirs
        if kind == "whole":
            assert ours == theirs == written
        if kind == "cut":
            assert ours == written[: len(ours)]
    assert {
        name: (different[name, "cut"], different[name, "changed"]) for name in FAMILIES
    } == DIFFERENT


HARMONY_DIFFERENT = {"cut": 165, "changed": 452}
"""Of NUM_CALLS each, how many vLLM 0.32.0 reads otherwise: thoughts, content or calls."""

HARMONY_SCRIPT = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.parser_manager import ParserManager

def json_or(text):
    try:
        return json.loads(text)
    except ValueError:
        return text

asked = json.load(sys.stdin)
encoding = get_encoding()
cls = ParserManager.get_parser("openai", "openai_gptoss", enable_auto_tools=True, is_harmony=True)
request = ChatCompletionRequest(model="", messages=[{"role": "user", "content": ""}], tools=asked["tools"])
answers = []
for text in asked["texts"]:
    tokens = encoding.encode(text, allowed_special="all")
    parser = cls(encoding, request.tools)
    thoughts, content, calls = parser.parse(text, request, model_output_token_ids=tokens)
    calls = [[call.name, json_or(call.arguments)] for call in calls or ()]
    answers.append([thoughts or "", content or "", calls])
print(json.dumps(answers))
"""


def made_up_answer(rng: random.Random) -> str:
    """Return an answer as gpt-oss writes it: thoughts, perhaps a preamble, then calls or a final message."""
    thought = " ".join(rng.choices(WORDS, k=rng.randint(1, 5)))
    parts = [("<|channel|>analysis", thought, "<|end|>")]
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2])):
        if rng.random() < 0.3:
            parts.append(("<|channel|>commentary", rng.choice(WORDS), "<|end|>"))
        call = made_up(rng)
        channel = f"<|channel|>{rng.choice(['commentary'] * 4 + ['analysis'])}"
        to = f" to=functions.{call.name}"
        head = rng.choice([channel + to] * 2 + [to + channel])
        kind = rng.choice([" <|constrain|>json", "<|constrain|>json", " json", " code", ""])
        parts.append((head + kind, call.arguments, "<|call|>"))
    if rng.random() < 0.2:
        parts.append(("<|channel|>analysis to=python code", "print(1)", "<|call|>"))
    if rng.random() < 0.5:
        parts.append(("<|channel|>final", rng.choice(WORDS), "<|return|>"))
    return "<|start|>assistant".join(f"{head}<|message|>{body}{end}" for head, body, end in parts)


@pytest.mark.timeout(300)
def test_thousands_of_gpt_oss_answers_are_read_as_vllm_reads_them() -> None:
    rng = random.Random("gpt_oss")
    asked: list[tuple[str, str]] = []
    for _ in range(NUM_CALLS):
        text = made_up_answer(rng)
        pieces = re.findall(r"<\|\w+\|>|.", text, re.DOTALL)  # a mark is one token
        at = rng.randrange(len(pieces))
        asked.append(("whole", text))
        asked.append(("cut", "".join(pieces[:at])))
        pieces[at] = rng.choice(["", *"x<>{|\n", *STYLES["gpt_oss"].markers])
        asked.append(("changed", "".join(pieces)))
    found = run_script(HARMONY_SCRIPT, {"texts": [text for _, text in asked], "tools": TOOLS})
    different: Counter[str] = Counter()
    written: list[Any] = []
    for (kind, text), theirs in zip(asked, found, strict=True):
        read = STYLES["gpt_oss"].read(text, TOOLS)
        calls = [[call.name, json.loads(call.arguments)] for call in read.parsed.calls]
        ours = [read.thoughts, read.parsed.content, calls]
        if kind == "whole":
            assert ours == theirs
            written = ours[2]
        if kind == "cut":
            assert ours[2] == written[: len(ours[2])]
        different[kind] += ours != theirs
    assert different == {"whole": 0, **HARMONY_DIFFERENT}
