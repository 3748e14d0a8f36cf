"""Rendered files run as they are read in the run file: nothing in it reaches a shell but as one word."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.cli.launch import TARGETS, Target
from atroposlib.cli.launch.render import render
from atroposlib.errors import ConfigError
from tests.builders.rows import rows_in
from tests.cli.helpers_launch import write_run

HOSTILE = (
    "a b&c=1;touch canary;$(touch canary)`touch canary`'\"|touch canary #%x $$(RUN_DIR) $HOME \\"
)
READY = f"/health?{HOSTILE}"
RUN: dict[str, Any] = {
    "name": "odd",
    "model": f"models/{HOSTILE}",
    "image": HOSTILE,
    "env": {"WORDS": HOSTILE, "LINES": "one\ntouch canary\ntwo"},
    "slurm": {"options": {"comment": HOSTILE}},
    "kubernetes": {"volume": "runs\nkind: Canary"},
    "parts": {
        "judge": {"command": ["serve"], "port": 7000, "ready": READY},
        "each": {"command": ["serve"], "port": 7001, "ready": READY, "count": 2},
        "mine": {
            "command": ["show", "--model", HOSTILE, f"{HOSTILE}=${{JUDGE_URL}}", "x\ntouch canary"],
            "needs": ["judge", "each"],
            "restart": "never",
        },
    },
}
WORDS = ["--model", HOSTILE, f"{HOSTILE}=ADDRESS", "x\ntouch canary"]
SHOW = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["SHOWN"], "a") as file:
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:], os.environ.get("WORDS"), os.environ.get("LINES")]
    print(json.dumps(words), file=file)
"""


def run_shell(script: str | Path, tmp_path: Path, **variables: str) -> list[list[str]]:
    """Run a script beside programs that write down their arguments; return these."""
    programs, shown = tmp_path / "bin", tmp_path / "shown"
    programs.mkdir(exist_ok=True)
    for name in ("curl", "wget", "show", "sleep"):
        (programs / name).write_text(SHOW)
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "SHOWN": str(shown), **variables}
    words = ["bash", str(script)] if isinstance(script, Path) else ["sh", "-c", script]
    subprocess.run(words, env=environ, cwd=tmp_path, check=True, timeout=15)
    return [each for each in rows_in(shown) if each[0] != "sleep"]


def rendered(tmp_path: Path, target: Target) -> Path:
    run = write_run(tmp_path / "run.yaml", RUN)
    render(run, target=target, out=tmp_path / "out", directory=tmp_path / "my runs%j")
    return tmp_path / "out"


def tasks(tmp_path: Path, target: Target) -> dict[str, Any]:
    found = yaml.safe_load_all((rendered(tmp_path, target) / "run.yaml").read_text())
    return {f"{each.get('kind', '')} {each.get('metadata', each)['name']}": each for each in found}


def expanded(text: str, values: dict[str, str]) -> str:
    """Replace `$(NAME)` and `$$` in a command or a value as Kubernetes does."""
    return re.sub(
        r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else values.get(m[2], m[0]), text
    )


def checked_urls(calls: list[list[str]]) -> list[str]:
    return [word for call in calls[:-1] for word in call if word.endswith(READY)]


def test_a_job_of_slurm_gets_every_value_as_one_word(tmp_path: Path) -> None:
    jobs = rendered(tmp_path, "slurm")
    script = (jobs / "mine.sbatch").read_text()
    directory = tmp_path / "my runs%j" / "odd"
    (directory / "addresses").mkdir(parents=True)
    for name in ("judge", "each-0", "each-1"):
        (directory / "addresses" / name).write_text("ADDRESS")
    calls = run_shell(jobs / "mine.sbatch", tmp_path, RUN_FILES=str(jobs))
    assert calls[-1] == ["show", *WORDS, HOSTILE, RUN["env"]["LINES"]]
    assert checked_urls(calls) == [f"ADDRESS{READY}"] * 3
    assert not (tmp_path / "canary").exists()
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    output = str(directory / "mine.log").replace("%", "%%")
    assert f'#SBATCH "--output={output}"' in options
    (comment,) = [line for line in options if "--comment" in line]
    read = re.fullmatch(r'#SBATCH "((?:[^\\"#]|\\.)*)"', comment)  # as sbatch reads it
    assert read is not None
    assert re.sub(r"\\(.)", r"\1", read[1]) == f"--comment={HOSTILE}"


