"""TRL's vLLM server (`trl vllm-serve`): text prompts in, token ids out.

`base_url` is the server's root, without `/v1`. Chats are templated and answers decoded in this process, with the
tokenizer of `tokenizer_name`. Servers that also return logprobs give token-exact completions; their prompt ids are then
compared with those sent. Tool calls are not parsed, and the server has no prompt logprobs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, NamedTuple

import msgspec

from atroposlib.errors import EngineProtocolError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.servers.api_server import TokenCompletions, read_stops
from atroposlib.inference.servers.http_peer import EngineHttpRejected
from atroposlib.inference.servers.openai_routes import (
    OTHER_LIMIT_NAMES,
    CallKeywords,
    completion_from,
    read_request,
)
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.token_ids import (
    NEUTRAL_SAMPLING,
    VLLM_SAMPLING,
    TokenServer,
    check_count,
    check_sampled,
)
from atroposlib.inference.tools.messages import as_dict
from atroposlib.utils.answer_bodies import completion_body

logger = logging.getLogger(__name__)

DEFAULTS = {"n": 1, **NEUTRAL_SAMPLING, "top_k": -1, "max_tokens": 1024}
"""Always sent; the original's values. The server's own default for `max_tokens` is 16."""

REQUEST_FIELDS = frozenset(
    {
        *DEFAULTS,
        "generation_kwargs",
        "guided_decoding_regex",
        "structured_outputs_regex",
        "truncate_prompt_tokens",
    }
)


class _Answer(msgspec.Struct, gc=False):
    completion_ids: list[list[int]]
    prompt_ids: list[list[int]] | None = None
    logprobs: list[list[float | list[float]]] | None = None
    logprob_token_ids: list[list[list[int]]] | None = None


_answer = msgspec.json.Decoder(_Answer)


class TrlAnswer(NamedTuple):
    """One answer of `/generate/`; one entry per completion."""

    prompt_ids: list[int] | None
    """The prompt as the server tokenised it; None from older servers."""
    token_ids: list[list[int]]
    logprobs: list[list[float]] | None
    """None from servers that return none."""


class TrlVllmServer(TokenServer):
    """A server started with `trl vllm-serve`."""

    example_url = "http://localhost:8000"
    health_path = "/health/"
    is_up_at_4xx = True  # servers with the original's routes may lack it

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None
    ) -> None:
        super().__init__(config, reasoning_config)
        self._takes_token_ids = True
        self._gives_logprobs = True
        self._ignored: set[str] = set()

    # Text.

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        options = dict(request.body.pop("chat_template_kwargs", {}))
        if tools := request.body.pop("tools", None):
            options["tools"] = tools
        text = await asyncio.to_thread(self._render, request.body.pop("messages"), options)
        return completion_from(await self._complete(text, request, is_chat=True))

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt = request.body.pop("prompt")
        if not isinstance(prompt, str):
            raise ValueError(f"prompt is {type(prompt).__name__}, expected one text")
        return completion_from(await self._complete(prompt, request, is_chat=False))

    def _render(self, messages: list[Any], options: dict[str, Any]) -> str:
        dicts = [as_dict(message) for message in messages]
        if dicts and dicts[-1].get("role") == "assistant":
            options["continue_final_message"] = True
        else:
            options["add_generation_prompt"] = True
        prompt = self.tokenizer.apply_chat_template(dicts, tokenize=False, **options)
        return self._without_second_bos(str(prompt))

    def _without_second_bos(self, text: str) -> str:
        """Drop the BOS of a text if the server's tokenizer adds one itself."""
        bos = self.tokenizer.bos_token
        if not bos or not text.startswith(bos):
            return text
        bos_id = self.tokenizer.bos_token_id
        doubled = self.tokenizer.encode(text)[:2] == [bos_id, bos_id]
        return text.removeprefix(bos) if doubled else text

    async def _complete(
        self, prompt: str, request: CallKeywords, *, is_chat: bool
    ) -> dict[str, Any]:
        """Return a completion's body; it has token counts if the server returns prompt ids."""
        sampled = await self._generate(prompt, request)
        choices: list[dict[str, Any]] = []
        for text, reason in await self._read_texts(sampled, request):
            content = (
                {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            )
            choices.append({**content, "finish_reason": reason})
        num_tokens = None
        if sampled.prompt_ids is not None:
            num_tokens = len(sampled.prompt_ids), sum(map(len, sampled.token_ids))
        return completion_body(choices, model=self.config.model_name, num_tokens=num_tokens)

    async def _read_texts(self, sampled: TrlAnswer, request: CallKeywords) -> list[tuple[str, str]]:
        return await asyncio.to_thread(
            lambda: [self._read_text(token_ids, request) for token_ids in sampled.token_ids]
        )

    def _read_text(self, token_ids: list[int], request: CallKeywords) -> tuple[str, str]:
        """Decode up to the stop; the reason is "length" unless a stop string or ending token is found."""
        stops = read_stops(request.body)
        # Chat models end their turn with other special tokens than EOS as well.
        enders = {*stops.token_ids, *self.tokenizer.all_special_ids}
        is_ended = self.tokenizer.eos_token_id in token_ids or not enders.isdisjoint(token_ids[-1:])
        shown = token_ids[:-1] if token_ids[-1:] and token_ids[-1] in stops.token_ids else token_ids
        text = str(self.tokenizer.decode(shown, skip_special_tokens=True))
        ends = [end for end in map(text.find, stops.strings) if end >= 0]
        if ends:
            return text[: min(ends)], "stop"
        return text, "stop" if is_ended else "length"

    # Tokens.

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokenCompletions:
        if not self._gives_logprobs:
            raise self._no_logprobs()
        request = read_request(kwargs, timeout_s=self.config.timeout)
        prompt_tokens = await self._take_prompt(request.body)
        sampled = await self._generate_after(prompt_tokens, request)
        if sampled.logprobs is None:
            self._gives_logprobs = False
            raise self._no_logprobs()
        if sampled.prompt_ids != prompt_tokens:
            raise EngineProtocolError(
                f"{self._label}/generate/ sampled after {len(sampled.prompt_ids or [])} prompt tokens"
                f" that are not the {len(prompt_tokens)} sent"
            )
        # These servers stop at the stop string themselves; the text only shows why a completion ended.
        finish_reasons = [reason for _, reason in await self._read_texts(sampled, request)]
        return TokenCompletions(prompt_tokens, sampled.token_ids, sampled.logprobs, finish_reasons)

    def _no_logprobs(self) -> NotImplementedError:
        return NotImplementedError(
            f"{self._label} returns no logprobs; train with a TRL server that does,"
            " or serve the model with vLLM and set server_type to 'vllm'"
        )

    async def _generate_after(self, prompt_tokens: list[int], request: CallKeywords) -> TrlAnswer:
        """Sample a continuation of token ids; servers that accept only text get the text of the ids."""
        if self._takes_token_ids:
            try:
                return await self._generate(prompt_tokens, request)
            except EngineHttpRejected as e:
                if e.status != 422:
                    raise
                logger.info("%s may refuse token ids; sending their text (%s)", self._label, e)
        text = await asyncio.to_thread(
            lambda: self._without_second_bos(
                self.tokenizer.decode(prompt_tokens, skip_special_tokens=False)
            )
        )
        sampled = await self._generate(text, request)
        self._takes_token_ids = False
        return sampled

    # The route.

    async def _generate(self, prompt: str | list[int], request: CallKeywords) -> TrlAnswer:
        body = self._body(prompt, request)
        where = f"{self._label}/generate/"
        read = functools.partial(read_answer, n=int(body["n"]), where=where)
        return await self._send("/generate/", body, request, read)

    def _body(self, prompt: str | list[int], request: CallKeywords) -> dict[str, Any]:
        body: dict[str, Any] = {"prompts": [prompt], **DEFAULTS}
        generation: dict[str, Any] = {}
        for name, value in request.body.items():
            if name in OTHER_LIMIT_NAMES:
                body["max_tokens"] = value
            elif name in REQUEST_FIELDS:
                body[name] = value
            elif name in VLLM_SAMPLING:  # older servers ignore `generation_kwargs`
                generation[name] = value
            elif name not in ("model", "messages") and name not in self._ignored:
                self._ignored.add(name)
                logger.warning("TRL's vLLM server has no %r; it is ignored", name)
        if generation:
            body["generation_kwargs"] = {**generation, **body.get("generation_kwargs", {})}
        return body


def read_answer(raw: bytes, *, n: int, where: str) -> TrlAnswer:
    """Decode `completion_ids` and, from servers that have them, `prompt_ids` and `logprobs`.

    Logprobs are one number per token, or a list per token whose ids are in `logprob_token_ids`: the sampled one is
    looked up there. A null (NaN) raises `ValidationError`.
    """
    answer = _answer.decode(raw)
    check_count(answer.completion_ids, n=n, what="completions", where=where)
    if answer.prompt_ids is not None:
        check_count(answer.prompt_ids, n=1, what="prompts", where=where)
    prompt_ids = None if answer.prompt_ids is None else answer.prompt_ids[0]
    if answer.logprobs is None:
        return TrlAnswer(prompt_ids, answer.completion_ids, None)
    check_count(answer.logprobs, n=n, what="lists of logprobs", where=where)
    top_ids = answer.logprob_token_ids or [[]] * n
    check_count(top_ids, n=n, what="lists of logprob_token_ids", where=where)
    logprobs = []
    for i, token_ids in enumerate(answer.completion_ids):
        here = f"{where}: logprobs[{i}]"
        values = _of_sampled(answer.logprobs[i], top_ids[i], token_ids, where=here)
        check_sampled(token_ids, values, where=here)
        logprobs.append(values)
    return TrlAnswer(prompt_ids, answer.completion_ids, logprobs)


def _of_sampled(
    row: list[float | list[float]], top_ids: list[list[int]], token_ids: list[int], *, where: str
) -> list[float]:
    """Return the sampled tokens' logprobs from a row of numbers, or of lists with their ids."""
    numbers = [entry for entry in row if not isinstance(entry, list)]
    if len(numbers) == len(row):
        return numbers
    try:
        return [
            values[ids.index(token)]  # type: ignore[index]
            for values, ids, token in zip(row, top_ids, token_ids, strict=True)
        ]
    except (TypeError, ValueError, IndexError) as e:
        raise EngineProtocolError(
            f"{where}: the logprobs of the sampled tokens cannot be found by logprob_token_ids ({e})"
        ) from e
