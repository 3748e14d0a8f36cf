"""Groups as the viewer shows them, made from a row of a JSONL file, a `ScoredGroup`, or samples of an evaluation.

A row holds the keys of `ScoredDataGroup` and those of `runtime/group_rows.py`; all of them but `scores` may be missing,
as in the original's files. A malformed field is left out rather than refused: a person looks at the page to find such
faults.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import xxhash

from atroposlib.frontend.vocabulary import Decode
from atroposlib.samples import group_advantages
from atroposlib.scored_data import FIELD, FIELDS, IGNORE_INDEX, Level, ScoredGroup

logger = logging.getLogger(__name__)

DECIMALS = 6
"""Of logprobs and advantages."""
MAX_METRIC_CHARS = 200
"""A longer text of an evaluation's sample is no metric."""

DATA_URI = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/]+={0,2}")
"""The images that a page shows: none is loaded from elsewhere."""
_BASE64_STARTS = {"/9j/": "jpeg", "iVBORw0KGgo": "png"}
"""First characters of the two formats in base64, for images without a type."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+(?:={1,2}\s*)?")

_PLACED = {
    *("scores", "messages", "images", "env_id", "group_id", "policy_version", "rollout"),
    *("weight_versions", "overrides"),
}
"""Fields of a group or a sequence that have a place of their own."""
_FACTS = (
    *("duration_s", "usage", "turns_not_continued"),
    *(f.name for f in FIELDS if f.level in (Level.GROUP, Level.SEQUENCE) and f.name not in _PLACED),
    *("environment_source", "atroposlib_version"),
)
"""Keys of a row that are shown as they are."""


def view_of_row(
    row: Mapping[str, Any], *, name: str, decode: Decode | None = None
) -> dict[str, Any] | None:
    """Return the view group of a row; None if it has no sequence. `name` is its id if the row has none."""
    scores = _listed(row.get("scores"))
    conversations = conversations_of(row.get("messages"), num_sequences=len(scores))
    if len(conversations) != len(scores):
        logger.warning(
            "%s: messages of %d sequences, scores of %d; the rest is dropped",
            *(name, len(conversations), len(scores)),
        )
    count = min(len(scores), len(conversations))
    if not count:
        return None
    trained = _trained(row)
    numbers = [_number(score) for score in scores[:count]]
    rollouts = _rollouts(row, count)
    advantages = _advantages(row, numbers, trained, rollouts)
    images = images_in(row.get("images"))
    sequences: list[dict[str, Any]] = []
    for i, conversation in enumerate(conversations[:count]):
        tokens = _token_ids(row, i)
        shown = _conversation(row, i, conversation, tokens, decode)
        if shown["text"] is not None:
            images += DATA_URI.findall(shown["text"])
            shown["text"] = DATA_URI.sub("[image]", shown["text"])
        sequences.append(
            {
                "score": numbers[i],
                "advantage": advantages[i],
                "finish_reason": _at(row.get("finish_reasons"), i),
                **_noted(_mapping(_at(row.get("overrides"), i))),
                **_part_of(rollouts, i),
                **_turn_rewards(_mapping(_at(row.get("overrides"), i))),
                **shown,
                **_token_figures(row, i, tokens, trained),
            }
        )
    return {
        "id": str(row.get("group_id") or name),
        "environment": row.get("environment"),
        "env_id": row.get("env_id"),
        "item_id": row.get("item_id"),
        "item": row.get("item"),
        "gold_answer": row.get("gold_answer"),
        "step": None,
        "policy_version": row.get("policy_version"),
        "staleness": None,
        "fate": None,
        "loss_share": None,
        "facts": _facts(row, scores[:count]),
        "images": list(dict.fromkeys(images)),
        "sequences": sequences,
    }


class _Line(msgspec.Struct):
    """The keys of a plain row that the index needs, arrays of tokens undecoded; another row does not decode as one."""

    scores: list[int | float]
    tokens: msgspec.Raw
    masks: msgspec.Raw
    messages: list[msgspec.Raw] | None = None
    prompt: str | list[Any] | None = None
    completions: list[str | None] | None = None
    calls: msgspec.Raw = msgspec.Raw(b"")
    overrides: msgspec.Raw = msgspec.Raw(b"")
    group_id: str | None = None
    environment: Any = None
    item_id: Any = None
    item: Any = None
    policy_version: Any = None
    rollout: None = None
    advantages: None = None
    group_overrides: None = None


_BRACKETS = re.compile(rb"\[\[,*\](,\[,*\])*\]")
"""What remains of arrays of integers in an array without the digits."""
_WHOLE_KEYS = (b'"set_advantage_to_zero"', b'"sft"', b'"suspicious"')
"""Overrides that the index shows, so that such a row is decoded whole."""
_line = msgspec.json.Decoder(_Line)


def quick_view(line: bytes, *, decode: Decode | None) -> dict[str, Any] | None:
    """Return what the index needs of a view group, in a tenth of the time; None if it needs `view_of_row`."""
    try:
        row = _line.decode(line)
        first = msgspec.json.decode(row.messages[0]) if row.messages else []
        tokens = msgspec.json.decode(row.tokens) if decode and not first else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    masks = bytes(row.masks).replace(b" ", b"")
    brackets = bytes(row.tokens).translate(None, b" 0123456789")
    lengths = [len(commas) + 1 for commas in brackets[2:-2].split(b"],[")]
    if not (
        _BRACKETS.fullmatch(brackets) is not None
        and masks.translate(None, b"-0123456789") == brackets
        and len(row.scores) == len(lengths) == len(row.messages or lengths)
        and all(map(_is_partly_trained, masks[2:-2].split(b"],["), lengths))
        and isinstance(first, list)
        and all(isinstance(message, dict) for message in first)
        and all(map(math.isfinite, row.scores))
        and (len(first) > 1 or b'"continues"' not in bytes(row.calls))
        and not any(key in bytes(row.overrides) for key in _WHOLE_KEYS)
    ):
        return None
    texts = {"prompt": row.prompt, "completions": row.completions}
    shown = _conversation(texts, 0, first, tokens[0] if tokens else range(lengths[0]), decode)
    if shown["text"] is not None:
        shown["text"] = DATA_URI.sub("[image]", shown["text"])
    scores = tuple(map(float, row.scores))
    return {
        "id": row.group_id,
        **{key: getattr(row, key) for key in ("environment", "item_id", "item", "policy_version")},
        **dict.fromkeys(("step", "staleness", "fate", "loss_share")),
        "sequences": [
            {"score": score, "advantage": advantage, "tokens": range(length), **shown}
            for score, advantage, length in zip(
                scores, _advantages_of(scores, tuple(range(len(scores)))), lengths, strict=True
            )
        ],
    }


def _is_partly_trained(mask: bytes, length: int) -> bool:
    if b"-100" not in mask:
        return False
    return not mask.endswith(b"-100") or mask.count(b"-100") < length  # counting is slow


def view_of_group(group: ScoredGroup, *, decode: Decode | None = None) -> dict[str, Any] | None:
    """Return the view group of a checked group; one without a group id gets a hash of its tokens and scores."""
    content = group.tokens.tobytes() + group.lengths.tobytes() + group.scores.tobytes()
    return view_of_row(group.to_dict(FIELD), name=xxhash.xxh3_64_hexdigest(content), decode=decode)


def views_of_samples(samples: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield one view group per item of an evaluation; the samples of an item follow each other."""
    numbered = enumerate(samples, start=1)
    for name, members in groupby(numbered, key=lambda each: _item_name(each[1], each[0])):
        yield _view_of_item(name, [_with_metrics(sample) for _, sample in members])


