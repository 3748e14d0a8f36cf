"""`atropos-env pin GROUP --env my_env.py`: write a test that the reward code gives a stored rollout its right scores.

The test's data, one line of the file of `process`, is a JSON file beside it. The scores are the stored ones unless
`--score` says what they should be. The rollout is replayed before anything is written; a group whose requests have
changed is refused, because no test could replay it.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from atroposlib.cli.rescore import rows_of, shown
from atroposlib.envs.base import BaseEnv
from atroposlib.errors import ConfigError, EnvError
from atroposlib.runtime.env_command import default_groups_path
from atroposlib.runtime.replay import Replay, Row, is_same, replay_row

ID_CHARS = 8
"""Of the group id in the names of the files."""
ANSWER_CHARS = 60

TEST = '''"""A rollout of {environment} whose scores a person judged: the reward code must give them.

Written by `atropos-env pin`. The rollout is in {data}.
"""

from pathlib import Path

import pytest
from {module} import {cls}

from atroposlib.testing import replay_scores

SCORES = [
{scores}
]


def {function}():
    row = Path(__file__).with_suffix(".json")
    assert replay_scores({arguments}) == pytest.approx(SCORES)
'''


class Pinned(NamedTuple):
    test: Path
    today: Replay
    scores: list[float]
    """[num_sequences] the scores that the test expects."""


def pin(
    env_cls: type[BaseEnv],
    row: Row,
    *,
    flags: Sequence[str] = (),
    judged: Mapping[int, float] | None = None,
    folder: Path,
) -> Pinned:
    """Write the test and its data; `judged` has the right score of sequences whose stored score is wrong.

    Raises ConfigError if a file exists or `judged` names no sequence of the group, EnvError if the group cannot be
    replayed.
    """
    scores: list[float] = [*row["scores"]]
    for i, score in (judged or {}).items():
        if i not in range(len(scores)):
            raise ConfigError(
                f"--score {i}={score:g}: the group has sequences 0 to {len(scores) - 1}"
            )
        scores[i] = score
    name = re.sub(r"\W", "_", str(row["group_id"])[:ID_CHARS])
    test = folder / f"test_pin_{name}.py"
    data = test.with_suffix(".json")
    for path in (test, data):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it to pin the group again")
    arguments = [env_cls.__name__, "row"]
    if flags:
        arguments.append(f"flags={list(flags)!r}")
    today = asyncio.run(replay_row(env_cls, row, flags=flags))
    if today.fault is not None and not today.has_raised:
        # The prompt may depend on other rows of the data.
        today = asyncio.run(replay_row(env_cls, row, flags=flags, loads_data=True))
        arguments.append("loads_data=True")
    if today.fault is not None and not today.has_raised:
        raise EnvError(f"group {row['group_id']} cannot be replayed: {today.fault}")
    answers = row.get("completions") or [None] * len(scores)
    lines = [
        f"    {score!r},{'' if answer is None else f'  # {answer[:ANSWER_CHARS]!a}'}"
        for score, answer in zip(scores, answers, strict=True)
    ]
    text = TEST.format(
        environment=row.get("environment") or env_cls.__name__,
        data=data.name,
        module=env_cls.__module__,
        cls=env_cls.__name__,
        scores="\n".join(lines),
        function=test.stem,
        arguments=", ".join(arguments),
    )
    data.write_bytes(msgspec.json.encode(row) + b"\n")
    test.write_text(text)
    return Pinned(test, today, scores)


def default_file(env_cls: type[BaseEnv]) -> Path:
    """Return the file that `process` writes without flags."""
    config, _ = env_cls.config_init()
    return Path(config.data_path_to_save_groups or default_groups_path(env_cls))


def find_row(path: Path, group_id: str) -> Row:
    """Return the group whose id is, or begins with, `group_id`; ConfigError if there is not exactly one."""
    found: list[Row] = []
    for row in rows_of(path):
        name = row.get("group_id")
        if name == group_id:
            return row
        if isinstance(name, str) and name.startswith(group_id):
            found.append(row)
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(row["group_id"]) for row in found[:5])
    what = f"is the start of {len(found)} ids: {names}" if found else "is the id of no group"
    raise ConfigError(f"{group_id!r} {what} in {path}")


def judged_scores(texts: Sequence[str]) -> dict[int, float]:
    """Read the values of `--score`.

    >>> judged_scores(["0=1", "3=0.5"])
    {0: 1.0, 3: 0.5}
    """
    found = {}
    for text in texts:
        index, _, score = text.partition("=")
        try:
            found[int(index)] = float(score)
            is_number = math.isfinite(float(score))
        except ValueError:
            is_number = False
        if not is_number:
            raise ConfigError(f"--score {text}: give SEQUENCE=SCORE, for example 0=1.0")
    return found


def to_text(pinned: Pinned) -> str:
    """Return what was written, and whether the test passes today."""
    wrong = [
        f"  sequence {i}: today {shown(today)}, should be {score:g}"
        for i, (today, score) in enumerate(zip(pinned.today.scores, pinned.scores, strict=True))
        if not is_same(score, today)
    ]
    if pinned.today.fault is not None:
        wrong = [f"  {pinned.today.fault}"]
    verdict = "it fails today:" if wrong else "it passes today"
    return "\n".join([f"wrote {pinned.test}; {verdict}", *wrong])
