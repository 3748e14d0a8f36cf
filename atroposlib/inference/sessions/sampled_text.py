"""Sampled tokens as turns: their text with and without special tokens, how they ended, what stop strings cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atroposlib.inference.servers.api_server import Stops, TokenCompletions, read_stops
from atroposlib.inference.servers.token_ids import THREAD_FROM_TOKENS
from atroposlib.inference.sessions.chat_template import ChatTemplate
from atroposlib.inference.sessions.sequences import SampledTurn
from atroposlib.utils.off_loop import off_loop


async def read_turns(
    answer: TokenCompletions, template: ChatTemplate, *, stops: Stops
) -> list[SampledTurn]:
    """Return one turn per completion; `stops` are cut from the text, the engine leaves them in the tokens."""
    is_large = sum(map(len, answer.output_tokens)) >= THREAD_FROM_TOKENS
    if is_large:
        return await off_loop(_read_turns, answer, template, stops)
    return _read_turns(answer, template, stops)


def _read_turns(
    answer: TokenCompletions, template: ChatTemplate, stops: Stops
) -> list[SampledTurn]:
    turns = []
    for tokens, logprobs, finish_reason, spans in zip(
        answer.output_tokens,
        answer.output_logprobs,
        answer.finish_reasons,
        answer.weight_versions,
        strict=True,
    ):
        text, visible_text = template.decode_both(tokens)
        reason = _reason(finish_reason)
        last = template.text_of(tokens[-1]) if template.ends_turn(tokens) else ""
        stop: str | int | None = None
        at = len(visible_text)
        ends_at_id = bool(tokens) and not last and tokens[-1] in stops.token_ids
        if reason == "stop" and (ends_at_id or any(s in visible_text for s in stops.strings)):
            num_before = len(template.decode_both(tokens[:-1])[1])
            stop, at = tokens[-1], num_before
            if not ends_at_id:
                stop, at = find_stop(visible_text, stops.strings, num_before=num_before)
        turns.append(
            SampledTurn(
                tokens=tokens,
                logprobs=logprobs,
                full_text=text + last,
                visible_text=visible_text[:at],
                stop=stop,
                cut=visible_text[at:],
                # A truncated turn may end with any special token.
                end=last if reason != "length" else "",
                finish_reason=reason,
                weight_versions=spans,
            )
        )
    return turns


class TextSoFar:
    """Turns the tokens of an unfinished answer into the beginning of its text, and tells it.

    What is told is the beginning of the finished turn's `visible_text`: the text stops before what may be a stop
    string, half a character or a special token; if `raw`, of its `full_text`. To decode long answers not too often,
    `tell` is called again when the answer has grown by 1/32.
    """

    def __init__(
        self, template: ChatTemplate, stops: Stops, tell: Callable[[str], None], raw: bool = False
    ) -> None:
        self._is_raw = raw
        self._template = template
        self._stops = stops
        self._tell = tell
        self._tokens: list[int] = []
        self._num_decoded = 0
        self._has_ended = False

    def __call__(self, tokens: list[int]) -> None:
        for token in tokens:
            is_end = not self._is_raw and self._template.ends_turn([token])
            self._has_ended |= is_end or token in self._stops.token_ids
            if not self._has_ended:
                self._tokens.append(token)
        if len(self._tokens) > self._num_decoded * 33 // 32:
            self._num_decoded = len(self._tokens)
            whole, visible = self._template.decode_both(self._tokens)
            text = (whole if self._is_raw else visible).rstrip("\ufffd")
            text = before_any(text, self._template.cleaned, cuts_whole=False)
            self._tell(before_any(text, self._stops.strings))


def before_any(text: str, ends: Sequence[str], *, cuts_whole: bool = True) -> str:
    """Return a text up to the first of `ends`, or to what may be the beginning of one at its end.

    With `cuts_whole` False, only the latter is cut off.

    >>> before_any("so: <tool", ["<tool_call>"])
    'so: '
    """
    at = len(text)
    for end in ends:
        if cuts_whole and (found := text.find(end, 0, at)) >= 0:
            at = found
        for size in range(min(len(end) - 1, len(text)), 0, -1):
            if text.endswith(end[:size]):
                at = min(at, len(text) - size)
                break
    return text[:at]


def stops_to_cut(kwargs: dict[str, Any]) -> Stops:
    """Return what must be cut from the text of a call's completions."""
    given = {**kwargs, **(kwargs.get("extra_body") or {})}
    stops = read_stops(kwargs)
    return Stops([], []) if given.get("include_stop_str_in_output") else stops


def find_stop(text: str, stops: Sequence[str], *, num_before: int) -> tuple[str | None, int]:
    """Return the stop string that ended a text and its position; None and the length of the text if none did.

    The last token completed it; the text before that token has `num_before` characters. Earlier occurrences did not
    end the text (`min_tokens`). The text of the last token may extend beyond the stop string.

    >>> find_stop("Thought: so\\nObservation: x", ["\\nObservation:"], num_before=22)
    ('\\nObservation:', 11)
    """
    # Each byte of an incomplete character counts as one character.
    first = num_before - 3
    places = [
        (at, stop) for stop in stops if (at := text.find(stop, max(0, first - len(stop) + 1))) >= 0
    ]
    if not places:
        return None, len(text)
    at, stop = min(places)
    return stop, at


def _reason(finish_reason: Any) -> str | None:
    # SGLang answers {"type": "stop", "matched": ...}.
    if isinstance(finish_reason, dict):
        finish_reason = finish_reason.get("type")
    return None if finish_reason is None else str(finish_reason)
