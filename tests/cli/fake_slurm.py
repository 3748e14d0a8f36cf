"""sbatch, scancel, squeue and scontrol for one machine, by the name that this file is called by.

As strict as Slurm's: an option, a value or a job that these would refuse is refused. The state of task T of job J is
the file J_T in the directory FAKE_SLURM; a process of its own waits until the task may begin, and runs it.
"""

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(os.environ["FAKE_SLURM"])
VALUED = {
    *("account", "array", "chdir", "comment", "constraint", "cpus-per-task", "dependency", "error", "export"),
    *("gpus", "gpus-per-node", "gres", "job-name", "kill-on-invalid-dep", "mail-type", "mem", "nice", "nodelist"),
    *("nodes", "ntasks", "open-mode", "output", "partition", "qos", "reservation", "signal", "time", "wrap"),
}  # fmt: skip
PLAIN = {"exclusive", "hold", "no-requeue", "overcommit", "parsable", "requeue"}
KILL_WAIT_S = 3.0


def refuse(message: str) -> None:
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")


def parse(words: list[str], valued: set[str], plain: set[str]) -> tuple[dict[str, str], list[str]]:
    """Return long options, and the other words."""
    options, others = {}, []
    for word in words:
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            others.append(word)
        elif name not in valued | plain or (has_value == "") != (name in plain):
            refuse(f"unrecognized option or missing value '{word}'")
        else:
            options[name] = value
    return options, others


def read(task: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(task.read_text())
    return found


def change(task: Path, **changes: Any) -> None:
    """Change a task's state; tasks are changed by several processes."""
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = task.with_name(f".{task.name}")
        new.write_text(json.dumps({**(read(task) if task.exists() else {}), **changes}))
        new.rename(task)


def tasks(name: str) -> list[Path]:
    """Return the files of a job, or of one of its tasks."""
    found = sorted(ROOT.glob(name if "_" in name else f"{name}_*"))
    if not re.fullmatch(r"\d+(_\d+)?", name) or not found:
        refuse(f"Invalid job id {name}")
    return found


def sbatch(words: list[str]) -> None:
    given, scripts = parse(words, VALUED, PLAIN)
    if "wrap" in given:
        text = f"#!/bin/sh\n{given['wrap']}\n"
    else:
        text = Path(*scripts).read_text()
    lines = [line[len("#SBATCH ") :] for line in text.splitlines() if line.startswith("#SBATCH ")]
    written, others = parse([shlex.split(line)[0] for line in lines], VALUED, PLAIN)
    options = written | given
    if not text.startswith("#!") or others or ("wrap" in given) == bool(scripts):
        refuse("This does not look like a batch script")
    dependency = options.get("dependency", "")
    if "," in dependency and "?" in dependency:
        refuse("Job dependency problem")
    for each in filter(None, re.split("[,?]", dependency)):
        kind, *jobs = each.split(":")
        if kind not in ("afterany", "afternotok", "afterok") or not [*map(tasks, jobs)]:
            refuse("Job dependency problem")
    first, _, last = options.get("array", "0-0").partition("-")
    number = str(
        1 + max((int(each.name.split("_")[0]) for each in ROOT.glob("[0-9]*_*")), default=0)
    )
    for index in range(int(first), int(last) + 1):
        job = ROOT / f"{number}_{index}"
        change(job, state="PENDING", held="hold" in options, text=text, options=options, signal=0)
        subprocess.Popen(
            [sys.executable, "-S", __file__, "run", job.name],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    print(number)


def scancel(words: list[str]) -> None:
    options, jobs = parse(words, {"signal"}, {"full"})
    for job in [each for name in jobs for each in tasks(name)]:
        if read(job)["state"] in ("PENDING", "RUNNING"):
            change(job, signal=int(signal.Signals[f"SIG{options.get('signal', 'TERM')}"]))


def squeue(words: list[str]) -> None:
    options, others = parse(words, {"format", "user"}, {"noheader"})
    if others or options["format"] != "%F":
        refuse(f"Unrecognized option: {words}")
    for job in sorted(ROOT.glob("[0-9]*_*")):
        if read(job)["state"] in ("PENDING", "RUNNING"):
            print(job.name.split("_")[0])


def scontrol(words: list[str]) -> None:
    match words:
        case ["release", jobs]:
            for job in [each for name in jobs.split(",") for each in tasks(name)]:
                change(job, held=False)
        case ["show", "job", name, "--oneliner"]:
            print(f"JobId={name} Requeue=1 Restarts=0 BatchFlag=1")
        case _:
            refuse(f"invalid keyword: {words}")


def is_met(condition: str) -> bool | None:
    """Whether a condition is met; None: it never will be."""
    kind, *names = condition.split(":")
    states = [read(each)["state"] for name in names for each in tasks(name)]
    if any(state in ("PENDING", "RUNNING") for state in states):
        return False
    is_ok = all(state == "COMPLETED" for state in states)
    return True if kind == "afterany" or is_ok == (kind == "afterok") else None


def may_begin(job: Path) -> bool:
    """Wait until a task may begin; False if it is cancelled before."""
    while True:
        now = read(job)
        wanted = now["options"].get("dependency", "")
        met = [is_met(each) for each in wanted.split("?")] if wanted else [True]
        is_hopeless = set(met) == {None} and now["options"].get("kill-on-invalid-dep") == "yes"
        if now["signal"] or is_hopeless:
            return False
        if not now["held"] and True in met:
            return True
        time.sleep(0.02)


def run(job: Path) -> None:
    """Run a task as soon as it may begin, and note its end."""
    if not may_begin(job):
        change(job, state="CANCELLED")
        return
    now = read(job)
    number, index = job.name.split("_")
    options = now["options"]
    variables = {"SLURM_JOB_ID": number, "SLURM_RESTART_COUNT": "0"}
    if "array" in options:  # each task also has a number of its own; one has that of the array
        variables |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
        variables["SLURM_JOB_ID"] = str(int(number) + 1000 * int(index))
    script = job.with_name(f".{job.name}.sh")
    script.write_text(now["text"])
    change(job, state="RUNNING")
    output = options["output"].replace("%%", "%").replace("%a", index)
    with Path(output).open("ab") as log:
        process = subprocess.Popen(
            ["bash", script],
            env={**os.environ, **variables},
            start_new_session=True,
            stdout=log,
            stderr=log,
        )
    deadline, sent = float("inf"), 0
    while process.poll() is None:
        wanted_signal = read(job)["signal"]
        if time.monotonic() > deadline:
            wanted_signal = signal.SIGKILL
        if wanted_signal and wanted_signal != sent:
            sent = wanted_signal
            deadline = min(deadline, time.monotonic() + KILL_WAIT_S)
            os.killpg(process.pid, sent)
        time.sleep(0.02)
    end = "COMPLETED" if process.returncode == 0 else "FAILED"
    change(job, state="CANCELLED" if sent == signal.SIGTERM else end)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(ROOT / sys.argv[2])
    else:
        globals()[Path(sys.argv[0]).name](sys.argv[1:])
