"""`python my_env.py check`: the checker as a command.

Takes its own options and every flag of `serve`. Prints a line per rule, or JSON; exit code 1 if a rule fails, with
`--strict` also if one was not checked, 2 for an invalid flag. Called by `runtime.env_command`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence

from atroposlib.checker import RULES, Report, check_env
from atroposlib.envs.hooks import EnvHooks
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.wording import columns_of, wrapped

DEFAULT_ITEMS = 3
ALL = -1
"""Value of `--items all`."""


def check_environment(
    env_cls: type[EnvHooks], argv: Sequence[str], *, prog: str, build: Callable[..., EnvHooks]
) -> int:
    """Check an environment with the options in `argv`; return the exit code.

    `build` constructs it from flags: `runtime.env_command.build_environment`.
    """
    logging.basicConfig(level=logging.CRITICAL)  # what the author's code logs is in the report
    options, flags = _parser(prog).parse_known_args(argv)

    def make(cls: type[EnvHooks]) -> EnvHooks:
        with contextlib.redirect_stdout(io.StringIO()):  # the configuration, once per environment
            return build(cls, "check", ["--testing", *flags], prog=prog)

    with contextlib.redirect_stdout(sys.stderr):  # keeps the author's prints out of the report
        report = check_env(
            env_cls,
            num_items=DEFAULT_ITEMS if options.items == ALL else options.items,
            seed=options.seed,
            skip=options.skip,
            make=make,
            tokenizer=None if options.tokenizer is None else load_tokenizer(options.tokenizer),
            timeout_s=options.timeout,
            budget_s=options.budget,
            walks_all_rows=options.items == ALL,
            samples=not options.fast,
            on_phase=lambda done: print(f"check: {done}", file=sys.stderr, flush=True),
        )
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(wrapped(f"{report.to_text()}\n{_next_step(report)}", columns_of(sys.stdout)))
    return 0 if report.is_ok and not (options.strict and report.not_checked) else 1


def _next_step(report: Report) -> str:
    if not report.is_ok:
        return "next: do what the lines with > say, and check again"
    return "next: process writes groups of a model and a page to read; then serve"


def _items(text: str) -> int:
    return ALL if text == "all" else int(text)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run the environment without a model and report what would go wrong in training.",
        epilog=f"Flags of the environment (--env.FIELD, --config FILE) are those of serve."
        f" Rules: {', '.join(rule.name for rule in RULES)}.",
        allow_abbrev=False,
    )
    items_help = "items to run (3); all: run 3, and walk every row of the data"
    parser.add_argument("--items", type=_items, default=DEFAULT_ITEMS, help=items_help)
    parser.add_argument("--fast", action="store_true", help="walk the rows, and run no item")
    budget_help = "seconds after which no more items run (60)"
    parser.add_argument("--budget", type=float, default=60.0, help=budget_help)
    parser.add_argument("--seed", type=int, default=0, help="random state of the check (0)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds per call (30)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="RULE", help="do not judge this rule; repeat"
    )
    strict_help = "exit with 1 also if a rule that applies could not be checked"
    parser.add_argument("--strict", action="store_true", help=strict_help)
    parser.add_argument("--tokenizer", help="name or path, instead of the built-in one")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
