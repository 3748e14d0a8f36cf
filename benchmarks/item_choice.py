"""How many tokens does it cost to learn the same, if earlier groups decide which item is asked next?

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/item_choice.py --out runs/item_choice

A model of the demo's architecture trains in one process with the trainer's `make_batch` and `take_step`. As in a run
with the default settings, groups of equal scores are dropped and others sampled in their place. Both choices take their
items from a `DatasetEnv`. The sizes of the items are so mixed that most are too hard at first, but for `medium`.
Finished runs are kept.
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
from typing import Any, ClassVar, Literal, cast

import torch
import transformers

from atroposlib.cli._demo.commands import TRAINER_RECIPE
from atroposlib.cli._demo.tiny_model import build_model, build_tokenizer
from atroposlib.config import parse_flags
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
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


@dataclass(frozen=True, kw_only=True)
class Task:
    """Questions with one right answer, all of characters that are tokens."""

    question: Callable[[random.Random, int], tuple[str, str]]
    """A random question of a size, and its answer."""
    sizes: range
    """Of the training and the held-out items, each as often as the others."""
    usual_size: float
    """The share of a size in the warm-up falls by the factor e per so much: small sizes are known, large ones not."""
    start: float
    """Success on the held-out items at which the warm-up ends."""
    num_tokens: int
    """Sampled in a run."""
    num_rows: int = 0
    """0: questions are generated."""

    def fresh(self, rng: random.Random) -> tuple[str, str]:
        """Return a held-out question and its answer."""
        return self.question(rng, rng.choice(self.sizes))

    def imitated(self, rng: random.Random) -> tuple[str, str]:
        """Return one of the warm-up."""
        weights = [math.exp(-size / self.usual_size) for size in self.sizes]
        return self.question(rng, rng.choices(self.sizes, weights)[0])

    def rows(self, rng: random.Random) -> list[tuple[str, str]]:
        sizes = self.sizes
        return [self.question(rng, sizes[i % len(sizes)]) for i in range(self.num_rows)]


def reversal(rng: random.Random, length: int) -> tuple[str, str]:
    text = "".join(rng.choices("abcdefghij", k=length))
    return f"{text}>", text[::-1]


def counting(rng: random.Random, length: int) -> tuple[str, str]:
    text = "".join(rng.choices("abc", k=length))
    return f"{text}:a>", "a" * text.count("a")


class Generated(DatasetEnv):
    """Questions of the size that is chosen."""

    task: ClassVar[Task]

    async def get_next_item(self) -> tuple[str, str]:
        size = int(self.choose_class(list(map(str, self.task.sizes))))
        self.num_items += 1
        return self.task.question(random.Random(f"{self.config.seed}:{self.num_items}"), size)

    def item_class(self, item: tuple[str, str]) -> str:
        return str(item[0].index(">" if ":" not in item[0] else ":"))


TASKS = {
    "reversal": Task(
        question=reversal, sizes=range(2, 25), usual_size=4.0, start=0.17, num_tokens=60_000
    ),
    "counting": Task(
        question=counting, sizes=range(4, 61, 4), usual_size=5.0, start=0.2, num_tokens=40_000
    ),
    "300 rows": Task(
        question=reversal,
        sizes=range(2, 17),
        usual_size=3.0,
        start=0.25,
        num_rows=300,
        num_tokens=100_000,
    ),
    "medium": Task(
        question=reversal,
        sizes=range(3, 11),
        usual_size=math.inf,
        start=0.35,
        num_rows=300,
        num_tokens=70_000,
    ),
}
NUM_HELDOUT, WAVE, NUM_TEACHING, EVALUATED_EVERY = 300, 24, 8, 3
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
            model, tokenizer, [task.imitated(rng) for _ in range(64)]
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
    env_cls = DatasetEnv if task.num_rows else Generated
    Generated.task = task
    env = served(env_cls, task.rows(random.Random(seed)), seed=seed, choice=choice)
    heldout = [task.fresh(random.Random(f"held out {i}")) for i in range(NUM_HELDOUT)]
    model = Model(task, model_dir, seed=seed)
    num_tokens = num_groups = num_taught = 0
    curve = [(0, model.success(heldout))]
    teaching: list[ScoredGroup] = []
    while num_tokens < task.num_tokens:
        items = [asyncio.run(env.get_next_item()) for _ in range(WAVE)]
        for item, group in zip(items, model.sample(items), strict=True):
            scores = group.scores.tolist()
            env.note_scores(item, scores)
            num_tokens += int((group.masks >= 0).sum())
            num_groups += 1
            if len(set(scores)) > 1:
                num_taught += 1
                teaching.append(group)
        while len(teaching) >= NUM_TEACHING:
            model.step(teaching[:NUM_TEACHING])
            del teaching[:NUM_TEACHING]
            if model.num_steps % EVALUATED_EVERY == 0:
                curve.append((num_tokens, model.success(heldout)))
    cpu_s = time.process_time() - began_s
    return {
        "share": num_taught / num_groups,
        "curve": curve,
        "cpu_s": cpu_s,
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
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/item_choice"))
    options = parser.parse_args()
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
