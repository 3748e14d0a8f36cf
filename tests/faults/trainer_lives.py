"""Lives of the real trainer, forked from one process that has imported torch: `test_trainer_crash.py` ends them.

Run as a program it reads one JSON object per line, a `Life`, and answers with how it ended. The forked process runs the
trainer's own command; what is put around its functions writes down the phase that it is in, journals each batch, and
kills the process at a point of the plan. No test lives here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).parents[2]
PHASE_BYTES = 16


class Life(NamedTuple):
    """One process from start to end."""

    flags: dict[str, Any]
    journal: str
    """Gets a line `step id id ...` for each batch, in the order of delivery."""
    kill_after_s: float | None = None
    """Seconds after the start of `kill_from`; None: not by time."""
    kill_from: str = "starting"
    """Phase at whose first start the time begins."""
    kill_at: str | None = None
    """One of `POINTS`, killed at its `kill_count`-th time."""
    kill_count: int = 1
    signals: tuple[str, ...] = ()
    """Phases at whose first start the process sends itself SIGTERM; twice the same: two signals."""


class Ended(NamedTuple):
    code: int
    """As of `subprocess`: negative for a signal."""
    phase: str
    """In which it ended."""
    seconds: float


@contextmanager
def nursery(log_path: Path, model_dir: Path) -> Iterator[Callable[[Life], Ended]]:
    """Yield a function that runs one life to its end; the output of all goes to `log_path`."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.trainer_lives"),
                *(f"{log_path}.phase", str(model_dir)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )

    def run(life: Life) -> Ended:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(life) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, log_path.read_text()[-4000:]
        return Ended(*json.loads(answer))

    try:
        yield run
    finally:
        process.kill()
        process.communicate()


# In the forking process


def serve(phase_path: str, model_dir: str) -> None:
    _do_once_what_is_slow(model_dir)
    answers = os.dup(1)
    os.dup2(2, 1)
    phase_file = os.open(phase_path, os.O_RDWR | os.O_CREAT)
    for line in sys.stdin:
        life = Life(*json.loads(line))
        _write_phase(phase_file, "starting")
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            _live(life, phase_file)
        try:
            code = _end(pid, life, phase_file)
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        ended = Ended(code, _read_phase(phase_file), time.monotonic() - began)
        os.write(answers, (json.dumps(ended) + "\n").encode())


def _do_once_what_is_slow(model_dir: str) -> None:
    """Import torch and transformers, and load a model, which fills their caches; leave no thread behind."""
    import tqdm
    from transformers.utils.logging import disable_progress_bar

    from example_trainer.config import TrainerConfig
    from example_trainer.training import load_policy

    tqdm.tqdm.monitor_interval = 0
    disable_progress_bar()
    load_policy(TrainerConfig(model_name=model_dir, device="cpu"))
    assert len(os.listdir("/proc/self/task")) == 1


def _end(pid: int, life: Life, phase_file: int) -> int:
    """Wait for the end of the process, or bring it about; return its exit code."""
    began = time.monotonic() if life.kill_from == "starting" else None
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if began is None and _read_phase(phase_file) != "starting":
            began = time.monotonic()
        is_due = began is not None and life.kill_after_s is not None
        if is_due and time.monotonic() - began >= life.kill_after_s:  # type: ignore[operator]
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _write_phase(file: int, phase: str) -> None:
    os.pwrite(file, phase.ljust(PHASE_BYTES).encode(), 0)


def _read_phase(file: int) -> str:
    return os.pread(file, PHASE_BYTES, 0).decode().strip()


# In the forked process


def _live(life: Life, phase_file: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        from example_trainer import grpo

        _instrument(life, phase_file)
        code = grpo.main([f"--{name}={value}" for name, value in life.flags.items()])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _instrument(life: Life, phase_file: int) -> None:
    from example_trainer import bridges, checkpointing, feed, records, training

    pending = list(life.signals)
    num_passed = 0

    def begin(phase: str) -> None:
        _write_phase(phase_file, phase)
        while phase in pending:
            pending.remove(phase)
            os.kill(os.getpid(), signal.SIGTERM)

    def kill(point: str) -> None:
        nonlocal num_passed
        if point == life.kill_at:
            num_passed += 1
            if num_passed == life.kill_count:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str, phase: str | None = None, *, point: str = "") -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if phase is not None:
                begin(phase)
            kill(f"before {point}")
            try:
                result = real(*args, **kwargs)
            finally:
                if phase is not None:
                    _write_phase(phase_file, "between")
            kill(f"after {point}")
            return result

        setattr(owner, name, wrapped)

    around(feed.Leader, "next_groups", "leasing", point="leasing")
    around(training, "take_step", "training", point="training")
    around(feed.Leader, "acknowledge", "acking", point="acking")
    around(bridges.CheckpointBridge, "publish", "publishing", point="publishing")
    around(training, "save_checkpoint", "saving")
    around(checkpointing, "_save_tensors", point="shards")
    around(checkpointing, "finish_directory", point="rename")
    around(feed.Leader, "checkpointed", point="telling the hub")
    around(checkpointing.Checkpoints, "remove_old", "pruning")
    around(checkpointing.Checkpoints, "begin", point="tidying")
    around(records.MetricsLog, "__init__", point="opening the record")
    around(records.MetricsLog, "write", "recording", point="recording")
    around(feed.Leader, "begin", point="registering")

    if life.kill_at == "half a line":
        real_append = records.MetricsLog._append

        def half(self: Any, record: Any) -> Any:
            if num_passed + 1 == life.kill_count:
                self._file.write(json.dumps(records.finite(record))[:100])
                self._file.flush()
            kill("half a line")
            return real_append(self, record)

        records.MetricsLog._append = half  # type: ignore[method-assign]
    if life.kill_at == "half removed":
        real_shutil = checkpointing.shutil

        def half_removed(path: Path, **options: Any) -> None:
            if "removed" in Path(path).name and Path(path).is_dir():
                (Path(path) / "model.safetensors").unlink()
                kill("half removed")
            real_shutil.rmtree(path, **options)

        checkpointing.shutil = SimpleNamespace(  # type: ignore[assignment]
            rmtree=half_removed, copy2=real_shutil.copy2
        )

    real_next = feed.Leader.next_groups

    def journalled(self: Any, step: int) -> Any:
        groups = real_next(self, step)
        if groups is not None:
            ids = [hashlib.sha256(group.tokens.tobytes()).hexdigest()[:12] for group in groups]
            with Path(life.journal).open("a") as journal:
                print(step + 1, *ids, file=journal)
        return groups

    feed.Leader.next_groups = journalled  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(*sys.argv[1:])
