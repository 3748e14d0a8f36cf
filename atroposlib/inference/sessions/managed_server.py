"""`ManagedServer`: chat and text calls whose tokens are all recorded.

An environment calls it like any chat API; afterwards `get_state()["nodes"]` holds the token sequences with labels
and logprobs, ready to be scored. Prompts are sent as token ids; a turn that continues an earlier one reuses its ids
verbatim (`sequences.py`, `chat_template.py`). A chat with images is sent as messages, since the engine alone knows how
many tokens an image takes, and the prompt's ids that it reports are recorded (vLLM; other engines do not report them).
One instance serves one rollout group and one server.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.errors import ConfigError, EngineProtocolError, EngineRejected
from atroposlib.inference.servers.api_server import APIServer, TokenCompletions, listening
from atroposlib.inference.servers.openai_routes import (
    OTHER_LIMIT_NAMES,
    completion_from,
    import_openai,
)
from atroposlib.inference.servers.sampling_notes import item_notes, recorded
from atroposlib.inference.sessions.chat_template import ChatTemplate, TemplateOptions
from atroposlib.inference.sessions.recognition import Difference, SaidTurn, called
from atroposlib.inference.sessions.sampled_text import TextSoFar, read_turns, stops_to_cut
from atroposlib.inference.sessions.sequences import (
    ChatPlace,
    NodeMatch,
    PendingTurn,
    SampledTurn,
    SequenceNode,
    SequenceStore,
    VisibleText,
    state_of,
)
from atroposlib.inference.tools.messages import (
    begun_text,
    call_ids,
    has_images,
    identity,
    read_messages,
)
from atroposlib.inference.tools.thoughts import THINK, ThinkTags
from atroposlib.inference.tools.tool_messages import (
    OpenAIToolCall,
    completion_with_tool_calls,
)
from atroposlib.utils.answer_bodies import completion_body
from atroposlib.utils.off_loop import off_loop
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.tokenizers.backends import encode_prompt

if TYPE_CHECKING:
    from atroposlib.inference.tools.parsers.style import Style, ToolCallParser
    from atroposlib.inference.tools.translator import ToolCallTranslator

logger = logging.getLogger(__name__)

THREAD_FROM_CHARS = 4096
"""Longer answers are searched for tool calls off the event loop: the worst case is 3 microseconds per character."""

_OWN_KEYWORDS = frozenset(
    {
        "messages",
        "prompt",
        "input_ids",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "logprobs",
        "top_logprobs",
        "model",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "max_context_tokens",
        "on_text",
    }
)
"""Keywords of a chat call that are left out of the token request, which always asks for logprobs."""


class Prompt(NamedTuple):
    """A prompt as sent to the engine."""

    text: str
    tokens: list[int]


class ManagedTurn(NamedTuple):
    """A sampled turn."""

    completion: Any
    """A `ChatCompletion` or `Completion`."""
    answer: TokenCompletions | None
    """The engine's answer; None from an API without token ids."""
    prompt: str
    """The text that it answers; empty if unknown."""


class SampledAnswer(NamedTuple):
    """An answer to a turn."""

    turn: PendingTurn
    """With the prompt's tokens that the engine reports."""
    answer: TokenCompletions
    completions: list[SampledTurn]


