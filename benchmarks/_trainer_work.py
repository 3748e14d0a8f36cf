"""The work of both sides of `trainer.py`: models, batches, and the FLOPs of a step.

`python -m benchmarks._trainer_work SPEC` makes the model of a Spec (JSON) with random weights on its device, in a
separate process because model memory and CUDA context are released only when a process ends. Nothing is downloaded.
Imported in the environment of either side: imports nothing of this project, and torch only to make a model.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIZES = [
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
]
SHAPES = {
    "tiny": dict(zip(SIZES, (64, 128, 2, 2, 2, 300), strict=True)),
    "12M": dict(zip(SIZES, (256, 1024, 4, 8, 4, 32_000), strict=True)),
    "0.5B": dict(zip(SIZES, (896, 4864, 24, 14, 2, 151_936), strict=True)),
    "1.5B": dict(zip(SIZES, (1536, 8960, 28, 12, 2, 151_936), strict=True)),
    "3B": dict(zip(SIZES, (2048, 11_008, 36, 16, 2, 151_936), strict=True)),
}
"""Fields of Qwen2Config; the last three are those of Qwen/Qwen2.5-0.5B, -1.5B and -3B."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model, and the steps that a process takes with it."""

    GROUP_SIZE: ClassVar = 8
    LR: ClassVar = 1e-5
    CLIP: ClassVar = 0.2
    MAX_GRAD_NORM: ClassVar = 1.0
    NUM_WARMUP: ClassVar = 1
    """Steps before the measured ones."""
    NUM_THREADS: ClassVar = 1

    shape: str
    sequences: int
    """Per step; every sequence belongs to a group."""
    seq_len: int
    micro_batch: int = 1
    """Sequences."""
    mixed: bool = False
    """Whether completions have any length from a sixteenth of the maximum, instead of all the maximum."""
    checkpointing: bool = False
    steps: int = 1
    repeats: int = 1
    """Processes of each side, alternating."""
    device: str = "cpu"
    attention: str = "sdpa"
    directory: str = ""

    @property
    def name(self) -> str:
        changes = ", mixed lengths" * self.mixed + ", checkpointing" * self.checkpointing
        return f"{self.shape}, {self.sequences} x {self.seq_len}{changes}"

    @property
    def model(self) -> str:
        return f"{self.directory}/{self.shape}"

    @property
    def dtype(self) -> str:
        """Precision of the forward pass; weights are float32."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def prompt_len(self) -> int:
        return self.seq_len // 8

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Batch(NamedTuple):
    """The sequences of a step; the first `prompt_len` tokens of each are the prompt."""

    tokens: list[NDArray[np.int64]]
    logprobs: list[NDArray[np.float32]]
    """Sampled logprobs of the completions."""
    scores: NDArray[np.float64]
    advantages: NDArray[np.float64]


def make_step(spec: Spec) -> Batch:
    """Return completions of random tokens, the same for equal specs.

    A model with random weights finds every token about as likely, so that sampled logprobs of -log V with noise give
    ratios around 1, some beyond the clip.
    """
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[spec.shape]["vocab_size"]
    longest = spec.seq_len - spec.prompt_len
    shortest = max(1, longest // 16) if spec.mixed else longest
    lengths = rng.integers(shortest, longest + 1, spec.sequences)
    lengths[0] = longest
    scores = rng.random(spec.sequences)
    groups = scores.reshape(-1, spec.GROUP_SIZE)
    centred = groups - groups.mean(1, keepdims=True)
    return Batch(
        tokens=[rng.integers(0, vocabulary, spec.prompt_len + n) for n in lengths],
        logprobs=[
            np.minimum(rng.normal(-math.log(vocabulary), 0.2, n), 0).astype(np.float32)
            for n in lengths
        ],
        scores=scores,
        advantages=(centred / (groups.std(1, keepdims=True) + 1e-4)).ravel(),
    )


def step_flops(spec: Spec, num_parameters: int) -> float:
    """Return the model FLOPs of a step, forward and backward: 6 N per token, and 12 L H Q T in a sequence of T tokens.

    PaLM, appendix B (arXiv:2204.02311), for N parameters and L layers of H heads of dimension Q; MFU is this per second
    divided by the GPU's peak. N counts the tied embedding once, as the head. As in PaLM, savings by the causal mask are
    not subtracted and recomputation is not added.
    """
    lengths = np.array([len(sequence) for sequence in make_step(spec).tokens], dtype=float)
    sizes = SHAPES[spec.shape]
    attention = 12 * sizes["num_hidden_layers"] * sizes["hidden_size"]  # the hidden size is H Q
    return float(6 * num_parameters * lengths.sum() + attention * (lengths**2).sum())


def build_model(shape: str, **changes: int) -> Any:
    """Return a Qwen2 with random weights on torch's default device; `changes` override the shape."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[shape] | changes,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape != "tiny",  # vLLM on the CPU cannot reload tied ones
        eos_token_id=257,  # of `make_tokenizer`
        pad_token_id=256,
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token for each of 256 characters."""
    from atroposlib.cli._demo.tiny_model import build_tokenizer

    return build_tokenizer("".join(map(chr, range(256))))


def main() -> None:
    import torch

    spec = Spec(**json.loads(sys.argv[1]))
    with torch.device(spec.device):
        model = build_model(spec.shape)
    model.to(getattr(torch, spec.dtype)).save_pretrained(spec.model)
    make_tokenizer().save_pretrained(spec.model)


if __name__ == "__main__":
    main()
