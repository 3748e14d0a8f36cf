"""An engine that answers at once: vLLM's `/v1/completions` and `/v1/chat/completions` from prepared bytes.

`_env_engine.py TOKENIZER_DIR NUM_TOKENS,...` prints its address and serves until it is killed. A reply is `n` prepared
choices of the requested length with the request's prompt, so that a measured environment never waits for it. It has
every field of stock vLLM 0.32, of the same size.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    logprobs = [-rng.expovariate(2.0) for _ in tokens]
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


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, choices: dict[int, list[Choice]]) -> None:
        self._choices = choices
        self._received = bytearray()
        self._next = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end])
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        length = int(found.group(1)) if found else 0
        if len(self._received) < head_end + 4 + length:
            return
        body = bytes(self._received[head_end + 4 : head_end + 4 + length])
        self._received.clear()
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/health":
            self._send(b"200 OK", [])
        elif path == b"/v1/completions":
            prompt = PROMPT.search(body)
            assert prompt is not None, body[:300]
            ids = prompt.group(1)
            pieces = [b"%s%s%s" % (choice.before, ids, choice.after) for choice in self._take(body)]
            self._send_choices(b"text_completion", pieces)
        elif path == b"/v1/chat/completions":
            self._send_choices(b"chat.completion", [choice.chat for choice in self._take(body)])
        else:
            self._send(b"404 Not Found", [b'{"detail":"Not Found"}'])

    def _take(self, body: bytes) -> list[Choice]:
        asked = {name: pattern.search(body) for name, pattern in NUMBER.items()}
        n = int(asked[b"n"].group(1)) if asked[b"n"] else 1
        max_tokens = int(asked[b"max_tokens"].group(1)) if asked[b"max_tokens"] else 16
        choices = self._choices[max_tokens]
        self._next += n
        return [choices[(self._next + i) % len(choices)] for i in range(n)]

    def _send_choices(self, kind: bytes, choices: list[bytes]) -> None:
        pieces = [b'{"id":"c","object":"%s","created":1,"model":"bench","choices":[' % kind]
        for index, choice in enumerate(choices):
            pieces += [b'%s{"index":%d,' % (b"," if index else b"", index), choice, b"}"]
        pieces.append(
            b'],"service_tier":null,"system_fingerprint":"vllm-0.32.0","usage":{"prompt_tokens":1,'
            b'"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":null},'
            b'"kv_transfer_params":null,"metrics":null}'
        )
        self._send(b"200 OK", pieces)

    def _send(self, status: bytes, pieces: list[bytes]) -> None:
        length = sum(map(len, pieces))
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.writelines([head % (status, length), *pieces])


async def main() -> None:
    directory, lengths = Path(sys.argv[1]), [int(text) for text in sys.argv[2].split(",")]
    choices = make_choices(directory, lengths)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(choices), "127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
