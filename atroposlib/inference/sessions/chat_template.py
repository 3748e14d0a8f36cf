"""Messages -> prompt text through a tokenizer's chat template, so that turns already sampled keep their exact tokens.

A tracked assistant turn is rendered as a short mark instead of its text. A later turn adds to the prompt only what the
template writes after the mark: sampled text is never tokenised again, and templates that trim or strip assistant text
(`<think>` blocks, white space) cannot change it. Pure apart from calling the tokenizer.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from os.path import commonprefix
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.messages import Message, begun_text, with_parsed
from atroposlib.inference.tools.parsers.harmony import MESSAGE_ENDS
from atroposlib.inference.tools.thoughts import THINK, ThinkTags, tags_known_to
from atroposlib.utils.tokenizers.backends import decode, encode, write_chat

logger = logging.getLogger(__name__)

_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Of `clean_up_tokenization` of transformers."""
_ASKS_FOR_DATE = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")


class TemplateOptions(NamedTuple):
    """Template inputs besides the messages."""

    tools: list[Any] | None = None
    variables: Mapping[str, Any] = {}
    """`chat_template_kwargs`, for example `enable_thinking`."""


@dataclass(slots=True)
class _Facts:
    """What is cached per tokenizer."""

    size: int
    template: str
    special: frozenset[int]
    """Without those of the think tags, which are part of an answer's text."""
    tags: ThinkTags | None
    tag_tokens: frozenset[int]
    """Special tokens in the think tags."""
    anchor: str
    """Special token text that keeps the tokenizer from adding a space before a fragment; "" if not needed."""
    plain_calls: str = ""
    """The chat template for which rendering tool calls as plain answers was found to be exact."""
    warned: set[str] = field(default_factory=set)


_FACTS: WeakKeyDictionary[Any, _Facts] = WeakKeyDictionary()


def _facts_of(tokenizer: Any) -> _Facts:
    size = len(tokenizer) if hasattr(type(tokenizer), "__len__") else 0
    template = str(getattr(tokenizer, "chat_template", None) or "")
    try:
        facts = _FACTS.get(tokenizer)
    except TypeError:  # an author's class that is not hashable or has no weak references
        return _find_facts(tokenizer, size, template)
    if facts is None or (facts.size, facts.template) != (size, template):
        facts = _FACTS[tokenizer] = _find_facts(tokenizer, size, template)
    return facts


def _find_facts(tokenizer: Any, size: int, template: str) -> _Facts:
    special = {int(token) for token in getattr(tokenizer, "all_special_ids", None) or ()}
    # Llama 3's <|eot_id|> need not be among the named special tokens.
    all_added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    for token, added in all_added.items():
        if getattr(added, "special", False):
            special.add(int(token))
    eos = getattr(tokenizer, "eos_token_id", None)
    anchor = ""
    if isinstance(eos, int):
        special.add(eos)
        text = str(tokenizer.decode([eos], skip_special_tokens=False))
        anchored = list(tokenizer.encode(text + "a", add_special_tokens=False))
        plain = list(tokenizer.encode("a", add_special_tokens=False))
        # SentencePiece models write "a" at the start of a text as " a".
        if anchored[:1] == [eos] and anchored[1:] != plain:
            anchor = text
    texts = {int(token): str(added) for token, added in all_added.items()}
    tags = tags_known_to(template, set(texts.values()))
    in_tags = {token for token, text in texts.items() if any(text in tag for tag in tags or ())}
    return _Facts(
        size=size,
        template=template,
        special=frozenset(special - in_tags),
        tags=tags,
        tag_tokens=frozenset(special & in_tags),
        anchor=anchor,
    )


def special_texts(tokenizer: Any) -> list[str]:
    """Return the texts of a tokenizer's special tokens, longest first."""
    facts = _facts_of(tokenizer)
    special = facts.special | facts.tag_tokens
    texts = {decode(tokenizer, [token], skip_special_tokens=False) for token in special}
    return sorted(texts, key=len, reverse=True)


