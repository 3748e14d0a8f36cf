"""A tiny model that has learned one conversation with a tool by heart, so that it really makes the call.

Byte-level tokens and the tool template of `helpers_templates`; the turn ends with the model's end-of-sequence token.
Takes a CPU second or two to make.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.inference.helpers_templates import TOOLS
from tests.tiny_model import IM_END, make_tiny_model, make_tiny_tokenizer

MAX_LENGTH = 1024
MAX_STEPS = 400
WANTED_LOSS = 0.02

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = "1 + 2?"
CALL = '<tool_call>\n{"name":"add",  "arguments": {"b":2,"a" : 1}}\n</tool_call>'
RESULT = "3"
ANSWER = "It is 3."
THANKS = "thanks"
FAREWELL = "bye"
CONVERSATION = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": RESULT},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": THANKS},
    {"role": "assistant", "content": FAREWELL},
]


def make_taught_model(dir: Path) -> Path:
    """Save the model and its tokenizer into `dir` and return `dir`."""
    make_tiny_model(dir, hidden_size=64, max_position_embeddings=MAX_LENGTH, init_std=0.06)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TOOLS
    tokenizer.eos_token = IM_END
    tokenizer.save_pretrained(dir)
    model = AutoModelForCausalLM.from_pretrained(dir, dtype=torch.float32)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(CONVERSATION, tools=[ADD], tokenize=False)
    tokens_T = torch.tensor(tokenizer.encode(text))
    labels_T = torch.full_like(tokens_T, -100)
    for answer in (CALL, ANSWER, FAREWELL):
        start = len(tokenizer.encode(text[: text.index(answer)]))
        labels_T[start : start + len(answer) + 1] = tokens_T[start : start + len(answer) + 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(MAX_STEPS):
            loss = model(input_ids=tokens_T[None], labels=labels_T[None]).loss
            if loss.item() < WANTED_LOSS:
                break
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            raise AssertionError(f"the model has not learned its lines: loss {loss.item():.3f}")
    model.save_pretrained(dir)
    assert json.loads((dir / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    return dir
