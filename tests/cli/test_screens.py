"""What commands show in a terminal of 80 columns, kept as text in `screens/`: whole words, the next command at the end.

    UPDATE_SCREENS=1 python -m pytest -m drill tests/cli/test_screens.py

writes the files anew. Numbers that differ from run to run are replaced by `N`, times of log lines by `TIME`.
"""

import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyte
import pytest
from rich.console import Console

from atroposlib.api.http.security import TokenSet
from atroposlib.api.server import create_app
from atroposlib.cli._demo.progress import Display
from atroposlib.cli._demo.report import compare_modes, mode_figures
from tests.api.helpers_api import serving
from tests.builders.programs import run_python
from tests.cli.helpers_cli import HubServer, text_group
from tests.cli.helpers_launch import DEMO
from tests.processes import ROOT, free_port

COLUMNS, ROWS = 80, 120
SCREENS = Path(__file__).parent / "screens"
TIMEOUT_S = 100
ENGINE = "--server_type=openai --model_name=scripted --openai.base_url=http://127.0.0.1:ENGINE/v1"
TESTING = "--testing --env.ensure_scores_are_not_same=false"
SERVE = "--env.rollout_server_url=http://127.0.0.1"

pytestmark = [pytest.mark.e2e, pytest.mark.drill, pytest.mark.timeout(3 * TIMEOUT_S)]


class Case(NamedTuple):
    status: int
    command: str
    """After `python`; PORT is a port where nothing listens, ENGINE that of a scripted engine, HUB that of a hub with a
    trainer, DONE that of one whose run is finished, LOCKED that of one that wants a token."""
    until: str = ""
    """Text after which Ctrl-C is pressed; "": the command ends by itself."""