class ChatTemplate:
    """A tokenizer's chat template. `write_calls` turns tool calls into text, for templates without tool calls."""

    def __init__(
        self, tokenizer: Any, *, write_calls: Callable[[Message], dict[str, Any]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._write_calls = write_calls
        self._facts = _facts_of(tokenizer)
        self._dated_template: str | None = None
        """The template with a fixed date, because a change at midnight breaks the prefix; None if it has no date."""
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, str) and _ASKS_FOR_DATE.search(template):
            now = datetime.now()
            self._dated_template = _ASKS_FOR_DATE.sub(
                lambda asked: json.dumps(now.strftime(asked[2])), template
            )
        self.think_tags = self._facts.tags
        """Those that the template or the tokenizer knows; None: neither knows thoughts."""
        self._tags = self.think_tags or THINK

    # Text.

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tracked: Mapping[int, str] | None = None,
        options: TemplateOptions,
    ) -> tuple[str, ...] | None:
        """Return the text around tracked turns, up to where the model starts writing: [len(tracked) + 1].

        `tracked` maps the index of a turn to the end-of-turn text that was sampled with it. If the model continues the
        last message (`begun_text`), its content is not part of the text. None if the template does not show each
        tracked turn once, in order. Raises ConfigError when the template refuses the messages.
        """
        tracked = tracked or {}
        opened = begun_text(messages) is not None
        last = len(messages) - 1
        at = {**tracked, last: ""} if opened else tracked
        try:
            pieces = self._cut(messages, at, options, add_generation_prompt=not opened)
        except _Refused:
            if not tracked:
                raise
            return None
        if not opened:
            if pieces is not None and messages[last]["role"] == "tool":
                self._look_for_results(messages, pieces[-1])
            return pieces
        if pieces is None:
            if tracked:
                return None
            raise ConfigError("the chat template leaves out the last message (the assistant's)")
        header = pieces[-2]
        if messages[last]["content"].lstrip().startswith(self._tags.opening):
            # Templates of reasoning models open or skip a block of their own.
            opening, closing = map(re.escape, self._tags)
            header = re.sub(rf"{opening}\s*({closing}\s*)?\Z", "", header)
        return (*pieces[:-2], header)

    def history(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tracked: Mapping[int, str],
        options: TemplateOptions,
    ) -> str | None:
        """Return the text after the last tracked turn, without the generation prompt."""
        if not messages:
            return ""
        try:
            pieces = self._cut(messages, tracked, options, add_generation_prompt=False)
        except ConfigError:  # some templates refuse a history without a user message
            return None
        return None if pieces is None else pieces[-1]

    def _cut(
        self,
        messages: Sequence[dict[str, Any]],
        tracked: Mapping[int, str],
        options: TemplateOptions,
        *,
        add_generation_prompt: bool,
    ) -> tuple[str, ...] | None:
        def cut(num: int, *, named: bool = False, prompt: bool = False) -> list[str] | None:
            text = self._apply(
                [
                    self._for_template(messages[i])
                    if i not in tracked
                    else _MARKS.in_place_of(messages[i], _MARKS.turn(i), named=named)
                    for i in range(num)
                ],
                options,
                add_generation_prompt=prompt,
            )
            names = {i: _first_name(messages[i]) if named else "" for i in tracked if i < num}
            for tag, mark in zip(self._tags, _MARKS.tags, strict=True):
                text = text.replace(mark, tag)
            return _MARKS.cut(text, names)

        called = [i for i in sorted(tracked) if messages[i].get("tool_calls")]
        if not called or not self._mentions("tool_calls"):
            pieces = cut(len(messages), prompt=add_generation_prompt)
        else:
            plain = _unless_refused(cut, len(messages), prompt=add_generation_prompt)
            results = [m for m in messages[called[-1] :] if m["role"] == "tool"]
            are_shown = plain is not None and _are_shown(results, plain[-1])
            # Rendering a long conversation is slow, so a template's handling of calls is checked once.
            template = str(self._tokenizer.chat_template)
            if are_shown and template == self._facts.plain_calls:
                pieces = plain
            else:
                pieces = _cut_calls(
                    cut, plain, len(messages), add_generation_prompt, tracked=tracked, called=called
                )
                if are_shown and results and pieces is plain:
                    self._facts.plain_calls = template
        return None if pieces is None else tuple(pieces)

    def _look_for_results(self, messages: Sequence[Message], text: str) -> None:
        """Warn once if tool results at the end of `messages` are missing from the text."""
        results = list(takewhile(lambda message: message["role"] == "tool", reversed(messages)))
        if not _are_shown(results, text):
            self.say_once(
                "The chat template leaves out tool results: the model does not see them."
                " Some templates show them only after a message with tool_calls"
            )

    def _for_template(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] != "assistant":
            return message
        message = dict(self.with_calls_shown(message))
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [with_parsed(call) for call in calls]
        for tag, mark in zip(self._tags, _MARKS.tags, strict=True):
            message["content"] = message["content"].replace(tag, mark)
        if not message["content"] and message.get("tool_calls"):
            # DeepSeek's templates take any text, even an empty one, for the whole answer.
            message["content"] = None
        return message

    def with_calls_shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its tool calls in the text if the template would leave them out."""
        if self._write_calls and message.get("tool_calls") and not self._mentions("tool_calls"):
            return self._write_calls(message)
        return message

    def _mentions(self, word: str) -> bool:
        return word in str(getattr(self._tokenizer, "chat_template", "") or "")

    def _apply(
        self,
        messages: list[dict[str, Any]],
        options: TemplateOptions,
        *,
        add_generation_prompt: bool,
    ) -> str:
        variables = dict(options.variables)
        if self._dated_template is not None:
            variables["chat_template"] = self._dated_template
        if options.tools:
            variables["tools"] = options.tools
            if not self._mentions("tools"):
                self.say_once(
                    "The chat template has no place for tools: the model does not see them"
                )
        try:
            return write_chat(
                self._tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )
        except Exception as e:
            is_refusal = _is_of_jinja(e)
            if is_refusal or isinstance(e, TypeError):
                for form in (_with_texts, _in_turns):
                    if (changed := form(messages)) != messages:
                        return self._apply(
                            changed, options, add_generation_prompt=add_generation_prompt
                        )
            if isinstance(e, ValueError) and getattr(self._tokenizer, "chat_template", "") is None:
                raise ConfigError(
                    "the tokenizer has no chat template; use an instruction-tuned model,"
                    " set tokenizer.chat_template, or call completion() with a text prompt"
                ) from e
            if is_refusal or isinstance(e, _FAULTS_OF_VALUES):
                raise _Refused(f"the chat template refuses these messages: {e}") from e
            raise

    # Tokens.

    def join(self, tokens: Sequence[int], added: str) -> tuple[list[int], str]:
        """Tokenise the text that follows `tokens`, without the end of turn if it was sampled already."""
        if not added:
            return [], added
        end = self.text_of(tokens[-1]) if self.ends_turn(tokens) else ""
        if end in MESSAGE_ENDS and (other := next(filter(added.startswith, MESSAGE_ENDS), "")):
            added = end + added.removeprefix(other)
        anchor = self._facts.anchor
        added_tokens = encode(self._tokenizer, anchor + added)
        if anchor:
            del added_tokens[0]
        if not end:
            return added_tokens, added
        before, found, after = added.partition(end)
        # Some templates write a line break before the end of a turn.
        if found and not before.strip() and tokens[-1] in added_tokens:
            return added_tokens[added_tokens.index(tokens[-1]) + 1 :], after
        return added_tokens, added

    def ends_turn(self, tokens: Sequence[int]) -> bool:
        """Whether the last token ends a turn rather than being text."""
        return bool(tokens) and tokens[-1] in self._facts.special

    def text_of(self, token: int) -> str:
        """Return the text of one special token."""
        return decode(self._tokenizer, [token], skip_special_tokens=False)

    def decode_both(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the text with special tokens, except the one that ends the turn, and the text without any."""
        body = tokens[:-1] if self.ends_turn(tokens) else tokens
        text = decode(self._tokenizer, body, skip_special_tokens=False)
        if self._facts.special.isdisjoint(body):
            return text, text
        if self._facts.tag_tokens:
            kept = [token for token in body if token not in self._facts.special]
            return text, decode(self._tokenizer, kept, skip_special_tokens=False)
        return text, decode(self._tokenizer, body, skip_special_tokens=True)

    @property
    def cleaned(self) -> tuple[str, ...]:
        """Texts from which the tokenizer removes spaces when it decodes."""
        is_cleaning = getattr(self._tokenizer, "clean_up_tokenization_spaces", False)
        return _CLEANED if is_cleaning else ()

    def say_once(self, warning: str, *args: Any) -> None:
        """Log a warning once per tokenizer."""
        if warning not in self._facts.warned:
            self._facts.warned.add(warning)
            logger.warning(warning, *args)


