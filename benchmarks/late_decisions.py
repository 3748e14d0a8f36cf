"""Is a decision learned that comes at the end of an answer, where answers outlive the staleness bound?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/late_decisions.py` runs the demo's engine, model and trainer in one
process. Time is counted in decoded tokens, so that runs repeat: a step takes so many of them and then changes the
engine's weights under the answers in flight. Groups pass the hub's rule, then the trainer's `make_batch`. Arms: "group"
throws away groups whose oldest token is beyond the bound, "token" does what hub and trainer do, "none" has no bound.

Half of the prompts, such as `b>`, are answered by a letter; to the others, such as `:b`, the answer is `WORK` and then
a letter. Warmed up, the model answers the short ones, does the work, and guesses the long ones' letter among four.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers

from atroposlib.cli._demo.commands import GROUP_SIZE, TRAINER_RECIPE
from atroposlib.cli._demo.tiny_model import build_model, build_tokenizer
from atroposlib.config import parse_flags
from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import load
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import PauseMode
from atroposlib.engine.sequences import Completion, EngineRequest
from atroposlib.inference.servers.sampling_notes import place_spans
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

ARMS = ("group", "token", "none")
LETTERS, ANSWERS = "abcd", "wxyz-.?"
WORK = "0123456789efghijklmnopqrstuv+,="
KINDS = {"{}>": "", ":{}": WORK}
"""Prompt, and what the answer begins with."""
GROUPS_PER_STEP, GROUPS_IN_FLIGHT = 4, 16
STEP_TOKENS, BOUND, SPREAD_TOKENS = 6, 2, 2
"""Decoded tokens of a step; policy versions; decoded tokens between the first groups."""


class Question(NamedTuple):
    prompt: str
    work: str
    guesses: list[str]
    """The letters that the warmed-up model answers, the right one first."""


class Asked(NamedTuple):
    question: Question
    part: Future[list[Completion]]


class Chances(NamedTuple):
    short: float
    """Of a right answer to a short prompt, like `long`."""
    long: float
    letter: float
    """Of the right letter after the work of a long answer, if that is right."""


class Run(NamedTuple):
    counts: Counter[str]
    chances: list[Chances]
    """After each number of steps."""
    cpu_s: float


def questions(seed: int) -> list[Question]:
    generator = random.Random(seed)
    return [
        Question(prompt.format(letter), work, guesses)
        for prompt, work in KINDS.items()
        for guesses in [generator.sample(ANSWERS, 4 if work else 1)]
        for letter in LETTERS
    ]


class Sampler:
    """The engine, the groups in flight and the hub's queue, on one clock."""

    def __init__(self, model: Path, *, arm: str, seed: int) -> None:
        self.arm = arm
        self.engine, self.tokenizer, *_ = load(
            EngineConfig(model=str(model), max_num_seqs=512, seed=seed)
        )
        self.engine.start()
        self.engine.pause(PauseMode.KEEP).result()
        self.random = random.Random(seed)
        self.questions = questions(seed)
        self.in_flight: list[Asked] = []
        self.queue: deque[ScoredGroup] = deque()
        self.counts: Counter[str] = Counter()
        """Decoded tokens of the clock; rollouts and tokens, sampled and thrown away."""

    def decode(self, num_tokens: int) -> None:
        """Decode so many tokens of every answer in flight; groups that finish are queued, and others asked."""
        for _ in range(num_tokens):
            most = min(1 + self.counts["clock"] // SPREAD_TOKENS, GROUPS_IN_FLIGHT)
            while len(self.in_flight) < most and len(self.queue) < GROUPS_PER_STEP:
                self.in_flight.append(self._ask())
            # Paused, so that the weights change after exactly so many tokens.
            self.engine.control(self.engine._step).result()
            self.counts["clock"] += 1
            done = [each for each in self.in_flight if each.part.done()]
            self.in_flight = [each for each in self.in_flight if not each.part.done()]
            self.queue += map(self._scored, done)

    def expire(self, oldest: int | None) -> None:
        """Throw the queued groups away that are too old."""
        kept: deque[ScoredGroup] = deque()
        for group in self.queue:
            version = group.policy_version if self.arm == "group" else group.newest_version
            assert version is not None
            if oldest is None or version >= oldest:
                kept.append(group)
            else:
                self.counts["thrown_tokens"] += group.num_trained
        self.queue = kept

    def _ask(self) -> Asked:
        question = self.random.choice(self.questions)
        params = SamplingParams(n=GROUP_SIZE, max_tokens=len(question.work) + 2)
        request = EngineRequest(self.tokenizer.encode(question.prompt), params)
        return Asked(question, self.engine.submit(request))

    def _scored(self, asked: Asked) -> ScoredGroup:
        question, answers = asked.question, asked.part.result()
        prompt = self.tokenizer.encode(question.prompt)
        right = self.tokenizer.encode(question.work + question.guesses[0])
        right.append(self.tokenizer.eos_token_id)
        start = len(prompt)
        spans = [place_spans(answer.weight_versions, start=start) for answer in answers]
        group = check_group(
            {
                "tokens": [prompt + answer.token_ids for answer in answers],
                "masks": [[IGNORE_INDEX] * start + answer.token_ids for answer in answers],
                "scores": [float(answer.token_ids == right) for answer in answers],
                "inference_logprobs": [[MASKED_LOGPROB] * start + a.logprobs for a in answers],
                "policy_version": min(int(each["weight_version"]) for row in spans for each in row),
                "weight_versions": spans,
            },
            strictness=Strictness.MEANING,
        )
        self.counts["tokens"] += group.num_trained
        self.counts["long"] += len(answers) if question.work else 0
        return group


def answer_logprobs(model: Any, tokenizer: Any, texts: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Return [B, T] the logprobs of each answer to its prompt, all of one kind."""
    start = len(texts[0][0])
    rows = [
        [*tokenizer.encode(prompt + answer), tokenizer.eos_token_id] for prompt, answer in texts
    ]
    tokens_BT = torch.tensor(rows)
    table_BTV = model(tokens_BT).logits[:, start - 1 : -1].log_softmax(-1)
    return table_BTV.gather(-1, tokens_BT[:, start:, None])[..., 0]


def warm_up(target: Path, *, seed: int, steps: int) -> None:
    """Save a model that does the work and guesses."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
    generator = random.Random(seed)
    by_kind = [list(each) for _, each in itertools.groupby(questions(seed), lambda q: q.work)]
    for step in range(steps):
        for settings in optimizer.param_groups:
            settings["lr"] = 4e-3 * min((step + 1) / 20, 1 - step / steps)
        for kind in by_kind:
            asked = [(q.prompt, q.work + generator.choice(q.guesses)) for q in kind]
            (-answer_logprobs(model, tokenizer, asked).sum(1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@torch.no_grad()
def chances(model: Any, tokenizer: Any, asked: Sequence[Question]) -> Chances:
    """Return the exact probabilities at temperature 1, means over the prompts."""
    short, long = (
        answer_logprobs(model, tokenizer, [(q.prompt, q.work + q.guesses[0]) for q in each])
        for _, each in itertools.groupby(asked, lambda q: q.work)
    )
    return Chances(
        short=float(short.sum(1).exp().mean()),
        long=float(long.sum(1).exp().mean()),
        letter=float(long[:, -2].exp().mean()),
    )


def run(model: Path, *, arm: str, steps: int, seed: int) -> Run:
    """Sample and train until so many steps are taken."""
    began_s = time.process_time()
    settings = TRAINER_RECIPE | {"model_name": model, "num_steps": steps, "seed": seed}
    settings |= {
        "device": "cpu",
        "threads": 1,
        "seq_len": 64,
        "lr_schedule": "constant",
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    config = parse_flags(TrainerConfig, flags, prog="late_decisions")
    policy = load_policy(config)
    optimizer, options = make_optimizer(policy, config), data_options(config, policy)
    sampler, gap = Sampler(model, arm=arm, seed=seed), LogprobGap(policy, limit=None)
    counts = sampler.counts
    curve = [chances(policy.model, sampler.tokenizer, sampler.questions)]
    for version in range(steps):
        oldest = None if arm == "none" else version - BOUND
        sampler.decode(STEP_TOKENS)
        sampler.expire(oldest)
        while len(sampler.queue) < GROUPS_PER_STEP:
            counts["waited"] += 1
            sampler.decode(1)
            sampler.expire(oldest)
        groups = [sampler.queue.popleft() for _ in range(GROUPS_PER_STEP)]
        batch = make_batch(groups, options, oldest_version=oldest)
        counts["received_long"] += sum(
            group.num_sequences for group in groups if group.lengths.max() > 4
        )
        counts["trained_long"] += sum(len(row.tokens) > 4 for row in batch.rows)
        counts["trained_short"] += sum(len(row.tokens) <= 4 for row in batch.rows)
        counts["too_old_tokens"] += sum(batch.num_too_old)
        take_step(policy, optimizer, batch, config, version, gap)
        curve.append(chances(policy.model, sampler.tokenizer, sampler.questions))
        weights = policy.model.state_dict()
        sampler.engine.reload(weights, weight_version=str(version + 1)).result()
    sampler.engine.close()
    return Run(counts, curve, time.process_time() - began_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=300, help="steps of the warm-up")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    marks = [options.steps * part // 4 for part in range(5)]
    table = Table(
        "Chance of a right answer after so many steps, long / short prompts",
        "arm",
        "seed",
        *map(str, marks),
        "letter of long answers",
        "waits",
        "too old",
        "thrown away",
        "rollouts trained, long / short",
        "long sampled",
        "CPU s",
    )
    with TemporaryDirectory() as directory:
        for seed in map(int, options.seeds.split(",")):
            model = Path(directory) / str(seed)
            warm_up(model, seed=seed, steps=options.warm_up)
            for arm in options.arms.split(","):
                found = run(model, arm=arm, steps=options.steps, seed=seed)
                counts, curve = found.counts, found.chances
                table.row(
                    arm,
                    seed,
                    *(f"{curve[mark].long:.2f} / {curve[mark].short:.2f}" for mark in marks),
                    f"{curve[0].letter:.2f} -> {curve[-1].letter:.2f}",
                    f"{counts['waited'] / counts['clock']:.0%}",
                    f"{counts['too_old_tokens'] / counts['tokens']:.0%}",
                    f"{counts['thrown_tokens'] / counts['tokens']:.0%}",
                    f"{counts['trained_long']} / {counts['trained_short']}",
                    counts["long"],
                    found.cpu_s,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