# Conversations.


def conversations_of(messages: Any, *, num_sequences: int) -> list[list[Any]]:
    """Return a list of messages, or of texts, for each sequence."""
    if not messages:
        return [[] for _ in range(num_sequences)]
    if not isinstance(messages, list) or (num_sequences == 1 and isinstance(messages[0], Mapping)):
        messages = [messages]  # one conversation or text, for a group of one
    return [_flat(conversation) for conversation in messages]


def _flat(messages: Any) -> list[Any]:
    """Return the messages of a conversation in order, with nested lists flattened.

    >>> _flat(["a", ["b", [{"role": "user"}]]])
    ['a', 'b', {'role': 'user'}]
    """
    if not isinstance(messages, list):
        return [messages]
    return [message for part in messages for message in _flat(part)]


def text_in(content: Any) -> str:
    """Return a message's text; the parts of a list are joined, and parts without text shown as their type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return f"[{part}]"
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"


def _conversation(
    row: Mapping[str, Any],
    i: int,
    messages: list[Any],
    tokens: Sequence[int],
    decode: Decode | None,
) -> dict[str, Any]:
    """Return the keys `messages` and `text` of a sequence; one of them is None.

    A single user message is the whole text of a sequence (`include_messages`). Without a conversation, it is made from
    the row's prompt and completion, unless the prompt is only the first turn; else it is the tokens' text.
    """
    is_whole_text = len(messages) == 1 and (
        isinstance(messages[0], str) or (tokens and _mapping(messages[0]).get("role") == "user")
    )
    if messages and not is_whole_text:
        return {"messages": [_message(message) for message in messages], "text": None}
    prompt, completion = row.get("prompt"), _at(row.get("completions"), i)
    calls = map(_mapping, _listed(row.get("calls")))
    if prompt and completion is not None and not any("continues" in call for call in calls):
        asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        answer = {"role": "assistant", "content": completion}
        return {"messages": [*map(_message, asked), answer], "text": None}
    if messages:
        only = messages[0]
        return {
            "messages": None,
            "text": only if isinstance(only, str) else text_in(only.get("content")),
        }
    return {"messages": None, "text": decode(tokens) if decode and tokens else None}


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "", "content": text_in(message)}
    return {key: value for key, value in message.items() if value is not None}


# Images.


def images_in(value: Any) -> list[str]:
    """Return the JPEG and PNG images in a group's `images` (nested) as data URIs, each once, in order."""
    return list(dict.fromkeys(uri for text in _texts_in(value) if (uri := _uri_of(text))))


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(inner)


