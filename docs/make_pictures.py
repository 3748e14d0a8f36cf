"""Run the demo and take the README's pictures: its terminal, `atropos status` while it trains, and the viewer's page.

    pip install -e '.[docs]'; PYTHONPATH=. OMP_NUM_THREADS=1 python docs/make_pictures.py

Needs Chromium with its driver. `--demo DIR` shows an earlier run in the viewer. `--ask DIR...` asks the viewer the five
questions about each run instead: it prints the clicks and seconds of each and, with `jq`, the overview's numbers as the
files have them, and takes a picture of every answer.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
import yaml
from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
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


@contextmanager
def browsing(page: Path) -> Iterator[webdriver.Chrome]:
    """Open a page in Chromium and wait for its list."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", f"--window-size={PAGE[0]},{PAGE[1]}"):
        options.add_argument(flag)
    with webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver"))
    ) as browser:
        browser.get(page.resolve().as_uri())
        WebDriverWait(browser, 30).until(lambda it: it.find_elements(By.CSS_SELECTOR, "#rows a"))
        yield browser


def photograph(demo: Path, out: Path) -> None:
    """Write pictures of the viewer's page of a run: its curves, and one of its groups."""
    page = demo / "run.html"
    write_run_page(find_run_files(demo), page, title="demo")
    with browsing(page) as browser:
        take(browser, out / "curves.png")
        browser.find_element(By.CSS_SELECTOR, "#rows a").click()
        wait_for(browser, "completions")
        take(browser, out / "group.png")


QUESTIONS = {
    "never_solved": (["items", "Never solved"], "Over time"),
    "where_from": (["#rows a", "Rewards"], "beside what the environment noted"),
    "length_paid": (["Reward against length"], "A point is a group"),
    "policy_changed": (["items", ".items a"], "Open this group alone"),
    "moved_the_loss": ([".charts svg"], "largest share of the loss first"),
}
"""Clicks from the first page (a part of a text, or a selector), and what the answer says."""
COUNTS = {
    "groups and mean score": (
        "groups",
        "[.scores[]] | [length, add] | @json",
        lambda found: (
            f"{len(found)} groups, {sum(n for n, _ in found)} sequences, "
            f"mean score {sum(total for _, total in found) / sum(n for n, _ in found):.3f}"
        ),
    ),
    "fates": (
        "fates",
        ".fate",
        lambda found: ", ".join(f"{fate} {found.count(fate)}" for fate in sorted(set(found))),
    ),
}
"""What `jq` reads in each line of which files, and how it is summed up."""


def wait_for(browser: webdriver.Chrome, text: str) -> None:
    WebDriverWait(browser, 60, 0.02).until(lambda it: text in it.find_element(By.ID, "detail").text)


def click(browser: webdriver.Chrome, what: str) -> None:
    """Click an element by a selector, or a link or button that has a text, when it is there."""
    in_detail = f"//*[@id='detail']//*[(self::a or self::button) and contains(., '{what}')]"
    by = (By.CSS_SELECTOR, what) if what[0] in "#." else (By.XPATH, in_detail)
    found = WebDriverWait(browser, 60, 0.02).until(lambda it: it.find_elements(*by))[0]
    ActionChains(browser).scroll_to_element(found).click(found).perform()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def ask(run: Path, out: Path) -> None:
    """Ask the five questions about a run; print a line each, and the overview beside the files."""
    files, page = find_run_files(run), run / "run.html"
    write_run_page(files, page)
    with browsing(page) as browser:
        say(f"{run.name}: {browser.find_element(By.ID, 'about').text}")
        for title, (kind, query, summed) in COUNTS.items():
            command = ["jq", "-c", query, *map(str, getattr(files, kind))]
            lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = [json.loads(line) for line in lines.splitlines()]
            found = [json.loads(each) if each[0] == "[" else each for each in found]
            say(f"  jq, {title}: {summed(found)}")
        overview = browser.find_element(By.ID, "detail").text.replace("\n", " ")
        say(f"  overview: {overview[:120]}")
        for name, (clicks, answer) in QUESTIONS.items():
            browser.execute_script("location.hash = 'view=run'")
            wait_for(browser, "Overview")
            began = time.perf_counter()
            for what in clicks:
                click(browser, what)
            wait_for(browser, answer)
            say(f"  {name}: clicks {len(clicks)}, {time.perf_counter() - began:.2f} s")
            take(browser, out / f"{run.name}_{name}.png")
        if said := browser.get_log("browser"):
            sys.exit(f"the page wrote to the console: {said}")


def take(browser: webdriver.Chrome, target: Path) -> None:
    """Write what the browser shows, in 64 colours."""
    browser.save_screenshot(str(target))
    Image.open(target).convert("RGB").quantize(64).save(target, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--steps", type=int, default=84)
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--ask", type=Path, nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.ask:
        for run in args.ask:
            ask(run, args.out)
        return
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
