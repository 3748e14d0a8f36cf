"""Conversion of authors' group dicts before `check_group`, and the drop rules after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.samples import rollout_scores
from atroposlib.scored_data import FIELDS, Level, ScoredGroup
from atroposlib.utils.off_loop import off_loop

T = TypeVar("T")

THREAD_FROM_TOKENS = 8192
"""Larger groups are checked and encoded off the event loop: over a millisecond of work, often for several at once."""


class Dropped(Exception):
    """A drop rule applies; `reason` is the counter's name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def one_message(text: str) -> list[dict[str, str]]:
    """Return a conversation whose only message is `text`."""
    return [{"role": "user", "content": text}]


def drop_rule(
    checked: ScoredGroup,
    *,
    config: BaseEnvConfig,
    max_token_len: int,
    abort_on_max_length: bool = True,
) -> Dropped | None:
    """Return the first drop rule, in the original's order, that applies to a well-formed group; None keeps it.

    `max_token_len` is the trainer's limit; 0 or less means unknown.
    """
    expected = (checked.group_overrides or {}).get("group_size", config.group_size)
    scores, _ = rollout_scores(checked.scores, checked.rollout)
    if len(scores) != expected:
        kind = "sequences" if checked.rollout is None else "rollouts"
        return Dropped("group_size", f"{len(scores)} {kind}, expected {expected}")
    if config.ensure_scores_are_not_same and (scores == scores[0]).all():
        return Dropped(
            "equal_scores", f"every score is {scores[0]}; see ensure_scores_are_not_same"
        )
    longest = int(checked.lengths.max())
    if abort_on_max_length and 0 < max_token_len <= longest:
        detail = f"{longest} tokens, the trainer accepts fewer than {max_token_len}"
        return Dropped("too_long", detail)
    return None


_NUMBERS = [f.name for f in FIELDS if f.is_numeric and f.level is not Level.GROUP]


def plain_group(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an author's group as `check_group` reads it.

    Torch tensors become numpy arrays or numbers (torch is not imported), boolean scores 1.0 and 0.0, and each text in
    `messages` a conversation of one message: environments that load texts, such as the original's SFT loader, have no
    conversations.
    """
    changed: dict[str, Any] = {}
    for name in _NUMBERS:
        value = group.get(name)
        if _is_tensor(value):
            changed[name] = _array_of(value)
        elif isinstance(value, list | tuple) and any(_is_tensor(row) for row in value):
            changed[name] = [_array_of(row) if _is_tensor(row) else row for row in value]
    scores = changed.get("scores", group.get("scores"))
    if isinstance(scores, list | tuple):
        changed["scores"] = [_number_of(score) for score in scores]
    elif isinstance(scores, np.ndarray) and scores.dtype == np.bool_:
        changed["scores"] = scores.astype(np.float64)
    messages = group.get("messages")
    if isinstance(messages, list) and any(isinstance(each, str) for each in messages):
        changed["messages"] = [
            one_message(each) if isinstance(each, str) else each for each in messages
        ]
    return {**group, **changed}


def _number_of(value: Any) -> Any:
    if isinstance(value, bool | np.bool_):
        return float(value)
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _array_of(tensor: Any) -> NDArray[Any]:
    on_cpu = tensor.detach().cpu()
    # numpy has no bfloat16, so every floating type goes through float32 or wider.
    is_narrow = on_cpu.is_floating_point() and on_cpu.element_size() < 4
    array: NDArray[Any] = (on_cpu.float() if is_narrow else on_cpu).numpy()
    return array


async def in_thread_if_large(group: Mapping[str, Any], work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, computed off the event loop for a large group."""
    tokens = group.get("tokens")
    rows = tokens if isinstance(tokens, list | tuple) else []
    size = sum(len(row) for row in rows if isinstance(row, list | tuple))
    # A teacher's fields hold many numbers per token.
    is_large = size > THREAD_FROM_TOKENS or group.get("distill_logprobs") is not None
    return await off_loop(work, *args) if is_large else work(*args)
