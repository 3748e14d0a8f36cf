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
    num_verdicts: int = 0
    """Answers of a judge or a reward model."""
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

    @property
    def num_given(self) -> int:
        """How many of the scripted answers the engine gave."""
        return len(texts_said(self.samples))

    def texts_of(self, answer: Answer) -> set[str]:
        """Return what the engine said as a scripted answer; empty if it did not give it."""
        said = texts_said(self.samples)
        return {said[i] for i, given in enumerate(self.answers) if given == answer and i in said}

    def best_answers(self) -> list[Answer]:
        """Return the scripted answers with the highest score."""
        best = max(self.scores)
        return [answer for answer in self.answers if best in self.scores_for(answer)]

    def worst_answer(self) -> Answer:
        """Return the last scripted answer with the lowest score: nonsense comes last."""
        worst = min(self.scores)
        return [answer for answer in self.answers if worst in self.scores_for(answer)][-1]

    def scores_for(self, answer: Answer) -> list[float]:
        """Return the scores of one scripted answer; [] if no group has it."""
        return [score for text in self.texts_of(answer) for score in self.earned.get(text, ())]


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


class SequenceFault(NamedTuple):
    """What is wrong with a sequence."""

    rule: str
    """token_exact: trained tokens differ from the sampled ones. aligned: masks or logprobs belong to other tokens."""
    what: str
    hint: str = ""


def fault_of(
    view: SequenceView, samples: Sequence[ProbeSample], tokenizer: Any
) -> SequenceFault | None:
    """Compare one sequence with all samples of its run, tokens if it has any, else texts; return the first fault."""
    tokens: list[int] = view.tokens.tolist()
    trained = np.flatnonzero(view.masks != IGNORE_INDEX)
    if not len(trained):
        return SequenceFault("aligned", "masks: no position is trained", "train the sampled tokens")
    sampled = _sampled_logprobs(tokens, samples)
    unsampled = [position for position in trained.tolist() if position not in sampled]
    if not unsampled:
        return _logprob_fault(view, sampled)
    for span in np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1):
        text, whole = (
            tokenizer.decode(view.tokens[span].tolist(), skip_special_tokens=skips).strip()
            for skips in (True, False)
        )
        spoken = whole.removesuffix(tokenizer.eos_token)  # the model may write special tokens
        if not any(text in sample.text or spoken in sample.text for sample in samples):
            return _given(span[0], f"{text!r:.60} is")
    if not any(sample.tokens for sample in samples):
        return None
    return _unsampled(tokens, unsampled[0], samples, tokenizer)


def _given(position: int, what: str) -> SequenceFault:
    return SequenceFault(
        "aligned",
        f"masks[{position}]: {what} trained, but the model was given it and did not sample it",
        "mask the prompt, and all other text that the model did not write, with -100",
    )


def _logprob_fault(view: SequenceView, sampled: Mapping[int, float]) -> SequenceFault | None:
    if view.inference_logprobs is None:
        return None
    for position in np.flatnonzero(view.masks != IGNORE_INDEX).tolist():
        got = float(view.inference_logprobs[position])
        if abs(got - sampled[position]) > LOGPROB_TOLERANCE:
            return SequenceFault(
                "aligned",
                f"inference_logprobs[{position}] is {got:.5f}, but the engine sampled token"
                f" {view.tokens[position]} with {sampled[position]:.5f}",
                "send the logprobs of node.logprobs as they are, one per token of the sequence",
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
) -> SequenceFault:
    """Find why a trained position was not sampled: part of the prompt, or the sampled text in other tokens."""
    for sample in samples:
        start = len(sample.prompt_tokens)
        if not start <= position or tokens[:start] != sample.prompt_tokens:
            continue
        before = tokenizer.decode(tokens[start:position], skip_special_tokens=True)
        after = tokenizer.decode(tokens[start:], skip_special_tokens=True)
        if len(before) < len(sample.text) and after.startswith(sample.text):
            wanted = next(iter(sample.tokens[position - start :]), None)
            return SequenceFault(
                "token_exact",
                f"token {position} is {tokens[position]}, but {wanted} was sampled there:"
                f" {sample.text!r:.60} was turned into tokens again",
            )
    if any(tokens[: position + 1] == sample.prompt_tokens[: position + 1] for sample in samples):
        return _given(position, f"token {tokens[position]} is")
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    for sample in samples:
        sent = sample.prompt_tokens
        if not sent or not text.startswith(tokenizer.decode(sent, skip_special_tokens=False)):
            continue
        other = next((i for i, t in enumerate(sent) if tokens[i : i + 1] != [t]), position)
        if other < position:
            return SequenceFault(
                "token_exact",
                f"token {other} is {tokens[other]}, but {sent[other]} was sent to the engine for"
                f" token {position}: an earlier turn was turned into tokens again",
                "keep one managed session for all turns: it sends the earlier tokens as they were sampled",
            )
    return SequenceFault(
        "token_exact",
        f"token {position} ({tokens[position]}) is trained, but after these tokens the engine"
        " sampled no such token",
    )
