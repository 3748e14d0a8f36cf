"""`atropos-env audit FILE [--env ENV]`: show stored groups to the audit of rewards, in the order of the file.

Without an environment, the detectors that only read; with one, its graders also judge every rewarded answer for other
gold answers. Rows of `process` and `serve` have what is needed; rows of other programs need `scores`, and `messages` or
`completions`. Exit code 1: an alarm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.cli.rescore import rows_of
from atroposlib.envs.audit import COUNTERFACTUALS, DETECTORS, Audit, Budget, Judged
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.eval_run import hash_of
from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.rollouts import number_of
from atroposlib.errors import ConfigError
from atroposlib.runtime.replay import Replayer
from atroposlib.runtime.stored_items import item_of
from atroposlib.utils.display import table_of


async def audit_file(path: Path, *, env: EnvHooks | None, success_score: float) -> Audit:
    """Return the audit after all groups of a file; ConfigError if the environment has no detectors."""
    if env is not None and not isinstance(env, DatasetEnv):
        what = f"{type(env).__name__} is no DatasetEnv, so its graders are unknown"
        raise ConfigError(f"--env: {what}")
    applies = set(DETECTORS).difference(COUNTERFACTUALS) if env is None else set(env.detectors())
    # A row has neither unscored answers nor evaluations.
    applies -= {"unscored", "evaluation"}
    async with contextlib.AsyncExitStack() as stack:
        if env is not None:
            stored = [row["item"] for row in rows_of(path) if row.get("item") is not None]
            await stack.enter_async_context(Replayer(env, rows=stored))
            success_score = env.success_score
        audit = Audit(applies, success_score=success_score, budget=Budget(0.0))
        for number, row in enumerate(rows_of(path), start=1):
            version, gold = row.get("policy_version"), row.get("gold_answer")
            at: dict[str, Any] = {
                "step": version if isinstance(version, int) else number,
                "group": str(row.get("group_id") or f"line {number}"),
            }
            answers = judged_of(row)
            key = str(number) if row.get("item") is None else hash_of(row["item"])
            audit.note(answers, item=key, gold=gold if isinstance(gold, str) else None, **at)
            if env is not None and row.get("item") is not None:
                item = item_of(type(env), row["item"])
                for i in audit.sample(answers, whole=True):
                    await audit.examine(env.graders, item, answers[i].text, **at)
    return audit


def judged_of(row: Mapping[str, Any]) -> list[Judged]:
    """Return the answers of a row; those without a text are left out."""
    conversations = row.get("messages") or [()] * len(row["scores"])
    completions = row.get("completions") or [None] * len(row["scores"])
    found = []
    for score, said, text in zip(row["scores"], conversations, completions, strict=False):
        messages = [each for each in said if isinstance(each, Mapping)]
        answers = [each.get("content") for each in messages if each.get("role") == "assistant"]
        text = answers[-1] if text is None and answers else text
        if isinstance(text, str):
            found.append(Judged(text, number_of(score), len(text), messages=messages))
    return found


def to_text(audit: Audit) -> str:
    """Return a table of the detectors and the alarms."""
    rows = [("Detector", "Seen", "Hits", "", "")]
    for name, watch in audit.watches.items():
        share = f"{watch.hits / watch.num:.1%}" if watch.num else "-"
        known = "alarm" if watch.is_raised else ""
        if watch.usual is None:
            known = "too few to say"
        elif watch.usual >= 0.5:
            known = "usual here, so it says nothing"
        rows.append((name, f"{watch.num:,}", f"{watch.hits:,}", share, known))
    alarms = audit.alarms or [f"no alarm of {len(audit.watches)} detectors of {len(DETECTORS)}"]
    return "\n".join([table_of(rows).rstrip(), *alarms])
