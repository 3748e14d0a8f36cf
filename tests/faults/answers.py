"""What the scripted engine of the faults' tests answers, so that any process can recognise it again."""

from __future__ import annotations

from collections.abc import Sequence

from atroposlib.inference.scripted_answers import made_up_logprobs, made_up_tokens
from atroposlib.inference.scripted_engine import Fault, Latency, Script
from atroposlib.inference.scripted_engine.generation import PRINTABLE

NUM_TOKENS = 6
"""Of every answer: the environments ask for no more."""
_SPANS = [("default", NUM_TOKENS)]


def script(*, delay_s: float = 0.02, faults: Sequence[Fault] = ()) -> Script:
    """Return the script of an engine that behaves like stock vLLM, with these faults."""
    latency = Latency(first_token_s=delay_s, sigma=0.3)
    return Script(latency=latency, reports_spans=False, faults=tuple(faults))


def answer_tokens(prompt: list[int], choice: int) -> list[int]:
    """Return the ids that every attempt with this prompt gets for this choice."""
    return made_up_tokens(prompt, seed=0, choice=choice, spans=_SPANS, alphabet=PRINTABLE)


def answer_logprobs(prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the logprobs that come with these answer tokens."""
    return made_up_logprobs(prompt, tokens, spans=_SPANS)
