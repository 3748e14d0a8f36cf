"""The check's in-process engine: answers with scripted texts and records every sampled token.

Its tokenizer joins pairs of letters, its samples never do. Code that decodes an answer and encodes it again therefore
gets other tokens than were sampled: with real tokenizers this drift is occasional, here it is certain.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import (
    ByteTokenizer,
    HarnessRequest,
    ServerHarness,
    made_up_logprobs,
)
from atroposlib.inference.servers.api_server import TokenCompletions

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
        at = 0
        while at < len(single):
            if at + 1 < len(single) and _is_alnum(single[at]) and _is_alnum(single[at + 1]):
                joined.append(_FIRST_PAIR + ((single[at] - 3) << 8) + single[at + 1] - 3)
                at += 2
            else:
                joined.append(single[at])
                at += 1
        return joined

    def encode_apart(self, text: str) -> list[int]:
        """Return one token per byte: they decode to `text` but differ from `encode`'s where it joins pairs."""
        return super().encode(text, add_special_tokens=False)

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        single: list[int] = []
        for token in [tokens] if isinstance(tokens, int) else tokens:
            if token >= _FIRST_PAIR:
                pair = int(token) - _FIRST_PAIR
                single += [(pair >> 8) + 3, (pair & 255) + 3]
            else:
                single.append(int(token))
        return super().decode(single, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.decode(tokens, **options) for tokens in sequences]

    def __call__(
        self, text: str, add_special_tokens: bool = True, **options: Any
    ) -> dict[str, Any]:
        tokens = self.encode(text, add_special_tokens)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}

    def __len__(self) -> int:
        return self.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSample:
    """One completion of the engine."""

    persona: int
    """Index of the scripted answer; a conversation keeps it over all turns."""
    prompt_text: str
    text: str
    prompt_tokens: list[int]
    """[P]; empty if only text was requested."""
    tokens: list[int]
    """[T]; empty if only text was requested."""
    logprobs: list[float]
    """[T]"""


class ProbeEngine(ServerHarness):
    """Gives answer i as the i-th completion of a prompt, and again in the later turns of that conversation."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(
            APIServerConfig(model_name="check"), tokenizer=tokenizer, respond=self._answer
        )
        self.samples: list[ProbeSample] = []
        self.judge: Callable[[str], str | None] = _no_judge
        """Called first; a prompt that it answers is a judge's, and neither scripted nor recorded."""
        self.asked = asyncio.Event()
        """Set while a request waits because of `hold`."""
        self._released = asyncio.Event()
        self._released.set()
        self._answers: Sequence[Answer] = ("",)
        self._given: Counter[str] = Counter()
        self._persona = 0

    def script(self, answers: Sequence[Answer]) -> None:
        """Start a run: drop earlier samples and give these answers in order."""
        self._answers = answers
        self.samples = []
        self._given.clear()
        self.requests.clear()

    def hold(self) -> None:
        """Hold requests until `release`."""
        self.asked.clear()
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    @property
    def has_tokens(self) -> bool:
        """Whether any sample of this run has tokens."""
        return any(sample.tokens for sample in self.samples)

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        call = await super()._begin(kwargs)
        if not self._released.is_set():
            self.asked.set()
            await self._released.wait()
        await asyncio.sleep(0)  # no engine answers without yielding to the loop
        return call

    def _answer(self, request: HarnessRequest) -> str:
        """Answer with text only."""
        verdict = self.judge(request.prompt)
        if verdict is not None:
            return verdict
        text = self._text_for(request.prompt)
        self._remember(request.prompt, text, [], [], [])
        return text

    def _text_for(self, prompt: str) -> str:
        self._persona = self._persona_of(prompt)
        answer = self._answers[self._persona]
        return answer if isinstance(answer, str) else answer(prompt)

    def _persona_of(self, prompt: str) -> int:
        """Return the persona of the conversation that the prompt continues, else the next one for this prompt."""
        best: ProbeSample | None = None
        best_length = 0
        for sample in self.samples:
            length = len(sample.prompt_text) + len(sample.text)
            if (
                best_length < length < len(prompt)
                and len(sample.prompt_text) < len(prompt)
                and prompt.startswith(sample.prompt_text + sample.text)
            ):
                best, best_length = sample, length
        index = self._given[prompt]
        self._given[prompt] += 1
        if best is not None:
            index += best.persona
        return index % len(self._answers)

    def _sample(
        self, prompt_tokens: list[int], prompt: str, call: int, kwargs: Mapping[str, Any]
    ) -> TokenCompletions:
        limit = int(kwargs.get("max_tokens") or kwargs.get("max_completion_tokens") or 2**31)
        all_tokens, all_logprobs, reasons = [], [], []
        verdict = self.judge(prompt)
        for _ in range(int(kwargs.get("n") or 1)):
            text = self._text_for(prompt) if verdict is None else verdict
            tokens = [*_apart(self.tokenizer, text), self.tokenizer.eos_token_id]
            reasons.append("stop" if len(tokens) <= limit else "length")
            tokens = tokens[:limit]
            logprobs = made_up_logprobs(prompt_tokens, tokens)
            if verdict is None:
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                self._remember(prompt, text, prompt_tokens, tokens, logprobs)
            all_tokens.append(tokens)
            all_logprobs.append(logprobs)
        return TokenCompletions(prompt_tokens, all_tokens, all_logprobs, reasons)

    def _remember(
        self,
        prompt: str,
        text: str,
        prompt_tokens: list[int],
        tokens: list[int],
        logprobs: list[float],
    ) -> None:
        self.samples.append(
            ProbeSample(
                persona=self._persona,
                prompt_text=prompt,
                text=text,
                prompt_tokens=list(prompt_tokens),
                tokens=list(tokens),
                logprobs=list(logprobs),
            )
        )


def _no_judge(prompt: str) -> None:
    return None


def question_of(prompt: str) -> str:
    """Return the last user message of a prompt in `ByteTokenizer`'s template, else the whole prompt.

    >>> question_of("<system>Be kind.<eos><user>How are you?<eos><assistant>")
    'How are you?'
    """
    _, found, after = prompt.rpartition("<user>")
    return after.partition(ByteTokenizer.eos_token)[0] if found else prompt


def _is_alnum(token: int) -> bool:
    byte = token - 3
    return 48 <= byte <= 57 or 65 <= byte <= 90 or 97 <= byte <= 122


def _apart(tokenizer: Any, text: str) -> list[int]:
    """Return tokens that decode to `text`, if possible other ones than the tokenizer's own."""
    if isinstance(tokenizer, PairTokenizer):
        return tokenizer.encode_apart(text)
    apart = [
        int(token)
        for character in text
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]
    if tokenizer.decode(apart, skip_special_tokens=True) == text:
        return apart
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
