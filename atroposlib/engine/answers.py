"""The answers of `/v1/completions` and `/v1/chat/completions`: vLLM's fields, and each choice's weight versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from atroposlib.engine.bodies import ChatBody, CompletionBody
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.sequences import Completion, Tokenizer

_LOWEST_LOGPROB = -9999.0
"""Replaces a logprob of minus infinity, which JSON cannot hold, as in vLLM."""


class Renderer:
    """Builds the bodies of answers for one model and tokenizer."""

    def __init__(self, model_name: str, tokenizer: Tokenizer) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}

    def completion(
        self,
        body: CompletionBody,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        results: Sequence[Sequence[Completion]],
    ) -> dict[str, Any]:
        """Return the answer of `/v1/completions`: all completions of the first prompt, then of the second, ..."""
        choices: list[dict[str, Any]] = []
        for prompt_ids, completions in zip(prompts, results, strict=True):
            for completion in completions:
                choice = _choice(completion, body, index=len(choices))
                choice["text"] = self._text(completion, params)
                if params.logprobs is not None:
                    choice["logprobs"] = self._completion_logprobs(completion, body)
                if body.return_token_ids:
                    choice["prompt_token_ids"] = prompt_ids
                choices.append(choice)
        return {
            **self._head("cmpl", "text_completion"),
            "choices": choices,
            "usage": _usage(prompts, results),
        }

    def chat(
        self,
        body: ChatBody,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        completions: Sequence[Completion],
    ) -> dict[str, Any]:
        """Return the answer of `/v1/chat/completions`; `prompt_token_ids` is a top-level field, as in vLLM."""
        choices = []
        for index, completion in enumerate(completions):
            choice = _choice(completion, body, index=index)
            choice["message"] = {"role": "assistant", "content": self._text(completion, params)}
            if params.logprobs is not None:
                choice["logprobs"] = {"content": self._chat_logprobs(completion, body)}
            choices.append(choice)
        return {
            **self._head("chatcmpl", "chat.completion"),
            "choices": choices,
            "usage": _usage([prompt_ids], [completions]),
            "prompt_token_ids": prompt_ids if body.return_token_ids else None,
        }

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model_name,
        }

    def _text(self, completion: Completion, params: SamplingParams) -> str:
        if completion.text is not None:
            return completion.text
        token_ids = completion.token_ids
        if completion.ended_by_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def _completion_logprobs(self, completion: Completion, body: CompletionBody) -> dict[str, Any]:
        as_ids = bool(body.return_tokens_as_token_ids)
        tokens = [self._token(token, as_ids=as_ids) for token in completion.token_ids]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = []
        for place, (token, logprob) in enumerate(zip(tokens, completion.logprobs, strict=True)):
            row = {token: _json_float(logprob)}
            for token_id, value in (
                completion.top_logprobs[place] if completion.top_logprobs else ()
            ):
                row.setdefault(self._token(token_id, as_ids=as_ids), _json_float(value))
            top.append(row)
        return {
            "tokens": tokens,
            "token_logprobs": [_json_float(value) for value in completion.logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, completion: Completion, body: ChatBody) -> list[dict[str, Any]]:
        as_ids = bool(body.return_tokens_as_token_ids)

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            token = self._token(token_id, as_ids=as_ids)
            return {
                "token": token,
                "logprob": _json_float(logprob),
                "bytes": list(token.encode()),
            }

        tops = completion.top_logprobs or [[] for _ in completion.token_ids]
        return [
            {**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in top]}
            for token_id, logprob, top in zip(
                completion.token_ids, completion.logprobs, tops, strict=True
            )
        ]

    def _token(self, token_id: int, *, as_ids: bool) -> str:
        if as_ids:
            return f"token_id:{token_id}"
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


def _choice(
    completion: Completion, body: CompletionBody | ChatBody, *, index: int
) -> dict[str, Any]:
    """Return the fields that choices of both routes have."""
    choice: dict[str, Any] = {
        "index": index,
        "logprobs": None,
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "weight_versions": [span._asdict() for span in completion.weight_versions],
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _usage(
    prompts: Sequence[Sequence[int]], results: Sequence[Sequence[Completion]]
) -> dict[str, int]:
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(c.token_ids) for completions in results for c in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _json_float(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
