"""Sessions at an API without token ids: `DummyManagedServer` for trials, `TextSession` records text for `process`.

Their tokens are made up and must not be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.inference.servers.sampling_notes import ItemRecord, Text
from atroposlib.inference.sessions.sequences import SequenceNode, state_of
from atroposlib.inference.tools.messages import as_dict


class DummyManagedServer:
    """Real text from an API without token ids, with made-up tokens in the nodes: for trials, never for training."""

    NUM_TOKENS = 128

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        completion = await self.server.chat_completion(**kwargs)
        messages = list(map(as_dict, kwargs["messages"]))
        for choice in completion.choices:
            answer = {"role": "assistant", "content": choice.message.content}
            self._add_answer(messages, answer, choice.finish_reason)
        return completion

    async def completion(self, **kwargs: Any) -> Any:
        completion = await self.server.completion(**kwargs)
        for choice in completion.choices:
            self._nodes.append(self._node(f"{kwargs['prompt']}{choice.text}", choice.finish_reason))
        return completion

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("an API without token ids has no prompt logprobs")

    def get_state(self) -> dict[str, Any]:
        return state_of(self._nodes, track_tree=self.track_tree)

    def reset(self) -> None:
        self._nodes.clear()

    def _add_answer(
        self, messages: list[dict[str, Any]], answer: dict[str, Any], finish_reason: str | None
    ) -> None:
        self._nodes.append(self._node(_as_text([*messages, answer]), finish_reason))

    def _node(self, text: str, finish_reason: str | None, *, first: int = 0) -> SequenceNode:
        return SequenceNode(
            full_text=text,
            tokens=[first, *range(1, self.NUM_TOKENS)],
            masked_tokens=[-100, *range(1, self.NUM_TOKENS)],
            logprobs=[-0.5] * self.NUM_TOKENS,
            metadata={
                "finish_reason": finish_reason,
                "policy_version": None,
                "weight_versions": None,
                "dummy_tokens": True,
            },
        )


class TextSession(DummyManagedServer):
    """Records the text of an API without token ids for `process`: one node per episode.

    An environment sees made-up tokens. The first is the episode's index in `ItemRecord.texts`, by which the rows find
    the text; they leave the tokens out.
    """

    def __init__(self, server: Any, record: ItemRecord, **options: Any) -> None:
        super().__init__(server, **options)
        self._record = record
        self._texts: list[int] = []
        """[num_nodes] indices of their texts."""

    async def completion(self, **kwargs: Any) -> Any:
        completion = await self.server.completion(**kwargs)
        prompt = {"role": "user", "content": kwargs["prompt"]}
        for choice in completion.choices:
            self._add_answer(
                [prompt], {"role": "assistant", "content": choice.text}, choice.finish_reason
            )
        return completion

    def reset(self) -> None:
        super().reset()
        self._texts.clear()

    def _add_answer(
        self, messages: list[dict[str, Any]], answer: dict[str, Any], finish_reason: str | None
    ) -> None:
        text = Text([*messages, answer], answer["content"] or "", finish_reason)
        for i, index in enumerate(self._texts):
            earlier = self._record.texts[index].messages
            if _said(messages[: len(earlier)]) == _said(earlier):
                self._record.texts[index] = text
                self._nodes[i] = self._node(_as_text(text.messages), finish_reason, first=index)
                return
        index = len(self._record.texts)
        self._texts.append(index)
        self._record.texts.append(text)
        self._nodes.append(self._node(_as_text(text.messages), finish_reason, first=index))


def _as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"{each.get('role')}:{each.get('content')}" for each in messages)


def _said(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    return [(message.get("role"), message.get("content") or "") for message in messages]
