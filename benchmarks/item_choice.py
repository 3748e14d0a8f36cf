"""How many tokens does it cost to learn the same, if earlier groups decide which item is asked next?

    PYTHONPATH=. python benchmarks/item_choice.py                  # the simulation: seconds
    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/item_choice.py --train --out runs/item_choice

The simulation has items of spread difficulty; groups that teach raise the skill. Training runs the demo's model in one
process with the trainer's `make_batch` and `take_step`. As in a run with the default settings, groups of equal scores
are dropped and others sampled in their place. Both take their items from a `DatasetEnv`. Finished runs are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, cast

import torch
import transformers

from atroposlib.cli._demo.commands import TRAINER_RECIPE
from atroposlib.cli._demo.tiny_model import build_model, build_tokenizer
from atroposlib.config import parse_flags
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.item_choice import Beliefs, chance_to_differ, updated
from atroposlib.scored_data import (
    IGNORE_INDEX,
    MASKED_LOGPROB,
    ScoredGroup,
    Strictness,
    check_group,
)
from benchmarks._table import Table
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import load_policy
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options, take_step
from example_trainer.training import set_up_torch

GROUP_SIZE = 8
Choice = Literal["order", "posterior"]


def served(env_cls: type[DatasetEnv], rows: list[Any], *, seed: int, choice: Choice) -> DatasetEnv:
    """Return an environment whose results decide about items, as in `serve`."""
    server = APIServerConfig(model_name="demo", base_url="http://127.0.0.1:9/v1")
    config = DatasetEnvConfig(
        tokenizer_name="demo", group_size=GROUP_SIZE, seed=seed, item_choice=choice
    )
    env = env_cls(config, [server])
    env.runtime = cast(Any, "none")
    env.train_rows = rows
    return env


# The simulation.


class Case(NamedTuple):
    name: str
    num_items: int
    num_groups: int
    difficulty: Callable[[random.Random], float]


CASES = [
    Case("500, 4,000; mixed", 500, 4000, lambda rng: rng.gauss(1.0, 2.0)),
    Case("500, 4,000; mostly too hard", 500, 4000, lambda rng: rng.gauss(4.0, 2.0)),
    Case("2,000, 8,000; extremes", 2000, 8000, lambda rng: rng.choice((-4.0, 0.0, 4.0))),
    Case("8,000, 8,000 (one epoch)", 8000, 8000, lambda rng: rng.gauss(1.0, 2.0)),
]
SKILL_PER_GROUP, SKILL_OF_ITEM = 0.0012, 0.15
"""What a group of p = 1/2 adds to the log-odds of all items, and of its own."""
CONFIDENCE = 0.2
"""A group ends at its half if it has equal scores, and this probability that the second half differs."""


class Simulated(DatasetEnv):
    def item_class(self, item: int) -> str:
        return str(item)


def chance(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


class Found(NamedTuple):
    share: float
    """Of groups that teach."""
    success: float
    """Mean on fresh items."""


async def simulate(case: Case, choice: Choice, *, seed: int, stops_early: bool = False) -> Found:
    """Sample as many answers as `num_groups` whole groups have."""
    rng = random.Random(seed)
    hard = [case.difficulty(rng) for _ in range(case.num_items)]
    own, skill, budget = [0.0] * case.num_items, 0.0, case.num_groups * GROUP_SIZE
    env = served(Simulated, list(range(case.num_items)), seed=seed, choice=choice)
    num_groups = num_teaching = 0
    beliefs: Beliefs = {}
    half = GROUP_SIZE // 2
    while budget > 0:
        item = await env.get_next_item()
        p = chance(skill + own[item] - hard[item])
        scores = [float(rng.random() < p) for _ in range(GROUP_SIZE)]
        if stops_early and len(set(scores[:half])) == 1:
            solved, unsolved = beliefs.get(str(item), (0.0, 0.0))
            num_right = half * scores[0]
            believed = (1 + solved + num_right) / (2 + solved + unsolved + half)
            rest = believed if scores[0] == 0 else 1 - believed
            if 1 - (1 - rest) ** half < CONFIDENCE:
                scores = scores[:half]
        env.note_scores(item, scores)
        solved = int(sum(scores))
        beliefs[str(item)] = updated(
            beliefs.get(str(item), (0.0, 0.0)), solved=solved, unsolved=len(scores) - solved
        )
        budget, num_groups = budget - len(scores), num_groups + 1
        if len(set(scores)) > 1:
            num_teaching += 1
            gain = 4 * p * (1 - p) / chance_to_differ(p, GROUP_SIZE)
            skill, own[item] = skill + SKILL_PER_GROUP * gain, own[item] + SKILL_OF_ITEM * gain
    fresh = (chance(skill - case.difficulty(rng)) for _ in range(20_000))
    return Found(num_teaching / num_groups, fmean(fresh))


def print_simulation() -> None:
    """Print, by case, the share of groups that teach and the success on fresh items."""
    rules: dict[str, tuple[Choice, bool]] = {
        "order": ("order", False),
        "order, early stop": ("order", True),
        "posterior": ("posterior", False),
        "posterior, early stop": ("posterior", True),
    }
    table = Table("Share of groups that teach; success on fresh items", "items, groups", *rules)
    for case in CASES:
        cells = []
        for choice, stops_early in rules.values():
            found = asyncio.run(simulate(case, choice, seed=0, stops_early=stops_early))
            cells.append(f"{found.share:.3f}; {found.success:.3f}")
        table.row(case.name, *cells)


# Training.


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions with one right answer, all of characters that are tokens."""

    env_cls: type[DatasetEnv]
    rows: Callable[[random.Random], list[Any]]
    fresh: Callable[[random.Random], tuple[str, str]]
    """A random question and its answer, for the warm-up and the held-out items."""
    start: float
    """Success at which the warm-up ends."""
    num_tokens: int
    """Sampled in a run."""


