"""A model that is unknown while its adapter is swapped is retried; one that never answered is an error."""

from __future__ import annotations

import pytest

from atroposlib.errors import EngineRejected
from atroposlib.inference.servers.admission import ConcurrencyController
from atroposlib.inference.servers.openai import OpenAIServer
from tests.inference.helpers_peer import Peer, Reply

ANSWER = {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]}
GONE = Reply({"error": {"message": "The model `policy` does not exist.", "code": 404}}, status=404)


async def test_a_model_that_answered_before_may_be_missing_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConcurrencyController, "PAUSE_S", 0.01)
    async with Peer(ANSWER, GONE, GONE, GONE, GONE, ANSWER) as peer:
        server = peer.opened(OpenAIServer(peer.config(model_name="policy")))
        server.max_backoff_s = 0.0
        for _ in range(2):
            completion = await server.completion(prompt="is it?")
            assert completion.choices[0].text == "yes"
        assert len(peer.asked) == 6


async def test_a_model_that_never_answered_is_refused_at_once() -> None:
    async with Peer(GONE, ANSWER) as peer:
        server = peer.opened(OpenAIServer(peer.config(model_name="policy")))
        server.max_backoff_s = 0.0
        with pytest.raises(EngineRejected, match="does not exist"):
            await server.completion(prompt="is it?")
        assert len(peer.asked) == 1
