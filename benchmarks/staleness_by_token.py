"""What is lost if staleness is judged by a group's oldest token, where answers outlive the bound?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/staleness_by_token.py` runs the demo's engine and model in one
process. Time is counted in decoded tokens, so that runs repeat. A step takes so many of them and then changes the
engine's weights under the answers in flight. Groups pass the hub's rule, then the trainer's `make_batch`. Arms: "group"
throws away groups whose oldest token is beyond the bound, "token" does what hub and trainer do, "none" has no bound.

90 % of the answers take 4 tokens, 10 % take 240, and nothing is trained.
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
from typing import NamedTuple

import torch
import transformers

from atroposlib.cli._demo.commands import GROUP_SIZE
from atroposlib.cli._demo.tiny_model import build_model, build_tokenizer
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
from example_trainer.data import DataOptions, make_batch

ARMS = ("group", "token", "none")
GROUPS_PER_STEP = 4
LETTERS = "abcdefghij"
SHORT, LONG, LONG_SHARE = 4, 240, 0.1
STEP_TOKENS, GROUPS_IN_FLIGHT, BOUND, SPREAD_TOKENS = 20, 28, 3, 8
"""Decoded tokens of a step; groups; policy versions; decoded tokens between the first groups."""


class Asked(NamedTuple):
    prompt: list[int]
    parts: list[Future[list[Completion]]]


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
        self.in_flight: list[Asked] = []
        self.queue: deque[ScoredGroup] = deque()
        self.counts: Counter[str] = Counter()
        """Decoded tokens of the clock; rollouts, long ones and tokens, sampled and thrown away."""

    def decode(self, num_tokens: int) -> None:
        """Decode so many tokens of every answer in flight; groups that finish are queued, and others asked."""
        for _ in range(num_tokens):
            most = min(1 + self.counts["clock"] // SPREAD_TOKENS, GROUPS_IN_FLIGHT)
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
        lengths = [LONG if self.random.random() < LONG_SHARE else SHORT for _ in range(GROUP_SIZE)]
        params = [SamplingParams(max_tokens=each, ignore_eos=True) for each in lengths]
        return Asked(prompt, [self.engine.submit(EngineRequest(prompt, p)) for p in params])

    def _scored(self, asked: Asked) -> ScoredGroup:
        start = len(asked.prompt)
        answers = [answer for part in asked.parts for answer in part.result()]
        spans = [place_spans(answer.weight_versions, start=start) for answer in answers]
        group = check_group(
            {
                "tokens": [asked.prompt + answer.token_ids for answer in answers],
                "masks": [[IGNORE_INDEX] * start + answer.token_ids for answer in answers],
                "scores": [float(i % 2) for i in range(len(answers))],
                "inference_logprobs": [[MASKED_LOGPROB] * start + a.logprobs for a in answers],
                "policy_version": min(int(each["weight_version"]) for row in spans for each in row),
                "weight_versions": spans,
            },
            strictness=Strictness.MEANING,
        )
        self.counts["tokens"] += group.num_trained
        self.counts["long"] += int((group.lengths > LONG).sum())
        return group


def run(model: Path, *, arm: str, clock: int, seed: int) -> Counter[str]:
    """Sample and take steps until the clock has decoded so many tokens; return counts."""
    options = DataOptions(seq_len=LONG + SHORT, max_sequences=64, max_tokens=32768)
    sampler = Sampler(model, arm=arm, seed=seed)
    counts, version = sampler.counts, 0
    while True:
        oldest = None if arm == "none" else version - BOUND
        sampler.decode(STEP_TOKENS)
        sampler.expire(oldest)
        while len(sampler.queue) < GROUPS_PER_STEP and counts["clock"] < clock:
            counts["waited"] += 1
            sampler.decode(1)
            sampler.expire(oldest)
        if counts["clock"] >= clock:
            break
        groups = [sampler.queue.popleft() for _ in range(GROUPS_PER_STEP)]
        batch = make_batch(groups, options, oldest_version=oldest)
        counts["trained_long"] += sum(len(row.tokens) >= LONG for row in batch.rows)
        counts["too_old_tokens"] += sum(batch.num_too_old)
        version += 1
        sampler.engine.set_weight_version(str(version)).result()
    sampler.engine.close()
    counts["steps"] = version
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", type=int, default=600, help="decoded tokens of a run")
    options = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    columns = ("arm", "steps", "waits", "too old", "thrown away", "long answers trained", "CPU s")
    table = Table("Answers of 4 and of 240 tokens", *columns)
    with TemporaryDirectory() as directory:
        tokenizer = build_tokenizer()
        for part in (build_model(tokenizer, seed=options.seed), tokenizer):
            part.save_pretrained(directory)
        for arm in options.arms.split(","):
            began_s = time.process_time()
            counts = run(Path(directory), arm=arm, clock=options.clock, seed=options.seed)
            shares = [
                f"{counts[part] / counts[whole]:.0%}"
                for part, whole in (
                    ("waited", "clock"),
                    ("too_old_tokens", "tokens"),
                    ("thrown_tokens", "tokens"),
                )
            ]
            long = f"{counts['trained_long']} of {counts['long']}"
            table.row(arm, counts["steps"], *shares, long, time.process_time() - began_s)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
