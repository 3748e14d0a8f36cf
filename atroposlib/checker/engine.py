"""The check's in-process engine: answers with scripted texts and records every sampled token.

Its tokenizer joins pairs of letters, its samples never do. Code that decodes an answer and encodes it again therefore
gets other tokens than were sampled: with real tokenizers this drift is occasional, here it is certain.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atroposlib.inference.answerer import Answers, Ask, Sampled, with_eos
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.inference.scripted_answers import request_of

Answer = str | Callable[[str], str]
"""A completion, or a function from the prompt's text to one."""

_FIRST_PAIR = 259
"""Lower ids are the tokens of `ByteTokenizer`."""


class PairTokenizer(ByteTokenizer):
    """Bytes as tokens, and one token for each two adjacent ASCII letters or digits."""

    vocab_size = _FIRST_PAIR + (1 << 16)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Return the tokens of `text`, pairs joined from the left.

        >>> len(PairTokenizer().encode("abc d", add_special_tokens=False))
        4
        """
        single = super().encode(text, add_special_tokens)
        joined: list[int] = []
        for token in single:
            if joined and _is_alnum(joined[-1]) and _is_alnum(token):
                joined[-1] = _FIRST_PAIR + ((joined[-1] - 3) << 8) + token - 3
            else:
                joined.append(token)
        return joined

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        single: list[int] = []
        for token in [tokens] if isinstance(tokens, int) else tokens:
            if token >= _FIRST_PAIR:
                pair = int(token) - _FIRST_PAIR
                single += [(pair >> 8) + 3, (pair & 255) + 3]
            else:
                single.append(int(token))
        return super().decode(single, skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.vocab_size)}

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(tokens, **options) for tokens in sequences]

    def __call__(
        self, text: str, add_special_tokens: bool = True, **options: Any
    ) -> dict[str, Any]:
        tokens = self.encode(text, add_special_tokens)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}

    def __len__(self) -> int:
        return self.vocab_size


@dataclass(slots=True, kw_only=True)
class ProbeSample:
    """One completion of the engine."""

    persona: int
    """Index of the scripted answer; a conversation keeps it over all turns."""
    prompt_text: str
    text: str
    prompt_tokens: list[int] = field(default_factory=list)
    """[P]; empty if only text was requested."""
    tokens: list[int] = field(default_factory=list)
    """[T]; empty if only text was requested."""
    logprobs: list[float] = field(default_factory=list)
    """[T]"""


class ProbeEngine(ServerHarness):
    """Gives answer i as the i-th completion of a prompt, and again in the later turns of that conversation."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(
            APIServerConfig(model_name="check"), tokenizer=tokenizer, respond=self._answer
        )
        self.samples: list[ProbeSample] = []
        self.judge: Callable[[str], str | None] = lambda prompt: None
        """Called first; a prompt that it answers is a judge's, and neither scripted nor recorded."""
        self.num_verdicts = 0
        """Answers of the judge and of reward models."""
        self._answers: Sequence[Answer] = ("",)
        self._given: Counter[str] = Counter()

    def script(self, answers: Sequence[Answer]) -> None:
        """Start a run: drop earlier samples and give these answers in order."""
        self._answers = answers
        self.samples = []
        self._given.clear()
        self.requests.clear()

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        call = await super()._begin(kwargs)
        await asyncio.sleep(0)  # no engine answers without yielding to the loop
        return call

    def _answer(self, request: HarnessRequest) -> str:
        verdict = self.judge(request.prompt)
        if verdict is not None:
            self.num_verdicts += 1
            return verdict
        persona = self._persona_of(request.prompt)
        answer = self._answers[persona]
        text = answer if isinstance(answer, str) else answer(request.prompt)
        self.samples.append(ProbeSample(persona=persona, prompt_text=request.prompt, text=text))
        return text

    def _persona_of(self, prompt: str) -> int:
        """Return the persona of the answer that the prompt continues or quotes, else the next one for this prompt."""
        index = self._given[prompt]
        self._given[prompt] += 1
        started = [
            sample
            for sample in self.samples
            if len(said := sample.prompt_text + sample.text) < len(prompt)
            and prompt.startswith(said)
        ]
        if started:
            index += max(started, key=lambda sample: len(sample.prompt_text + sample.text)).persona
        elif quoted := [sample for sample in self.samples if _is_quoted(sample, prompt)]:
            index += max(quoted, key=lambda sample: len(sample.text)).persona
        return index % len(self._answers)

    async def answer(self, ask: Ask) -> Answers:
        """Answer without stop strings and ids: what a grader does with a text must not depend on who would cut it."""
        num_earlier = len(self.samples)
        whole = dataclasses.replace(ask, stop=(), stop_token_ids=frozenset())
        answers = await super().answer(whole)
        added = self.samples[num_earlier:]  # none for a judge's prompt
        for sample, completion in zip(added, answers.completions, strict=False):
            sample.text = str(completion.text)
            if ask.wants_tokens:
                # Copies: the author's code may change what it got.
                sample.prompt_tokens = list(answers.prompt_tokens)
                sample.tokens = list(completion.tokens)
                sample.logprobs = list(completion.logprobs)
        return answers

    def _sample(self, ask: Ask, choice: int) -> Sampled:
        tokens = tokens_apart(self.tokenizer, self._answer(request_of(ask, choice)))
        return with_eos(self.tokenizer, tokens, ask.max_tokens)


def tokens_apart(tokenizer: Any, text: str) -> list[int]:
    """Return tokens that decode to `text`, if possible other ones than the tokenizer's own."""
    apart = [
        int(token)
        for character in text
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]
    if tokenizer.decode(apart, skip_special_tokens=True) == text:
        return apart
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def question_of(prompt: str) -> str:
    """Return the last user message of a prompt in `ByteTokenizer`'s template, else the whole prompt.

    >>> question_of("<system>Be kind.<eos><user>How are you?<eos><assistant>")
    'How are you?'
    """
    _, found, after = prompt.rpartition("<user>")
    return after.partition(ByteTokenizer.eos_token)[0] if found else prompt


def shown(answer: Answer) -> str:
    """Return an answer for the report; a function of the prompt by its name."""
    return f"{answer!r:.160}" if isinstance(answer, str) else f"<{answer.__name__}>"


def _is_quoted(sample: ProbeSample, prompt: str) -> bool:
    """Whether another conversation repeats a sample's question and, after it, its answer."""
    _, repeated, after = prompt.partition(question_of(sample.prompt_text))
    return bool(repeated) and prompt != sample.prompt_text and sample.text in after


def _is_alnum(token: int) -> bool:
    return 3 <= token < _FIRST_PAIR and bytes([token - 3]).isalnum()