class ManagedServer:
    """Tracks the token sequences of the calls made through it."""

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | ToolCallParser | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        self.server = server
        self.track_tree = track_tree
        self.tool_parser = tool_parser
        """The tool call parser or its name; None: tool calls stay text."""
        # Sampled tokens are never rewritten, so `<think>` blocks are kept in either case.
        self.preserve_think_blocks = preserve_think_blocks
        self.broken_prefixes: Counter[str] = Counter()
        """Turns that could not reuse the tokens of earlier turns, by `Difference.reason`."""
        self.max_context_tokens: int | None = None
        """Limit of a prompt and its answer together: answers get what the prompt leaves, at least 1 token."""
        self.refuses_long_prompts = False
        """Whether a prompt that leaves no room raises EngineRejected instead of getting 1 token."""
        self._given_tokenizer = tokenizer
        self._store = SequenceStore(keep_parents=track_tree)

    @property
    def num_broken_prefixes(self) -> int:
        """Turns that could not reuse the tokens of earlier turns, which the client or the template rewrote."""
        return self.broken_prefixes.total()

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The given tokenizer, else the server's, else the one that the server's config names."""
        tokenizer = self._given_tokenizer
        if tokenizer is None:
            tokenizer = getattr(self.server, "tokenizer", None)
        if tokenizer is None:
            config = self.server.config
            name = getattr(config, "tokenizer_name", "none")
            tokenizer = _tokenizer_named(config.model_name if name in ("none", "") else name)
        return tokenizer

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            self.tokenizer, write_calls=self._write_calls if self.tool_parser else None
        )

    @property
    def think_tags(self) -> ThinkTags | None:
        """The tags around the model's thoughts; None if neither its template nor its tokenizer knows thoughts."""
        return self._template.think_tags

    @functools.cached_property
    def _translator(self) -> ToolCallTranslator:
        from atroposlib.inference.tools.translator import ToolCallTranslator

        assert self.tool_parser is not None
        return ToolCallTranslator(self.tokenizer, parser_name=self.tool_parser)

    @property
    def style(self) -> Style | None:
        """The format of tool calls; None without a `tool_parser`."""
        return None if self.tool_parser is None else self._translator.style

    @property
    def has_channels(self) -> bool:
        """Whether thoughts are told apart by the markers of `style` (`Style.begun`), not by think tags."""
        return self.tool_parser is not None and self._translator.style.begun is not None

    def _write_calls(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._translator.convert_messages_for_template([dict(message)])[0]

    # Calls.

    async def chat_completion(self, **kwargs: Any) -> Any:
        """Sample the next message(s) of a conversation and return an `openai` `ChatCompletion`.

        After the first call of a session, `choices[i]` is `get_state()["nodes"][i]`; concurrent calls add their nodes
        in the order of the calls. If the last message is the assistant's, the model continues it. With `tools` and a
        `tool_parser`, calls are in `message.tool_calls`; that of gpt-oss also moves thoughts to
        `message.reasoning_content`. A stop string or token is moved from the content to `choice.stop_reason`. The nodes
        hold all sampled tokens.
        """
        async with self.chat_turn(**kwargs) as turn:
            return turn.completion

    @asynccontextmanager
    async def chat_turn(self, **kwargs: Any) -> AsyncIterator[ManagedTurn]:
        """Yield what `chat_completion` samples; the turn is stored if the block ends without an exception.

        Where the engine streams, `on_text` is called with the number of a choice, the prompt and the choice's text so
        far, which begins its content unless it has tool calls; of gpt-oss, with its special tokens.
        """
        messages = read_messages(kwargs["messages"])
        kwargs, options = _take_options(kwargs)
        turn = self._prepare_chat(messages, options)
        continued = begun_text(messages) or ""
        tools = options.tools if self.tool_parser is not None else None
        tags = self._template.think_tags or THINK
        completions, replies = [], []
        with self._store.continuing(turn):
            turn, answer, turns = await self._sample(turn, kwargs, messages)
            if turn.difference is not None:
                self._count_broken(turn.difference, len(messages))
            for sampled in turns:
                reply, finish_reason = await self._reply(
                    sampled, continued, tools, kwargs.get("tool_choice")
                )
                whole = {**reply, "content": continued + (reply["content"] or "")}
                thoughts = reply.get("reasoning_content", "")
                calls = called(reply) if "tool_calls" in reply else ()
                said = SaidTurn(
                    whole["content"],
                    sampled.cut,
                    calls,
                    tags,
                    thoughts,
                    identity=identity(whole),
                    call_ids=call_ids(reply),
                )
                completions.append(
                    dataclasses.replace(sampled, said=said, finish_reason=finish_reason)
                )
                replies.append(reply)
            has_calls = any("tool_calls" in reply for reply in replies)
            build = completion_with_tool_calls if has_calls else completion_from
            body = self._body(turn, completions, [{"message": reply} for reply in replies])
            yield ManagedTurn(build(body), answer, turn.full_text)
            self._store.commit(turn, completions)

    async def completion(self, **kwargs: Any) -> Any:
        """Sample continuations of a text prompt and return an `openai` `Completion`."""
        async with self.text_turn(**kwargs) as turn:
            return turn.completion

    @asynccontextmanager
    async def text_turn(self, **kwargs: Any) -> AsyncIterator[ManagedTurn]:
        """Yield what `completion` samples; the turn is stored if the block ends without an exception."""
        turn = self._prepare_text(kwargs["prompt"])
        with self._store.continuing(turn):
            turn, answer, completions = await self._sample(turn, kwargs)
            texts = [{"text": sampled.visible_text} for sampled in completions]
            completion = completion_from(self._body(turn, completions, texts))
            yield ManagedTurn(completion, answer, turn.full_text)
            self._store.commit(turn, completions)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return the top logprobs at every position of a prompt, given as `input_ids`, `prompt` or `messages`."""
        if kwargs.get("input_ids") is None:
            if kwargs.get("messages") is not None:
                kwargs, options = _take_options(kwargs)
                messages = read_messages(kwargs["messages"])
                tokens = self._chat_tokens(messages, options)
            elif kwargs.get("prompt") is not None:
                tokens = encode_prompt(self.tokenizer, kwargs["prompt"])
            else:
                raise ValueError("get_logprobs needs input_ids, prompt or messages")
            kwargs = {**kwargs, "input_ids": tokens}
        for key in ("messages", "tools"):
            kwargs.pop(key, None)
        result: dict[str, Any] = await self.server.get_logprobs(**kwargs)
        keys = ("prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs")
        if missing := [key for key in keys if key not in result]:
            raise EngineProtocolError(f"get_logprobs answered without {', '.join(missing)}")
        return {key: result[key] for key in keys}

    def preview(self, **kwargs: Any) -> Prompt:
        """Return the prompt that `chat_completion(**kwargs)` would send now, without sending it."""
        messages = read_messages(kwargs["messages"])
        _refuse_images(messages)
        _, options = _take_options(kwargs)
        turn = self._prepare_chat(messages, options)
        return Prompt(turn.full_text, turn.tokens)

    @property
    def nodes(self) -> list[SequenceNode]:
        """The token sequences so far. A branched conversation is several sequences with a common prefix, each fully
        labelled; `sequences.train_once` keeps every sampled token in one of them."""
        return self._store.nodes

    @property
    def num_nodes(self) -> int:
        """How many `nodes` there are; turns take less time until they are read."""
        return len(self._store)

    def get_state(self) -> dict[str, Any]:
        """Return the sequences as `sequences.state_of` does."""
        return state_of(self._store.nodes, track_tree=self.track_tree)

    def reset(self) -> None:
        """Clear all sequences and drop turns in flight; lists obtained earlier stay valid."""
        self._store.clear()

    # Prompts.

    def _prepare_chat(
        self, messages: list[dict[str, Any]], options: TemplateOptions
    ) -> PendingTurn:
        identities = tuple(identity(message) for message in messages)
        if has_images(messages):
            chat = _chat_with_images(list(map(self._template.with_calls_shown, messages)), options)
            first = ChatPlace(index=len(messages))
            return self._first_turn("", [], messages=identities, place=first, chat=chat)
        if (begun := begun_text(messages)) is not None:
            *before, _ = identities
            found = self._store.find_opened(before, begun)
            if found is not None:
                ended, added = found
                place = ended.stage.place
                return self._resume(ended, added, messages=tuple(before), place=place)
            identities = tuple(before)
        match, difference = self._store.find_messages(identities, messages[: len(identities)])
        turn = None if match is None else self._continue(match, messages, identities, options)
        if turn is None:
            pieces = self._template.render(messages, options=options)
            assert pieces is not None  # without tracked turns there is one piece
            text = pieces[0] + (begun_text(messages) or "")
            tokens = encode_prompt(self.tokenizer, text, add_special_tokens=False)
            first = ChatPlace(index=len(identities), lead=pieces[0])
            turn = self._first_turn(text, tokens, messages=identities, place=first)
            if match is not None and difference is None:
                difference = Difference("template")
        return turn if difference is None else dataclasses.replace(turn, difference=difference)

    def _count_broken(self, difference: Difference, num_messages: int) -> None:
        self.broken_prefixes[difference.reason] += 1
        if isinstance(self.server, APIServer):
            self.server.broken_prefixes[difference.reason] += 1
        if (notes := item_notes.get()) is not None:
            notes.broken_prefixes[difference.reason] += 1
        if difference.reason == "template":
            self._template.say_once(
                "The chat template rewrites earlier turns, so a conversation of %d messages cannot reuse its"
                " sampled tokens and begins a new sequence; num_broken_prefixes of a session counts this",
                num_messages,
            )
        else:
            self._template.say_once(
                "The client changed an earlier turn (%s; %s), so a conversation of %d messages cannot reuse the turn's"
                " sampled tokens and begins a new sequence; broken_prefixes of a session counts this by reason",
                difference.reason,
                difference,
                num_messages,
            )

    def _first_turn(self, text: str, tokens: list[int], **rest: Any) -> PendingTurn:
        """Prepare a turn that continues no sequence."""
        return PendingTurn(
            order=next(self._store.orders),
            tokens=tokens,
            full_text=text,
            visible_text=VisibleText(text),
            **rest,
        )

    def _continue(
        self,
        match: NodeMatch,
        messages: list[dict[str, Any]],
        before: tuple[Hashable, ...],
        options: TemplateOptions,
    ) -> PendingTurn | None:
        """Prepare the turn after a sampled one; None if the template rewrites what came before."""
        turns = list(match.stage.chat_turns())[::-1]
        tracked = {place.index: end for place, end in turns}
        pieces = self._template.render(messages, tracked=tracked, options=options)
        if pieces is None:
            return None
        for i, ((place, _), lead) in enumerate(zip(turns, pieces[:-1], strict=True)):
            if place.lead == lead:
                continue
            # The text right before an assistant turn may differ from the generation prompt it was sampled after.
            earlier = {place.index: end for place, end in turns[:i]}
            given = self._template.history(
                messages[: place.index], tracked=earlier, options=options
            )
            if given is None or not (place.lead.startswith(given) and lead.startswith(given)):
                return None
            place.lead = lead
        place = ChatPlace(index=len(before), lead=pieces[-1], previous=match.stage)
        added = match.given + pieces[-1] + (begun_text(messages) or "")
        kept = match.tokens(match.stage.num_tokens)
        return self._after(match, kept, added, messages=before, place=place)

    def _resume(self, match: NodeMatch, added: str, **rest: Any) -> PendingTurn:
        """Prepare to continue a turn or text that had ended: the token that ended it is dropped."""
        kept = match.tokens(match.stage.num_tokens - bool(match.stage.end))
        turn = self._after(match, kept, added.removeprefix(match.stage.cut), **rest)
        return dataclasses.replace(
            turn, visible_text=VisibleText(added, after=match.stage.visible_text)
        )

    def _after(self, match: NodeMatch, kept: list[int], added: str, **rest: Any) -> PendingTurn:
        full_text = match.full_text
        if len(kept) < match.stage.num_tokens:
            full_text = full_text.removesuffix(match.stage.end)
        added_tokens, added_text = self._template.join(kept, added)
        return PendingTurn(
            order=next(self._store.orders),
            tokens=kept + added_tokens,
            full_text=full_text + added_text,
            visible_text=VisibleText(added, after=match.stage.visible_text),
            parent=match,
            num_kept=len(kept),
            **rest,
        )

    def _prepare_text(self, prompt: str) -> PendingTurn:
        found = self._store.find_text(prompt)
        if found is None:
            tokens = encode_prompt(self.tokenizer, prompt)
            return self._first_turn(prompt, tokens)
        match, added = found
        if not added:
            return self._resume(match, added)
        kept = match.tokens(match.stage.num_tokens)
        # The caller repeats the stop string, which its text did not show; the tokens contain it already.
        turn = self._after(match, kept, added.removeprefix(match.stage.cut))
        visible_text = match.stage.visible_text
        if not visible_text.begins(prompt):
            return dataclasses.replace(turn, visible_text=VisibleText(prompt))
        rest = prompt[visible_text.num_chars :]
        return dataclasses.replace(turn, visible_text=VisibleText(rest, after=visible_text))

    def _chat_tokens(self, messages: list[dict[str, Any]], options: TemplateOptions) -> list[int]:
        """Return the tokens of a conversation: the sampled ones if it was sampled here."""
        identities = [identity(message) for message in messages]
        match, _ = self._store.find_messages(identities, messages)
        place = None if match is None else match.stage.place
        if match is not None and place is not None and place.index == len(messages) - 1:
            return list(match.tokens(match.stage.num_tokens))
        _refuse_images(messages)
        return self._prepare_chat(messages, options).tokens

    # Answers.

    async def _sample(
        self,
        turn: PendingTurn,
        kwargs: dict[str, Any],
        messages: list[dict[str, Any]] | None = None,
    ) -> SampledAnswer:
        """Sample what follows a turn and record its texts; `messages` are those of a chat."""
        stops = stops_to_cut(kwargs)
        request = {key: value for key, value in kwargs.items() if key not in _OWN_KEYWORDS}
        if os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1":
            logger.info("Prompt of %d tokens: %.500s", len(turn.tokens), turn.full_text)
        await import_openai()
        prompt = turn.chat or {"input_ids": turn.tokens, "prompt": turn.full_text}
        limits = filter(None, (self.max_context_tokens, kwargs.get("max_context_tokens")))
        limit = min(limits, default=None)
        if limit is not None and turn.chat is None:
            room = limit - len(turn.tokens)
            if room < 1 and self.refuses_long_prompts:
                raise EngineRejected(
                    f"This model's maximum context length is {limit} tokens. However, your messages resulted in"
                    f" {len(turn.tokens)} tokens. Please reduce the length of the messages."
                )
            limit_tokens(request, max(1, room))
        wanted = int(kwargs.get("n") or 1)
        listeners = []
        if (tell := kwargs.get("on_text")) is not None:
            is_raw = turn.place is not None and self.has_channels
            listeners = [
                TextSoFar(
                    self._template, stops, functools.partial(tell, i, turn.full_text), raw=is_raw
                )
                for i in range(wanted)
            ]
        with listening(listeners):
            raw = await self.server.tokens_and_logprobs_completion(**prompt, **request)
        answer = TokenCompletions.of(raw)
        self.server = answer.stand_in or self.server  # later turns find their prefix in its cache
        if turn.chat is not None:
            turn = self._with_tokens(turn, answer.prompt_tokens)
        elif answer.prompt_tokens is not turn.tokens and answer.prompt_tokens != turn.tokens:
            if turn.parent is not None:
                raise EngineProtocolError(
                    f"the engine sampled after {len(answer.prompt_tokens)} prompt tokens that are"
                    f" not the {len(turn.tokens)} sent"
                )
            # Keep the engine's tokens: the logprobs are conditioned on them.
            turn = dataclasses.replace(turn, tokens=list(answer.prompt_tokens))
        if len(answer.output_tokens) != wanted:
            raise EngineProtocolError(
                f"the engine answered {len(answer.output_tokens)} completions, expected n = {wanted}"
            )
        turns = await read_turns(answer, self._template, stops=stops)
        if (record := recorded()) is not None:
            texts = [sampled.visible_text for sampled in turns]
            record.describe(answer, messages=messages, texts=texts)
        return SampledAnswer(turn, answer, turns)

    def _with_tokens(self, turn: PendingTurn, tokens: list[int]) -> PendingTurn:
        """Return a turn with images with the prompt's tokens, which may begin with those of an earlier turn."""
        assert turn.chat is not None
        text = str(self.tokenizer.decode(tokens))
        match, difference = self._store.find_messages(turn.messages, turn.chat["messages"])
        num_kept = 0 if match is None else match.stage.num_tokens
        if match is not None and tokens[:num_kept] == match.tokens(num_kept):
            turn = dataclasses.replace(turn, parent=match, num_kept=num_kept)
        elif match is not None:
            difference = difference or Difference("template")
        return dataclasses.replace(
            turn,
            tokens=list(tokens),
            full_text=text,
            visible_text=VisibleText(text),
            difference=difference,
        )

    async def _reply(
        self, sampled: SampledTurn, continued: str, tools: list[Any] | None, tool_choice: Any
    ) -> tuple[dict[str, Any], str | None]:
        """Return the message for the caller and its finish reason."""
        reply: dict[str, Any] = {"role": "assistant", "content": sampled.visible_text}
        may_call, has_channels = bool(tools) and tool_choice != "none", self.has_channels
        if not may_call and not has_channels:
            return reply, sampled.finish_reason
        raw_text = continued + sampled.full_text.removesuffix(sampled.end).removesuffix(sampled.cut)
        if has_channels:  # the end shows that a call is whole
            raw_text += sampled.end
        tools = (tools or []) if may_call else []
        is_large = len(raw_text) >= THREAD_FROM_CHARS
        translate = self._translator.read
        read = (
            await off_loop(translate, raw_text, tools) if is_large else translate(raw_text, tools)
        )
        if has_channels:
            content = read.parsed.content.removeprefix(continued)
            thoughts = {"reasoning_content": read.thoughts} if read.thoughts else {}
            reply |= {"content": content.removesuffix(sampled.end), **thoughts}
        if not may_call or not read.parsed.calls:
            return reply, sampled.finish_reason
        text, calls, _ = self._translator.remember(read)
        reply["content"] = (text or "").removeprefix(continued) or None
        reply["tool_calls"] = list(map(OpenAIToolCall.of, calls or ()))
        return reply, "length" if sampled.finish_reason == "length" else "tool_calls"

    def _body(
        self,
        turn: PendingTurn,
        completions: Sequence[SampledTurn],
        contents: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a completion's body; a choice ended by a stop string or token has it as `stop_reason`, as in vLLM."""
        choices = []
        for sampled, content in zip(completions, contents, strict=True):
            stop = {} if sampled.stop is None else {"stop_reason": sampled.stop}
            choices.append({**content, "finish_reason": sampled.finish_reason, **stop})
        num_sampled = sum(len(sampled.tokens) for sampled in completions)
        model = self.server.config.model_name
        return completion_body(choices, model=model, num_tokens=(len(turn.tokens), num_sampled))


@functools.cache
def _tokenizer_named(name: str) -> Any:
    # Cached because a session lasts one group and loading takes seconds.
    try:
        return load_tokenizer(name)
    except ConfigError as e:
        raise ConfigError(f"{e}, or call managed_server(tokenizer=...)") from e


def limit_tokens(request: dict[str, Any], room: int) -> None:
    """Limit an answer to `room` tokens, whatever name the request has for its own limit.

    >>> request = {"max_completion_tokens": 99, "stop": "x"}
    >>> limit_tokens(request, 8)
    >>> request
    {'stop': 'x', 'max_tokens': 8}
    """
    bodies = [request]
    if request.get("extra_body"):
        request["extra_body"] = dict(request["extra_body"])
        bodies.append(request["extra_body"])
    names = ("max_tokens", *OTHER_LIMIT_NAMES)
    given = [body.pop(name, None) for body in bodies for name in names]
    request["max_tokens"] = min(filter(None, (room, *given)))


def _chat_with_images(messages: list[dict[str, Any]], options: TemplateOptions) -> dict[str, Any]:
    """Return the keywords with which the engine renders a chat; tool calls are parsed here, not by the engine."""
    if begun_text(messages) is not None:
        raise ValueError("the model cannot continue an answer in a chat with images")
    chat: dict[str, Any] = {"messages": messages}
    if options.tools:
        chat |= {"tools": options.tools, "tool_choice": "none"}
    if options.variables:
        chat["chat_template_kwargs"] = dict(options.variables)
    return chat


def _refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    if has_images(messages):
        raise ValueError("only the engine knows the tokens of a prompt with images")


def _take_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], TemplateOptions]:
    """Return a call's keywords without the template variables of `extra_body`, and the template options."""
    variables = kwargs.get("chat_template_kwargs") or {}
    extra_body = kwargs.get("extra_body")
    if isinstance(extra_body, Mapping):
        variables = {**variables, **(extra_body.get("chat_template_kwargs") or {})}
        rest = {key: value for key, value in extra_body.items() if key not in _OWN_KEYWORDS}
        kwargs = {**kwargs, "extra_body": rest}
    return kwargs, TemplateOptions(kwargs.get("tools") or None, variables)