def test_a_server_of_slurm_is_probed_at_its_path(tmp_path: Path) -> None:
    script = (rendered(tmp_path, "slurm") / "judge.sbatch").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("run_part")]
    calls = run_shell(line.replace("run_part", "show"), tmp_path)
    assert calls[0][:4] == ["show", "judge", READY, "600"]
    assert not (tmp_path / "canary").exists()


def test_a_task_of_skypilot_gets_every_value_as_one_word(tmp_path: Path) -> None:
    mine = tasks(tmp_path, "skypilot")[" mine"]
    (tmp_path / "job").write_text(mine["run"])
    variables = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_JOBGROUP_NAME": "g"}
    calls = run_shell(tmp_path / "job", tmp_path, **mine["envs"], **variables)
    words = [word.replace("ADDRESS", "http://judge-0.g:7000") for word in WORDS]
    assert calls[-1] == ["show", *words, HOSTILE, RUN["env"]["LINES"]]
    urls = ["http://judge-0.g:7000", "http://each-0.g:7001", "http://each-1.g:7001"]
    assert checked_urls(calls) == [url + READY for url in urls]
    assert not (tmp_path / "canary").exists()


def test_a_pod_of_kubernetes_gets_every_value_as_one_word(tmp_path: Path) -> None:
    found = tasks(tmp_path, "kubernetes")
    assert not any(name.startswith("Canary") for name in found)
    pod = found["Job odd-mine"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values: dict[str, str] = {}
    for each in container["env"]:
        if "value" in each:
            values[each["name"]] = expanded(each["value"], values)
    words = [word.replace("ADDRESS", "http://odd-judge-0.odd-judge:7000") for word in WORDS]
    assert [expanded(word, values) for word in container["command"]] == ["show", *words]
    assert (values["WORDS"], values["LINES"]) == (HOSTILE, RUN["env"]["LINES"])
    for wait in pod["initContainers"]:
        shell, option, script = (expanded(word, {}) for word in wait["command"])
        assert (shell, option) == ("sh", "-c")
        calls = run_shell(script, tmp_path)
    assert [call[-3] for call in calls] == [
        f"http://odd-{host}:{port}{READY}"
        for host, port in [
            ("judge-0.odd-judge", 7000),
            ("each-0.odd-each", 7001),
            ("each-1.odd-each", 7001),
        ]
    ]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_what_no_quoting_can_carry_is_refused(tmp_path: Path, target: Target) -> None:
    part = {"command": ["x"]}
    for changes, message in [
        ({"env": {"A; touch canary": "x"}}, "no name of an environment variable"),
        ({"parts": {"p": {**part, "env": {"$(touch canary)": "x"}}}}, "no name of an environment"),
        ({"parts": {"p\u00e9": part}}, "a name has letters"),
    ]:
        run: dict[str, Any] = {"name": "odd", "image": "i", "parts": {"p": part}, **changes}
        with pytest.raises(ConfigError, match=message):
            render(write_run(tmp_path / "run.yaml", run), target=target, out=tmp_path / "out")


@pytest.mark.parametrize("options", [{"comment": "x\ntouch canary"}, {"x\ntouch canary": True}])
def test_an_option_of_several_lines_is_no_line_of_a_job(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    run = write_run(tmp_path / "run.yaml", {**RUN, "slurm": {"options": options}})
    with pytest.raises(ConfigError, match="must be one line"):
        render(run, target="slurm", out=tmp_path / "out")
