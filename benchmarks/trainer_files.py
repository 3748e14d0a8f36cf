"""How long does training wait for files? `PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/trainer_files.py DIRECTORY`

One run of the trainer on the CPU with a model of 98M parameters, which it makes in DIRECTORY on first use: it publishes
after every step, to shared memory, and saves every third on the disk. The engine answers every request and loads
nothing. Prints means over the steps after the first as JSON. To compare two commits, run it in their checkouts
alternately.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from benchmarks._hub_process import running_hub
from benchmarks._trainer_work import Spec, make_step
from example_trainer.config import TrainerConfig
from example_trainer.training import train

NUM_STEPS = 12
SAVED_EVERY = 3
SPEC = Spec(shape="98M", sequences=8, seq_len=32)


class Engine(BaseHTTPRequestHandler):
    """An engine that reports no version."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self._answer()

    def _answer(self) -> None:
        self.send_response(404 if "version" in self.path or "info" in self.path else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_group() -> dict[str, object]:
    batch = make_step(SPEC)
    masked = SPEC.prompt_len
    return {
        "tokens": [tokens.tolist() for tokens in batch.tokens],
        "masks": [[-100] * masked + tokens[masked:].tolist() for tokens in batch.tokens],
        "scores": batch.scores.tolist(),
        "inference_logprobs": [[1.0] * masked + sampled.tolist() for sampled in batch.logprobs],
    }


def main(directory: Path) -> None:
    spec, saved = dataclasses.replace(SPEC, directory=str(directory)), directory / "saved"
    if not Path(spec.model).is_dir():
        making = [sys.executable, "-m", "benchmarks._trainer_work", spec.to_json()]
        subprocess.run(making, check=True)
    shutil.rmtree(saved, ignore_errors=True)
    with running_hub("memory", directory=directory) as hub, engine() as engine_url:
        httpx.post(
            f"{hub.base_url}/scored_data_list", json=[make_group()] * NUM_STEPS
        ).raise_for_status()
        config = TrainerConfig(
            model_name=spec.model,
            device="cpu",
            bridge="reload",
            hub_url=hub.base_url,
            engine_url=engine_url,
            num_steps=NUM_STEPS,
            batch_size=SPEC.sequences,
            checkpoint_interval=SAVED_EVERY,
            keep_last=2,
            save_path=saved,
        )
        began = time.perf_counter()
        train(config)
        total_s = time.perf_counter() - began
    rows = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    names = ("wall_s", "train_s", "publish_s", "save_s", "batch_wait_s", "cpu_s")
    means = {name: round(statistics.fmean(row[name] for row in rows[1:]), 3) for name in names}
    print(json.dumps({"run_s": round(total_s, 1), **means}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
