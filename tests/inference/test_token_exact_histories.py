"""Whatever is asked in whatever order, a node trains exactly what an engine sampled after the tokens before it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.inference.harness import made_up_logprobs
from atroposlib.inference.sessions.managed_server import ManagedServer, SequenceNode
from tests.inference.helpers_templates import (
    CALLS_BEFORE_RESULTS,
    CHATML,
    NO_RESULTS,
    RESULTS_BELONG_TO_CALLS,
    RESULTS_IN_CALLS,
    SYSTEM_IN_LAST,
    TEMPLATES,
    Template,
    ToldEngine,
)

REWRITES = Template(
    "rewrites",
    SYSTEM_IN_LAST,
    "<|endoftext|>",
    lambda text: f"[INST] {text}[/INST]",
    bos="<|begin_of_text|>",
)
DATED = "{{ '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + CHATML
BATTERY = [
    *TEMPLATES,
    REWRITES,
    *[
        Template(name, jinja, "<|im_end|>", lambda text: text, has_system=False)
        for name, jinja in [
            ("dated", DATED),
            ("no_results", NO_RESULTS),
            ("results_belong_to_calls", RESULTS_BELONG_TO_CALLS),
            ("results_in_calls", RESULTS_IN_CALLS),
        ]
    ],
    Template(
        "calls_before_results",
        CALLS_BEFORE_RESULTS,
        "<|endoftext|>",
        lambda text: text,
        bos="<|begin_of_text|>",
        has_system=False,
    ),
]
"""Chat templates of 17 kinds; what stands between two turns is not looked at here."""

TEXTS = [
    "the sum",
    " 42 \n",
    "<think>a</think>b",
    "<think>",
    "",
    "\n\n",
    "\u00e9",
    "ATROPOS0TURN1END",
    '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>',
]

Calls = list[tuple[list[int], list[int]]]


class Conversations:
    """Asks at random; remembers every prompt sent and what was sampled after it."""

    def __init__(self, template: Template, seed: int) -> None:
        self.rng = random.Random(seed)
        self.template = template
        self.engine = ToldEngine(template.tokenizer)
        self.managed = ManagedServer(self.engine)
        first: list[Any] = [{"role": "user", "content": "begin"}]
        if template.has_system:
            first.insert(0, {"role": "system", "content": "be brief"})
        self.histories: list[list[Any]] = [first]
        self.texts = ["once upon"]
        self.calls: Calls = []

    async def step(self) -> None:
        n = self.rng.choice([1, 1, 2])
        num_nodes = len(self.managed.nodes)
        answers = [self._answer() for _ in range(n)]
        self.engine.answers = list(answers)
        if self.rng.random() < 0.25:
            prompt = self.rng.choice(self.texts)
            reply = await self.managed.completion(prompt=prompt, n=n)
            for choice in reply.choices:
                self.texts += [prompt + choice.text, f"{prompt}{choice.text} and"]
        else:
            history = self.rng.choice(self.histories)
            reply = await self.managed.chat_completion(messages=history, n=n)
            for choice in reply.choices:
                self._remember(history, choice.message.content)
        assert num_nodes + n - 1 <= len(self.managed.nodes) <= num_nodes + n
        self.calls += [(self.engine.sent[-1], ids) for ids, _ in answers]

    def _answer(self) -> tuple[list[int], str]:
        tokenizer = self.template.tokenizer
        if self.rng.random() < 0.5:
            ids = tokenizer.encode(self.rng.choice(TEXTS), add_special_tokens=False)
        else:
            ids = [self.rng.randrange(len(tokenizer)) for _ in range(self.rng.randrange(6))]
        if self.rng.random() < 0.3:
            return ids, "length"
        end = self.template.end or self.template.eos
        return [*ids, *tokenizer.encode(end, add_special_tokens=False)], "stop"

    def _remember(self, history: list[Any], content: str) -> None:
        opened = history[-1]["content"] if history[-1]["role"] == "assistant" else ""
        before = history[:-1] if history[-1]["role"] == "assistant" else history
        whole = {"role": "assistant", "content": opened + content}
        question = {"role": "user", "content": self.rng.choice(TEXTS)}
        self.histories += [
            [*before, whole, question],
            [*before, whole],
            [*before, {**whole, "content": whole["content"] + " Wait"}],
            [*before, {**whole, "content": whole["content"][:3]}],
            [*before, {**whole, "content": "edited"}, question],
        ]


def assert_explained(node: SequenceNode, calls: Calls) -> None:
    """Every trained token was sampled at its place, after the tokens before it, with its logprob."""
    length = len(node.tokens)
    assert len(node.masked_tokens) == len(node.logprobs) == length
    explained: dict[int, set[float]] = {}
    for prompt, sampled in calls:
        start = len(prompt)
        if node.tokens[:start] != prompt:
            continue
        for i, (token, logprob) in enumerate(
            zip(sampled, made_up_logprobs(prompt, sampled), strict=True)
        ):
            if start + i >= length or node.tokens[start + i] != token:
                break
            explained.setdefault(start + i, set()).add(logprob)
    for i, label in enumerate(node.masked_tokens):
        if label == -100:
            assert node.logprobs[i] == 1.0
        else:
            assert label == node.tokens[i]
            assert node.logprobs[i] in explained[i]


@pytest.mark.parametrize("template", BATTERY, ids=lambda template: template.name)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
async def test_any_history_of_calls_trains_what_was_sampled_where_it_was_sampled(
    template: Template, seed: int
) -> None:
    conversations = Conversations(template, seed)
    for _ in range(8):
        await conversations.step()
    nodes = conversations.managed.get_state()["nodes"]
    for node in nodes:
        assert_explained(node, conversations.calls)
    for prompt, sampled in conversations.calls:
        end = len(prompt) + len(sampled)
        holders = [
            node
            for node in nodes
            if node.tokens[:end] == prompt + sampled
            and node.masked_tokens[len(prompt) : end] == sampled
        ]
        assert holders, "a completion is nowhere trained"