def _uri_of(text: str) -> str | None:
    if DATA_URI.fullmatch(text):
        return text
    for start, kind in _BASE64_STARTS.items():
        if text.startswith(start) and _BASE64.fullmatch(text):
            return f"data:image/{kind};base64,{''.join(text.split())}"
    return None


# Numbers.


def _rollouts(row: Mapping[str, Any], num_sequences: int) -> list[int]:
    """Return the place of each sequence's rollout among the group's, in the order of their first sequences."""
    numbers = _listed(row.get("rollout"))
    if len(numbers) < num_sequences or set(map(type, numbers)) != {int}:
        return list(range(num_sequences))
    places: dict[int, int] = {}
    return [places.setdefault(number, len(places)) for number in numbers[:num_sequences]]


def _part_of(rollouts: list[int], i: int) -> dict[str, Any]:
    """Return the keys `rollout` and `label` of a sequence; {} where each sequence is a rollout.

    >>> _part_of([0, 1, 1], 2)
    {'rollout': 1, 'label': 'rollout 2, part 2 of 2'}
    """
    if len(set(rollouts)) == len(rollouts):
        return {}
    place, num_parts = rollouts[i], rollouts.count(rollouts[i])
    part = f", part {rollouts[: i + 1].count(place)} of {num_parts}" if num_parts > 1 else ""
    return {"rollout": place, "label": f"rollout {place + 1}{part}"}


