"""A trainer process that tests kill: leases, acknowledges, writes checkpoints, and resumes from the last one.

    journal_trainer.py URL DIRECTORY

The groups are those of `faulty_env.py`, each recognised by its prompt and compared whole. `checkpoint.json` in
DIRECTORY has the step and the prompt of every group learned from up to it, in order. Once a file `drain` exists, a
checkpoint is written whenever there is no batch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from atroposlib.client import LeaseExpired, TrainerClient
from atroposlib.errors import HubUnavailable
from atroposlib.scored_data import ScoredGroup
from tests.faults.answers import answer_logprobs, answer_tokens
from tests.faults.drivers import BATCH_SIZE, CorruptGroup, registration
from tests.faults.faulty_env import PROMPT_END

END_TOKEN = ord(PROMPT_END) + 3
CHECKPOINT_EVERY = 4
"""Steps."""
STEP_S = 0.15


def read_prompt(group: ScoredGroup) -> str:
    """Return the prompt. Raises `CorruptGroup` unless every value is what engine and environment made of it."""
    names = set()
    for index in range(group.num_sequences):
        sequence = group.sequence(index)
        tokens = sequence.tokens.tolist()
        length = tokens.index(END_TOKEN) + 1
        answer = answer_tokens(tokens[:length], index)
        names.add(bytes(token - 3 for token in tokens[1 : length - 1]).decode())
        if tokens[length:] != answer or sequence.masks.tolist() != [-100] * length + answer:
            raise CorruptGroup(f"sequence {index}: {tokens}, masks {sequence.masks.tolist()}")
        assert group.inference_logprobs is not None
        start = int(group.offsets[index])
        logprobs = group.inference_logprobs[start + length : start + len(tokens)]
        if not np.allclose(logprobs, answer_logprobs(tokens[:length], answer)):
            raise CorruptGroup(f"sequence {index}: logprobs {logprobs}")
    if len(names) != 1 or group.scores.tolist() != list(range(group.num_sequences)):
        raise CorruptGroup(f"{names}, scores {group.scores.tolist()}")
    return names.pop()


def train(url: str, directory: Path) -> None:
    checkpoint, drain = directory / "checkpoint.json", directory / "drain"
    saved: dict[str, Any] = {"step": 0, "groups": []}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    step, groups = saved["step"], list(saved["groups"])
    with TrainerClient(url, timeout_s=5.0) as hub:
        hub.register(registration(), resume_step=step)
        while True:
            try:
                batch = hub.lease_batch(wait_s=1.0)
            except HubUnavailable:
                time.sleep(0.1)
                continue
            if batch is not None:
                assert batch.step == step + 1, f"step {batch.step} after {step}"
                assert sum(each.num_sequences for each in batch.groups) == BATCH_SIZE
                groups += map(read_prompt, batch.groups)
                time.sleep(STEP_S)  # this is when most kills arrive
                hub.ack(batch)
                step = batch.step
            is_due = step - saved["step"] >= CHECKPOINT_EVERY
            is_idle = batch is None and drain.exists() and step > saved["step"]
            if is_due or is_idle:
                saved = {"step": step, "groups": groups}
                written = checkpoint.with_suffix(".new")
                written.write_text(json.dumps(saved))
                written.replace(checkpoint)
                hub.checkpoint(step)


def main() -> None:
    url, directory = sys.argv[1:]
    while True:
        try:
            train(url, Path(directory))
        except LeaseExpired as error:
            print("fenced:", error, flush=True)  # resume from the checkpoint, as after a crash


if __name__ == "__main__":
    main()
