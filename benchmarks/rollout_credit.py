"""How much of a step's gradient is signal, when an agent splits its context into several sequences?

`PYTHONPATH=. python benchmarks/rollout_credit.py` needs no model: the policy is one distribution per decision. A
rollout takes four decisions and is solved if all are right. Its decisions stand in one sequence, or in up to eight,
each with four further sampled tokens that decide nothing, as the summaries do that agents write. Advantages and weights
are the trainer's (`make_batch`). Printed is the squared norm of the gradient's mean over the variance of a group's:
with half of it, a step needs twice the groups.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup, Strictness, check_group
from benchmarks._table import Table
from example_trainer.data import DataOptions, make_batch
from example_trainer.objective import RolloutWeight

GROUP_SIZE, NUM_DECISIONS, NUM_CHOICES, NUM_SUMMARY = 8, 4, 3, 4
RIGHT = 0
PROMPT = NUM_CHOICES
"""The token before decision 0; the next ones stand before the others, the last before a token of a summary."""
P_RIGHT = 0.8
"""Of each decision: 0.41 of the rollouts are solved."""


class Rule(NamedTuple):
    """One row."""

    name: str
    is_split: bool
    has_rollouts: bool
    weight: RolloutWeight


RULES = [
    Rule("one sequence per rollout", False, True, "rollout"),
    Rule("split: each sequence counts as a rollout", True, False, "token"),
    Rule("split: rollouts, rollout_weight token", True, True, "token"),
    Rule("split: rollouts, rollout_weight rollout", True, True, "rollout"),
]
MOST_PARTS = {"at random": (8, 8), "more if wrong": (2, 8), "more if right": (8, 2)}
"""Of a right rollout, and of a wrong one."""


def policy() -> NDArray[np.float64]:
    """Return [NUM_DECISIONS + 1, NUM_CHOICES] probabilities; the last row is of summaries."""
    rest = (1 - P_RIGHT) / (NUM_CHOICES - 1)
    decisions = [[P_RIGHT, *[rest] * (NUM_CHOICES - 1)]] * NUM_DECISIONS
    return np.array([*decisions, [1 / NUM_CHOICES] * NUM_CHOICES])


def sample_group(
    rule: Rule, most_parts: tuple[int, int], random: np.random.Generator
) -> ScoredGroup:
    """Return one group; tokens come in pairs, the place of a choice and the choice."""
    p = policy()
    fields: dict[str, list[Any]] = {key: [] for key in ("tokens", "masks", "scores", "rollout")}
    for number in range(GROUP_SIZE):
        made = [int(random.choice(NUM_CHOICES, p=p[place])) for place in range(NUM_DECISIONS)]
        is_right = made == [RIGHT] * NUM_DECISIONS
        num_parts = int(random.integers(1, most_parts[not is_right] + 1)) if rule.is_split else 1
        parts: list[list[tuple[int, int]]] = [[] for _ in range(num_parts)]
        for place, choice in enumerate(made):
            parts[place * num_parts // NUM_DECISIONS].append((place, choice))
        for part in parts:
            if num_parts > 1:
                choices = random.choice(NUM_CHOICES, size=NUM_SUMMARY, p=p[NUM_DECISIONS])
                part += [(NUM_DECISIONS, int(choice)) for choice in choices]
            fields["tokens"].append([t for place, choice in part for t in (PROMPT + place, choice)])
            fields["masks"].append([t for _, choice in part for t in (IGNORE_INDEX, choice)])
            fields["scores"].append(float(is_right))
            fields["rollout"].append(number)
    fields["inference_logprobs"] = [
        [1.0 if label == IGNORE_INDEX else -1.0 for label in labels] for labels in fields["masks"]
    ]
    if not rule.has_rollouts:
        del fields["rollout"]
    return check_group(fields, strictness=Strictness.MEANING)


def gradient(group: ScoredGroup, weight: RolloutWeight) -> NDArray[np.float64]:
    """Return the policy gradient of one group with respect to the logits."""
    options = DataOptions(seq_len=64, max_sequences=512, max_tokens=2**20, rollout_weight=weight)
    p = policy()
    found = np.zeros_like(p)
    for row in make_batch([group], options).rows:
        places, pull = row.tokens[row.trained] - PROMPT, row.weight * row.advantages
        np.add.at(found, (places, row.labels), pull)
        np.add.at(found, places, -pull[:, None] * p[places])
    return found


def signal(rule: Rule, most_parts: tuple[int, int], *, num_groups: int) -> float:
    """Return the signal-to-noise ratio of one group's gradient."""
    random = np.random.default_rng(0)
    found = np.array(
        [gradient(sample_group(rule, most_parts, random), rule.weight) for _ in range(num_groups)]
    )
    return float((found.mean(axis=0) ** 2).sum() / found.var(axis=0).sum())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=3000, help="per cell")
    arguments = parser.parse_args()
    table = Table("Signal to noise of a group's gradient", "rollouts", *MOST_PARTS)
    for rule in RULES:
        cells = [signal(rule, parts, num_groups=arguments.groups) for parts in MOST_PARTS.values()]
        table.row(rule.name, *(f"{cell:.2f}" for cell in cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
