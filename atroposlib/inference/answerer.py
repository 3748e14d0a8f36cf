"""What is behind every imitation of an engine: `answer` turns an `Ask` into token ids, logprobs and finish reasons.

`ServerHarness` (tests, `--testing`, `check`), stepped episodes, replay and the scripted HTTP engine differ in where an
answer comes from (a script, the trainer, a recording) and where it goes (`InProcessServer`, HTTP). What ends a text and
what of it is shown is decided here for all of them, as vLLM decides it; `check` alone asks for whole texts.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atroposlib.inference.servers.api_server import APIServer, Stops, TokenCompletions, read_stops
from atroposlib.inference.servers.openai_routes import (
    OTHER_LIMIT_NAMES,
    completion_from,
)
from atroposlib.inference.servers.token_ids import SampledCompletion, gather
from atroposlib.inference.tools.messages import as_dict
from atroposlib.utils.answer_bodies import completion_body
from atroposlib.utils.tokenizers.backends import encode_prompt

NO_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt and its sampling parameters."""

    prompt_tokens: list[int] | None = None
    """[P] None: the answerer tokenises `prompt` or `messages`, as for plain chats and chats with images."""
    prompt: str | None = None
    """The prompt as text, if it was given."""
    messages: list[Any] | None = None
    """The conversation; None for a text, and over HTTP, where the prompt is tokenised before."""
    wants_tokens: bool = True
    """Whether token ids and logprobs are asked for, not only texts."""
    n: int = 1
    max_tokens: int = NO_LIMIT
    seed: int | None = None
    """None: the script's."""
    greedy: bool = False
    """Temperature 0: the seed does not matter."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    call: int = 0
    """How many requests came before this one."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """All keywords of a call in this process."""


@dataclass(slots=True, kw_only=True)
class Completion(SampledCompletion):
    """One completion: tokens with EOS or what stopped it. They may be missing if only texts are asked for."""

    text: str | None
    """Without special tokens and without what stopped it; None for some recorded tool calls."""
    stop_reason: int | str | None = None
    """The stop string or id that ended it, as in vLLM."""
    tool_calls: Any = None


class Answers(NamedTuple):
    """One prompt and its completions."""

    prompt_tokens: list[int]
    """[P] empty if unknown."""
    completions: list[Completion]


class Sampled(NamedTuple):
    """The tokens of one completion and why it ended: "stop", "length" or "abort"."""

    tokens: list[int]
    finish_reason: str


def with_prompt(tokenizer: Any, ask: Ask) -> Ask:
    """Return an ask whose prompt is known as text and as token ids."""
    prompt, tokens = ask.prompt, ask.prompt_tokens
    if prompt is None and tokens is not None:
        prompt = tokenizer.decode(tokens)
    elif prompt is None:
        tools = [as_dict(tool) for tool in ask.keywords.get("tools") or ()]
        prompt = tokenizer.apply_chat_template(
            [as_dict(message) for message in ask.messages or ()],
            tokenize=False,
            add_generation_prompt=True,
            **({"tools": tools} if tools else {}),
        )
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
    elif tokens is None:
        tokens = encode_prompt(tokenizer, prompt)
    return dataclasses.replace(ask, prompt=prompt, prompt_tokens=list(tokens))


def sample_text(tokenizer: Any, text: str, limit: int) -> Sampled:
    """Return a text's tokens with EOS, cut to `limit`."""
    return with_eos(tokenizer, tokenizer.encode(text, add_special_tokens=False), limit)


def with_eos(tokenizer: Any, tokens: Sequence[int], limit: int) -> Sampled:
    """Return tokens with EOS, cut to `limit`."""
    ended = [*tokens, tokenizer.eos_token_id]
    return Sampled(ended[:limit], "stop" if len(ended) <= limit else "length")


def end_at_stop(tokenizer: Any, ask: Ask, sampled: Sampled) -> Completion:
    """Cut tokens at the first stop id or string: the tokens include it, the text does not. Without logprobs."""
    tokens, reason = sampled
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    stops = [stop for stop in ask.stop if stop in text]
    stop: int | str | None = None
    if stops or not ask.stop_token_ids.isdisjoint(tokens):
        for end, token in enumerate(tokens, 1):
            if token in ask.stop_token_ids:
                stop, text = token, tokenizer.decode(tokens[: end - 1], skip_special_tokens=True)
            elif stops:
                so_far = tokenizer.decode(tokens[:end], skip_special_tokens=True)
                if (stop := next((each for each in stops if each in so_far), None)) is not None:
                    text = so_far[: so_far.index(stop)]
            if stop is not None:
                tokens, reason = tokens[:end], "stop"
                break
    return Completion(tokens=tokens, logprobs=[], finish_reason=reason, stop_reason=stop, text=text)


def ask_of(given: Mapping[str, Any], *, stops: Stops) -> Ask:
    """Return the sampling parameters of a call or a body, without prompt and limit."""
    seed = given.get("seed")
    return Ask(
        n=int(given.get("n") or 1),
        seed=None if seed is None else int(seed),
        greedy=given.get("temperature") == 0,
        stop=tuple(stops.strings),
        stop_token_ids=frozenset(stops.token_ids),
        ignore_eos=bool(given.get("ignore_eos")),
    )


class InProcessServer(APIServer):
    """An inference server of this process: something that answers in place of a model."""

    @abstractmethod
    async def answer(self, ask: Ask) -> Answers:
        """Return `ask.n` completions."""

    def read(self, kwargs: dict[str, Any], *, wants_tokens: bool = False) -> Ask:
        """Return what a call asks for; without a limit, a text ends where it ends."""
        given = {**kwargs, **(kwargs.get("extra_body") or {})}
        limits = (given.get(name) for name in ("max_tokens", *OTHER_LIMIT_NAMES))
        return dataclasses.replace(
            ask_of(given, stops=read_stops(kwargs)),
            max_tokens=int(next(filter(None, limits), NO_LIMIT)),
            prompt_tokens=kwargs.get("input_ids"),
            prompt=kwargs.get("prompt"),
            messages=kwargs.get("messages"),
            wants_tokens=wants_tokens,
            keywords=kwargs,
        )

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        return await self._respond(self.read(kwargs), write_chat)

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        return await self._respond(self.read(kwargs), write_text)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Any:
        return await self._respond(self.read(kwargs, wants_tokens=True), write_tokens)

    async def _respond(self, ask: Ask, write: Callable[[Answers], Any]) -> Any:
        return write(await self.answer(ask))


def write_chat(answers: Answers) -> Any:
    """Return answers as a `ChatCompletion`."""
    choices = []
    for each in answers.completions:
        message = {"role": "assistant", "content": each.text}
        if each.tool_calls:
            message["tool_calls"] = each.tool_calls
        choices.append({"finish_reason": each.finish_reason, "message": message})
    return completion_from(_body(choices))


def write_text(answers: Answers) -> Any:
    """Return answers as a `Completion`."""
    choices = [
        {"finish_reason": each.finish_reason, "text": each.text or ""}
        for each in answers.completions
    ]
    return completion_from(_body(choices))


def write_tokens(answers: Answers) -> TokenCompletions:
    """Return answers as token ids and logprobs."""
    return gather(answers.prompt_tokens, answers.completions)


def _body(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the same body for the same choices."""
    return {**completion_body(choices, model="test_model"), "id": "test_id", "created": 0}
