"""`python my_env.py check`: the checker as a command.

Takes its own options and every flag of `serve`. Prints a line per rule, or JSON; exit code 1 if a rule fails, 2 for an
invalid flag. Called by `runtime.env_command`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence

from atroposlib.checker import RULES, check_env
from atroposlib.envs.hooks import EnvHooks
from atroposlib.utils.tokenizers import load_tokenizer


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
            num_items=options.items,
            seed=options.seed,
            skip=options.skip,
            make=make,
            tokenizer=None if options.tokenizer is None else load_tokenizer(options.tokenizer),
            timeout_s=options.timeout,
        )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.to_text())
    return 0 if report.is_ok else 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run the environment without a model and report what would go wrong in training.",
        epilog=f"Flags of the environment (--env.FIELD, --config FILE) are those of serve."
        f" Rules: {', '.join(rule.name for rule in RULES)}.",
        allow_abbrev=False,
    )
    parser.add_argument("--items", type=int, default=3, help="items to run (3)")
    parser.add_argument("--seed", type=int, default=0, help="random state of the check (0)")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds per call (30)")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="RULE", help="do not judge this rule; repeat"
    )
    parser.add_argument("--tokenizer", help="name or path, instead of the built-in one")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser
