"""What a scripted engine samples: a pure function of prompt, seed, choice and weight version.

Every logprob depends on all tokens before it and on the version that sampled it, so mixing up sequences, turns or
versions changes it; scoring a sequence returns the logprobs it was sampled with. Shared by `ServerHarness` and the
HTTP engine (`complete`). No clock, faults or wire format here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from atroposlib.inference.answerer import Ask, Completion, Sampled, end_at_stop
from atroposlib.inference.servers.api_server import WeightSpan
from atroposlib.inference.servers.sampling_notes import Spans

Respond = Callable[["HarnessRequest"], str]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessRequest:
    """What a scripted answer may depend on."""

    prompt: str
    """The prompt as text."""
    choice: int
    """Which of the `n` completions."""
    call: int
    """How many requests came before this one."""
    kwargs: Mapping[str, Any]
    """The call's keywords."""


def vocab_size_of(tokenizer: Any) -> int:
    """Return the number of token ids of a tokenizer; `vocab_size` leaves out added tokens."""
    num_with_added = len(tokenizer) if hasattr(type(tokenizer), "__len__") else 0
    return max(int(getattr(tokenizer, "vocab_size", 0)), num_with_added)


class ByteTokenizer:
    """A tokenizer without files: UTF-8 bytes as tokens (id = byte + 3), with BOS, EOS and a chat template.

    An image in a chat is the text `[image]`.
    """

    pad_token_id = 0
    bos_token_id = 1
    eos_token_id = 2
    all_special_ids = (0, 1, 2)
    vocab_size = 259
    bos_token = "<bos>"
    eos_token = "<eos>"
    pad_token = "<pad>"
    chat_template = "<role>content<eos>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = [self.bos_token_id] if add_special_tokens else []
        for i, piece in enumerate(text.split(self.eos_token)):
            tokens += [self.eos_token_id] if i else []
            tokens += [byte + 3 for byte in piece.encode()]
        return tokens

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        names = {0: self.pad_token, 1: self.bos_token, 2: self.eos_token}
        parts: list[bytes] = []
        for token in tokens:
            if token >= 3:
                parts.append(bytes([token - 3]))
            elif not skip_special_tokens:
                parts.append(names[token].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        text = "".join(
            f"<{message['role']}>{_text_of(message['content'])}{self.eos_token}"
            for message in messages
        )
        if add_generation_prompt:
            text += "<assistant>"
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _text_of(content: Any) -> str:
    """Return a message's text, with `[image]` in place of images."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text", "[image]")) for part in content)


def request_of(ask: Ask, choice: int) -> HarnessRequest:
    """Return what a `Respond` is called with."""
    prompt = str(ask.prompt)
    return HarnessRequest(prompt=prompt, choice=choice, call=ask.call, kwargs=ask.keywords)


def complete(
    tokenizer: Any,
    ask: Ask,
    sampled: Sampled,
    *,
    spans_of: Callable[[int], list[WeightSpan] | None],
) -> Completion:
    """Return the completion of sampled tokens; `spans_of` gives the weight versions of the first so many."""
    completion = end_at_stop(tokenizer, ask, sampled)
    tokens = completion.tokens
    completion.weight_versions = spans = spans_of(len(tokens))
    completion.logprobs = made_up_logprobs(ask.prompt_tokens or (), tokens, spans=spans)
    return completion


def answer_from_hash(request: HarnessRequest) -> str:
    """Answer any prompt with a short text derived from its hash."""
    seed = f"{request.prompt}|{request.choice}".encode()
    return f"answer {int.from_bytes(hashlib.blake2b(seed, digest_size=2).digest(), 'little')}"


def made_up_logprobs(
    prompt_tokens: Sequence[int], tokens: Sequence[int], *, spans: Spans | None = None
) -> list[float]:
    """Return numbers in [-1, 0) that depend on every token before them and on the version that sampled each.

    They are multiples of 1/65536: exact in float32 and in JSON. They do not depend on where the prompt ends:

    >>> made_up_logprobs([5], [6, 7])[1:] == made_up_logprobs([5, 6], [7])
    True
    """
    if not tokens:
        return []
    states = _prefix_states(prompt_tokens, tokens)
    if spans is not None:
        states = states ^ _repeated_hashes(spans)
    scattered = _scatter(states) >> np.uint64(48)
    logprobs: list[float] = (-(scattered.astype(np.float64) + 1.0) / 65536.0).tolist()
    return logprobs


def made_up_candidates(
    tokens: Sequence[int], *, num_top: int, vocab_size: int, version: str | None
) -> list[list[tuple[int, float]]]:
    """Return (id, logprob) at each position of a prompt: `num_top` likelier ids, best first, then its own token.

    The first position is empty: nothing is before it.
    """
    if not tokens:
        return []
    first, rest = tokens[:1], tokens[1:]
    spans = None if version is None else [(version, len(rest))]
    own = zip(rest, made_up_logprobs(first, rest, spans=spans), strict=True)
    return [[]] + [
        [
            *(
                ((token + 1 + i) % vocab_size, value * (i + 1) / (num_top + 1))
                for i in range(num_top)
            ),
            (token, value),
        ]
        for token, value in own
    ]


def made_up_tokens(
    prompt_tokens: Sequence[int],
    *,
    seed: int,
    choice: int,
    spans: Spans,
    alphabet: Sequence[int],
) -> list[int]:
    """Return as many tokens of `alphabet` as the spans cover; each depends on its version.

    >>> tokens = made_up_tokens([5], seed=0, choice=0, spans=[("1", 4)], alphabet=range(3, 259))
    >>> made_up_tokens([5], seed=0, choice=0, spans=[("1", 2), ("2", 2)], alphabet=range(3, 259))[:2] == tokens[:2]
    True
    """
    hashes = _repeated_hashes([(f"{version}|{seed}|{choice}", num) for version, num in spans])
    places = np.arange(1, len(hashes) + 1, dtype=np.uint64) * _MULTIPLIER
    scattered = _scatter(places ^ _state_of(prompt_tokens) ^ hashes)
    picked = (scattered >> np.uint64(16)) % np.uint64(len(alphabet))
    found: list[int] = np.asarray(alphabet, dtype=np.int64)[picked.astype(np.int64)].tolist()
    return found


def made_up_number(prompt_tokens: Sequence[int], *, seed: int, choice: int, below: int) -> int:
    """Return a number in [0, below) that depends on the prompt, the seed and the choice."""
    mixed = _scatter(_state_of(prompt_tokens) ^ _repeated_hashes([(f"number|{seed}|{choice}", 1)]))
    return int(mixed[0]) % below


def _prefix_states(prompt_tokens: Sequence[int], tokens: Sequence[int]) -> _U64:
    """[T] a polynomial hash of everything up to and including each of `tokens`, modulo 2**64."""
    ids = np.array([*prompt_tokens, *tokens], np.int64).astype(np.uint64)
    powers = np.power(_MULTIPLIER, np.arange(len(ids), dtype=np.uint64))
    states: _U64 = np.cumsum((ids + np.uint64(1)) * powers, dtype=np.uint64)
    return states[len(prompt_tokens) :]


def _state_of(tokens: Sequence[int]) -> _U64:
    """[1] the hash of all tokens."""
    return _prefix_states((), tokens)[-1:] if len(tokens) else np.zeros(1, np.uint64)


def _repeated_hashes(texts: Spans) -> _U64:
    """[T] the hash of each text, as often as the number beside it says."""
    hashes = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        for text, _ in texts
    ]
    return np.repeat(np.array(hashes, np.uint64), [num for _, num in texts])


def _scatter(values: _U64) -> _U64:
    """Mix the bits of each value: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