CASES = {
    "env_new": Case(0, "-m atroposlib.cli.environments new another"),
    "env_list_one": Case(0, "-m atroposlib.cli.environments list gsm8k_server"),
    "check": Case(0, "task.py check"),
    "process": Case(0, f"task.py process --env.total_steps=2 {ENGINE}"),
    "process_testing": Case(0, f"task.py process {TESTING} --env.total_steps=2"),
    "rescore": Case(0, "-m atroposlib.cli.environments rescore rows.jsonl --env task.py --testing"),
    "rescore_no_file": Case(
        2, "-m atroposlib.cli.environments rescore row.jsonl --env task.py --testing"
    ),
    "sft": Case(0, "-m atroposlib.cli.sft sft.jsonl --from-file rows.jsonl --save-messages"),
    "dpo": Case(0, "-m atroposlib.cli.dpo dpo.jsonl --from-file rows.jsonl --save-messages"),
    "sft_rows": Case(0, "-m atroposlib.cli.sft a.jsonl --from-file pairs.jsonl --save-messages"),
    "dpo_rows": Case(0, "-m atroposlib.cli.dpo b.jsonl --from-file pairs.jsonl --save-messages"),
    "up": Case(0, "-m atroposlib.cli.atropos up run.yaml"),
    "status": Case(0, "-m atroposlib.cli.atropos status http://127.0.0.1:DONE"),
    "serve": Case(0, f"task.py serve {TESTING} {SERVE}:HUB", until="sent 3"),
    "serve_finished": Case(0, f"task.py serve {TESTING} {SERVE}:DONE --env.total_steps=1"),
    "serve_wrong_token": Case(1, f"task.py serve {TESTING} {SERVE}:LOCKED"),
    "status_wrong_token": Case(1, "-m atroposlib.cli.atropos status http://127.0.0.1:LOCKED"),
    "run_api": Case(0, "-m atroposlib.cli.run_api --memory --port PORT", until="listening"),
    "render": Case(0, f"-m atroposlib.cli.atropos render {DEMO} --for slurm"),
    "engine_down": Case(
        130,
        "task.py process --server_type=openai --model_name=m --openai.base_url=http://127.0.0.1:PORT/v1",
        until="engine down",
    ),
    "evaluate": Case(0, f"task.py evaluate {ENGINE}"),
    "status_no_hub": Case(1, "-m atroposlib.cli.atropos status --hub_url http://127.0.0.1:PORT"),
    "up_no_file": Case(2, "-m atroposlib.cli.atropos up nothing.yaml"),
    "run_api_wrong_flag": Case(2, "-m atroposlib.cli.run_api --prot 8000"),
    "run_api_unprotected": Case(2, "-m atroposlib.cli.run_api --host 0.0.0.0 --port PORT"),
    "view_run_no_file": Case(2, "-m atroposlib.cli.view_run nothing.jsonl"),
    "wrong_model": Case(
        1, f"task.py process --env.total_steps=2 {ENGINE} --env.max_num_workers=1 --model_name=huge"
    ),
    "serve_text_engine": Case(2, f"task.py serve {ENGINE}"),
    "no_tokenizer": Case(2, "task.py process --tokenizer_name=nothing/there"),
    "no_data_set": Case(2, f"{ROOT}/environments/gsm8k_server.py process {ENGINE}"),
    "wrong_flag": Case(2, "task.py process --group_sise 3"),
    "bad_yaml": Case(2, "task.py process --config bad.yaml"),
    "misspelt_key": Case(2, "task.py process --config misspelt.yaml"),
    "no_config": Case(2, "task.py process --config nothing.yaml"),
    "no_env": Case(2, "-m atroposlib.cli.environments run gsm8k"),
    "wrong_command": Case(2, "task.py proces"),
}
PAIR = [[{"role": "assistant", "content": answer}] for answer in "23"]
FILES = {
    "bad.yaml": "env:\n  group_size: 4\n total_steps: 3\n",
    "misspelt.yaml": "env:\n  gruop_size: 4\n",
    "run.yaml": """\
name: short
parts:
  download: {command: [python, -c, "print('downloaded')"], ready: exit}
trainer: {command: [python, -c, "print('step 1 of 1')"], needs: [download]}
""",
    "pairs.jsonl": json.dumps({**text_group("1 + 1 =", ["2", "3"], [1.0, 0.0]), "messages": PAIR})
    + "\n",
}
UNSTEADY = (
    (r"\d\d:\d\d:\d\d(?= [IWE] )", "TIME"),
    (r"TIME W Inference server .*\n(  .*\n)*", ""),  # on a busy machine
    (r"We couldn't connect(.|\n)*?files(?=;)", "REASON"),  # of transformers
    (r"data/task_\d+", "data/task"),  # the commands before have written others
    (r"\d{8}-\d{6}", "DATE-TIME"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"(duration +|rate +|took |\(|, )\d+(\.\d+)?(?= s\b|/min| seconds)", r"\1N"),
    (r"\d[\d.,]*k? in, \d[\d.,]*k? out|\d[\d,]* prompt\s+and\s+\d[\d,]*(?=\s)", "N tokens"),
    (r"\d+\.\d+(?= MB)", "N"),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Start a scripted engine; return its port."""
    command = [sys.executable, "-m", "atroposlib.inference.scripted_engine", "--script"]
    script = json.dumps({"answers": ["two"]})
    with subprocess.Popen([*command, script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as ran:
        assert ran.stdout is not None
        port = ran.stdout.readline().strip().rpartition(":")[2]
        assert port.isdigit()
        yield port
        ran.terminate()


@pytest.fixture(scope="module")
def ports(engine: str) -> Iterator[dict[str, str]]:
    """Return the ports of the scripted engine and of three hubs by their names in a command."""
    with (
        serving(create_app()) as hub,
        serving(create_app()) as done,
        serving(create_app(tokens=TokenSet(()))) as locked,
    ):
        started, finished = HubServer(hub), HubServer(done)
        started.register(num_steps=3)
        assert started.get("/batch") == {"batch": None}
        finished.register(num_steps=1, batch_size=4)
        finished.send(text_group("1 + 1 =", ["2", "3", "4", "5"], [1.0, 0.0, 0.0, 0.0]))
        assert finished.get("/batch")["batch"]
        urls = {"HUB": hub, "DONE": done, "LOCKED": locked}
        yield {"ENGINE": engine} | {name: url.rpartition(":")[2] for name, url in urls.items()}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment, groups that it made, and wrong files."""
    folder = tmp_path_factory.mktemp("work")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    run_python("-m", "atroposlib.cli.environments", "new", "task", cwd=folder)
    rows = "--env.data_path_to_save_groups=rows.jsonl"
    run_python("task.py", "process", "--testing", "--env.total_steps=2", rows, cwd=folder)
    return folder


def in_terminal(arguments: list[str], *, cwd: Path, until: str = "") -> tuple[int, str, int]:
    """Run Python in a terminal until it ends; return its exit code, its last screen and the longest line written.

    Once it has written `until`, press Ctrl-C.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {"TERM": "xterm", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": ""}
    child = subprocess.Popen(
        [sys.executable, *arguments],
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        cwd=cwd,
        env=os.environ | variables,
    )
    os.close(slave)
    limit = threading.Timer(TIMEOUT_S, child.kill)
    limit.start()
    written = b""
    while True:
        try:
            written += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if until and until.encode() in written:
            child.send_signal(signal.SIGINT)
            until = ""
    limit.cancel()
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r\n", "\n", written.decode()).replace("\r", "\n")
    longest = max(len(line) for line in text.split("\n"))
    return child.wait(TIMEOUT_S), last_screen(written), longest


def last_screen(written: bytes) -> str:
    """Return what a terminal shows after it got these bytes."""
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(written)
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def check_golden(name: str, screen: str) -> None:
    """Compare a screen with the kept one, or keep it."""
    golden = SCREENS / f"{name}.txt"
    if os.environ.get("UPDATE_SCREENS"):
        golden.write_text(screen + "\n")
    assert screen + "\n" == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_screen_is_whole_at_80_columns(name: str, work: Path, ports: dict[str, str]) -> None:
    if name == "no_data_set":
        pytest.importorskip("datasets")
    case = CASES[name]
    command = case.command
    for word, port in {**ports, "PORT": str(free_port())}.items():
        command = command.replace(word, port)
    status, screen, longest = in_terminal(command.split(), cwd=work, until=case.until)
    for pattern, text in UNSTEADY:
        screen = re.sub(pattern, text, screen)
    screen = screen.replace(str(ROOT), "REPOSITORY").replace(str(work), "WORK")
    assert (status, longest <= COLUMNS) == (case.status, True), screen
    check_golden(name, screen)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_the_demo_is_whole_at_80_columns(num_steps: int, tmp_path: Path) -> None:
    steps: list[Any] = [
        {
            **{"reward_mean": reward, "num_trained_tokens": 1536, "wall_s": 0.5},
            **{"staleness_mean": 1.0, "queue_size": 32, "logprob_gap_max": 1.5e-5},
            "batch_wait_s": 0.125,
        }
        for reward in (0.25, 0.5, 0.875)[:num_steps]
    ]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\r\n")
    console = Console(file=out, width=COLUMNS, force_terminal=True, legacy_windows=False)
    display = Display(console, num_steps=3)
    display.say("  step  60  validation accuracy 0.250")
    with display:
        for step in steps:
            display.show_step(step)
    if steps:
        figures = {"heldout_sampled_after": 0.9, **mode_figures(steps)}
        other = tmp_path / "demo-1"
        other.mkdir()
        (other / "summary.json").write_text(json.dumps({"asynchronous": True, **figures}))
        display.say(compare_modes(tmp_path / "demo", {"asynchronous": False, **figures}))
    out.flush()
    screen = re.sub(r"\d:\d\d:\d\d", "TIME", last_screen(out.buffer.getvalue()))
    check_golden("demo" if steps else "demo_waiting", screen)