def _turn_rewards(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key `turn_rewards`, a number or None for each turn of the model; {} without them."""
    rewards = _listed(values.get("turn_rewards"))
    return {"turn_rewards": [rounded(reward) for reward in rewards]} if rewards else {}


def _trained(row: Mapping[str, Any]) -> list[list[int]]:
    """Return 0 or 1 for each token of each sequence; masks of 0 and 1 alone are read as that."""
    masks = list(map(_listed, _listed(row.get("masks"))))
    if all(label in (0, 1) for mask in masks for label in mask):
        return [list(map(int, mask)) for mask in masks]
    return [[0 if label == IGNORE_INDEX else 1 for label in mask] for mask in masks]


def _token_ids(row: Mapping[str, Any], i: int) -> list[int]:
    """Return the tokens of a sequence; [] without them, or if one is no token id."""
    tokens = _listed(_at(row.get("tokens"), i))
    are_ids = set(map(type, tokens)) == {int} and 0 <= min(tokens) <= max(tokens) < 2**31
    return tokens if are_ids else []


def _token_figures(
    row: Mapping[str, Any], i: int, tokens: list[int], trained: list[list[int]]
) -> dict[str, Any]:
    """Return the arrays of a sequence that are as long as its tokens; {} without tokens."""
    is_trained = _at(trained, i)
    if not tokens or not is_trained or len(is_trained) != len(tokens):
        return {}
    found: dict[str, Any] = {"tokens": tokens, "trained": is_trained}
    if versions := _versions(_at(row.get("weight_versions"), i), len(tokens)):
        found["versions"] = versions
    for name, key in (("sampled", "inference_logprobs"), ("token_advantages", "advantages")):
        values = _at(row.get(key), i)
        if isinstance(values, list) and len(values) == len(tokens):
            found[name] = _rounded(values, is_trained)
    return found


def _rounded(values: list[Any], is_trained: list[int]) -> list[float | None]:
    """Return the values of the trained tokens, None for the others and for what is no number (below 1e300)."""
    try:
        array = np.array(values, float)
    except (TypeError, ValueError, OverflowError):  # one is no number
        array = np.empty(())
    if array.ndim != 1:
        array = np.array(list(map(_number, values)), float)
    with np.errstate(over="ignore"):
        numbers = array.round(DECIMALS)
    is_finite = np.isfinite(numbers)
    is_shown = is_trained if is_finite.all() else (is_finite & is_trained).tolist()
    return [
        value if is_one else None for value, is_one in zip(numbers.tolist(), is_shown, strict=True)
    ]


def _versions(spans: Any, num_tokens: int) -> list[int | None] | None:
    """Return the policy version of every token, None where it is unknown; None without a known one."""
    found: list[int | None] = [None] * num_tokens
    is_known = False
    try:
        for span in spans or ():
            start, length, version = span["start"], span["num_tokens"], span["weight_version"]
            number = int(version) if version.isdecimal() else None
            found[start : start + length] = [number] * min(length, num_tokens + 1)
            is_known = is_known or (number is not None and length > 0)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    is_known = is_known and len(found) == num_tokens
    return found if is_known else None


def _advantages(
    row: Mapping[str, Any],
    scores: Sequence[float | None],
    trained: list[list[int]],
    rollouts: list[int],
) -> list[float | None]:
    """Return one advantage per sequence, as the trainer computes them by default, or the mean of those given."""
    given = _listed(row.get("advantages"))
    if len(given) == len(scores):
        return [_mean_where(values, _at(trained, i)) for i, values in enumerate(given)]
    if any(score is None for score in scores):
        return [None] * len(scores)
    overrides = [_mapping(_at(row.get("overrides"), i)) for i in range(len(scores))]
    all_supervised = _mapping(row.get("group_overrides")).get("sft")
    compared = [
        place
        for place, override in enumerate(overrides)
        if not override.get("sft", all_supervised)
        and (not any(trained) or any(_at(trained, place) or ()))
    ]
    found = _advantages_of(
        tuple(scores[place] for place in compared), tuple(rollouts[place] for place in compared)
    )
    by_place = dict(zip(compared, found, strict=True))
    return [
        0.0 if override.get("set_advantage_to_zero") else by_place.get(place)
        for place, override in enumerate(overrides)
    ]


@functools.lru_cache(2**16)
def _advantages_of(scores: tuple[Any, ...], rollouts: tuple[int, ...]) -> list[float | None]:
    """Return the advantages of sequences that are compared."""
    with np.errstate(all="ignore"):
        found = group_advantages(np.array(scores, float), np.array(rollouts, int))
    return list(map(rounded, found.tolist()))


def _mean_where(values: Any, is_trained: list[int] | None) -> float | None:
    if not isinstance(values, list):
        return rounded(values)
    used = [_number(v) for v, is_one in zip(values, is_trained or (), strict=False) if is_one]
    known = [value for value in used if value is not None]
    return rounded(sum(known) / len(known)) if used and len(known) == len(used) else None


def rounded(value: Any) -> float | None:
    """Return a number without the digits that are not shown; None for anything that is no finite number."""
    number = _number(value)
    return None if number is None else round(number, DECIMALS)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _noted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key `notes`, what an environment wrote of a sequence besides its turns; {} without any."""
    notes = {key: value for key, value in values.items() if key != "turn_rewards"}
    return {"notes": notes} if notes else {}


def _facts(row: Mapping[str, Any], scores: Sequence[Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    odd = [f"sequence {i}: {s}" for i, s in enumerate(scores, start=1) if _number(s) is None]
    if odd:
        facts["scores that are no numbers"] = ", ".join(odd)
    calls = _listed(row.get("calls"))
    if calls:
        first = _mapping(calls[0])
        facts |= {"model": first.get("model"), "sampling": first.get("sampling")}
        facts["requests"] = len(calls)
    with contextlib.suppress(OverflowError, OSError, ValueError):  # no time
        if began_at := _number(row.get("began_at")):
            facts["began_at"] = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(began_at))
    facts |= {key: row.get(key) for key in _FACTS}
    return {key: value for key, value in facts.items() if value not in (None, {}, [])}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _at(values: Any, i: int) -> Any:
    """Return an entry of an optional list; None if there is none."""
    return values[i] if isinstance(values, list) and i < len(values) else None


# Evaluations.

_SAMPLE_KEYS = frozenset(
    {
        *("row", "item", "messages", "finish_reason", "gold_answer"),
        *("item_index", "item_hash", "num_samples", "sample_index", "score", "turn_rewards"),
    }
)
"""Keys of a sample with a place of their own, and the numbering."""


def _item_name(sample: Mapping[str, Any], number: int) -> str:
    """Return the id of the group of a sample; one without an item's index is alone in its group."""
    index = sample.get("item_index")
    return f"sample-{number}" if index is None else f"item-{index}"


_READ = ("extracted_answer", "extracted", "prediction", "predicted_answer", "parsed_answer")
_WHY = ("explanation", "judge_explanation", "grader_explanation", "judgement", "unscored")
_NUM_TOKENS = ("num_tokens", "completion_tokens")
"""Keys under which samples have what was read, the grader's explanation, and the length of the answer."""


def _with_metrics(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a sample with the numbers of its `metrics` among its keys."""
    metrics = sample.get("metrics")
    return {**metrics, **sample, "metrics": None} if isinstance(metrics, Mapping) else sample


def _view_of_item(name: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    shared = {
        key: value
        for key, value in first.items()
        if key not in _SAMPLE_KEYS
        and not isinstance(value, float)
        and len(samples) > 1
        and all(sample.get(key) == value for sample in samples)
    }
    return {
        "id": name,
        "item_id": first.get("item_index"),
        "item": first.get("row", first.get("item")),
        "gold_answer": first.get("gold_answer"),
        "facts": shared,
        "sequences": [_view_of_sample(sample, shared) for sample in samples],
        "verdicts": [verdict_of(sample, seq=i) for i, sample in enumerate(samples)],
    }


def verdict_of(sample: Mapping[str, Any], *, seq: int) -> dict[str, Any]:
    """Return what became of an answer: right, wrong or not judged, what was expected and read, and why."""
    correct, score = _first_of(sample, ("correct", "is_correct")), _score_of(sample)
    if correct is None and score in (0, 1):
        correct = score
    kind = "not judged" if score is None else "scored"
    if correct is not None:
        kind = "right" if correct else "wrong"
    target = _first_of(sample, ("gold_answer", "target"))
    if target is None:
        row = _mapping(sample.get("row", sample.get("item")))
        target = _first_of(row, ("answer", "gold", "target", "solution"))
    read = _first_of(sample, _READ)
    why = _first_of(sample, _WHY)
    return {
        "seq": seq,
        "kind": kind,
        "target": None if target is None else str(target),
        "read": None if read is None else str(read),
        "tokens": _first_of({**_mapping(sample.get("usage")), **sample}, _NUM_TOKENS),
        "why": None if why is None else str(why),
    }


def _first_of(values: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((value for key in keys if (value := values.get(key)) is not None), None)


def _score_of(sample: Mapping[str, Any]) -> float | None:
    """Return the score of a sample; that of one without a score is 1 if it is correct, else 0."""
    key = next((key for key in ("score", "correct", "is_correct") if key in sample), "score")
    return _number(sample.get(key))


def _view_of_sample(sample: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    messages = sample.get("messages")
    metrics: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    for key, value in sample.items():
        if key not in _SAMPLE_KEYS and key not in shared and value is not None:
            is_short = isinstance(value, str) and len(value) <= MAX_METRIC_CHARS
            is_metric = is_short or isinstance(value, bool | int | float)
            (metrics if is_metric else notes)[key] = value
    texts = [f"{key}: {text_in(value)}" for key, value in notes.items()]
    return {
        "score": _score_of(sample),
        "finish_reason": sample.get("finish_reason"),
        **_noted(notes),
        **_turn_rewards(sample),
        "messages": [_message(message) for message in _flat(messages)] if messages else None,
        "text": "\n\n".join(texts) if texts and not messages else None,
        "metrics": metrics,
    }
