"""One run of an item with scripted answers: its groups, compared with the engine's samples and with another run.

A trained position is right if some sample had exactly the preceding tokens as its prompt and earlier tokens, then
sampled exactly this token with this logprob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from atroposlib.checker.engine import Answer, ProbeSample
from atroposlib.scored_data import IGNORE_INDEX, ScoredGroup, SequenceView

LOGPROB_TOLERANCE = 1e-4
"""Allows conversion to 16 or 32 bits; scripted logprobs of different positions nearly always differ by more."""


@dataclass(slots=True, kw_only=True)
class Run:
    """One call of collect_trajectories and its results."""

    item: int
    answers: list[Answer]
    samples: list[ProbeSample]
    groups: list[ScoredGroup] = field(default_factory=list)
    earned: dict[str, list[float]] = field(default_factory=dict)
    """Scores by answer text, ascending."""

    @property
    def scores(self) -> list[float]:
        """All scores earned."""
        return [score for earned in self.earned.values() for score in earned]

    @property
    def has_difference(self) -> bool:
        """Whether some answers earned more than others."""
        return len(set(self.scores)) > 1

    def scores_for(self, answer: Answer) -> list[float]:
        """Return the scores of one scripted answer; [] if no group has it."""
        said = texts_said(self.samples)
        texts = {said.get(i) for i, given in enumerate(self.answers) if given == answer}
        return [score for text in texts if text is not None for score in self.earned.get(text, ())]


class Sink:
    """Receives groups in place of the runtime's outbox."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    async def accept(self, scored_data: Any, item: Any = None, **options: Any) -> int:
        found = [scored_data] if isinstance(scored_data, Mapping) else list(scored_data or [])
        self.groups += [group for group in found if group is not None]
        return len(found)

    async def post(self, scored_data: Any) -> None:
        """Ignore what an environment sends itself; `accept` already has it."""


def difference(first: Run, second: Run, *, may_leave_out: bool = False) -> str | None:
    """Describe the first answer that the second run scored differently or left out; None if there is none."""
    for answer, earned in first.earned.items():
        other = second.earned.get(answer)
        if other is None and not may_leave_out:
            return f"{answer!r:.60} earned {_listed(earned)}, but was left out"
        if (
            other
            and len(earned) == len(other)
            and not np.allclose(earned, other, rtol=1e-9, atol=1e-12)
        ):
            return f"{answer!r:.60} earned {_listed(earned)}, but {_listed(other)}"
    return None


def _listed(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:.6g}" for score in scores)


class Fault(NamedTuple):
    """What is wrong with a sequence."""

    rule: str
    """token_exact: trained tokens differ from the sampled ones. aligned: masks or logprobs belong to other tokens."""
    what: str


def fault_of(view: SequenceView, samples: Sequence[ProbeSample], tokenizer: Any) -> Fault | None:
    """Compare one sequence with all samples of its run; return the first fault."""
    tokens: list[int] = view.tokens.tolist()
    trained = np.flatnonzero(view.masks != IGNORE_INDEX).tolist()
    if not trained:
        return Fault("aligned", "masks: no position is trained")
    sampled = _sampled_logprobs(tokens, samples)
    for position in trained:
        if position not in sampled:
            return _unsampled(tokens, position, samples, tokenizer)
    if view.inference_logprobs is None:
        return None
    for position in trained:
        got = float(view.inference_logprobs[position])
        if abs(got - sampled[position]) > LOGPROB_TOLERANCE:
            return Fault(
                "aligned",
                f"inference_logprobs[{position}] is {got:.5f}, but the engine sampled token"
                f" {tokens[position]} with {sampled[position]:.5f}",
            )
    return None


def texts_said(samples: Sequence[ProbeSample]) -> dict[int, str]:
    """Return the text of each scripted answer, with the turns of its conversation joined.

    If any sample has tokens, samples without tokens are ignored: they belong to no sequence.
    """
    said: dict[int, str] = {}
    with_tokens = [sample for sample in samples if sample.tokens]
    for sample in with_tokens or samples:
        said[sample.persona] = said.get(sample.persona, "") + sample.text
    return said


def text_of(view: SequenceView, samples: Sequence[ProbeSample], tokenizer: Any) -> str | None:
    """Return the answer text that a sequence contains; None if it contains none."""
    said = texts_said(samples)
    tokens: list[int] = view.tokens.tolist()
    for sample in reversed(samples):
        whole = [*sample.prompt_tokens, *sample.tokens]
        if sample.tokens and tokens[: len(whole)] == whole:
            return said[sample.persona]
    trained = view.tokens[view.masks != IGNORE_INDEX].tolist()
    text = str(tokenizer.decode(trained, skip_special_tokens=True))
    return max((words for words in said.values() if words in text), key=len, default=None)


def _sampled_logprobs(tokens: Sequence[int], samples: Sequence[ProbeSample]) -> dict[int, float]:
    """Return the sampled logprob by position, for the positions of `tokens` that match a sample."""
    found: dict[int, float] = {}
    for sample in samples:
        start = len(sample.prompt_tokens)
        if not sample.tokens or list(tokens[:start]) != sample.prompt_tokens:
            continue
        for position, (token, logprob) in enumerate(
            zip(sample.tokens, sample.logprobs, strict=True), start
        ):
            if position >= len(tokens) or tokens[position] != token:
                break
            found[position] = logprob
    return found


def _unsampled(
    tokens: list[int], position: int, samples: Sequence[ProbeSample], tokenizer: Any
) -> Fault:
    """Find why a trained position was not sampled: part of the prompt, or the sampled text in other tokens."""
    for sample in samples:
        start = len(sample.prompt_tokens)
        if not start <= position or tokens[:start] != sample.prompt_tokens:
            continue
        before = tokenizer.decode(tokens[start:position], skip_special_tokens=True)
        after = tokenizer.decode(tokens[start:], skip_special_tokens=True)
        if len(before) < len(sample.text) and after.startswith(sample.text):
            wanted = next(iter(sample.tokens[position - start :]), None)
            return Fault(
                "token_exact",
                f"token {position} is {tokens[position]}, but {wanted} was sampled there:"
                f" {sample.text!r:.60} was turned into tokens again",
            )
    if any(tokens[: position + 1] == sample.prompt_tokens[: position + 1] for sample in samples):
        return Fault(
            "aligned",
            f"masks[{position}]: token {tokens[position]} is trained, but it was given to the"
            " model, not sampled",
        )
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for sample in samples:
        sent = sample.prompt_tokens
        if not sent or not text.startswith(tokenizer.decode(sent, skip_special_tokens=False)):
            continue
        other = next((i for i, t in enumerate(sent) if tokens[i : i + 1] != [t]), position)
        if other < position:
            return Fault(
                "token_exact",
                f"token {other} is {tokens[other]}, but {sent[other]} was sent to the engine for"
                f" token {position}: an earlier turn was turned into tokens again",
            )
    return Fault(
        "token_exact",
        f"token {position} ({tokens[position]}) is trained, but after these tokens the engine"
        " sampled no such token",
    )
