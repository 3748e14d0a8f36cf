"""Lives of the real trainer, forked from one process that has imported torch: `test_trainer_crash.py` ends them.

Run as a program it reads one JSON object per line, a `Life`, and answers with how it ended. The forked process runs the
trainer's own command; what is put around its functions writes down the phase that it is in, journals each batch, and
kills the process at a point of the plan. Or it runs `parallel_worker.py`. No test lives here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.processes import free_port

ROOT = Path(__file__).parents[2]
PHASE_BYTES = 16
MAX_LIFE_S = 60.0
"""A process that hangs is killed then; with several runs, after so long for each."""
SLOW_FLUSH_S = 0.02


class Life(NamedTuple):
    """One process from start to end."""

    flags: dict[str, Any]
    journal: str
    """Gets a line `step id id ...` for each batch, in the order of delivery."""
    kill_after_s: float | None = None
    """Seconds after the first batch is asked for (`from_start`: after the fork); None: not by time."""
    from_start: bool = False
    signal: int = signal.SIGKILL
    """Sent then."""
    deeds: Sequence[tuple[str, int, str]] = ()
    """What the process does when it passes a point for the n-th time: (point, n, deed); see `_Deeds`."""
    ranks: int = 1
    runs: Sequence[dict[str, Any]] = ()
    """What `parallel_worker.py` is to run, instead of the trainer's command."""


class Ended(NamedTuple):
    codes: list[int]
    """Of each rank, as of `subprocess`: negative for a signal."""
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
        port = free_port()
        pids = []
        for rank in range(life.ranks):
            pids.append(os.fork())
            if not pids[-1]:
                _live(life, phase_file, rank, port)
        codes = _end(pids, life, phase_file)
        ended = Ended(codes, _read_phase(phase_file), time.monotonic() - began)
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
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > 1:  # one that loaded weights may just be ending
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)


def _end(pids: list[int], life: Life, phase_file: int) -> list[int]:
    """Wait for the end of the processes, or bring it about; return their exit codes."""
    start = time.monotonic()
    began = start if life.from_start else None
    codes: dict[int, int] = {}
    is_sent = life.kill_after_s is None
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if began is None and _read_phase(phase_file) != "starting":
            began = now
        if not is_sent and began is not None and now - began >= (life.kill_after_s or 0.0):
            is_sent = True
            for pid in set(pids) - codes.keys():
                os.kill(pid, life.signal)
        if now - start > MAX_LIFE_S * max(1, len(life.runs)):
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    return [codes[pid] for pid in pids]


def _write_phase(file: int, phase: str) -> None:
    os.pwrite(file, phase.ljust(PHASE_BYTES).encode(), 0)


def _read_phase(file: int) -> str:
    return os.pread(file, PHASE_BYTES, 0).decode().strip()


# In the forked process


def _live(life: Life, phase_file: int, rank: int, port: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        if life.ranks > 1:  # as torchrun starts them
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(life.ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        log = os.open(f"{life.journal}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from example_trainer import grpo
        from tests.trainer import parallel_worker

        if life.runs:
            code = parallel_worker.main(life.runs)
        else:
            _instrument(life, phase_file, rank)
            code = grpo.main([f"--{name}={value}" for name, value in life.flags.items()])
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001  a process of its own would print it and end with 1
        code = 1
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class _Deeds:
    """Carries out the plan of a life.

    Deeds: "kill", "kill in S" (seconds later), "terminate" (SIGTERM to itself), "terminate twice" (from a thread that
    then never ends), "kill the hub" (whose pid is in the file `<journal>.hub`), "fill the disk" (no file may grow
    beyond 64 KiB), "slow the disk" (each flush takes SLOW_FLUSH_S more), and "raise 0" or "raise 1" on that rank alone.
    """

    def __init__(self, life: Life, rank: int) -> None:
        self._life = life
        self._rank = rank
        self._passed: Counter[str] = Counter()

    def is_next(self, point: str) -> bool:
        return any((point, self._passed[point] + 1) == (at, n) for at, n, _ in self._life.deeds)

    def pass_by(self, point: str) -> None:
        self._passed[point] += 1
        for at, count, deed in self._life.deeds:
            if (at, count) == (point, self._passed[point]):
                self._do(deed)

    def _do(self, deed: str) -> None:
        from example_trainer import model

        match deed:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "terminate twice":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)  # two at once may be one
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait()
            case "slow the disk":
                real = model.sync_to_disk
                model.sync_to_disk = lambda path: (time.sleep(SLOW_FLUSH_S), real(path))  # type: ignore[func-returns-value]
            case later if later.startswith("kill in "):
                threading.Timer(float(later[8:]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            case "kill the hub":
                os.kill(int(Path(self._life.journal + ".hub").read_text()), signal.SIGKILL)
            case "fill the disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
            case "raise 0" | "raise 1":
                if deed == f"raise {self._rank}":
                    raise RuntimeError(f"as planned: {deed}")
            case _:
                raise AssertionError(deed)


def _instrument(life: Life, phase_file: int, rank: int) -> None:
    from example_trainer import checkpointing, feed, model, records, step, training
    from example_trainer.bridges import running

    deeds = _Deeds(life, rank)

    def around(owner: Any, name: str, phase: str | None = None, *, point: str = "") -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if phase is not None:
                _write_phase(phase_file, phase)
            deeds.pass_by(f"before {point}")
            try:
                result = real(*args, **kwargs)
            finally:
                if phase is not None:
                    _write_phase(phase_file, "between")
            deeds.pass_by(f"after {point}")
            return result

        setattr(owner, name, wrapped)

    around(feed.Leader, "next_groups", "leasing", point="leasing")
    around(training, "take_step", "training", point="training")
    around(feed.Leader, "acknowledge", "acking", point="acking")
    around(training, "publish", "publishing", point="publishing")
    around(training, "save_checkpoint", "saving", point="saving")
    around(step, "update_weights", point="the update")
    around(feed.Follower, "next_groups", point="following")
    # In the thread that writes a checkpoint:
    around(checkpointing, "written_directory", point="writing")
    around(checkpointing, "_write_parts", point="shards")
    around(feed.Leader, "checkpointed", point="telling the hub")
    # In the one that publishes; also at the start:
    around(running.ReloadBridge, "publish", point="serving")
    around(checkpointing.Checkpoints, "begin", point="tidying")
    around(records.MetricsLog, "__init__", point="opening the record")
    around(records.MetricsLog, "write", "recording", point="recording")
    around(feed.Leader, "begin", point="registering")

    real_append = records.MetricsLog._append

    def half(self: Any, record: Any) -> Any:
        if deeds.is_next("half a line"):
            self._file.write(json.dumps(records.finite(record))[:100].encode())
            self._file.flush()
        deeds.pass_by("half a line")
        return real_append(self, record)

    records.MetricsLog._append = half  # type: ignore[method-assign]
    real_sync = model.sync_to_disk

    def sync(path: Path) -> None:
        # Of a checkpoint: its files, the hidden directory that holds them, and after the renaming the one above.
        if path.name.startswith("."):
            deeds.pass_by("before rename")
        real_sync(path)
        if not any(part.startswith(".") for part in path.parts):
            deeds.pass_by("after rename")

    model.sync_to_disk = sync
    real_remove = checkpointing.remove_directory

    def half_removed(path: Path) -> None:
        if "removed" in path.name and path.is_dir():
            (path / "model.safetensors").unlink(missing_ok=True)
            deeds.pass_by("half removed")
        real_remove(path)

    checkpointing.remove_directory = half_removed

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
