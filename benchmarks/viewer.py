"""CPU time and memory of writing the viewer's page of a large run.

    PYTHONPATH=. python benchmarks/viewer.py [--groups 100000]

writes a file of groups as `process` does, and its page, to a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from atroposlib.frontend.run_files import find_run_files, write_run_page
from benchmarks._table import Table

SEQUENCES, PROMPT_TOKENS, ANSWER_TOKENS = 4, 16, 16
WORDS = [f"word {number}" for number in range(16)]


class WordTokenizer:
    """One token per word."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(WORDS[token] for token in tokens)


def write_rows(path: Path, num_groups: int) -> None:
    """Write groups of `SEQUENCES` answers to one prompt."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_groups):
            prompt = rng.choices(range(len(WORDS)), k=PROMPT_TOKENS)
            answers = [rng.choices(range(len(WORDS)), k=ANSWER_TOKENS) for _ in range(SEQUENCES)]
            row = {
                "tokens": [prompt + answer for answer in answers],
                "masks": [[-100] * PROMPT_TOKENS + answer for answer in answers],
                "inference_logprobs": [
                    [1.0] * PROMPT_TOKENS + [rng.uniform(-3.0, 0.0) for _ in answer]
                    for answer in answers
                ],
                "scores": [float(rng.random() < 0.5) for _ in answers],
                "group_id": f"{number:032x}",
                "environment": "sums",
                "item_id": number,
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100_000)
    num_groups = parser.parse_args().groups
    table = Table(
        "Writing the page", "groups", "file MB", "page MB", "CPU s", "peak RSS above start MB"
    )
    with tempfile.TemporaryDirectory() as folder:
        source, page = Path(folder, "groups.jsonl"), Path(folder, "groups.html")
        write_rows(source, num_groups)
        start_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        write_run_page(find_run_files(source), page, tokenizer=WordTokenizer())
        cpu_s = time.process_time() - started
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_kb
        sizes = [path.stat().st_size / 1e6 for path in (source, page)]
        table.row(num_groups, *sizes, cpu_s, peak_kb / 1024)


if __name__ == "__main__":
    main()
