"""What a row of `process` or `serve` holds besides the group: enough to audit the group and to score it again.

The inference layer records every request of an item (`ItemRecord`); the rest comes from the environment and its base
class. Authors write nothing for it. All keys are new beside the original's.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from pydantic import BaseModel

from atroposlib import __version__
from atroposlib.envs.hooks import EnvHooks
from atroposlib.inference.servers.sampling_notes import (
    AnsweredRequest,
    ItemRecord,
    Position,
    Text,
)
from atroposlib.inference.servers.usage import Usage, usage_of
from atroposlib.inference.sessions.text_sessions import DummyManagedServer
from atroposlib.runtime.masking import without_secrets
from atroposlib.scored_data import ScoredGroup
from atroposlib.utils.json_lines import on_one_line

logger = logging.getLogger(__name__)

_NOT_SAMPLING = frozenset(
    {
        *("model", "messages", "prompt", "input_ids", "tools", "timeout", "split"),
        *("extra_headers", "extra_query"),  # may hold keys
    }
)
"""Keywords of a request that are not recorded as its sampling."""

_MADE_UP = list(range(1, DummyManagedServer.NUM_TOKENS))
MADE_UP_KEYS = ("tokens", "masks", "inference_logprobs")
"""Written as one `[]` per sequence for an API without token ids."""


class Ending(NamedTuple):
    """The request that completed a sequence."""

    completion: str
    finish_reason: str | None


class Provenance:
    """Describes the groups of one environment."""

    def __init__(self, env: EnvHooks) -> None:
        self._env = env
        self._constants = {
            "environment_source": source_of(type(env)),
            "atroposlib_version": __version__,
        }
        self._has_warned = False

    def of(self, sequences: list[list[int]], item: Any, record: ItemRecord) -> dict[str, Any]:
        """Return the keys of a row that the group, with these tokens, does not have."""
        calls = sorted(record.calls, key=lambda call: call.number)
        answers = [self._answer(tokens, record) for tokens in sequences]
        is_text = all(text_of(tokens, record) for tokens in sequences)
        usage = reduce(Usage.plus, totals(calls).values(), Usage())
        return {
            "item_id": record.item_id,
            "item": record.item,
            "group_size": self._env.config.group_size,
            "gold_answer": self._gold_answer(item),
            "prompt": self._first_prompt(calls),
            "completions": [answer and answer.completion for answer in answers],
            "finish_reasons": [answer and answer.finish_reason for answer in answers],
            "has_token_ids": not is_text,
            **(dict.fromkeys(MADE_UP_KEYS, [[] for _ in sequences]) if is_text else {}),
            "calls": self._calls(calls),
            "usage": usage._asdict(),
            "began_at": record.began_at,
            "duration_s": record.duration_s,
            **self._constants,
        }

    def _gold_answer(self, item: Any) -> str | None:
        try:
            return self._env.gold_answer(item)
        except Exception:
            if not self._has_warned:
                logger.exception("gold_answer failed; the row is written without it")
            self._has_warned = True
            return None

    def _answer(self, tokens: list[int], record: ItemRecord) -> Ending | None:
        """Return how a sequence ended; None if no request of the item sampled its last tokens."""
        if (text := text_of(tokens, record)) is not None:
            return Ending(text.completion, text.finish_reason)
        for call in record.calls:
            if not isinstance(call.answer, tuple):
                continue
            prompt, outputs, _, reasons = call.answer[:4]
            for i, output in enumerate(outputs):
                if (
                    len(prompt) + len(output) == len(tokens)
                    and tokens[len(prompt) :] == output
                    and tokens[: len(prompt)] == prompt
                ):
                    return Ending(self._texts(call)[i], _reason(reasons[i]))
        return None

    def _texts(self, call: AnsweredRequest) -> Sequence[str]:
        """Return the text of each completion of a token request."""
        if call.texts is None:
            call.texts = [self._env.decode_tokens(tokens) for tokens in call.answer[1]]
        return call.texts

    def _first_prompt(self, calls: Sequence[AnsweredRequest]) -> Any:
        """Return the prompt of the first request to the policy."""
        policy = [server.config for server in self._env.server.servers]
        for call in calls:
            if any(call.config is config for config in policy):
                return _prompt(call)
        return None

    def _calls(self, calls: Sequence[AnsweredRequest]) -> list[dict[str, Any]]:
        """Describe the requests; one that continues a conversation holds only its added messages."""
        rows = []
        indices: dict[Position, int] = {call.number: i for i, call in enumerate(calls)}
        for i, call in enumerate(calls):
            row, prompt = self._call(call), _prompt(call)
            row["after"] = indices.get(call.after, call.after)
            earlier = _continued(prompt, calls[:i])
            if earlier is not None:
                row |= {"continues": earlier, "prompt": prompt[len(_prompt(calls[earlier])) :]}
            rows.append(row)
        return rows

    def _call(self, call: AnsweredRequest) -> dict[str, Any]:
        if isinstance(call.answer, tuple):
            reasons = map(_reason, call.answer[3])
            answers = [
                {"text": text, "finish_reason": reason}
                for text, reason in zip(self._texts(call), reasons, strict=True)
            ]
        else:
            answers = [_choice(choice) for choice in getattr(call.answer, "choices", ())]
        usage = usage_of(call.answer, call.config)._asdict()
        del usage["num_requests"]
        return {
            "model": call.config.model_name,
            "base_url": without_secrets(call.config.base_url),
            "prompt": _prompt(call),
            "answers": answers,
            "sampling": {
                key: value
                for key, value in call.asked.items()
                if key not in _NOT_SAMPLING and value is not None
            },
            "usage": usage,
            "began_at": call.began_at,
            "duration_s": call.duration_s,
        }


def totals(calls: Iterable[AnsweredRequest]) -> dict[tuple[str, str], Usage]:
    """Return the usage by (base_url, model)."""
    sums: dict[tuple[str, str], Usage] = {}
    for call in calls:
        key = (without_secrets(call.config.base_url) or "", call.config.model_name)
        sums[key] = sums.get(key, Usage()).plus(usage_of(call.answer, call.config))
    return sums


def source_of(env_cls: type) -> dict[str, str] | None:
    """Return file name and SHA-256 of the module that defines a class; None if it has no file."""
    try:
        path = Path(inspect.getfile(env_cls))
        return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except (OSError, TypeError):
        return None


def item_json(item: Any) -> msgspec.Raw:
    """Return an item as JSON, the same in every process; an item that has no JSON form as its text."""
    try:
        json = msgspec.json.encode(item, enc_hook=plain, order="deterministic")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        text = str(item).encode(errors="backslashreplace")  # half of a surrogate pair
        json = msgspec.json.encode(text.decode())
    return msgspec.Raw(on_one_line(json))  # as in the file


def fingerprint(json: bytes) -> int:
    """Return a 64-bit hash of an item's JSON."""
    return xxhash.xxh3_64_intdigest(json)


