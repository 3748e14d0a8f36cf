"""A task that a tiny model learns in seconds: write two letters in reverse. And the environment that samples it."""

import asyncio
import copy
import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from atroposlib.client import HubClient, TrainerRegistration
from atroposlib.scored_data import MASKED_LOGPROB, ScoredGroup, Strictness, check_group
from tests.tiny_model import make_tiny_model

LETTERS = "abc"
PROMPTS = [first + second + ">" for first, second in itertools.product(LETTERS, repeat=2)]
GROUP_SIZE = 16
BATCH_SIZE = len(PROMPTS) * GROUP_SIZE
ANSWER = 2
"""Tokens."""


def registration(num_steps: int) -> TrainerRegistration:
    return TrainerRegistration(
        batch_size=BATCH_SIZE,
        max_token_len=16,
        checkpoint_dir="checkpoints",
        save_checkpoint_interval=0,
        starting_step=0,
        num_steps=num_steps,
    )


def make_starting_model(dir: Path) -> Path:
    """Save a tiny model that answers with two letters, right a quarter of the time."""
    make_tiny_model(dir, init_std=0.05)
    model = AutoModelForCausalLM.from_pretrained(dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    answers = [p[:2] for p in PROMPTS]
    rows = [p + answer for p in PROMPTS for answer in (*answers, p[1::-1], p[1::-1])]
    tokens_BT = torch.tensor([list(row.encode()) for row in rows])
    labels_BT = tokens_BT.clone()
    labels_BT[:, :-ANSWER] = -100
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=tokens_BT, labels=labels_BT).loss.backward()
        optimizer.step()
    model.save_pretrained(dir)
    return dir


def accuracy(model: Any) -> float:
    """The mean probability of the right answer."""
    tokens_BT = torch.tensor([list((p + p[1::-1]).encode()) for p in PROMPTS])
    with torch.no_grad():
        logprobs_BTV = model(tokens_BT[:, :-1]).logits[:, -ANSWER:].log_softmax(-1)
    answers = tokens_BT[:, -ANSWER:, None]
    return float(logprobs_BTV.gather(-1, answers).sum((1, 2)).exp().mean())


def sample_groups(model: Any, *, version: int) -> list[ScoredGroup]:
    """One group per prompt, sampled from `model` at temperature 1; the score is the share of right letters."""
    prompts = [list(p.encode()) for p in PROMPTS for _ in range(GROUP_SIZE)]
    tokens_BT = torch.tensor(prompts)
    logprobs = []
    with torch.no_grad():
        for _ in range(ANSWER):
            table_BV = model(tokens_BT).logits[:, -1].log_softmax(-1)
            chosen_B1 = torch.multinomial(table_BV.exp(), 1)
            logprobs.append(table_BV.gather(-1, chosen_B1))
            tokens_BT = torch.cat([tokens_BT, chosen_B1], dim=1)
    logprobs_BA = torch.cat(logprobs, dim=1)
    groups = []
    for i, prompt in enumerate(PROMPTS):
        rows = slice(i * GROUP_SIZE, (i + 1) * GROUP_SIZE)
        tokens = tokens_BT[rows].tolist()
        wanted = list(prompt[1::-1].encode())
        answers = [row[-ANSWER:] for row in tokens]
        group = {
            "tokens": tokens,
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "scores": [
                sum(a == w for a, w in zip(answer, wanted, strict=True)) / ANSWER
                for answer in answers
            ],
            "inference_logprobs": [
                [MASKED_LOGPROB] * len(prompt) + row for row in logprobs_BA[rows].tolist()
            ],
        }
        checked = check_group(group, strictness=Strictness.MEANING)
        groups.append(checked.replace(policy_version=version))
    return groups


class BanditEnvironment:
    """Answers every published policy with one batch of groups sampled from it."""

    def __init__(self, hub_url: str, *, seed: int = 0) -> None:
        self._hub_url = hub_url
        self._seed = seed
        self.accuracies: list[float] = []

    def publish(self, model: Any, version: int) -> None:
        """Sample from the weights as they are and send the groups to the hub."""
        policy = copy.deepcopy(model).eval()
        call = len(self.accuracies)
        self.accuracies.append(accuracy(policy))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed + call)
            groups = sample_groups(policy, version=version)
        named = [group.replace(group_id=f"{call}-{i}") for i, group in enumerate(groups)]
        asyncio.run(self._send(named))

    async def _send(self, groups: list[ScoredGroup]) -> None:
        async with HubClient(self._hub_url) as hub:
            await hub.send(groups)