def reversal(rng: random.Random, length: int) -> tuple[str, str]:
    text = "".join(rng.choices("abcdefghij", k=length))
    return f"{text}>", text[::-1]


def counting(rng: random.Random, length: int) -> tuple[str, str]:
    text = "".join(rng.choices("abc", k=length))
    return f"{text}:a>", "a" * text.count("a")


LENGTHS = range(2, 14)
LEVELS = [str(n) for n in range(2, 21, 2)]


class Reversals(DatasetEnv):
    """Rows of many lengths; those of one length share a belief."""

    def item_class(self, item: tuple[str, str]) -> str:
        return str(len(item[0]))


class Counting(DatasetEnv):
    """Generated questions of the class that is chosen."""

    async def get_next_item(self) -> tuple[str, str]:
        level = int(self.choose_class(LEVELS))
        self.num_items += 1
        return counting(random.Random(f"{self.config.seed}:{self.num_items}"), level)

    def item_class(self, item: tuple[str, str]) -> str:
        return str(len(item[0]) - 3)


TASKS = {
    "reversal, lengths 2 to 13": Task(
        env_cls=Reversals,
        rows=lambda rng: [reversal(rng, length) for length in LENGTHS for _ in range(25)],
        fresh=lambda rng: reversal(rng, rng.choice(LENGTHS)),
        start=0.2,
        num_tokens=60_000,
    ),
    "counting by classes": Task(
        env_cls=Counting,
        rows=lambda rng: [],
        fresh=lambda rng: counting(rng, int(rng.choice(LEVELS))),
        start=0.45,
        num_tokens=30_000,
    ),
    "300 rows": Task(
        env_cls=DatasetEnv,
        rows=lambda rng: [reversal(rng, rng.randint(3, 10)) for _ in range(300)],
        fresh=lambda rng: reversal(rng, rng.randint(3, 10)),
        start=0.35,
        num_tokens=80_000,
    ),
}
LEARNING_RATE = 6e-4
NUM_HELDOUT, WAVE, NUM_TEACHING, EVALUATED_EVERY = 300, 16, 24, 2
"""Held-out items; groups that are sampled together; groups of a step that must teach."""


