"""The bodies of the scripted engine's protocols: requests into `Ask`s, `Answers` into bodies.

Shapes are those of vLLM 0.32 (OpenAI routes, `/inference/v1/generate`), SGLang's `/generate` and `trl vllm-serve`.
Pure. Bad requests are refused with the status and message of the real servers. Only SGLang's `/generate` streams.
Samples may have fewer logprobs than tokens: one of the faults.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from atroposlib.http_bodies import ApiError
from atroposlib.inference.answerer import Answers, Ask, Completion, ask_of
from atroposlib.inference.scripted_answers import made_up_candidates
from atroposlib.inference.scripted_engine.script import Script
from atroposlib.inference.servers import sglang, vllm
from atroposlib.inference.servers.api_server import Stops
from atroposlib.utils.answer_bodies import chat_logprobs, completion_body, text_logprobs

MAX_LOGPROBS = 20
"""vLLM's --max-logprobs."""
TRL_DEFAULT_MAX_TOKENS = 16

Body = dict[str, Any]


class Engine(Protocol):
    """What bodies depend on."""

    tokenizer: Any
    model_name: str
    max_model_len: int
    vocab_size: int

    @property
    def script(self) -> Script: ...
    @property
    def weight_version(self) -> str: ...


# Requests.


def read_completions(body: Body, engine: Engine) -> list[Ask]:
    """`/v1/completions`: a text, a list of ids, or lists of either."""
    prompt = body.get("prompt")
    if prompt is None or prompt == []:
        raise ApiError("You must pass at least one prompt")
    return [_read_vllm(body, tokens, engine) for tokens in _to_tokens(prompt, engine)]


def read_chat(body: Body, engine: Engine) -> list[Ask]:
    """`/v1/chat/completions`: without a limit, as long as the context allows."""
    messages = body.get("messages")
    if not messages:
        raise ApiError("You must pass at least one message")
    continues = bool(body.get("continue_final_message"))
    tokens = engine.tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=not continues and body.get("add_generation_prompt", True),
        **({"tools": body["tools"]} if body.get("tools") else {}),
    )
    limits = {key: body.get(key) for key in ("max_completion_tokens", "max_tokens")}
    limit = next((value for value in limits.values() if value is not None), None)
    if limit is None:
        limit = max(1, engine.max_model_len - len(tokens))
    logprobs = body.get("top_logprobs") if body.get("logprobs") else None
    return [_read_vllm({**body, "max_tokens": limit, "logprobs": logprobs}, list(tokens), engine)]


def read_scale_out(body: Body, engine: Engine) -> list[Ask]:
    """vLLM's `/inference/v1/generate`."""
    tokens = body.get("token_ids")
    if not tokens:
        raise ApiError("token_ids: List should have at least 1 item", param="token_ids")
    params = dict(body.get("sampling_params") or {})
    return [_read_vllm({**params, "model": body.get("model")}, tokens, engine)]


def read_sglang(body: Body, engine: Engine) -> list[Ask]:
    """SGLang's `/generate`: `input_ids` or `text`, one or several."""
    params = body.get("sampling_params") or {}
    prompts = body.get("input_ids")
    if prompts is None:
        prompts = body.get("text")
    if not prompts:
        raise ApiError("Either text, input_ids or input_embeds should be provided.")
    limit = params.get("max_new_tokens")
    limit = sglang.DEFAULT_MAX_TOKENS if limit is None else int(limit)
    all_tokens = _to_tokens(prompts, engine)
    for tokens in all_tokens:
        _check_prompt(tokens, engine)
    return [_ask(params, tokens, limit) for tokens in all_tokens]


def read_trl(body: Body, engine: Engine) -> list[Ask]:
    """`trl vllm-serve`'s `/generate/`: texts, or lists of ids in newer versions."""
    prompts = body.get("prompts")
    if not prompts:
        raise ApiError("prompts: Field required", status=422, param="prompts")
    limit = int(body.get("max_tokens") or TRL_DEFAULT_MAX_TOKENS)
    params = {**body, **(body.get("generation_kwargs") or {})}
    return [_ask(params, tokens, limit) for tokens in _to_tokens(prompts, engine)]


