"""Every server type against the scripted engine, which has all their routes: the same prompt gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_inference import Sample, sample

from atroposlib.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.harness import HarnessRequest, ServerHarness
from atroposlib.inference.scripted_engine import (
    ByteTokenizer,
    Fault,
    Script,
    ScriptedEngine,
    made_up_logprobs,
)
from atroposlib.inference.servers.api_server import APIServer, listening
from atroposlib.inference.servers.openai import OpenAIServer
from atroposlib.inference.servers.sglang import SGLangServer
from atroposlib.inference.servers.trl import TrlVllmServer
from atroposlib.inference.servers.vllm import VLLMServer
from atroposlib.inference.sessions.managed_server import ManagedServer

PROMPT = [10, 11, 12]
TYPES: dict[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}
WITH_TOKENS = pytest.mark.parametrize("name", ["vllm", "sglang", "trl"])


def open_server(name: str, engine: ScriptedEngine) -> Any:
    url = engine.url if name == "trl" else f"{engine.url}/v1"
    config = APIServerConfig(base_url=url, server_type=name, model_name=engine.model_name)  # type: ignore[arg-type]
    server = TYPES[name](config)
    server.tokenizer = ByteTokenizer()  # type: ignore[attr-defined]
    return server


def expected(choice: int, *spans: tuple[str, int]) -> Sample:
    return sample(PROMPT, choice, seed=5, spans=spans)


@WITH_TOKENS
async def test_tokens_and_logprobs_are_those_of_the_engine(name: str) -> None:
    async with ScriptedEngine(Script(seed=5), weight_version="7") as engine:
        server = open_server(name, engine)
        for _ in range(2):
            answer = await server.tokens_and_logprobs_completion(
                input_ids=PROMPT, n=2, max_tokens=4
            )
        await server.close()
    wanted = [expected(choice, ("7", 4)) for choice in range(2)]
    assert answer.prompt_tokens == PROMPT
    assert answer.output_tokens == [tokens for tokens, _ in wanted]
    assert answer.output_logprobs == [logprobs for _, logprobs in wanted]
    assert answer.finish_reasons == ["length", "length"]
    # TRL's server keeps no versions.
    assert answer.weight_versions == [None if name == "trl" else [("7", 4)]] * 2


@pytest.mark.parametrize("name", ["vllm", "sglang", "trl"])
async def test_a_conversation_is_the_same_sequence_over_http_and_in_process(name: str) -> None:
    def respond(request: HarnessRequest) -> str:
        return f"{request.prompt[-8:]}{request.choice}"

    async with ScriptedEngine(respond=respond, weight_version="7") as engine:
        found = []
        for server in (
            open_server(name, engine),
            ServerHarness(respond=respond, weight_version="7"),
        ):
            managed = ManagedServer(server, tokenizer=ByteTokenizer())
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            for _ in range(2):
                answer = await managed.chat_completion(messages=messages, max_tokens=50)
                again = {"role": "user", "content": "go on"}
                messages = [*messages, answer.choices[0].message, again]
            (node,) = managed.get_state()["nodes"]
            places = [(turn["start"], turn["num_tokens"]) for turn in node.metadata.pop("turns")]
            if name == "trl":  # whose server keeps no versions
                node.metadata = {}
            found.append((node.tokens, node.masked_tokens, node.logprobs, node.metadata, places))
            await server.close()
    assert found[0] == found[1]
    assert sum(token != -100 for token in node.masked_tokens) == 2 * 10  # both turns are trained


async def test_prompt_logprobs_are_the_same_from_sglang_vllm_and_in_process() -> None:
    async with ScriptedEngine() as engine:
        answers = []
        in_process = ServerHarness(weight_version="default")
        for server in (open_server("sglang", engine), open_server("vllm", engine), in_process):
            answers.append([await server.get_logprobs(input_ids=PROMPT, top_k=k) for k in (0, 3)])
            await server.close()
    assert answers[0] == answers[1] == answers[2]
    own, top = answers[0]
    assert own["prompt_topk_token_ids"] == [[], [11], [12]]
    values = made_up_logprobs(PROMPT[:1], PROMPT[1:], spans=[("default", 2)])
    assert own["prompt_topk_logprobs"] == [[], *([value] for value in values)]
    assert [len(ids) for ids in top["prompt_topk_token_ids"]] == [0, 3, 3]


async def test_no_version_is_claimed_for_a_request_during_which_weights_changed() -> None:
    script = Script(faults=(Fault(kind="swap_weights", skip=1, times=1),))
    async with ScriptedEngine(script, weight_version="7") as engine:
        server = open_server("sglang", engine)
        found = []
        for _ in range(3):
            answer = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=4)
            found += answer.weight_versions
        after = engine.weight_version
        await server.close()
    assert after != "7"
    assert found == [[("7", 4)], None, [(after, 4)]]


@pytest.mark.parametrize(
    ("missing", "asked"),
    [
        ((), {"/model_info": 2}),
        (("/model_info",), {"/model_info": 1, "/get_weight_version": 2}),
        (("/model_info", "/get_weight_version"), {"/model_info": 1, "/get_weight_version": 1}),
    ],
)
async def test_the_version_is_asked_for_where_the_server_tells_it(
    missing: tuple[str, ...], asked: dict[str, int]
) -> None:
    async with ScriptedEngine(weight_version="7", missing_paths=missing) as engine:
        server = open_server("sglang", engine)
        for _ in range(2):
            answer = await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=4)
            assert answer.weight_versions == [[("7", 4)]]
        await server.close()
    paths = ("/model_info", "/get_weight_version")
    assert {path: engine.counts[path] for path in paths if engine.counts[path]} == asked


@WITH_TOKENS
@pytest.mark.parametrize("kind", ["cut_json", "wrong_lengths"])
async def test_half_answers_are_refused(name: str, kind: Any) -> None:
    async with ScriptedEngine(Script(faults=(Fault(kind=kind),))) as engine:
        server = open_server(name, engine)
        with pytest.raises(EngineProtocolError, match=r"not JSON|\d+ (logprobs|tokens)"):
            await server.tokens_and_logprobs_completion(input_ids=PROMPT, max_tokens=4)
        await server.close()


# Streams.


async def told_and_answered(server: Any, *, n: int = 1, **asked: Any) -> tuple[Any, Any]:
    """Return the pieces that were told of each completion, and the answer."""
    told: list[list[list[int]]] = [[] for _ in range(n)]
    with listening([pieces.append for pieces in told]):
        answer = await server.tokens_and_logprobs_completion(
            **{"input_ids": PROMPT, "n": n, "max_tokens": 8, **asked}
        )
    return told, answer


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (Script(seed=3), {}),
        (Script(seed=3, lengths=(2, 8)), {"n": 3}),
        (Script(answers=("half a line\nand more",)), {"stop": ["\n"], "max_tokens": 99}),
        (Script(seed=3), {"stream_interval": 3}),
        (Script(faults=(Fault(kind="swap_weights"),)), {"n": 2}),
        (Script(seed=3, lengths=(2, 5)), {"n": 5, "max_tokens": 30000}),  # in three requests
    ],
)
async def test_a_stream_of_sglang_is_its_unstreamed_answer(
    script: Script, asked: dict[str, Any]
) -> None:
    answers = []
    for listens in (True, False):
        async with ScriptedEngine(script, weight_version="7") as engine:
            server = open_server("sglang", engine)
            if listens:
                told, answer = await told_and_answered(server, **asked)
            else:
                answer = await server.tokens_and_logprobs_completion(
                    **{"input_ids": PROMPT, "max_tokens": 8, **asked}
                )
            await server.close()
        answers.append((*answer, answer.weight_versions))
        assert all(bool(request.body.get("stream")) == listens for request in engine.served)
    assert answers[0] == answers[1]
    assert [sum(pieces, []) for pieces in told] == answers[0][1]
    assert max(map(len, told)) > 1


async def test_a_long_answer_is_streamed_in_a_bounded_number_of_events() -> None:
    async with ScriptedEngine(Script(lengths=(1030, 1030))) as engine:
        server = open_server("sglang", engine)
        (pieces,), answer = await told_and_answered(server, max_tokens=8192)
        await server.close()
    assert [len(piece) for piece in pieces] == [1, *[16] * 64, 5]
    assert sum(pieces, []) == answer.output_tokens[0]


@pytest.mark.parametrize(
    ("asked", "script", "error", "words"),
    [
        ({"input_ids": [5] * 99}, Script(), EngineRejected, "maximum context length is 64"),
        ({}, Script(faults=(Fault(kind="drop_in_body"),)), EngineUnavailable, "broke off"),
        ({}, Script(faults=(Fault(kind="wrong_lengths"),)), EngineUnavailable, "says 8"),
    ],
)
async def test_a_stream_that_fails_is_no_answer_and_is_not_repeated(
    asked: dict[str, Any], script: Script, error: type[Exception], words: str
) -> None:
    async with ScriptedEngine(script, max_model_len=64) as engine:
        server = open_server("sglang", engine)
        with pytest.raises(error, match=words):
            await told_and_answered(server, **asked)
        await server.close()
    assert engine.counts["/generate"] == 1
