"""What is lost if staleness is judged by a group's oldest token, where answers outlive the bound?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/staleness_by_token.py` runs the demo's engine and model in one
process. Time is counted in decoded tokens, so that runs repeat. A step takes so many of them and then changes the
engine's weights under the answers in flight. Groups pass the hub's rule, then the trainer's `make_batch`. Arms: "group"
throws away groups whose oldest token is beyond the bound, "token" does what hub and trainer do, "none" has no bound.

`bimodal`: 90 % of the answers take 4 tokens, 10 % take 240; nothing is trained. `learning`: 60 % of the prompts are
easy: their answers are right and end after 4 tokens, so they feed the trainer and teach nothing. The answer to the
others is 24 tokens of work, the letter of the prompt, and the end; the model is warmed up to do the work and to guess
the letter.
"""

from __future__ import annotations

import argparse
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
GROUPS_PER_STEP = 4
LETTERS = "abcd"
WORK = "0123456789+=klmnopqrstuv"
"""What an answer begins with."""
SHORT, LONG, LONG_SHARE, EASY_SHARE = 4, 240, 0.1, 0.6


class Setting(NamedTuple):
    """How time passes, in decoded tokens and policy versions; the first groups begin `spread_tokens` apart."""

    step_tokens: int
    groups_in_flight: int
    bound: int
    max_tokens: int
    is_trained: bool
    spread_tokens: int


BIMODAL = Setting(
    20, groups_in_flight=28, bound=3, max_tokens=LONG, is_trained=False, spread_tokens=8
)
LEARNING = Setting(
    8, groups_in_flight=12, bound=2, max_tokens=len(WORK) + 4, is_trained=True, spread_tokens=0
)


class Run(NamedTuple):
    """What a run counted, and the chance of a right answer at times of its clock: at the start and after each step."""

    counts: Counter[str]
    chances: list[tuple[int, float]]
    cpu_s: float

    @property
    def token_shares(self) -> list[str]:
        """Of the sampled tokens: those without a gradient for their age, and those in groups that were thrown away."""
        names = ("too_old_tokens", "thrown_tokens")
        return [f"{self.counts[name] / self.counts['tokens']:.0%}" for name in names]


class Asked(NamedTuple):
    prompt: list[int]
    is_easy: bool
    parts: list[Future[list[Completion]]]


class Sampler:
    """The engine, the groups in flight and the hub's queue, on one clock."""

    def __init__(self, setting: Setting, model: Path, *, arm: str, seed: int) -> None:
        self.setting, self.arm = setting, arm
        self.engine, self.tokenizer, *_ = load(
            EngineConfig(model=str(model), max_num_seqs=512, seed=seed)
        )
        self.engine.start()
        self.engine.pause(PauseMode.KEEP).result()
        self.random = random.Random(seed)
        self.in_flight: list[Asked] = []
        self.queue: deque[ScoredGroup] = deque()
        self.counts: Counter[str] = Counter()
        """Decoded tokens of the clock; rollouts, long ones and tokens, sampled and thrown away."""

    def decode(self, num_tokens: int) -> None:
        """Decode so many tokens of every answer in flight; groups that finish are queued, and others asked."""
        for _ in range(num_tokens):
            spread = self.setting.spread_tokens
            begun = 1 + self.counts["clock"] // spread if spread else self.setting.groups_in_flight
            most = min(begun, self.setting.groups_in_flight)
            while len(self.in_flight) < most and len(self.queue) < GROUPS_PER_STEP:
                self.in_flight.append(self._ask())
            # Paused, so that the weights change after exactly so many tokens.
            self.engine.control(self.engine._step).result()
            self.counts["clock"] += 1
            done = [each for each in self.in_flight if all(part.done() for part in each.parts)]
            self.in_flight = [each for each in self.in_flight if each not in done]
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
        prompt = self.tokenizer.encode(self.random.choice(LETTERS) + ">")
        is_easy = self.setting.is_trained and self.random.random() < EASY_SHARE
        lengths = [SHORT if is_easy else self.setting.max_tokens] * GROUP_SIZE
        if not self.setting.is_trained:
            lengths = [LONG if self.random.random() < LONG_SHARE else SHORT for _ in lengths]
        ignores_end = is_easy or not self.setting.is_trained
        requests = [
            EngineRequest(prompt, SamplingParams(max_tokens=each, ignore_eos=ignores_end))
            for each in lengths
        ]
        return Asked(prompt, is_easy, [self.engine.submit(each) for each in requests])

    def _scored(self, asked: Asked) -> ScoredGroup:
        start = len(asked.prompt)
        answers = [answer for part in asked.parts for answer in part.result()]
        spans = [place_spans(answer.weight_versions, start=start) for answer in answers]
        group = check_group(
            {
                "tokens": [asked.prompt + answer.token_ids for answer in answers],
                "masks": [[IGNORE_INDEX] * start + answer.token_ids for answer in answers],
                "scores": [self._score(i, asked, answer) for i, answer in enumerate(answers)],
                "inference_logprobs": [[MASKED_LOGPROB] * start + a.logprobs for a in answers],
                "policy_version": min(int(each["weight_version"]) for row in spans for each in row),
                "weight_versions": spans,
            },
            strictness=Strictness.MEANING,
        )
        self.counts["tokens"] += group.num_trained
        self.counts["long"] += int((group.lengths > LONG).sum())
        return group

    def _score(self, number: int, asked: Asked, answer: Completion) -> float:
        if not self.setting.is_trained:
            return float(number % 2)
        if asked.is_easy:
            return 1.0
        right = self.tokenizer.encode(WORK + self.tokenizer.decode(asked.prompt[:1]))
        return float(answer.token_ids == [*right, self.tokenizer.eos_token_id])


