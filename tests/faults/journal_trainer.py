"""A trainer process that tests kill: leases, acknowledges, writes checkpoints, and resumes from the last one.

    journal_trainer.py URL DIRECTORY READS NUM_STEPS CHECKPOINT_EVERY STEP_S

READS is how groups are recognised and compared whole: `keys` those of `drivers.py`, `prompts` those of `faulty_env.py`.
`checkpoint.json` in DIRECTORY has the step, every group learned from up to it, in order, and weights: a hash of their
names in that order. `journal` gets each batch received, one line `step name name ...`. Once a file `drain` exists, a
checkpoint is written whenever there is no batch. The process ends with step NUM_STEPS.
"""

from __future__ import annotations

import hashlib
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
from tests.faults.drivers import BATCH_SIZE, CorruptGroup, read_group, registration
from tests.faults.faulty_env import PROMPT_END

END_TOKEN = ord(PROMPT_END) + 3


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


def read_key(group: ScoredGroup) -> str:
    return "{}-{}".format(*read_group(group))


READERS = {"keys": read_key, "prompts": read_prompt}


def train(url: str, directory: Path, reads: str, num_steps: int, every: int, step_s: float) -> None:
    checkpoint, drain = directory / "checkpoint.json", directory / "drain"
    saved: dict[str, Any] = {"step": 0, "weights": "", "groups": []}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    step, weights, groups = saved["step"], saved["weights"], list(saved["groups"])
    with TrainerClient(url, timeout_s=5.0) as hub, (directory / "journal").open("a") as journal:
        hub.register(registration(), resume_step=step)
        while step < num_steps:
            try:
                batch = hub.lease_batch(wait_s=1.0)
            except HubUnavailable:
                time.sleep(0.1)
                continue
            if batch is not None:
                assert batch.step == step + 1, f"step {batch.step} after {step}"
                assert sum(each.num_sequences for each in batch.groups) == BATCH_SIZE
                names = list(map(READERS[reads], batch.groups))
                print(batch.step, *names, file=journal, flush=True)
                for name in names:
                    weights = hashlib.sha256(f"{weights}{name}".encode()).hexdigest()
                groups += names
                time.sleep(step_s)  # this is when most kills arrive
                hub.ack(batch)
                step = batch.step
            is_due = step - saved["step"] >= every or step == num_steps
            is_idle = batch is None and drain.exists() and step > saved["step"]
            if is_due or is_idle:
                saved = {"step": step, "weights": weights, "groups": groups}
                written = checkpoint.with_suffix(".new")
                written.write_text(json.dumps(saved))
                written.replace(checkpoint)
                hub.checkpoint(step)


def main() -> None:
    url, directory, reads, num_steps, every, step_s = sys.argv[1:]
    while True:
        try:
            train(url, Path(directory), reads, int(num_steps), int(every), float(step_s))
        except LeaseExpired as error:
            print("fenced:", error, flush=True)  # resume from the checkpoint, as after a crash
        else:
            return


if __name__ == "__main__":
    main()
