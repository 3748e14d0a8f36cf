"""Does an agent that splits its context learn as fast as one that does not?

`PYTHONPATH=. python benchmarks/rollout_credit.py` trains a table of logits with the trainer's advantages and weights
(`make_batch`), no model. A rollout takes four decisions; it is solved if all are right. Its decisions stand in one
sequence, or in a random number of them, each with a summary of `NUM_SUMMARY` further sampled tokens that decide
nothing; a rollout with a mistake splits more often, as agents do that try again. Printed is the share of solved
rollouts, mean and spread over seeds.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup, Strictness, check_group
from benchmarks._table import Table
from example_trainer.data import DataOptions, make_batch

NUM_ITEMS, NUM_DECISIONS, NUM_CHOICES, NUM_SUMMARY = 8, 4, 3, 4
GROUP_SIZE = 8
NUM_PLACES = NUM_CHOICES + NUM_ITEMS * (NUM_DECISIONS + 1)
NUM_FEATURES = 24
"""Fewer than places: what is learned in one place moves the others."""
RIGHT = 1
LEARNING_RATE = 0.03
NUM_STEPS = 100


class Rule(NamedTuple):
    """What is compared."""

    name: str
    is_split: bool
    has_rollouts: bool
    loss_mean: Literal["token", "rollout"]


RULES = [
    Rule("one sequence per rollout", False, True, "token"),
    Rule("split; each sequence counts as a rollout", True, False, "token"),
    Rule("split; baseline over rollouts, loss_mean token", True, True, "token"),
    Rule("split; baseline over rollouts, loss_mean rollout", True, True, "rollout"),
]
MOST_PARTS = {"at random": (8, 8), "more with a mistake": (2, 8), "more without": (8, 2)}
"""Of a right rollout, and of one with a mistake."""


def place(item: int, position: int) -> int:
    """Return the token that stands for the question before a decision; those of summaries come last."""
    return NUM_CHOICES + item * (NUM_DECISIONS + 1) + min(position, NUM_DECISIONS)


def sample_group(
    logprobs: NDArray[np.float64],
    item: int,
    rule: Rule,
    most_parts: tuple[int, int],
    random: np.random.Generator,
) -> tuple[ScoredGroup, float]:
    """Return one group, and the share of its rollouts that are solved. A decision is a pair: question, answer."""
    fields: dict[str, list[Any]] = {
        key: [] for key in ("tokens", "masks", "scores", "inference_logprobs", "rollout")
    }
    solved = 0
    for number in range(GROUP_SIZE):
        made = [
            int(
                random.choice(
                    NUM_CHOICES,
                    p=np.exp(logprobs[place(item, position)])
                    / np.exp(logprobs[place(item, position)]).sum(),
                )
            )
            for position in range(NUM_DECISIONS)
        ]
        is_right = all(choice == RIGHT for choice in made)
        solved += is_right
        num_parts = int(random.integers(1, most_parts[not is_right] + 1)) if rule.is_split else 1
        parts: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
        for position, choice in enumerate(made):
            parts[position * num_parts // NUM_DECISIONS].append((place(item, position), choice))
        for part in parts:
            if num_parts > 1:
                last = place(item, NUM_DECISIONS)
                part += [
                    (
                        last,
                        int(
                            random.choice(
                                NUM_CHOICES, p=np.exp(logprobs[last]) / np.exp(logprobs[last]).sum()
                            )
                        ),
                    )
                    for _ in range(NUM_SUMMARY)
                ]
            fields["tokens"].append([token for pair in part for token in pair])
            fields["masks"].append([token for _, c in part for token in (IGNORE_INDEX, c)])
            fields["inference_logprobs"].append(
                [value for at, c in part for value in (1.0, float(logprobs[at, c]))]
            )
            fields["scores"].append(float(is_right))
            fields["rollout"].append(number)
    if not rule.has_rollouts:
        del fields["rollout"]
    return check_group(fields, strictness=Strictness.MEANING), solved / GROUP_SIZE


def learn(rule: Rule, most_parts: tuple[int, int], *, seed: int) -> list[float]:
    """Return the share of solved rollouts in each step."""
    random = np.random.default_rng(seed)
    features = torch.from_numpy(random.standard_normal((NUM_PLACES, NUM_FEATURES))).float()
    weights = torch.zeros(NUM_FEATURES, NUM_CHOICES, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=LEARNING_RATE)
    options = DataOptions(
        seq_len=64, max_sequences=10**6, max_tokens=10**6, loss_mean=rule.loss_mean
    )
    rates = []
    for _ in range(NUM_STEPS):
        logprobs_PC = torch.log_softmax(features @ weights, dim=1)
        logprobs = logprobs_PC.detach().double().numpy()
        groups, solved = zip(
            *(sample_group(logprobs, item, rule, most_parts, random) for item in range(NUM_ITEMS)),
            strict=True,
        )
        rates.append(float(np.mean(solved)))
        loss = logprobs_PC.new_zeros(())
        for row in make_batch(groups, options).rows:
            chosen = logprobs_PC[row.tokens[row.trained], row.labels]
            loss = loss - row.weight * (torch.tensor(row.advantages) * chosen).sum()
        if loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    table = Table("Solved rollouts, mean of all steps", "rule", *MOST_PARTS)
    for rule in RULES:
        cells = []
        for most_parts in MOST_PARTS.values():
            rates = [np.mean(learn(rule, most_parts, seed=s)) for s in range(arguments.seeds)]
            cells.append(f"{np.mean(rates):.3f} ± {np.std(rates) / len(rates) ** 0.5:.3f}")
        table.row(rule.name, *cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