def answer_logprobs(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> Any:
    """Return the log-probability of each answer with its end, and the number of its tokens."""
    rows, starts = [], []
    for question, answer in pairs:
        rows.append([*tokenizer.encode(question + answer), tokenizer.eos_token_id])
        starts.append(len(question))
    longest = max(map(len, rows))
    tokens_BT = torch.tensor(
        [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    )
    mask_BT = torch.tensor(
        [
            [start <= i < len(row) for i in range(longest)]
            for row, start in zip(rows, starts, strict=True)
        ]
    )
    logprobs_BTV = model(tokens_BT[:, :-1]).logits.log_softmax(-1)
    own_BT = logprobs_BTV.gather(-1, tokens_BT[:, 1:, None])[..., 0] * mask_BT[:, 1:]
    return own_BT.sum(-1), mask_BT.sum()


def small_model(tokenizer: Any) -> Any:
    """Return the demo's architecture with half the width and half the layers: a run takes a minute of CPU time."""
    torch.manual_seed(0)
    config = build_model(tokenizer, seed=0).config
    config.update({"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2})
    config.update({"layer_types": config.layer_types[:2]})
    return transformers.Qwen2ForCausalLM(config)


def warm_up(task: Task, folder: Path) -> None:
    """Imitate right answers until `start`, and save the model."""
    tokenizer = build_tokenizer()
    model = small_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rng = random.Random("warm up")
    checked = [task.fresh(random.Random(f"validation {i}")) for i in range(300)]
    for step in range(1, 2001):
        for parameters in optimizer.param_groups:
            parameters["lr"] = 3e-3 * min(1.0, step / 20)
        logprobs_B, num_tokens = answer_logprobs(
            model, tokenizer, [task.fresh(rng) for _ in range(64)]
        )
        optimizer.zero_grad()
        (-logprobs_B.sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                reached = float(answer_logprobs(model, tokenizer, checked)[0].exp().mean())
            print(f"warm-up step {step}: {reached:.3f}", flush=True)
            if reached >= task.start:
                break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Model:
    """The policy, its optimizer, and how it answers."""

    def __init__(self, task: Task, folder: Path, *, seed: int) -> None:
        self.max_answer = 2 + max(len(task.fresh(random.Random(i))[1]) for i in range(100))
        settings = TRAINER_RECIPE | {
            "model_name": folder,
            "num_steps": 1000,
            "seed": seed,
            "lr": 3e-4,
        }
        settings |= {"device": "cpu", "threads": 1}
        self.config = parse_flags(
            TrainerConfig,
            [f"--{name}={value}" for name, value in settings.items()],
            prog="item_choice",
        )
        set_up_torch(self.config)
        self.policy = load_policy(self.config)
        self.optimizer = make_optimizer(self.policy, self.config)
        self.options = data_options(self.config, self.policy)
        self.gap = LogprobGap(self.policy, limit=None)
        self.num_steps = 0

    def success(self, heldout: list[tuple[str, str]]) -> float:
        """Return the expected success at temperature 1, exactly."""
        with torch.no_grad():
            found = answer_logprobs(self.policy.model, self.policy.tokenizer, heldout)[0]
        return float(found.exp().mean())

    def step(self, groups: list[ScoredGroup]) -> None:
        batch = make_batch(groups, self.options)
        take_step(self.policy, self.optimizer, batch, self.config, self.num_steps, self.gap)
        self.num_steps += 1

    def sample(self, items: list[tuple[str, str]]) -> list[ScoredGroup]:
        """Return a group of answers per item, sampled at temperature 1."""
        tokenizer = self.policy.tokenizer
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        prompts = [tokenizer.encode(question) for question, _ in items]
        longest = max(map(len, prompts))
        out = self.policy.model.generate(
            torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor(
                [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            ),
            do_sample=True,
            top_k=0,
            max_new_tokens=self.max_answer,
            num_return_sequences=GROUP_SIZE,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers_BT = out.sequences[:, longest:]
        logprobs_BTV = torch.stack(out.logits, dim=1).log_softmax(-1)
        own_BT = logprobs_BTV.gather(-1, answers_BT[..., None])[..., 0]
        rows = iter(zip(answers_BT.tolist(), own_BT.tolist(), strict=True))
        groups = []
        for prompt, (_, right) in zip(prompts, items, strict=True):
            fields: dict[str, list[Any]] = defaultdict(list)
            for answer, logprobs in islice(rows, GROUP_SIZE):
                has_ended = end in answer
                trained = answer[: answer.index(end) + 1] if has_ended else answer
                text = tokenizer.decode(trained[: len(trained) - has_ended])
                fields["scores"].append(float(has_ended and text == right))
                fields["tokens"].append(prompt + trained)
                fields["masks"].append([IGNORE_INDEX] * len(prompt) + trained)
                fields["inference_logprobs"].append(
                    [MASKED_LOGPROB] * len(prompt) + logprobs[: len(trained)]
                )
            groups.append(check_group(fields, strictness=Strictness.MEANING))
        return groups


def train(name: str, *, choice: Choice, seed: int, model_dir: Path) -> dict[str, Any]:
    """Train on the sampled tokens of the task; return success by tokens, and the share of groups that taught."""
    task, began_s = TASKS[name], time.process_time()
    env = served(task.env_cls, task.rows(random.Random(seed)), seed=seed, choice=choice)
    heldout = [task.fresh(random.Random(f"held out {i}")) for i in range(NUM_HELDOUT)]
    model = Model(task, model_dir, seed=seed)
    num_tokens = num_groups = num_taught = 0
    curve = [(0, model.success(heldout))]
    while num_tokens < task.num_tokens:
        teaching: list[Any] = []
        while len(teaching) < NUM_TEACHING:
            items = [asyncio.run(env.get_next_item()) for _ in range(WAVE)]
            for item, group in zip(items, model.sample(items), strict=True):
                scores = group.scores.tolist()
                env.note_scores(item, scores)
                num_tokens += int((group.masks >= 0).sum())
                num_groups += 1
                if len(set(scores)) > 1:
                    teaching.append(group)
        num_taught += len(teaching)
        model.step(teaching)
        if model.num_steps % EVALUATED_EVERY == 0:
            curve.append((num_tokens, model.success(heldout)))
            cpu_s = time.process_time() - began_s
            print(
                f"{choice} {seed}: {curve[-1]}, {num_taught / num_groups:.3f}, {cpu_s:.0f} s",
                flush=True,
            )
    return {
        "share": num_taught / num_groups,
        "curve": curve,
        "cpu_s": time.process_time() - began_s,
    }


def smoothed(curve: list[tuple[int, float]]) -> list[float]:
    """Return the mean of each score and its neighbours."""
    scores = [score for _, score in curve]
    return [fmean(scores[max(0, i - 2) : i + 3]) for i in range(len(scores))]


def tokens_until(curve: list[tuple[int, float]], score: float) -> int:
    """Return the sampled tokens at which the smoothed curve has the score."""
    return next(t for (t, _), s in zip(curve, smoothed(curve), strict=True) if s >= score)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", action="store_true", help="train the demo's model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/item_choice"))
    options = parser.parse_args()
    if not options.train:
        print_simulation()
        return 0
    transformers.utils.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    columns = (
        "task",
        "seed",
        "held-out score",
        "tokens: order",
        "posterior",
        "ratio",
        "share that teaches",
        "",
        "CPU s",
        "",
    )
    table = Table("Tokens until the same held-out score", *columns)
    for name in options.tasks:
        model_dir = options.out / name / "model"
        if not model_dir.exists():
            warm_up(TASKS[name], model_dir)
        for seed in options.seeds:
            found = []
            for choice in ("order", "posterior"):
                path = options.out / name / f"{choice}-{seed}.json"
                if not path.exists():
                    result = train(name, choice=choice, seed=seed, model_dir=model_dir)
                    path.write_text(json.dumps(result))
                found.append(json.loads(path.read_text()))
            first, second = found
            reached = min(max(smoothed(each["curve"])) for each in found)
            spent = [tokens_until(each["curve"], reached) for each in found]
            table.row(
                name,
                seed,
                reached,
                *spent,
                spent[1] / spent[0],
                first["share"],
                second["share"],
                first["cpu_s"],
                second["cpu_s"],
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
