"""What does an optimizer step cost beside TRL's, what does it cost beside the model, and how much memory?

`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/trainer.py --trl_python /path/to/venv/bin/python`: the other
environment holds `trl` and the same torch. Both sides load the same random Qwen2 and take the same steps over the same
completions, each run a process of its own, in turn; their losses and gradient norms are compared, so that a row cannot
come from less work. A step is everything from groups (TRL: padded tensors) to cleared gradients, metrics included.
`--gpu` is half a billion parameters in bfloat16 at 2,048 and 8,192 tokens. `--only step,beside,head` picks questions.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._trainer_measure import Batch, Result, Spec, write

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
"""Qwen2; the larger one is Qwen2.5-0.5B's."""
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference of losses and gradient norms beyond which the two sides did not do the same."""


class Run(NamedTuple):
    """One side's results over the repeats, and what a step of it trained."""

    results: list[Result]
    num_tokens: int
    num_trained: int

    @property
    def cpu_s(self) -> float:
        return statistics.median(s for result in self.results for s in result.cpu_s)

    @property
    def wall_s(self) -> float:
        return statistics.median(s for result in self.results for s in result.wall_s)

    @property
    def peak_bytes(self) -> float:
        return statistics.median(result.peak_bytes for result in self.results)


def make_model(directory: Path, shape: str, *, vocabulary: int, seq_len: int) -> None:
    """Save a model with random weights, and a byte-level tokenizer that only names the special tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny_model import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=vocabulary,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_step(spec: Spec, *, vocabulary: int, mixed: bool) -> Batch:
    """Return completions of random tokens, as long as they may be, or of any length from a sixteenth of that.

    A model with random weights finds every token about as likely, so that sampled logprobs of -log V with noise give
    ratios around 1, some beyond the clip.
    """
    from atroposlib.samples import group_advantages

    rng = np.random.default_rng(0)
    num_sequences = spec.sequences_per_micro_batch * spec.num_micro_batches
    longest = spec.seq_len - spec.prompt_len
    shortest = max(1, longest // 16) if mixed else longest
    lengths = rng.integers(shortest, longest + 1, num_sequences)
    lengths[0] = longest
    scores = rng.random(num_sequences)
    by_group = scores.reshape(-1, spec.group_size)
    return Batch(
        tokens=[rng.integers(0, vocabulary, spec.prompt_len + n) for n in lengths],
        logprobs=[
            np.minimum(rng.normal(-math.log(vocabulary), 0.2, n), 0).astype(np.float32)
            for n in lengths
        ],
        scores=scores,
        advantages=np.concatenate([group_advantages(group) for group in by_group]),
    )


def run_side(module: str, python: str, directory: Path) -> Result:
    """Run one side as a process and return what it printed last."""
    run = subprocess.run(
        [python, "-m", f"benchmarks.{module}", str(directory)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise SystemExit(
            f"{python} -m benchmarks.{module} ended with {run.returncode}:\n{run.stderr}"
        )
    return Result(**json.loads(run.stdout.rstrip().splitlines()[-1]))


def same_work(ours: Result, theirs: Result, spec: Spec) -> bool:
    tolerance = LOSS_TOLERANCE[spec.dtype]
    # TRL logs five digits; a loss near 0 is compared with the size of its terms, which is about 1.
    losses = np.allclose(ours.losses, theirs.losses, rtol=tolerance, atol=tolerance)
    return losses and np.allclose(ours.grad_norms, theirs.grad_norms, rtol=10 * tolerance)


def compare(
    directory: Path, spec: Spec, batch: Batch, options: argparse.Namespace
) -> dict[str, Run]:
    """Run both sides in turn; SystemExit when their numbers show that they did different work."""
    write(directory, spec, batch)
    sides = {"atropos": ("_trainer_ours", sys.executable)}
    if options.trl_python:
        sides["TRL"] = ("_trainer_trl", options.trl_python)
    num_tokens = sum(map(len, batch.tokens))
    num_trained = sum(map(len, batch.logprobs))
    runs = {name: Run([], num_tokens, num_trained) for name in sides}
    for _ in range(options.repeats):
        for name, (module, python) in sides.items():
            runs[name].results.append(run_side(module, python, directory))
            last = runs[name].results[-1]
            print(
                f"  {name}: CPU {_joined(last.cpu_s)} s, wall {_joined(last.wall_s)} s,"
                f" peak {last.peak_bytes / 1e6:.0f} MB, losses {_joined(last.losses, 6)} ({last.note})",
                file=sys.stderr,
                flush=True,
            )
    if "TRL" in runs and not same_work(runs["atropos"].results[0], runs["TRL"].results[0], spec):
        raise SystemExit("losses or gradient norms differ: the two sides did not do the same work")
    return runs


def rows_of(
    case: str, runs: dict[str, Run], spec: Spec, options: argparse.Namespace
) -> Iterator[list[str]]:
    baseline = runs["atropos"]
    for name, run in runs.items():
        result = run.results[0]
        flops = 6 * result.num_parameters * run.num_tokens
        on_gpu = spec.device != "cpu"
        cost, ours = (run.wall_s, baseline.wall_s) if on_gpu else (run.cpu_s, baseline.cpu_s)
        yield [
            case,
            name,
            "-" if on_gpu else f"{1e3 * run.cpu_s / run.num_trained:.3f}",
            f"{run.num_tokens / run.wall_s:,.0f}",
            f"{flops / run.wall_s / (1e12 * options.peak_tflops):.1%}" if on_gpu else "-",
            f"{run.peak_bytes / 1e6:,.0f}",
            f"{cost / ours:.2f} / {run.peak_bytes / baseline.peak_bytes:.2f}",
            f"{result.losses[0]:.6f} / {result.grad_norms[0]:.4f}",
        ]
    if "TRL" not in runs:
        yield [case, "TRL", "not measured: no --trl_python", *["-"] * 5]


def spec_of(options: argparse.Namespace, seq_len: int) -> Spec:
    return Spec(
        device=options.device,
        dtype=options.dtype,
        attention=options.attention,
        checkpointing=options.checkpointing,
        packing=options.packing,
        sequences_per_micro_batch=options.micro_batch,
        num_micro_batches=options.sequences // options.micro_batch,
        group_size=options.group_size,
        seq_len=seq_len,
        prompt_len=seq_len // 8,
        lr=1e-5,
        clip=0.2,
        max_grad_norm=1.0,
        warmup_steps=1,
        steps=options.steps,
        threads=options.threads,
    )


def measure_steps(options: argparse.Namespace) -> Iterator[list[str]]:
    for seq_len in options.seq_len:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            make_model(
                directory / "model", options.shape, vocabulary=options.vocabulary, seq_len=seq_len
            )
            for lengths in options.lengths:
                spec = spec_of(options, seq_len)
                batch = make_step(spec, vocabulary=options.vocabulary, mixed=lengths == "mixed")
                runs = compare(directory, spec, batch, options)
                yield from rows_of(
                    f"{options.sequences} x {seq_len}, {lengths}", runs, spec, options
                )


def measure_beside(options: argparse.Namespace) -> Iterator[list[str]]:
    from benchmarks._trainer_costs import costs

    for cost in costs(*options.beside):
        yield [
            cost.name,
            f"{1e3 * cost.cpu_s:,.1f}",
            f"{1e9 * cost.cpu_s / cost.num_tokens:,.1f}",
        ]


def measure_head(options: argparse.Namespace) -> Iterator[list[str]]:
    """Each in a process of its own, since memory once used stays with a process."""
    for num_positions, vocabulary in ((2048, 32_000), (4096, 152_000), (16_384, 152_000)):
        what = [str(num_positions), str(vocabulary), "64", options.device, options.dtype]
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks._trainer_head", *what],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(run.stdout)
        peak, logits, cpu_s = found["peak_bytes"], found["logits_bytes"], found["cpu_s"]
        row = (num_positions, vocabulary, logits / 1e6, peak / 1e6)
        yield [f"{x:,.0f}" for x in row] + [f"{peak / logits:.3f}", f"{cpu_s:.1f}"]


def print_table(title: str, columns: Sequence[str], rows: Iterator[list[str]]) -> None:
    found = list(rows)
    print(f"\n### {title}\n\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in found:
        print("| " + " | ".join(row) + " |")
    sys.stdout.flush()


def _joined(values: Sequence[float], digits: int = 2) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="step,beside,head", type=lambda text: text.split(","))
    parser.add_argument("--trl_python", help="interpreter of an environment that has TRL")
    parser.add_argument("--gpu", action="store_true", help="the large case; other flags still win")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=list(LOSS_TOLERANCE))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--seq_len", type=_numbers)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--micro_batch", type=int, help="sequences")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, help="measured steps per process, after one to warm up"
    )
    parser.add_argument("--lengths", default="equal,mixed", type=lambda text: text.split(","))
    parser.add_argument("--attention", default="sdpa", help="of both; flash_attention_2")
    parser.add_argument("--packing", action="store_true", help="of our side; TRL pads")
    parser.add_argument("--checkpointing", action="store_true", help="of both")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peak_tflops", type=float, default=989.0, help="of the GPU; default: H100, dense bfloat16"
    )
    parser.add_argument(
        "--beside", type=_numbers, default=[64, 8, 2048], help="groups, sequences each, tokens each"
    )
    options = parser.parse_args(argv)
    small = {"device": "cpu", "dtype": "float32", "shape": "tiny", "vocabulary": 32_000, "steps": 1}
    small |= {"seq_len": [512], "sequences": 32, "micro_batch": 4}
    large = {"device": "cuda", "dtype": "bfloat16", "shape": "0.5b", "vocabulary": 151_936}
    large |= {"seq_len": [2048, 8192], "sequences": 32, "micro_batch": 4, "steps": 3}
    for name, value in (large if options.gpu else small).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options = parse()
    if "step" in options.only:
        memory = "peak above the model, MB"
        columns = ["step", "side", "CPU s per 1k trained tokens", "tokens/s", "MFU", memory]
        columns += ["time / memory, times ours", "first loss / gradient norm"]
        print_table(f"One optimizer step, {options.dtype}", columns, measure_steps(options))
    if "beside" in options.only:
        groups, members, tokens = options.beside
        title = f"Beside the model: {groups} groups of {members} x {tokens} tokens"
        print_table(title, ["what", "CPU ms", "ns per token"], measure_beside(options))
    if "head" in options.only:
        columns = ["positions", "vocabulary", "all logits, MB", "peak, MB", "share", "CPU s"]
        print_table("Memory of log-probabilities", columns, measure_head(options))


if __name__ == "__main__":
    main()