def warm_up(target: Path, *, seed: int, steps: int = 100) -> None:
    """Save a model that does the work and ends with any letter."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = random.Random(seed)
    for _ in range(steps):
        pairs = [generator.choices(LETTERS, k=2) for _ in range(16)]
        loss = -answer_logprobs(model, tokenizer, pairs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def answer_logprobs(model: Any, tokenizer: Any, pairs: Sequence[Sequence[str]]) -> torch.Tensor:
    """Return [B, T] the logprobs of the answer to each first letter that ends with the second one."""
    rows = [[*tokenizer.encode(f"{a}>{WORK}{b}"), tokenizer.eos_token_id] for a, b in pairs]
    tokens_BT = torch.tensor(rows)
    table_BTV = model(tokens_BT).logits[:, 1:-1].log_softmax(-1)
    return table_BTV.gather(-1, tokens_BT[:, 2:, None])[..., 0]


def chance(model: Any, tokenizer: Any) -> float:
    """Return the exact probability of a right answer at temperature 1, over all prompts."""
    with torch.no_grad():
        logprobs_BT = answer_logprobs(model, tokenizer, [each * 2 for each in LETTERS])
    return float(logprobs_BT.sum(1).exp().mean())


def run(setting: Setting, model: Path, *, arm: str, clock: int, seed: int) -> Run:
    """Sample and take steps until the clock has decoded so many tokens."""
    began_s = time.process_time()
    settings = TRAINER_RECIPE | {"model_name": model, "num_steps": clock, "seed": seed}
    settings |= {"device": "cpu", "threads": 1, "seq_len": LONG + SHORT, "lr": 1e-3}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    config = parse_flags(TrainerConfig, flags, prog="staleness_by_token")
    policy = load_policy(config)
    optimizer, options = make_optimizer(policy, config), data_options(config, policy)
    sampler, gap = Sampler(setting, model, arm=arm, seed=seed), LogprobGap(policy, limit=None)
    counts = sampler.counts
    chances = [(0, chance(policy.model, sampler.tokenizer))]
    version = 0
    while counts["clock"] < clock:
        oldest = None if arm == "none" else version - setting.bound
        sampler.decode(setting.step_tokens)
        sampler.expire(oldest)
        while len(sampler.queue) < GROUPS_PER_STEP and counts["clock"] < clock:
            counts["waited"] += 1
            sampler.decode(1)
            sampler.expire(oldest)
        if len(sampler.queue) < GROUPS_PER_STEP:
            break
        groups = [sampler.queue.popleft() for _ in range(GROUPS_PER_STEP)]
        batch = make_batch(groups, options, oldest_version=oldest)
        counts["trained_long"] += sum(len(row.tokens) >= LONG for row in batch.rows)
        counts["too_old_tokens"] += sum(batch.num_too_old)
        weights: dict[str, torch.Tensor] = {}
        if setting.is_trained:
            take_step(policy, optimizer, batch, config, version, gap)
            chances.append((counts["clock"], chance(policy.model, sampler.tokenizer)))
            weights = policy.model.state_dict()
        version += 1
        sampler.engine.reload(weights, weight_version=str(version)).result()
    counts["steps"] = version
    sampler.engine.close()
    return Run(counts, chances, time.process_time() - began_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("bimodal", "learning"))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--clock", type=int, default=800, help="decoded tokens of a run")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    seeds, arms = list(map(int, options.seeds.split(","))), options.arms.split(",")
    tokens = ("too old", "thrown away", "CPU s")
    with TemporaryDirectory() as directory:
        models = {seed: Path(directory) / str(seed) for seed in seeds}
        for seed, model in models.items():
            warm_up(model, seed=seed)
        if options.only != "learning":
            columns = ("arm", "steps", "waits", "long trained", *tokens)
            table = Table("Answers of 4 and of 240 tokens", *columns)
            for arm in arms:
                model = models[seeds[0]]
                found = run(BIMODAL, model, arm=arm, clock=options.clock, seed=seeds[0])
                counts = found.counts
                waits = f"{counts['waited'] / counts['clock']:.0%}"
                long = f"{counts['trained_long']} of {counts['long']}"
                table.row(arm, counts["steps"], waits, long, *found.token_shares, found.cpu_s)
        if options.only != "bimodal":
            marks = range(0, options.clock + 1, max(1, options.clock // 4))
            columns = ("arm", "seed", *(f"at {mark}" for mark in marks), "steps")
            table = Table("Chance of a right answer", *columns, *tokens)
            for seed, model in models.items():
                for arm in arms:
                    found = run(LEARNING, model, arm=arm, clock=options.clock, seed=seed)
                    at = [
                        [chance for when, chance in found.chances if when <= m][-1] for m in marks
                    ]
                    steps = found.counts["steps"]
                    table.row(arm, seed, *at, steps, *found.token_shares, found.cpu_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
