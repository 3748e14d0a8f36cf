"""An engine that answers at once: vLLM's `/v1/completions` and `/v1/chat/completions` from prepared bytes.

`_env_engine.py TOKENIZER_DIR NUM_TOKENS,...` prints its address and serves until it is killed. A reply is `n` prepared
choices of the requested length with the request's prompt, so that a measured environment never waits for it. It has
every field of stock vLLM 0.32, of the same size.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from aiohttp import web
from tokenizers import Tokenizer

from benchmarks._env_text import corpus

NUM_CHOICES = 24
"""Prepared choices of each length."""
PROMPT = re.compile(rb'"prompt":(\[[0-9,]*\])')
NUMBER = {name: re.compile(rb'"%s":(\d+)' % name) for name in (b"n", b"max_tokens")}


class Choice(NamedTuple):
    """One choice without braces and index; a completion's prompt goes between `before` and `after`."""

    before: bytes
    after: bytes
    chat: bytes


def dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def make_choice(tokenizer: Tokenizer, tokens: Sequence[int], rng: random.Random) -> Choice:
    text = tokenizer.decode(tokens)
    pieces = [tokenizer.decode([token]) for token in tokens]
    # float32 values, as vLLM prints them.
    logprobs = [float(np.float32(-rng.expovariate(2.0))) for _ in tokens]
    offsets = [0]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    completion = {
        "text": text,
        "logprobs": {
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": pieces,
            "top_logprobs": [{p: v} for p, v in zip(pieces, logprobs, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": tokens,
        "prompt_logprobs": None,
    }
    message = {"role": "assistant", "content": text, "refusal": None, "annotations": None}
    chat = {
        "message": {**message, "audio": None, "function_call": None, "reasoning": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }
    return Choice(
        dumps(completion)[1:-1] + b',"prompt_token_ids":',
        b',"routed_experts":null',
        dumps(chat)[1:-1],
    )


def make_choices(directory: Path, lengths: Sequence[int]) -> dict[int, list[Choice]]:
    """Cut the text into completions of each length."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens = tokenizer.encode(corpus()).ids
    tokens *= 1 + 2 * max(lengths) // len(tokens)
    rng = random.Random(0)
    made = {}
    for length in lengths:
        starts: list[int] = []
        while len(starts) < NUM_CHOICES:
            start = rng.randrange(len(tokens) - length)
            if tokenizer.decode([tokens[start]]).isalpha():  # must not merge with the prompt's end
                starts.append(start)
        made[length] = [make_choice(tokenizer, tokens[s : s + length], rng) for s in starts]
    return made


def create_app(choices: dict[int, list[Choice]]) -> web.Application:
    """Return the engine; requests take the prepared choices in turn."""
    numbers = itertools.count()

    def take(body: bytes) -> list[Choice]:
        asked = {name: pattern.search(body) for name, pattern in NUMBER.items()}
        n = int(asked[b"n"].group(1)) if asked[b"n"] else 1
        prepared = choices[int(asked[b"max_tokens"].group(1)) if asked[b"max_tokens"] else 16]
        return [prepared[next(numbers) % len(prepared)] for _ in range(n)]

    async def completions(request: web.Request) -> web.Response:
        body = await request.read()
        prompt = PROMPT.search(body)
        assert prompt is not None, body[:300]
        ids = prompt.group(1)
        pieces = [b"%s%s%s" % (choice.before, ids, choice.after) for choice in take(body)]
        return answer(b"text_completion", pieces)

    async def chat_completions(request: web.Request) -> web.Response:
        return answer(b"chat.completion", [each.chat for each in take(await request.read())])

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=2**30)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    return app


def answer(kind: bytes, choices: list[bytes]) -> web.Response:
    pieces = [b'{"id":"c","object":"%s","created":1,"model":"bench","choices":[' % kind]
    for index, choice in enumerate(choices):
        pieces += [b'%s{"index":%d,' % (b"," if index else b"", index), choice, b"}"]
    pieces.append(
        b'],"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":{"prompt_tokens":1,'
        b'"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":null},'
        b'"kv_transfer_params":null,"metrics":null}'
    )
    return web.Response(body=b"".join(pieces), content_type="application/json")


def main() -> None:
    directory, lengths = Path(sys.argv[1]), [int(text) for text in sys.argv[2].split(",")]
    app = create_app(make_choices(directory, lengths))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        web.run_app(app, sock=listener, print=None, access_log=None)


if __name__ == "__main__":
    main()
