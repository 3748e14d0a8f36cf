"""How many tokens does the local engine generate per second of CPU time?

The demo's model size (Qwen2, hidden 128, 4 layers, 1.1 M parameters) with random weights, without HTTP. Run it with
`OMP_NUM_THREADS=1 python benchmarks/engine.py`; options: `--rows 64,256`, `--threads 1`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import Engine, EngineRequest
from atroposlib.engine.server import EngineConfig, load


def make_demo_sized_model(directory: Path) -> None:
    """Save a 1.1 M parameter model; its tokenizer is the tests' byte-level one."""
    from tests.tiny_model import make_tiny_tokenizer

    tokenizer = make_tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def measure(engine: Engine, name: str, requests: list[EngineRequest]) -> None:
    """Run the requests together and print one row."""
    before = engine.snapshot().result()
    began_s = time.perf_counter()
    for future in [engine.submit(request) for request in requests]:
        future.result()
    wall_s = time.perf_counter() - began_s
    after = engine.snapshot().result()

    def gained(key: str) -> float:
        return float(after[key] - before[key])

    tokens, cpu_s = gained("generated_tokens"), gained("cpu_s")
    steps = max(1.0, gained("decode_steps"))
    print(
        f"{name:<44} {tokens:>8.0f} {tokens / cpu_s:>10.0f} {tokens / wall_s:>10.0f} "
        f"{1e3 * cpu_s / steps:>9.1f} {gained('prefilled_tokens'):>9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    row_counts = [int(text) for text in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as directory:
        make_demo_sized_model(Path(directory))
        config = EngineConfig(model=directory, device="cpu", max_num_seqs=max(row_counts))
        engine = load(config).engine
    engine.start()
    header = ("case", "tokens", "tok/cpu-s", "tok/s", "cpu-ms/st", "prefilled")
    print("{:<44} {:>8} {:>10} {:>10} {:>9} {:>9}".format(*header))
    for rows in row_counts:
        short = SamplingParams(max_tokens=64, ignore_eos=True)
        prompts = [[i % 250, *range(6)] for i in range(rows)]
        measure(engine, f"{rows} rows x 64 tokens", [EngineRequest(p, short) for p in prompts])
        filtered = SamplingParams(max_tokens=64, ignore_eos=True, top_p=0.9, temperature=0.7)
        measure(
            engine,
            f"{rows} rows x 64 tokens, top_p 0.9",
            [EngineRequest(p, filtered) for p in prompts],
        )
        mixed = [
            EngineRequest(p, SamplingParams(max_tokens=1 + (37 * i) % 127, ignore_eos=True))
            for i, p in enumerate(prompts * 2)
        ]
        measure(engine, f"{2 * rows} rows x 1..127 tokens, joining", mixed)
        long = [[i % 250, *([7] * 255)] for i in range(rows // 8)]
        eight = SamplingParams(max_tokens=8, n=8, ignore_eos=True)
        measure(
            engine,
            f"{rows // 8} prompts of 256 x n=8 x 8 tokens",
            [EngineRequest(p, eight) for p in long],
        )
        apart = [
            EngineRequest([j % 250, *p[1:]], SamplingParams(max_tokens=8, ignore_eos=True))
            for p in long
            for j in range(8 * p[0], 8 * p[0] + 8)
        ]
        measure(engine, f"{rows} distinct prompts of 256 x 8 tokens", apart)
    engine.close()


if __name__ == "__main__":
    main()
