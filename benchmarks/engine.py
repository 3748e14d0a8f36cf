"""How many tokens does the local engine generate per second of CPU time?

The demo's model size (Qwen2, 1.1 M parameters) with random weights and 258 tokens, without HTTP. Run it as
`PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/engine.py`; options: `--rows 64,256`, `--threads 1`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import transformers

from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import load
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import Engine
from atroposlib.engine.sequences import EngineRequest
from benchmarks._table import Table
from benchmarks._trainer_work import build_model, make_tokenizer

DEMO_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


class Case(NamedTuple):
    name: str
    requests: list[EngineRequest]


def cases(num_rows: int) -> Iterator[Case]:
    def requests(prompts: list[list[int]], **params: float) -> list[EngineRequest]:
        return [
            EngineRequest(p, SamplingParams(ignore_eos=True, **params))  # type: ignore[arg-type]
            for p in prompts
        ]

    short = [[i % 250, *range(6)] for i in range(num_rows)]
    long = [[i % 250, *([7] * 255)] for i in range(num_rows // 8)]
    apart = [[j % 250, *p[1:]] for p in long for j in range(8 * p[0], 8 * p[0] + 8)]
    yield Case(f"{num_rows} rows x 64 tokens", requests(short, max_tokens=64))
    yield Case(
        f"{num_rows} rows x 64 tokens, top_p 0.9",
        requests(short, max_tokens=64, top_p=0.9, temperature=0.7),
    )
    mixed = [
        each
        for i, prompt in enumerate(short * 2)
        for each in requests([prompt], max_tokens=1 + (37 * i) % 127)
    ]
    yield Case(f"{2 * num_rows} rows x 1..127 tokens, joining", mixed)
    yield Case(
        f"{num_rows // 8} prompts of 256 x n=8 x 8 tokens", requests(long, max_tokens=8, n=8)
    )
    yield Case(f"{num_rows} distinct prompts of 256 x 8 tokens", requests(apart, max_tokens=8))


def measure(engine: Engine, case: Case, table: Table) -> None:
    """Run the requests together and print one row."""
    before = engine.snapshot().result()
    began_s = time.perf_counter()
    for future in [engine.submit(request) for request in case.requests]:
        future.result()
    wall_s = time.perf_counter() - began_s
    after = engine.snapshot().result()
    keys = ("generated_tokens", "cpu_s", "decode_steps", "prefilled_tokens")
    tokens, cpu_s, steps, prefilled = (after[key] - before[key] for key in keys)
    table.row(
        case.name, tokens, tokens / cpu_s, tokens / wall_s, 1e3 * cpu_s / max(1, steps), prefilled
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
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(directory)
        model = build_model("tiny", **DEMO_SHAPE, vocab_size=len(tokenizer))
        model.save_pretrained(directory)
        config = EngineConfig(model=directory, device="cpu", max_num_seqs=max(row_counts))
        engine = load(config).engine
    engine.start()
    columns = ("case", "tokens", "tokens per CPU s", "tokens/s", "CPU ms per step", "prefilled")
    table = Table("Tokens of the local engine", *columns)
    for num_rows in row_counts:
        for case in cases(num_rows):
            measure(engine, case, table)
    engine.close()


if __name__ == "__main__":
    main()