def plain(value: Any) -> Any:
    """Convert pydantic, numpy and torch values to plain ones, any other value to its text."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


# APIs without token ids.


def text_of(tokens: list[int], record: ItemRecord) -> Text | None:
    """Return the episode behind a sequence of `TextSession`; None for real tokens."""
    if record.texts and tokens[1:] == _MADE_UP and tokens[0] < len(record.texts):
        return record.texts[tokens[0]]
    return None


def text_messages(checked: ScoredGroup, record: ItemRecord) -> list[list[Any]] | None:
    """Return the conversations of a group without token ids; None if it has token ids."""
    if not record.texts:
        return None
    texts = [text_of(tokens, record) for tokens in checked.to_dict(["tokens"])["tokens"]]
    return [text.messages for text in texts if text] if all(texts) else None


def _prompt(call: AnsweredRequest) -> Any:
    """Return the messages or the text of a request."""
    return call.messages or call.asked.get("messages") or call.asked.get("prompt")


def _continued(prompt: Any, calls: Sequence[AnsweredRequest]) -> int | None:
    """Return the call with the longest conversation that `prompt` continues; None if it begins one."""
    found, longest = None, 0
    if isinstance(prompt, list):
        for i, call in enumerate(calls):
            earlier = _prompt(call)
            if (
                isinstance(earlier, list)
                and longest < len(earlier) < len(prompt)
                and prompt[: len(earlier)] == earlier
            ):
                found, longest = i, len(earlier)
    return found


def _choice(choice: Any) -> dict[str, Any]:
    message = getattr(choice, "message", None)
    found = {
        "text": getattr(choice, "text", None) if message is None else message.content,
        "finish_reason": choice.finish_reason,
    }
    calls = getattr(message, "tool_calls", None)
    return {**found, "tool_calls": calls} if calls else found


def _reason(finish_reason: Any) -> str | None:
    # SGLang answers {"type": "stop", "matched": ...}.
    if isinstance(finish_reason, dict):
        finish_reason = finish_reason.get("type")
    return None if finish_reason is None else str(finish_reason)
