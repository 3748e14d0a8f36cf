"""Solve a small task with the commands of a shell; the files that are left decide.

Every episode has its own folder. The model calls the tool `shell`, sees what the command printed and its exit status,
and answers without a call when it is done. The reward is 1 if the folder at the end of the episode has exactly the
files that the task asks for, with their text, else 0. Each command runs in a sandbox of its own, without network and
files of this machine, to which the files of the folder are copied; empty folders are not kept.

A command starts processes, so it needs bubblewrap (`apt install bubblewrap`) or --env.docker_image python:3.11-slim.

Data: generated, or JSONL rows with `task`, `files` and `wanted` (both path -> text), and `solution`, a command.
Needs: bubblewrap or Docker.

    python environments/terminal_env.py process ...
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from atroposlib.envs.dataset_env import Split
from atroposlib.envs.multi_turn_env import Episode
from atroposlib.envs.sandbox import DockerSandbox, Sandbox, SandboxLimits, local_sandbox
from atroposlib.envs.shell import Folder
from atroposlib.envs.shell_env import ShellEnv, ShellEnvConfig
from atroposlib.envs.tool_env import hermes_call

NUM_TASKS = 2000
"""Generated training tasks."""
WORDS = ["apple", "bridge", "candle", "forest", "harbor", "magnet", "pencil", "saddle", "velvet"]


@dataclass(frozen=True, kw_only=True)
class Task:
    task: str
    files: dict[str, str] = field(repr=False)
    wanted: dict[str, str] = field(repr=False)
    """The files at the end."""
    solution: str | None = None


class TerminalConfig(ShellEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-7B-Instruct"
    group_size: int = 8
    max_token_length: int = 2048
    num_eval_rows: int = 200
    docker_image: str | None = None
    """Run commands in containers of this image, for example python:3.11-slim; None: in bubblewrap."""


class TerminalEnv(ShellEnv):
    """Several turns, reward by the state at the end."""

    name = "terminal"
    env_config_cls = TerminalConfig
    config: TerminalConfig

    def is_isolated(self) -> bool:
        """Whether commands run in a container or in namespaces."""
        return self.config.docker_image is not None or super().is_isolated()

    def sandbox(self) -> Sandbox:
        image = self.config.docker_image
        return local_sandbox() if image is None else DockerSandbox(image)

    def load_rows(self, split: Split) -> list[Task] | None:
        """Return the rows of the configured file, else generated ones."""
        if self.config.dataset_path is None and split == "train":
            rng = random.Random(f"{self.config.seed}:tasks")
            made = [self.parse_row(make_task(rng)) for _ in range(NUM_TASKS)]
            return [task for task in made if task is not None]
        rows: list[Task] | None = super().load_rows(split)
        return rows

    def parse_row(self, row: dict[str, Any]) -> Task | None:
        """Return the task; one that is solved from the start is skipped."""
        task = Task(**row)
        return None if trimmed(task.files) == trimmed(task.wanted) else task

    def prompt(self, row: Task) -> str:
        names = "\n".join(sorted(row.files))
        return f"{row.task} Leave no other new files.\n\nThe folder has these files:\n{names}"

    def example_answers(self, item: Task) -> list[str]:
        return [] if item.solution is None else [hermes_call("shell", command=item.solution)]

    def machine(self, row: Task) -> Folder:
        return Folder(row.files, sandbox=self.sandbox(), limits=SandboxLimits())

    def final_score(self, episode: Episode) -> float:
        return float(trimmed(episode.state["machine"].files) == trimmed(episode.row.wanted))


def trimmed(files: dict[str, str]) -> dict[str, str]:
    """Return the files without the space at their ends.

    >>> trimmed({"a": "1\\n"}) == trimmed({"a": "1"})
    True
    """
    return {path: text.rstrip() for path, text in files.items()}


def make_task(rng: random.Random) -> dict[str, Any]:
    """Return a task about counting, sorting, replacing, moving or adding."""
    lines = [f"{rng.choice(WORDS)} {rng.randint(1, 99)}" for _ in range(rng.randint(6, 12))]
    word, other = lines[0].split()[0], rng.choice(WORDS)
    name = f"{rng.choice(WORDS)}.txt"
    text = "\n".join(lines) + "\n"
    files = {name: text, "notes/about.txt": f"{other}\n"}
    matching = [line for line in lines if line.startswith(f"{word} ")]
    task, changes, solution = rng.choice(
        [
            (
                f"Write the number of lines of {name} that contain the word {word} to count.txt.",
                {"count.txt": f"{len(matching)}"},
                f"grep -cw {word} {name} > count.txt",
            ),
            (
                f"Sort the lines of {name} alphabetically, byte by byte, and keep each line once.",
                {name: "\n".join(sorted(set(lines)))},
                f"LC_ALL=C sort -u -o {name} {name}",
            ),
            (
                f"Replace every {word} in {name} by the word stone.",
                {name: text.replace(word, "stone")},
                f"sed -i s/{word}/stone/g {name}",
            ),
            (
                f"Copy the lines of {name} that contain the word {word} to notes/{word}.txt, in their order.",
                {f"notes/{word}.txt": "\n".join(matching)},
                f"grep -w {word} {name} > notes/{word}.txt",
            ),
            (
                f"Write the sum of the numbers in {name} to total.txt.",
                {"total.txt": f"{sum(int(line.split()[1]) for line in lines)}"},
                f"n=0; while read -r _ x; do n=$((n + x)); done < {name}; echo $n > total.txt",
            ),
        ]
    )
    return {"task": task, "files": files, "wanted": {**files, **changes}, "solution": solution}


if __name__ == "__main__":
    TerminalEnv.cli()
