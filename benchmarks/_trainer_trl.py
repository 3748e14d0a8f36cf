"""TRL's side of `trainer.py`: TRL's training loop on prepared completions instead of sampled ones.

`GRPOTrainer.train` runs unchanged, with its sampler, batching, metrics and optimizer step; only
`_generate_and_score_completions` is replaced and returns the prepared batch in TRL's form: prompts padded on the left,
completions on the right, with `old_per_token_logps`. `loss_type="dapo"` is the mean over all completion tokens of the
step; `beta=0` means no reference. Runs in the environment with TRL: `python -m benchmarks._trainer_trl SPEC`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks._trainer_measure import Meter
from benchmarks._trainer_work import Batch, Spec, make_step


class Stopwatch(TrainerCallback):
    """Measures from before a step's first forward pass until its gradient is cleared."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._meter.begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._meter.end()

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self._meter.result.losses.append(float(logs["loss"]))
            self._meter.result.grad_norms.append(float(logs["grad_norm"]))


def padded(rows: list[torch.Tensor], *, width: int, filler: float = 0) -> torch.Tensor:
    out = torch.full((len(rows), width), filler, dtype=rows[0].dtype)
    for at, row in zip(out, rows, strict=True):
        at[: len(row)] = row
    return out


def prepared(batch: Batch, spec: Spec, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the result of `_generate_and_score_completions`; prompts are equally long, so none is padded."""
    prompts = [torch.from_numpy(tokens[: spec.prompt_len]) for tokens in batch.tokens]
    completions = [torch.from_numpy(tokens[spec.prompt_len :]) for tokens in batch.tokens]
    lengths = torch.tensor([len(row) for row in completions])
    width = int(lengths.max())
    inputs = {
        "prompt_ids": torch.stack(prompts),
        "prompt_mask": torch.ones(len(prompts), spec.prompt_len, dtype=torch.int64),
        "completion_ids": padded(completions, width=width),
        "completion_mask": (torch.arange(width) < lengths[:, None]).to(torch.int64),
        "advantages": torch.from_numpy(batch.advantages).float(),
        "old_per_token_logps": padded([torch.from_numpy(x) for x in batch.logprobs], width=width),
        "num_items_in_batch": lengths.sum(),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    torch.set_num_threads(spec.NUM_THREADS)
    # transformers' Trainer splits each micro-batch over all GPUs that it sees.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    model = AutoModelForCausalLM.from_pretrained(
        spec.model, dtype=torch.float32, attn_implementation=spec.attention
    ).to(spec.device)
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    batch = make_step(spec)
    meter = Meter(model, device=spec.device, num_warmup=spec.NUM_WARMUP)
    arguments = GRPOConfig(
        output_dir=f"{spec.directory}/trl",
        per_device_train_batch_size=spec.micro_batch,
        gradient_accumulation_steps=spec.sequences // spec.micro_batch,
        num_generations=spec.GROUP_SIZE,
        max_completion_length=spec.seq_len - spec.prompt_len,
        max_steps=spec.NUM_WARMUP + spec.steps,
        learning_rate=spec.LR,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=spec.MAX_GRAD_NORM,
        beta=0.0,
        loss_type="dapo",
        epsilon=spec.CLIP,
        gradient_checkpointing=spec.checkpointing,
        bf16=spec.dtype == "bfloat16",
        use_cpu=spec.device == "cpu",
        shuffle_dataset=False,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        log_completions=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [""] * spec.sequences}),
        processing_class=tokenizer,
        callbacks=[Stopwatch(meter)],
    )
    trainer._generate_and_score_completions = lambda inputs: prepared(
        batch, spec, trainer.accelerator.device
    )
    trainer.train()
    meter.result.num_tokens = sum(map(len, batch.tokens))
    meter.result.note = f"TRL {trl.__version__}, {arguments.optim.value}"
    meter.result.print()


if __name__ == "__main__":
    main()