_FAULTS_OF_VALUES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a template raises for variables and tools that it cannot use."""


class _Refused(ConfigError):
    """The template raised an error of its own."""


class _Marks:
    """Placeholders for turns and think tags while the template runs. No message contains them: they are random."""

    def __init__(self) -> None:
        self._base = f"ATROPOS{secrets.token_hex(16)}"
        self.tags = f"{self._base}OPENINGEND", f"{self._base}CLOSINGEND"
        self._turns = re.compile(rf"{self._base}TURN(\d+)END")

    def turn(self, index: int) -> str:
        return f"{self._base}TURN{index}END"

    def in_place_of(self, message: Message, mark: str, *, named: bool) -> dict[str, Any]:
        """Return a message with the mark as its content, or (`named`) as the name of its first call."""
        if not named or not message.get("tool_calls"):
            return {"role": message["role"], "content": mark}
        calls = [with_parsed(call) for call in message["tool_calls"]]
        calls[0] = {**calls[0], "function": {**calls[0]["function"], "name": mark}}
        return {"role": message["role"], "content": None, "tool_calls": calls}

    def cut(self, text: str, names: Mapping[int, str]) -> list[str] | None:
        """Split a text at the marks of turns; None unless each occurs once, in order.

        A mark that stands for a call's name may recur: some templates repeat the name in the result.
        """
        piece, *marked = self._turns.split(text)
        pieces = [piece]
        indices = iter(sorted(names))
        seen: set[int] = set()
        for number, piece in zip(marked[::2], marked[1::2], strict=True):
            index = int(number)
            if index in seen and names[index]:
                pieces[-1] += names[index] + piece
            elif index not in seen and index == next(indices, None):
                seen.add(index)
                pieces.append(piece)
            else:
                return None
        return pieces if len(seen) == len(names) else None


_MARKS = _Marks()


def _cut_calls(
    cut: Callable[..., list[str] | None],
    plain: list[str] | None,
    num_messages: int,
    add_generation_prompt: bool,
    *,
    tracked: Mapping[int, str],
    called: Sequence[int],
) -> list[str] | None:
    """Split a conversation at its tracked tool calls, leaving out the text of the calls.

    It is rendered with the calls and (`plain`) as if they were plain answers: templates may refuse or leave out
    results that follow no call.
    """
    places = {i: place for place, i in enumerate(sorted(tracked), start=1) if i in called}
    pieces = _unless_refused(cut, num_messages, prompt=add_generation_prompt, named=True)
    if pieces is None:
        return plain

    def call_text(i: int) -> str:
        # Nothing follows the call here, so this is the rest of its text and the end of the turn.
        alone = _unless_refused(cut, i + 1, named=True)
        return commonprefix([pieces[places[i]], alone[-1]]) if alone else ""

    if plain is not None and all(
        other in piece for piece, other in zip(pieces, plain, strict=True)
    ):
        # Earlier calls were checked when they were the newest.
        newest = places[called[-1]]
        num_left_out = len(pieces[newest]) - len(plain[newest])
        if pieces[newest].endswith(plain[newest]) and num_left_out <= len(call_text(called[-1])):
            return plain
    for i, place in places.items():
        ends = MESSAGE_ENDS if tracked[i] in MESSAGE_ENDS else (tracked[i],)
        position = max(map(call_text(i).rfind, ends)) if tracked[i] else -1
        if position < 0:
            return None
        pieces[place] = pieces[place][position:]
    return pieces


def _are_shown(results: Sequence[Message], text: str) -> bool:
    contents = [message["content"].strip() for message in results]
    return all(content in text or json.dumps(content)[1:-1] in text for content in contents)


def _unless_refused(
    cut: Callable[..., list[str] | None], num_messages: int, **how: bool
) -> list[str] | None:
    try:
        return cut(num_messages, **how)
    except _Refused:
        return None


def _first_name(message: Message) -> str:
    calls = message.get("tool_calls")
    return str(calls[0]["function"].get("name")) if calls else ""


def _with_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for templates that concatenate text: "" for no content, else arguments as JSON."""
    return [_with_text(message) for message in messages]


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return message
    if message["content"] is None:
        return {**message, "content": ""}
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for templates of strict turns: one system message at the beginning, and joined questions.

    Agents send several system messages, also later on; those are the user's here.

    >>> told = [("system", "a"), ("system", "b"), ("user", "c"), ("system", "d")]
    >>> _in_turns([{"role": role, "content": text} for role, text in told])
    [{'role': 'system', 'content': 'a\\n\\nb'}, {'role': 'user', 'content': 'c\\n\\nd'}]
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else message
        if message["role"] == "system" and last["role"] != "system":
            message = {**message, "role": "user"}
        if joined and message["role"] == last["role"] and message["role"] in ("system", "user"):
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _is_of_jinja(error: Exception) -> bool:
    # jinja2 comes with transformers and may not be installed.
    return any(cls.__module__.partition(".")[0] == "jinja2" for cls in type(error).__mro__)
