"""The answers of `/v1/completions` and `/v1/chat/completions`: vLLM's fields, and each choice's weight versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from atroposlib.engine.bodies import ChatBody, CompletionBody
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.sequences import Completion, Tokenizer
from atroposlib.utils.answer_bodies import chat_logprobs, completion_body, text_logprobs


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
                choice = self._choice(completion, body, params)
                choice["text"] = self._text(completion, params)
                if body.return_token_ids:
                    choice["prompt_token_ids"] = prompt_ids
                choices.append(choice)
        num_tokens = _num_tokens(prompts, results)
        return completion_body(choices, model=self._model_name, num_tokens=num_tokens)

    def chat(
        self,
        body: ChatBody,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        completions: Sequence[Completion],
    ) -> dict[str, Any]:
        """Return the answer of `/v1/chat/completions`; `prompt_token_ids` is a top-level field, as in vLLM."""
        choices = []
        for completion in completions:
            message = {"role": "assistant", "content": self._text(completion, params)}
            choices.append({**self._choice(completion, body, params), "message": message})
        num_tokens = _num_tokens([prompt_ids], [completions])
        answer = completion_body(choices, model=self._model_name, num_tokens=num_tokens)
        return {**answer, "prompt_token_ids": prompt_ids if body.return_token_ids else None}

    def _choice(
        self, completion: Completion, body: CompletionBody | ChatBody, params: SamplingParams
    ) -> dict[str, Any]:
        """Return the fields that choices of both routes have."""
        choice: dict[str, Any] = {
            "finish_reason": completion.finish_reason.value,
            "stop_reason": completion.stop_reason,
            "weight_versions": [span._asdict() for span in completion.weight_versions],
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if params.logprobs is not None:
            write = chat_logprobs if isinstance(body, ChatBody) else text_logprobs
            as_ids = bool(body.return_tokens_as_token_ids)
            sampled = zip(completion.token_ids, completion.logprobs, strict=True)
            tops = completion.top_logprobs
            choice["logprobs"] = write(
                self._texts(sampled, as_ids=as_ids),
                None if tops is None else [self._texts(top, as_ids=as_ids) for top in tops],
            )
        return choice

    def _text(self, completion: Completion, params: SamplingParams) -> str:
        if completion.text is not None:
            return completion.text
        token_ids = completion.token_ids
        if completion.ended_by_token and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def _texts(
        self, tokens: Iterable[tuple[int, float]], *, as_ids: bool
    ) -> Iterator[tuple[str, float]]:
        """Yield the text and the logprob of tokens given by id."""
        for token_id, logprob in tokens:
            if as_ids:
                yield f"token_id:{token_id}", logprob
                continue
            text = self._token_texts.get(token_id)
            if text is None:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
                self._token_texts[token_id] = text
            yield text, logprob


def _num_tokens(
    prompts: Sequence[Sequence[int]], results: Sequence[Sequence[Completion]]
) -> tuple[int, int]:
    """Return the tokens of the prompts and of the completions."""
    sampled = sum(len(completion.token_ids) for each in results for completion in each)
    return sum(map(len, prompts)), sampled
