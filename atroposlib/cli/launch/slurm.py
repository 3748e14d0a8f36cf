"""Job files for Slurm: one script for each part, their functions, and a script that submits them all.

The jobs find each other by files in the run's directory, which all nodes must see. An instance that Slurm queues again
on another node writes its new address there, and the jobs that use it start their programs again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from atroposlib.cli.launch.parts import Part, variables_in
from atroposlib.cli.launch.run_file import VARIABLE, RunFile
from atroposlib.errors import ConfigError

FUNCTIONS = Path(__file__).with_name("slurm_functions.sh")
PLACES = ("account", "partition", "qos", "reservation")
"""Options that the clean-up job takes over from the run's."""


def render_slurm(run: RunFile, parts: Sequence[Part], *, run_dir: Path) -> dict[str, str]:
    """Return the files by name; `run_dir` is on a file system that all nodes share."""
    files = {f"{part.name}.sbatch": _job(run, parts, part, run_dir) for part in parts}
    return {
        "submit.sh": _submit(run, parts, run_dir),
        **files,
        "functions.sh": FUNCTIONS.read_text(encoding="utf-8"),
    }


def _submit(run: RunFile, parts: Sequence[Part], run_dir: Path) -> str:
    options: dict[str, object] = {"job-name": f"{run.name}-clean-up", "time": "5", "mem": "100M"}
    options["output"] = str(run_dir).replace("%", "%%") + "/clean-up.log"
    options |= {name: run.slurm.options[name] for name in PLACES if name in run.slurm.options}
    submissions = "\n".join(map(_submission, parts))
    return f"""#!/bin/bash
# Submits every job of the run. Stop it: scancel $(cat {shlex.quote(str(run_dir))}/jobs)
set -euo pipefail
cd "$(dirname "$0")"
export RUN_FILES=$PWD RUN_DIR={shlex.quote(str(run_dir))}
source "$RUN_FILES/functions.sh"
begin_submission
{submissions}
end_submission {" ".join(shlex.quote(_option(*each)) for each in options.items())}
"""


def _job(run: RunFile, parts: Sequence[Part], part: Part, run_dir: Path) -> str:
    section = part.section
    is_array = section.count > 1
    logs = str(run_dir).replace("%", "%%")
    options: dict[str, object] = {
        "job-name": f"{run.name}-{part.name}",
        "output": f"{logs}/{part.name}{'-%a' if is_array else ''}.log",
        "open-mode": "append",
    }
    if is_array:
        options["array"] = f"0-{section.count - 1}"
    wanted = {"cpus-per-task": section.cpus, "mem": section.memory, "time": section.time}
    options |= {name: value for name, value in wanted.items() if value is not None}
    if section.gpus:
        options["gres"] = f"gpu:{section.gpus}"
    options |= run.slurm.options
    restart = "no-requeue" if section.restart == "never" else "requeue"
    head = [
        "#!/bin/bash",
        *(_directive(name, value) for name, value in options.items() if value is not False),
        f"#SBATCH --{restart}",
        "set -euo pipefail",
        f"export RUN_DIR={shlex.quote(str(run_dir))} INDEX=${{SLURM_ARRAY_TASK_ID:-0}}",
    ]
    if part.port is not None:
        head.append(f"export HOST=0.0.0.0 PORT=$(({part.port} + INDEX)) SCHEME={part.scheme}")
    lines = [*head, *_environment(part), "export PYTHONUNBUFFERED=1", *run.setup.splitlines()]
    lines.append('source "$RUN_FILES/functions.sh"')
    if part.port is not None:
        lines.append(f"export {part.variable}; {part.variable}=$(own_address)")
    lines += ["", *_end_of_part(parts, part)]
    if "DATA_DIR" in variables_in(part):
        lines += ["take_data", ""]
    lines += _connect(parts, part)
    lines += ["PROGRAM() {", f"    exec {command_line(part, indent=' ' * 8)}", "}", ""]
    limits = f"{section.timeout:.0f} {section.restart} {section.max_restarts}"
    lines.append(f'run_part "{part.instance("$INDEX")}" {shlex.quote(part.ready or "-")} {limits}')
    return "\n".join(lines) + "\n"


