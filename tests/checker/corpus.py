"""The corpus of the check: broken environments with the rule that must fail and its hint, and sound environments.

Where two rules could see a fault, the environment is written so that only one does: the corpus measures that the check
names the cause, not a consequence. Environments that are not declared as broken are sound.
"""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import openai.types.chat  # noqa: F401 - the first call would take longer than HANGING has

from atroposlib.checker import Report, check_env
from atroposlib.envs.base import BaseEnv
from tests.checker import broken_environments as e
from tests.checker import reward_environments as r
from tests.environments.helpers_environments import load

BROKEN = e.BROKEN


def broken(name: str) -> type[BaseEnv]:
    """Return a broken environment by name."""
    return next(case.env_cls for case in BROKEN if case.env_cls.__name__ == name)


HANGING = ("ItemsNeverCome", "ItemsSpin", "SpinsInATask", "EvaluateHangs")
SLOW = ("SleepsInScoring", "ComputesInScoring")

SOUND: tuple[type[BaseEnv], ...] = (
    *(
        env_cls
        for module in (e, r)
        for env_cls in vars(module).values()
        if isinstance(env_cls, type)
        and issubclass(env_cls, BaseEnv)
        and env_cls.__module__ == module.__name__
        and env_cls not in {case.env_cls for case in (*BROKEN, *e.NOTED)}
    ),
    load("letter_reversal_server").LetterReversalEnv,
    load("gsm8k_server").GSM8kEnv,
    load("agents.arithmetic_agents").ArithmeticAgents,
)


def check(env_cls: type[BaseEnv], **options: Any) -> Report:
    """Check one environment of the corpus, with local data where it needs some."""
    options.setdefault("timeout_s", 1.0 if env_cls.__name__ in HANGING else 30.0)
    options.setdefault("num_items", 1 if env_cls.__name__ in SLOW else 2)
    quiet = redirect_stdout(io.StringIO())  # tables of evaluate()
    with tidied(), quiet, tempfile.TemporaryDirectory() as folder:
        if env_cls.__name__ == "JunkInOneTask":
            options["num_items"] = 5
        if env_cls.__name__ == "GSM8kEnv":
            options.setdefault("make", _gsm8k_on(Path(folder)))
        if env_cls.__name__ == "ArithmeticAgents":
            options |= {"make": _http_agents, "num_items": 1}
        return check_env(env_cls, **options)


def _gsm8k_on(folder: Path) -> Any:
    rows = [{"question": f"{n} times 100?", "answer": f"#### {n * 100}"} for n in (12, 13)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return _configured(dataset_path=str(path), num_reward_workers=1)


def _configured(**settings: Any) -> Any:
    def make(env_cls: Any) -> Any:
        config, servers = env_cls.config_init()
        return env_cls(config.model_copy(update={"use_wandb": False, **settings}), servers)

    return make


_http_agents = _configured(agent="http", group_size=8)


@contextmanager
def tidied() -> Iterator[None]:
    """Close afterwards what broken environments left open."""
    try:
        yield
    finally:
        for thing in e.Sums.held:
            if isinstance(thing, subprocess.Popen):
                thing.kill()
                thing.communicate()
            elif not isinstance(thing, asyncio.Task):
                thing.close()
        e.Sums.held.clear()
