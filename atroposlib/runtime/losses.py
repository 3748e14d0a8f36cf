"""Why work gave nothing to train on: every reason with its cause and the setting that decides it.

The reasons are the counters of the outbox (`dropped`, in groups) and of the environment (`EnvHooks.lost_answers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atroposlib.runtime.group_rows import item_json

SAMPLE_CHARS = 120
"""Of an item, in a line of the log."""

CAUSES = {
    "aborted": "the engine aborted answers, for example at a weight update; look at its log",
    "another_run": "the trainer started another experiment",
    "equal_scores": "all scores of a group are equal, so it has no gradient: change the task or the score, raise"
    " group_size, or keep such groups with --env.ensure_scores_are_not_same false",
    "group_size": "the number of sequences is not --env.group_size; a group that differs on purpose says so in"
    ' group_overrides["group_size"]',
    "judge_cut_off": "the judge's verdict was cut off: raise --env.judge_max_tokens",
    "judge_unparsable": "the judge's verdict has no score in the form that the prompt asks for: use a stronger judge or"
    " change judge_messages; --env.on_reward_failure decides what becomes of the answer",
    "malformed": "the group's fields do not fit together: correct the environment's code",
    "no group": "collect_trajectories or postprocess_histories returned none; the environment's code decides this",
    "none": "the environment returned None in a list of groups",
    "shape_group": "shape_group returned None or no scores",
    "suspicious": "the audit found that they should not be paid; --env.on_suspicion drop leaves them out",
    "too_long": "a sequence is as long as the trainer's token limit or longer: lower --env.max_token_length or raise"
    " the trainer's limit",
    "too_short": "answers have fewer trained tokens than --env.min_trained_tokens: lower it, or look at the answers",
    "unjudged": "score gave no number, raised, or timed out (--env.reward_timeout_s); --env.on_reward_failure decides"
    " what becomes of the answer",
}


def listed(counts: Mapping[str, int]) -> str:
    """Return counts as text, sorted by name; "none" if there are none.

    >>> listed({"too_long": 1, "equal_scores": 3})
    'equal_scores 3, too_long 1'
    """
    return ", ".join(f"{name} {counts[name]}" for name in sorted(counts) if counts[name]) or "none"


def is_logged(count: int) -> bool:
    """Whether the log names the `count`-th loss of a reason: the first, the 10th, the 100th and so on."""
    return str(count).rstrip("0") == "1"


def sample(detail: str, item: Any) -> str:
    """Return what happened to an item, in one line; an item of None is unknown.

    >>> sample("every score is 0.5", {"question": "1 + 1?"})
    'every score is 0.5; item {"question":"1 + 1?"}'
    """
    if item is None:
        return detail
    text = bytes(item_json(item)).decode()
    shown = text if len(text) <= SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}..."
    return f"{detail}; item {shown}"


def explain(
    *,
    dropped: Mapping[str, int],
    lost: Mapping[str, int],
    num_without_groups: int,
    samples: Mapping[str, str],
) -> str:
    """Return one line per reason, the most frequent first: its count, its cause, what to do and its first sample.

    >>> print(explain(dropped={"none": 3}, lost={}, num_without_groups=0, samples={"none": "item 5"}))
      none (3): the environment returned None in a list of groups (the first: item 5)
    """
    counts = {**lost, **dropped}
    if num_without_groups and not any(lost.values()):
        counts["no group"] = num_without_groups
    ordered = sorted(counts.items(), key=lambda count: -count[1])
    return "\n".join(
        f"  {reason} ({number}): {_cause(reason)}"
        + (f" (the first: {samples[reason]})" if reason in samples else "")
        for reason, number in ordered
        if number
    )


def _cause(reason: str) -> str:
    if reason.startswith("rejected_"):
        return "the hub refused the group; its reason is in the warning above"
    return CAUSES.get(reason, "a reason of the environment's own")


class LossReminder:
    """Decides when to warn that items end and no group comes. Time is an argument."""

    def __init__(self, now: float, *, every_s: float) -> None:
        self._every_s = every_s
        self._warn_at = now + every_s
        self._num_made = 0
        self._num_wasted = 0
        """The caller's `num_wasted` when it last made a group."""

    def is_due(self, now: float, *, num_made: int, num_wasted: int) -> bool:
        """Whether to warn now; `num_wasted` counts items that ended without a group, and dropped groups."""
        if num_made > self._num_made:
            self._num_made, self._num_wasted = num_made, num_wasted
            self._warn_at = now + self._every_s
        if now < self._warn_at or num_wasted == self._num_wasted:
            return False
        self._warn_at = now + self._every_s
        return True