def _submission(part: Part) -> str:
    num = part.section.count
    tasks = [f"_{i}" for i in range(num)] if num > 1 else ["''"]
    when = "afterany" if part.ends_run else "afternotok"
    return f"submit {part.name} {when} {' '.join(tasks)}"


def _option(name: str, value: object) -> str:
    word = f"--{name}" if value is True or value is None else f"--{name}={value}"
    if "\n" in word:
        raise ConfigError(f"slurm.options.{name}: {value!r} must be one line")
    return word


def _directive(name: str, value: object) -> str:
    word = _option(name, value)
    if shlex.quote(word) != word:  # sbatch's own rule: a backslash escapes, also between quotes
        word = '"' + re.sub(r'([\\"#])', r"\\\1", word) + '"'
    return f"#SBATCH {word}"


def _environment(part: Part) -> list[str]:
    lines: list[str] = []
    for name, value in part.env.items():
        lines += [f': "${{{each}:?set it before submit.sh}}"' for each in VARIABLE.findall(value)]
        if value != f"${{{name}}}":
            lines.append(f"export {name}={shell_word(value)}")
    return lines


def _connect(parts: Sequence[Part], part: Part) -> list[str]:
    """Return the function that waits for what the part needs, and the names of the servers among it."""
    needed = part.needed(parts)
    lines = ["CONNECT() {"] if needed else ["CONNECT() { true; }"]
    uses: list[str] = []
    for each in needed:
        names = each.instances
        lines += [f"    wait_for {name} {shlex.quote(each.ready or '-')}" for name in names]
        if each.port is None:
            continue
        uses += names
        one = names[0] if len(names) == 1 else f'"{each.name}-$((INDEX % {len(names)}))"'
        every = ",".join(f"$(address {name})" for name in names)
        variable = each.variable
        lines.append(f"    export {variable}; {variable}=$(address {one})")
        if f"{variable}S" in variables_in(part):
            lines.append(f'    export {variable}S; {variable}S="{every}"')
    end = ["}"] if needed else []
    return [*lines, *end, f'USES="{" ".join(uses)}"', ""]


def _end_of_part(parts: Sequence[Part], part: Part) -> list[str]:
    """Return what happens at every end of a job: a part that ends the run, or fails, takes the other jobs with it."""
    lines = ["AT_END() { true; }"]
    if part.ends_run and any(each.name == "hub" for each in parts):
        token = '${ATROPOS_HUB_TOKEN:+-H "Authorization: Bearer $ATROPOS_HUB_TOKEN"}'
        ledger = f'curl -fs -m 10 {token} "$HUB_URL/ledger" > "$RUN_DIR/ledger.json" || true'
        lines = [f"AT_END() {{ {ledger}; }}"]
    return [*lines, f"trap 'end_job $? {'run' if part.ends_run else 'part'}' EXIT", ""]


def command_line(part: Part, *, indent: str) -> str:
    """Return a part's command for a shell, one flag a line."""
    words = list(map(shell_word, part.command))
    first = next((i for i, word in enumerate(part.command) if word.startswith("--")), len(words))
    return f" \\\n{indent}".join([" ".join(words[:first]), *words[first:]])


def shell_word(word: str) -> str:
    """Quote a word for a shell, which replaces its variables.

    >>> shell_word("--url=${HUB_URL}/a b"), shell_word("plain")
    ('"--url=${HUB_URL}/a b"', 'plain')
    """
    if VARIABLE.search(word) is None:
        return shlex.quote(word)
    pieces = VARIABLE.split(word)  # text, name, text, ...
    for i in range(0, len(pieces), 2):
        for special in ("\\", '"', "$", "`"):
            pieces[i] = pieces[i].replace(special, f"\\{special}")
    pieces[1::2] = [f"${{{name}}}" for name in pieces[1::2]]
    return f'"{"".join(pieces)}"'
