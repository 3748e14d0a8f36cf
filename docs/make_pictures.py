"""Run the demo and take the README's pictures: its terminal, `atropos status` while it trains, and the viewer's page.

    pip install -e '.[docs]'; PYTHONPATH=. OMP_NUM_THREADS=1 python docs/make_pictures.py

Needs Chromium with its driver. `--demo DIR` shows an earlier run in the viewer.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pyte
import yaml
from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from atroposlib.frontend.run_files import find_run_files, write_run_page

COLUMNS, ROWS = 110, 34
PAGE = (1280, 860)
"""Width and height of the browser's window."""
MAX_BYTES = 150_000


def in_terminal(command: Sequence[str]) -> pyte.Screen:
    """Run a command in a terminal until it ends; return its last screen."""
    screen = pyte.HistoryScreen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    while True:
        try:
            said = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        stream.feed(said)
    os.close(master)
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)} failed:\n" + "\n".join(screen.display))
    return screen


def draw(screen: pyte.Screen, command: str, target: Path) -> None:
    """Write a screen as SVG, below the command that was typed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.assemble(("$ ", "bold green"), command))
    lines = [line_of(screen, y) for y in range(ROWS)]
    while lines and not lines[-1]:
        lines.pop()
    for line in lines:
        console.print(line)
    svg = console.export_svg(title="")
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S))  # needs no server


def line_of(screen: pyte.Screen, y: int) -> Text:
    """Return a line with its colours, and paths relative to this directory."""
    line = Text()
    for x in range(COLUMNS):
        cell = screen.buffer[y][x]
        color = cell.fg if cell.fg.isalpha() else f"#{cell.fg}"
        color = {"default": "", "brown": "yellow"}.get(color, color)
        color = re.sub("^bright(?=[a-z])", "bright_", color)
        line.append(cell.data, f"{'bold ' * cell.bold}{color}")
    line.rstrip()
    here = f"{Path.cwd()}/"
    start = line.plain.find(here)
    return line if start < 0 else line[:start] + line[start + len(here) :]


def draw_status(demo: Path, target: Path, *, step: int) -> None:
    """Wait until the demo's trainer is at a step, and take a picture of `atropos status`."""
    config, metrics = demo / "config.yaml", demo / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        time.sleep(1)
    hub = yaml.safe_load(config.read_text())["commands"]["trainer"]
    [url] = [flag.partition("=")[2] for flag in hub if flag.startswith("--hub_url=")]
    command = [sys.executable, "-m", "atroposlib.cli.atropos", "status", url]
    draw(in_terminal(command), f"atropos status {url}", target)


def photograph(demo: Path, out: Path) -> None:
    """Write pictures of the viewer's page of a run: its curves, and one of its groups."""
    page = demo / "run.html"
    write_run_page(find_run_files(demo), page, title="demo")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", f"--window-size={PAGE[0]},{PAGE[1]}"):
        options.add_argument(flag)
    with webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver"))
    ) as browser:
        browser.get(page.resolve().as_uri())
        first = WebDriverWait(browser, 30).until(
            lambda it: it.find_element(By.CSS_SELECTOR, "#rows a")
        )
        take(browser, out / "curves.png")
        first.click()
        WebDriverWait(browser, 30).until(
            lambda it: "completions" in it.find_element(By.ID, "detail").text
        )
        take(browser, out / "group.png")


def take(browser: webdriver.Chrome, target: Path) -> None:
    """Write what the browser shows, in 64 colours."""
    browser.save_screenshot(str(target))
    Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--demo", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    demo: Path = args.demo or Path("runs/demo")
    if args.demo is None:
        shutil.rmtree(demo, ignore_errors=True)
        half = {"step": args.steps // 2}
        reader = threading.Thread(
            target=draw_status, args=(demo, args.out / "status.svg"), kwargs=half
        )
        reader.daemon = True
        reader.start()
        command = [sys.executable, "-m", "atroposlib.cli.demo", f"--steps={args.steps}"]
        draw(in_terminal(command), "make demo", args.out / "demo.svg")
        reader.join(timeout=30)
    photograph(demo, args.out)
    for picture in sorted(args.out.iterdir()):
        if picture.stat().st_size > MAX_BYTES:
            sys.exit(f"{picture} has {picture.stat().st_size} bytes, more than {MAX_BYTES}")


if __name__ == "__main__":
    main()
