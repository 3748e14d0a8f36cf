"""Does a correction help a model learn from groups that an older policy sampled?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/staleness.py` trains the demo's model on letter reversal, in one
process with the trainer's own `make_batch` and `take_step`. A queue of batches forces the staleness: each step samples
a batch and trains the one that was sampled so many steps ago. A cell is the expected accuracy on held-out prompts at
temperature 1 after the last step. Finished runs are read from `--out`; `--cells tis:4,none:1` measures some.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict, deque
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, get_args

import torch
import transformers

from atroposlib.cli._demo.commands import GROUP_SIZE, TRAINER_RECIPE
from atroposlib.cli._demo.warm_up import WarmUpConfig, encode_rows, sampling_accuracy, warm_up
from atroposlib.config import parse_flags
from atroposlib.scored_data import MASKED_LOGPROB, ScoredGroup, Strictness, check_group
from atroposlib.utils import letter_reversal as task
from benchmarks._table import Table
from example_trainer.config import TrainerConfig
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy, load_policy
from example_trainer.objective import Correction
from example_trainer.optim import make_optimizer
from example_trainer.step import data_options, describe_result, take_step
from example_trainer.training import set_up_torch

NUM_PROMPTS = 16
CELLS = [f"{correction}:{stale}" for stale in (0, 1, 2, 4) for correction in get_args(Correction)]
COLUMNS = ("accuracy", "clip_fraction", "rejected_fraction", "token_share_max", "cpu_s")


class Run(NamedTuple):
    """One training: correction, steps between sampling and training, and further flags of the trainer."""

    correction: str
    staleness: int
    seed: int
    steps: int
    flags: str


def sample(policy: Policy, questions: list[str], *, version: int) -> list[ScoredGroup]:
    """Return a group of answers per question, sampled from the policy at temperature 1."""
    end = policy.tokenizer.eos_token_id
    prompt_BT = torch.tensor(policy.tokenizer(questions)["input_ids"])
    out = policy.model.generate(
        prompt_BT,
        do_sample=True,
        top_k=0,
        max_new_tokens=task.MAX_ANSWER_TOKENS,
        num_return_sequences=GROUP_SIZE,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt_len = prompt_BT.shape[1]
    table_BTV = torch.stack(out.logits, dim=1).log_softmax(-1)
    logprobs_BT = table_BTV.gather(-1, out.sequences[:, prompt_len:, None])[..., 0]
    rows = zip(out.sequences.tolist(), logprobs_BT.tolist(), strict=True)
    groups = []
    for question in questions:
        group: dict[str, list[Any]] = defaultdict(list)
        for tokens, logprobs in islice(rows, GROUP_SIZE):
            answer = tokens[prompt_len:]
            has_ended = end in answer
            trained = answer[: answer.index(end) + 1] if has_ended else answer
            text = policy.tokenizer.decode(trained[: len(trained) - has_ended])
            group["scores"].append(float(task.is_correct(question, text, finished=has_ended)))
            group["tokens"].append(tokens[:prompt_len] + trained)
            group["masks"].append([-100] * prompt_len + trained)
            logprobs = [MASKED_LOGPROB] * prompt_len + logprobs[: len(trained)]
            group["inference_logprobs"].append(logprobs)
        checked = check_group(group, strictness=Strictness.MEANING)
        groups.append(checked.replace(policy_version=version))
    return groups


def train(run: Run, models: Path) -> dict[str, float]:
    """Return the `COLUMNS` of one training."""
    began_s = time.process_time()
    model_dir = models / str(run.seed)
    warm_up(WarmUpConfig(out=model_dir, seed=run.seed))
    settings = TRAINER_RECIPE | {"model_name": model_dir, "num_steps": run.steps, "seed": run.seed}
    settings |= {"device": "cpu", "threads": 1, "correction": run.correction}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    config = parse_flags(TrainerConfig, [*flags, *run.flags.split()], prog="staleness")
    set_up_torch(config)
    policy = load_policy(config)
    optimizer, options = make_optimizer(policy, config), data_options(config, policy)
    questions = task.prompts(task.Split.TRAIN, seed=1000 + run.seed)

    def sampled(version: int) -> list[ScoredGroup]:
        return sample(policy, list(islice(questions, NUM_PROMPTS)), version=version)

    waiting = deque(sampled(0) for _ in range(run.staleness))
    gap = LogprobGap(policy, limit=None)
    steps = []
    for step in range(run.steps):
        waiting.append(sampled(step))
        batch = make_batch(waiting.popleft(), options)
        result = take_step(policy, optimizer, batch, config, step, gap)
        steps.append(describe_result(result, batch))
    heldout = task.distinct_prompts(task.Split.HELDOUT, count=1000, seed=0)
    return {
        "accuracy": sampling_accuracy(policy.model, encode_rows(policy.tokenizer, heldout)),
        "clip_fraction": fmean(step["clip_fraction"] or 0.0 for step in steps),
        "rejected_fraction": fmean(step["rejected_fraction"] or 0.0 for step in steps),
        "token_share_max": max(step["token_share_max"] or 0.0 for step in steps),
        "cpu_s": time.process_time() - began_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default=",".join(CELLS), help="correction:staleness,...")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--flags", default="", help="further flags of the trainer, in one string")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {Run(*row["run"]): row["found"] for row in map(json.loads, lines)}
    table = Table("Held-out accuracy", "correction", "staleness", "by seed", *COLUMNS)
    for cell in options.cells.split(","):
        correction, staleness = cell.split(":")
        rest = (options.steps, options.flags)
        runs = [Run(correction, int(staleness), int(s), *rest) for s in options.seeds.split(",")]
        for run in runs:
            if run not in known:
                known[run] = train(run, options.out / "models")
                with path.open("a") as file:
                    file.write(json.dumps({"run": run, "found": known[run]}) + "\n")
        by_seed = ", ".join(f"{known[run]['accuracy']:.3f}" for run in runs)
        means = [fmean(known[run][name] for run in runs) for name in COLUMNS]
        table.row(correction, staleness, by_seed, *means)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
