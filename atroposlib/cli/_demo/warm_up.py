"""Supervised warm-up of the demo's model, in its own process: `python -m atroposlib.cli._demo.warm_up`.

Trains on the train split until the model's expected accuracy at temperature 1 is 25 % on the validation prompts; then
reinforcement learning has rewards to start from and most of the task left to learn. The number of steps varies: the
accuracy rises from 0.03 to 0.28 between steps 70 and 120. Writes a checkpoint for engines and trainers, and one JSON
line per check to `--progress`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.cli._demo.tiny_model import build_model, build_tokenizer
from atroposlib.config import parse_flags
from atroposlib.errors import AtroposError, cli_boundary
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.letter_reversal import Split, answer_to, distinct_prompts, prompts

LEARNING_RATE = 1.5e-3
LEARNING_RATE_WARMUP_STEPS = 20
BATCH_SIZE = 32
CHECK_EVERY_STEPS = 10
NUM_VALIDATION_PROMPTS = 200


class WarmUpConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    out: Path
    """Directory for the checkpoint."""
    progress: Path | None = None
    """JSON lines file, one line per check."""
    seed: int = 0
    """Seed of the weights and of the rows."""
    target_accuracy: float = Field(default=0.25, gt=0, le=1)
    """Stop at this validation accuracy at temperature 1."""
    max_steps: int = Field(default=400, ge=1)
    """Give up after this many steps."""


def main(argv: Sequence[str] | None = None) -> int:
    return cli_boundary(lambda: warm_up(parse_flags(WarmUpConfig, argv, prog="warm_up")))


def warm_up(config: WarmUpConfig) -> None:
    """Train until the target accuracy and save; AtroposError if `max_steps` do not reach it.

    A finished checkpoint in `out` is left as it is, so that a restarted run keeps its model.
    """
    if config.out.exists():
        print(f"{config.out} is there already")
        return
    import torch

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    training_prompts = prompts(Split.TRAIN, seed=config.seed)
    validation = encode_rows(
        tokenizer, distinct_prompts(Split.VALIDATION, count=NUM_VALIDATION_PROMPTS, seed=0)
    )
    accuracy = 0.0
    for step in range(1, config.max_steps + 1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = LEARNING_RATE * min(1.0, step / LEARNING_RATE_WARMUP_STEPS)
        batch = encode_rows(tokenizer, list(islice(training_prompts, BATCH_SIZE)))
        loss = -answer_logprobs(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY_STEPS:
            continue
        accuracy = sampling_accuracy(model, validation)
        _report(config.progress, step=step, loss=loss.item(), accuracy=accuracy)
        if accuracy >= config.target_accuracy:
            config.out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=config.out.parent) as unfinished:
                checkpoint = Path(unfinished) / "model"
                model.save_pretrained(checkpoint)
                tokenizer.save_pretrained(checkpoint)
                checkpoint.rename(config.out)
            return
    raise AtroposError(
        f"the warm-up reached a validation accuracy of {accuracy:.3f} in {config.max_steps} steps, "
        f"not target_accuracy={config.target_accuracy}; raise --max_steps or try another --seed"
    )


def encode_rows(tokenizer: Any, questions: Sequence[str]) -> Any:
    """Return `tokens` and `labels`, stacked as one tensor [2, B, T]; all rows have the same length."""
    import torch

    rows = [tokenizer.encode(question + answer_to(question)) for question in questions]
    tokens = torch.tensor([[*row, tokenizer.eos_token_id] for row in rows])
    labels = tokens.clone()
    labels[:, : len(questions[0])] = IGNORE_INDEX
    return torch.stack([tokens, labels])


def answer_logprobs(model: Any, rows: Any) -> Any:
    """Return the log-probability of every answer token (with its end token), [B, answer length]."""
    tokens_BT, labels_BT = rows
    num_answer_tokens = int((labels_BT[0] != IGNORE_INDEX).sum())
    logprobs_BTV = model(tokens_BT).logits[:, -num_answer_tokens - 1 : -1].log_softmax(-1)
    answers_BT = labels_BT[:, -num_answer_tokens:]
    return logprobs_BTV.gather(-1, answers_BT.unsqueeze(-1)).squeeze(-1)


def sampling_accuracy(model: Any, rows: Any) -> float:
    """Return the expected accuracy at temperature 1, exactly: the mean probability of the answer.

    The probability of sampling the correct answer is the product of its tokens' probabilities, which one forward pass
    gives exactly.
    """
    import torch

    with torch.no_grad():
        return float(answer_logprobs(model, rows).sum(-1).exp().mean())


def _report(path: Path | None, **measured: float) -> None:
    line = json.dumps(measured)
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
