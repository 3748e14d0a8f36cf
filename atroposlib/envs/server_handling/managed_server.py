"""Chat and text calls whose every token is remembered: `ManagedServer`.

An environment talks to it as to any chat API; afterwards `get_state()["nodes"]` holds the token sequences with labels
and logprobs, ready to be scored. Prompts are sent as token ids; a turn that continues an earlier one reuses its ids
verbatim (`sequences.py`, `chat_template.py`). One instance serves one rollout group and one server.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
import uuid
from collections.abc import Sequence
from typing import Any

from atroposlib.envs.server_handling.api_server import TokenCompletions
from atroposlib.envs.server_handling.chat_template import ChatTemplate, as_dict, identity
from atroposlib.envs.server_handling.openai_routes import chat_completion_from, completion_from
from atroposlib.envs.server_handling.sequences import (
    PendingTurn,
    SampledTurn,
    SequenceNode,
    SequenceStore,
)
from atroposlib.errors import ConfigError, EngineProtocolError

logger = logging.getLogger(__name__)

_OWN_KEYWORDS = frozenset(
    {"messages", "prompt", "input_ids", "tools", "tool_choice", "logprobs", "top_logprobs", "model"}
)
"""Keywords of a chat call that the token request does not carry; logprobs are always asked for."""


class ManagedServer:
    """Tracks the token sequences of the calls made through it."""

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        self.server = server
        self.track_tree = track_tree
        self.tool_parser = tool_parser
        # Sampled tokens are never rewritten, so `<think>` blocks survive whatever this says.
        self.preserve_think_blocks = preserve_think_blocks
        self.num_broken_prefixes = 0
        """Turns that repeated earlier ones but could not reuse their tokens, because the template rewrote the past."""
        self._given_tokenizer = tokenizer
        self._store = SequenceStore(keep_parents=track_tree)
        self._warned_about_tools = False

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer given, else the server's."""
        tokenizer = self._given_tokenizer
        if tokenizer is None:
            tokenizer = getattr(self.server, "tokenizer", None)
        if tokenizer is None:
            raise ConfigError(
                f"{type(self.server).__name__} has no tokenizer; call managed_server(tokenizer=...)"
            )
        return tokenizer

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    # Calls.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Sample the next message(s) of a conversation and return an `openai` `ChatCompletion`.

        After the first call of a session, `choices[i]` is `get_state()["nodes"][i]`; calls made at the same time
        have their nodes in the order of the calls.
        """
        messages = [as_dict(message) for message in kwargs["messages"]]
        if not messages:
            raise ValueError("chat_completion needs at least one message")
        tools = kwargs.get("tools")
        if tools and not self._warned_about_tools:
            self._warned_about_tools = True
            logger.warning("Tool calls are shown to the model but not parsed out of its answers")
        turn = self._prepare_chat(messages, tools)
        turn, answer = await self._sample(turn, kwargs)
        completions = self._read(answer, messages=messages)
        self._store.commit(turn, completions)
        return chat_completion_from(
            {
                **self._envelope(turn, completions, "chat.completion"),
                "choices": [
                    {
                        "index": i,
                        "message": {"role": "assistant", "content": sampled.visible_text},
                        "finish_reason": sampled.finish_reason,
                        "logprobs": None,
                    }
                    for i, sampled in enumerate(completions)
                ],
            }
        )

    async def completion(self, **kwargs: Any) -> Any:
        """Sample continuations of a text prompt and return an `openai` `Completion`."""
        turn = self._prepare_text(kwargs["prompt"])
        turn, answer = await self._sample(turn, kwargs)
        completions = self._read(answer, messages=None)
        self._store.commit(turn, completions)
        return completion_from(
            {
                **self._envelope(turn, completions, "text_completion"),
                "choices": [
                    {
                        "index": i,
                        "text": sampled.visible_text,
                        "finish_reason": sampled.finish_reason,
                        "logprobs": None,
                    }
                    for i, sampled in enumerate(completions)
                ],
            }
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the top logprobs at every position of a prompt, given as `input_ids`, `prompt` or `messages`."""
        if kwargs.get("input_ids") is None:
            if kwargs.get("messages") is not None:
                rendered = self._template.render([as_dict(m) for m in kwargs["messages"]])
                tokens = self._template.encode(rendered.prompt, add_special_tokens=False)
            elif kwargs.get("prompt") is not None:
                tokens = self._template.encode(kwargs["prompt"], add_special_tokens=True)
            else:
                raise ValueError("get_logprobs needs input_ids, prompt or messages")
            kwargs = {**kwargs, "input_ids": tokens}
        kwargs.pop("messages", None)
        result: dict[str, Any] = await self.server.get_logprobs(**kwargs)
        keys = ("prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs")
        if missing := [key for key in keys if key not in result]:
            raise EngineProtocolError(f"get_logprobs answered without {', '.join(missing)}")
        return {key: result[key] for key in keys}

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [SequenceNode]}`; with `track_tree`, `{"sequences": ..., "tree": ...}` by full text."""
        nodes = self._store.nodes
        if self.track_tree:
            by_text = {node.full_text: node for node in nodes}
            return {"sequences": by_text, "tree": dict(by_text)}
        return {"nodes": nodes}

    def reset(self) -> None:
        """Forget all sequences; lists obtained earlier stay valid."""
        self._store.clear()

    # Prompts.

    def _prepare_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> PendingTurn:
        identities = [identity(message) for message in messages]
        continues = messages[-1].get("role") == "assistant"
        before = tuple(identities[:-1] if continues else identities)
        match = self._store.find_messages(identities)
        if match is not None and match.stage.messages is not None:
            stage = match.stage
            num_known = len(match.stage.messages)
            rendered = self._template.render(messages, tracked=stage.tracked, tools=tools)
            added = self._template.text_after(
                rendered, earlier_history=stage.history, turn=num_known - 1
            )
            if added is not None:
                added_tokens, added_text = self._join(match.tokens, added)
                return PendingTurn(
                    order=self._store.next_order(),
                    tokens=match.tokens + added_tokens,
                    full_text=stage.full_text + added_text,
                    visible_text=stage.visible_text + added,
                    parent=match,
                    messages=before,
                    tracked=stage.tracked,
                    history=rendered.history,
                )
            self.num_broken_prefixes += 1
            logger.warning(
                "The chat template rewrites earlier turns, so a conversation of %d messages cannot reuse its"
                " sampled tokens and begins a new sequence (%d so far in this session)",
                len(messages),
                self.num_broken_prefixes,
            )
        rendered = self._template.render(messages, tools=tools)
        return PendingTurn(
            order=self._store.next_order(),
            tokens=self._template.encode(rendered.prompt, add_special_tokens=False),
            full_text=rendered.prompt,
            visible_text=rendered.prompt,
            parent=None,
            messages=before,
            history=rendered.history,
        )

    def _prepare_text(self, prompt: str) -> PendingTurn:
        found = self._store.find_text(prompt)
        if found is None:
            return PendingTurn(
                order=self._store.next_order(),
                tokens=self._template.encode(prompt, add_special_tokens=True),
                full_text=prompt,
                visible_text=prompt,
                parent=None,
            )
        match, added = found
        added_tokens, added_text = self._join(match.tokens, added)
        return PendingTurn(
            order=self._store.next_order(),
            tokens=match.tokens + added_tokens,
            full_text=match.stage.full_text + added_text,
            visible_text=prompt,
            parent=match,
        )

    def _join(self, tokens: Sequence[int], added: str) -> tuple[list[int], str]:
        """Tokenise the text that follows `tokens`, without the end-of-turn token if that was sampled already."""
        added_tokens = self._template.encode(added, add_special_tokens=False)
        if tokens and added_tokens[:1] == [tokens[-1]] and self._template.is_special(tokens[-1]):
            sampled_end = self._template.decode([tokens[-1]], skip_special_tokens=False)
            return added_tokens[1:], added.removeprefix(sampled_end)
        return added_tokens, added

    # Answers.

    async def _sample(
        self, turn: PendingTurn, kwargs: dict[str, Any]
    ) -> tuple[PendingTurn, TokenCompletions]:
        request = {key: value for key, value in kwargs.items() if key not in _OWN_KEYWORDS}
        if os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1":
            logger.debug("Prompt of %d tokens: %.500s", len(turn.tokens), turn.full_text)
        raw = await self.server.tokens_and_logprobs_completion(
            input_ids=turn.tokens, prompt=turn.full_text, **request
        )
        answer = TokenCompletions.of(raw)
        if answer.prompt_tokens != turn.tokens:
            if turn.parent is not None:
                raise EngineProtocolError(
                    f"the engine sampled after {len(answer.prompt_tokens)} prompt tokens that are"
                    f" not the {len(turn.tokens)} sent"
                )
            # The engine's word counts: the logprobs are conditioned on what it saw.
            turn = dataclasses.replace(turn, tokens=list(answer.prompt_tokens))
        wanted = int(kwargs.get("n") or 1)
        if len(answer.output_tokens) != wanted:
            raise EngineProtocolError(
                f"the engine answered {len(answer.output_tokens)} completions, expected n = {wanted}"
            )
        return turn, answer

    def _read(
        self, answer: TokenCompletions, *, messages: list[dict[str, Any]] | None
    ) -> list[SampledTurn]:
        continued = ""
        if messages is not None and messages[-1].get("role") == "assistant":
            continued = messages[-1].get("content") or ""
        turns = []
        for tokens, logprobs, finish_reason, spans in zip(
            answer.output_tokens,
            answer.output_logprobs,
            answer.finish_reasons,
            answer.weight_versions,
            strict=True,
        ):
            visible = self._template.decode(tokens, skip_special_tokens=True)
            message = {"role": "assistant", "content": continued + visible}
            turns.append(
                SampledTurn(
                    tokens=list(tokens),
                    logprobs=list(logprobs),
                    full_text=self._template.decode(tokens, skip_special_tokens=False),
                    visible_text=visible,
                    message=identity(message) if messages is not None else None,
                    finish_reason=_reason(finish_reason),
                    weight_versions=spans,
                )
            )
        return turns

    def _envelope(
        self, turn: PendingTurn, completions: Sequence[SampledTurn], kind: str
    ) -> dict[str, Any]:
        num_sampled = sum(len(sampled.tokens) for sampled in completions)
        return {
            "id": str(uuid.uuid4()),
            "object": kind,
            "created": int(time.time()),
            "model": self.server.config.model_name,
            "usage": {
                "prompt_tokens": len(turn.tokens),
                "completion_tokens": num_sampled,
                "total_tokens": len(turn.tokens) + num_sampled,
            },
        }


def _reason(finish_reason: Any) -> str | None:
    # SGLang answers {"type": "stop", "matched": ...}.
    if isinstance(finish_reason, dict):
        finish_reason = finish_reason.get("type")
    return None if finish_reason is None else str(finish_reason)


class DummyManagedServer:
    """Real text from an API without token ids, made-up tokens in the nodes: to try an environment, never to train."""

    NUM_TOKENS = 128

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self._nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        completion = await self.server.chat_completion(**kwargs)
        lines = [f"{m.get('role')}:{m.get('content')}" for m in map(as_dict, kwargs["messages"])]
        for choice in completion.choices:
            self._add(
                "\n\n".join([*lines, f"assistant:{choice.message.content}"]), choice.finish_reason
            )
        return completion

    async def completion(self, **kwargs: Any) -> Any:
        completion = await self.server.completion(**kwargs)
        for choice in completion.choices:
            self._add(f"{kwargs['prompt']}{choice.text}", choice.finish_reason)
        return completion

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("an API without token ids has no prompt logprobs")

    def get_state(self) -> dict[str, Any]:
        if self.track_tree:
            by_text = {node.full_text: node for node in self._nodes}
            return {"sequences": by_text, "tree": dict(by_text)}
        return {"nodes": list(self._nodes)}

    def reset(self) -> None:
        self._nodes.clear()

    def _add(self, text: str, finish_reason: str | None) -> None:
        self._nodes.append(
            SequenceNode(
                full_text=text,
                tokens=list(range(self.NUM_TOKENS)),
                masked_tokens=[-100, *range(1, self.NUM_TOKENS)],
                logprobs=[-0.5] * self.NUM_TOKENS,
                metadata={
                    "finish_reason": finish_reason,
                    "policy_version": None,
                    "weight_versions": None,
                    "dummy_tokens": True,
                },
            )
        )


class _Creator:
    def __init__(self, create: Any) -> None:
        self._create = create

    async def create(self, **kwargs: Any) -> Any:
        return await self._create(**kwargs)


class _Chat:
    def __init__(self, create: Any) -> None:
        self.completions = _Creator(create)


class ManagedServerAdapter:
    """A managed server with the surface of `openai.AsyncOpenAI`, for libraries that expect a client."""

    def __init__(self, managed: Any, base_url: str = "") -> None:
        self.managed = managed
        self.base_url = base_url
        self.chat = _Chat(managed.chat_completion)
        self.completions = _Creator(managed.completion)

    def post(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a managed server has no other routes")

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a managed server cannot be copied")