def _to_tokens(prompts: Any, engine: Engine) -> list[list[int]]:
    """Return the ids of each prompt: `prompts` is a text, a list of ids, or a list of either."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    encode = engine.tokenizer.encode
    return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _read_vllm(body: Body, tokens: list[int], engine: Engine) -> Ask:
    name = body.get("model")
    if name and name != engine.model_name:
        raise ApiError(
            f"The model `{name}` does not exist. Valid aliases: {engine.model_name}.",
            status=404,
            param="model",
        )
    if body.get("stream"):
        raise ApiError("this engine does not stream", param="stream")
    _check_prompt(tokens, engine)
    n, temperature = body.get("n"), body.get("temperature")
    n = 1 if n is None else int(n)
    if n < 1:
        raise ApiError(f"n must be at least 1, got {n}.")
    if temperature is not None and temperature < 0:
        raise ApiError(
            f"temperature must be non-negative, got {temperature}. (parameter=temperature, value={temperature})",
            param="temperature",
        )
    if n > 1 and temperature == 0:
        raise ApiError(f"n must be 1 when using greedy sampling, got {n}.")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = body.get(name)
        if wanted is not None and int(wanted) > MAX_LOGPROBS:
            raise ApiError(
                f"Requested sample logprobs of {wanted}, which is greater than max allowed:"
                f" {MAX_LOGPROBS} (parameter={name}, value={wanted})",
                param=name,
            )
    limit = body.get("max_tokens")
    limit = vllm.DEFAULT_MAX_TOKENS if limit is None else int(limit)
    if limit < 1:
        raise ApiError(f"max_tokens must be at least 1, got {limit}.", param="max_tokens")
    return _ask(body, tokens, min(limit, engine.max_model_len - len(tokens)))


def _check_prompt(tokens: list[int], engine: Engine) -> None:
    if len(tokens) >= engine.max_model_len:
        raise ApiError(
            f"This model's maximum context length is {engine.max_model_len} tokens. However, your prompt contains"
            f" {len(tokens)} input tokens, which exceeds this limit even without any output tokens. Please reduce the"
            f" length of the input prompt. (parameter=input_tokens, value={len(tokens)})",
            param="input_tokens",
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < engine.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < engine.vocab_size)
        raise ApiError(f"Token id {wrong} is out of vocabulary")


def _ask(params: Mapping[str, Any], tokens: list[int], limit: int) -> Ask:
    stop = params.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(each, str) for each in stop):
        raise ApiError("stop: Input should be a valid string", param="stop")
    stops = Stops(list(stop), params.get("stop_token_ids") or [])
    ask = ask_of(params, stops=stops)
    return dataclasses.replace(ask, prompt_tokens=tokens, max_tokens=limit)


# Answers.


def write_completions(body: Body, results: Sequence[Answers], engine: Engine) -> Body:
    """Choices prompt-major; ids only with `return_token_ids`."""
    choices: list[Body] = []
    for prompt_tokens, samples in results:
        for sample in samples:
            choice = {
                **_choice(sample, body),
                "text": sample.text,
                "prompt_logprobs": _prompt_logprobs(
                    prompt_tokens, body.get("prompt_logprobs"), engine
                ),
                "prompt_token_ids": prompt_tokens if body.get("return_token_ids") else None,
            }
            if body.get("logprobs") is not None:
                choice["logprobs"] = text_logprobs(_pieces(sample, engine))
            if engine.script.reports_spans:
                choice["weight_versions"] = [
                    {"weight_version": version, "num_tokens": num}
                    for version, num in sample.weight_versions or ()
                ]
            choices.append(choice)
    return _answer(choices, body, results, engine)


def write_chat(body: Body, results: Sequence[Answers], engine: Engine) -> Body:
    """Prompt ids are at the top level here, unlike in completions."""
    ((prompt_tokens, samples),) = results
    choices = []
    for sample in samples:
        message = {"role": "assistant", "content": sample.text, "refusal": None}
        choice = {**_choice(sample, body), "message": message}
        if body.get("logprobs"):
            choice["logprobs"] = chat_logprobs(_pieces(sample, engine))
        choices.append(choice)
    return {
        **_answer(choices, body, results, engine),
        "prompt_logprobs": _prompt_logprobs(prompt_tokens, body.get("prompt_logprobs"), engine),
        "prompt_token_ids": prompt_tokens if body.get("return_token_ids") else None,
    }


def _choice(sample: Completion, body: Body) -> Body:
    """Return the fields that choices of both OpenAI routes have."""
    return {
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "token_ids": sample.tokens if body.get("return_token_ids") else None,
    }


def write_scale_out(body: Body, results: Sequence[Answers], engine: Engine) -> Body:
    """Ids and logprobs only, and the weight versions as `[start, end)`."""
    ((prompt_tokens, samples),) = results
    params = body.get("sampling_params") or {}
    choices = []
    for sample in samples:
        ends = accumulate(num for _, num in sample.weight_versions or ())
        spans = [
            {"version": version, "start": end - num, "end": end}
            for (version, num), end in zip(sample.weight_versions or (), ends, strict=True)
        ]
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(sample.tokens, sample.logprobs, strict=False)
        ]
        choices.append(
            {
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "token_ids": sample.tokens,
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": spans,
                "logprobs": {"content": content} if params.get("logprobs") is not None else None,
            }
        )
    return {
        **_answer(choices, body, results, engine),
        "request_id": body.get("request_id") or _id_of(body, 0),
        "prompt_logprobs": _prompt_logprobs(prompt_tokens, params.get("prompt_logprobs"), engine),
        "prompt_token_ids": prompt_tokens if body.get("return_token_ids") else None,
        "output_mode": "tokens",
    }


def write_sglang(body: Body, results: Sequence[Answers], engine: Engine) -> Body | list[Body]:
    """One object for one completion, a list for several."""
    answers: list[Body] = []
    for prompt_tokens, samples in results:
        for sample in samples:
            answers.append(_sglang_answer(body, len(answers), prompt_tokens, sample, engine))
    return answers[0] if len(answers) == 1 else answers


def sglang_events(
    body: Body, answers: Answers, engine: Engine, *, ended: set[int]
) -> Iterator[Body]:
    """Yield the events that are due when the completions have come so far; add to `ended` those that have ended."""
    interval = int((body.get("sampling_params") or {}).get("stream_interval") or 1)
    for index, sample in enumerate(answers.completions):
        is_due = len(sample.tokens) % interval == (1 if interval > 1 else 0)
        if index not in ended and (is_due or sample.finish_reason):
            event = _sglang_answer(body, index, answers.prompt_tokens, sample, engine)
            yield {**event, "index": index}
        if sample.finish_reason:
            ended.add(index)


def _sglang_answer(
    body: Body, index: int, prompt_tokens: list[int], sample: Completion, engine: Engine
) -> Body:
    reason: Body = {"type": sample.finish_reason}
    if sample.finish_reason == "length":
        reason["length"] = len(sample.tokens)
    elif sample.finish_reason == "stop":
        matched = sample.stop_reason
        reason["matched"] = engine.tokenizer.eos_token_id if matched is None else matched
    meta: Body = {
        "id": _id_of(body, index),
        "finish_reason": reason if sample.finish_reason else None,
        "prompt_tokens": len(prompt_tokens),
        "weight_version": engine.weight_version,
        "completion_tokens": len(sample.tokens),
        "cached_tokens": 0,
        "e2e_latency": 0.0,
    }
    if body.get("return_logprob"):
        meta |= _sglang_logprobs(body, prompt_tokens, sample, engine)
    return {"text": sample.text, "output_ids": sample.tokens, "meta_info": meta}


def write_trl(body: Body, results: Sequence[Answers], engine: Engine) -> Body:
    """Completions prompt-major."""
    samples = [sample for _, all_samples in results for sample in all_samples]
    return {
        "prompt_ids": [prompt_tokens for prompt_tokens, _ in results],
        "completion_ids": [sample.tokens for sample in samples],
        "logprobs": [sample.logprobs for sample in samples],
    }


def _answer(
    choices: Sequence[Body], body: Body, results: Sequence[Answers], engine: Engine
) -> Body:
    prompt = sum(len(prompt_tokens) for prompt_tokens, _ in results)
    sampled = sum(len(sample.tokens) for _, samples in results for sample in samples)
    return completion_body(
        choices,
        model=engine.model_name,
        num_tokens=(prompt, sampled),
        id=_id_of(body, 0),
        created=0,
    )


def _id_of(body: Body, index: int) -> str:
    """Return the same id for the same request, so that answers are byte-identical."""
    return hashlib.blake2b(repr((body, index)).encode(), digest_size=8).hexdigest()


def _piece(token: int, engine: Engine) -> str:
    """Return the text of a token; as in vLLM, "" for incomplete UTF-8."""
    text: str = engine.tokenizer.decode([token])
    return "" if "\ufffd" in text else text


def _pieces(sample: Completion, engine: Engine) -> Iterator[tuple[str, float]]:
    """Yield the text and the logprob of each sampled token."""
    for token, logprob in zip(sample.tokens, sample.logprobs, strict=False):
        yield _piece(token, engine), logprob


def _candidates(
    prompt_tokens: list[int], num_top: int, engine: Engine
) -> list[list[tuple[int, float]]]:
    return made_up_candidates(
        prompt_tokens,
        num_top=num_top,
        vocab_size=engine.vocab_size,
        version=engine.weight_version,
    )


def _prompt_logprobs(
    prompt_tokens: list[int], num_top: Any, engine: Engine
) -> list[Body | None] | None:
    """Return the `num_top` likeliest ids and the prompt's own at each position; None at the first."""
    if num_top is None:
        return None
    return [
        {
            str(token): {"logprob": value, "rank": rank, "decoded_token": _piece(token, engine)}
            for rank, (token, value) in enumerate(ranked, 1)
        }
        or None
        for ranked in _candidates(prompt_tokens, int(num_top), engine)
    ]


def _sglang_logprobs(
    body: Body, prompt_tokens: list[int], sample: Completion, engine: Engine
) -> Body:
    num_top = int(body.get("top_logprobs_num") or 0)
    start = body.get("logprob_start_len")
    if start is None or start < 0:
        start = len(prompt_tokens)
    candidates = _candidates(prompt_tokens, num_top, engine)[start:]
    own = [ranked[-1][1] if ranked else None for ranked in candidates]
    meta: Body = {
        "input_token_logprobs": [
            [v, t, None] for v, t in zip(own, prompt_tokens[start:], strict=True)
        ],
        "output_token_logprobs": [
            [v, t, None] for v, t in zip(sample.logprobs, sample.tokens, strict=False)
        ],
        "output_token_logprobs_length": len(sample.logprobs),
    }
    if num_top:
        meta["input_top_logprobs"] = [
            [[v, t, None] for t, v in ranked[:-1]] or None for ranked in candidates
        ]
    return meta
