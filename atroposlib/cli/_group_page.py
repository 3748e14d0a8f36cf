"""Scored groups as HTML for the viewers: the common prefix, then each continuation with its score. Pure.

All text of a group is escaped; images are only JPEG and PNG data in the group itself.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from typing import Any

from atroposlib.cli._rows import Decode, texts_of
from atroposlib.scored_data import ScoredGroup

_DATA_URI = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/]+={0,2}")
_BASE64_STARTS = {"/9j/": "jpeg", "iVBORw0KGgo": "png"}
"""First characters of the two formats in base64, for images without a type."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")

STYLE = """<style>
.atropos pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 10px 12px;
  font: 14px/1.5 ui-monospace, monospace; color: inherit;
  background: var(--background-fill-secondary, #f6f6f8); border-radius: 6px; }
.atropos h3 { margin: 18px 0 6px; font-size: 16px; }
.atropos .row { display: grid; grid-template-columns: 92px 1fr; gap: 12px; margin: 8px 0; }
.atropos .score { text-align: center; padding: 10px 4px; border-radius: 6px; font-weight: 600;
  font-variant-numeric: tabular-nums; align-self: start; color: #1b1b1f; background: #e3e3e8; }
.atropos .high { background: #bfe8c7; } .atropos .low { background: #f6c9c4; }
.atropos .note { opacity: .75; margin: 4px 0 10px; }
.atropos img { max-width: 320px; max-height: 320px; border-radius: 6px; margin: 4px 8px 4px 0; }
.atropos summary { cursor: pointer; font-weight: 600; margin: 10px 0; }
</style>"""


def page_of(groups: Sequence[ScoredGroup], decode: Decode, *, images: bool = False) -> str:
    """Return a fragment that shows groups, the first one open."""
    if len(groups) == 1:
        return f'{STYLE}<div class="atropos">{_group(groups[0], decode, images=images)}</div>'
    parts = [
        f"<details{' open' if i == 0 else ''}><summary>Group {i + 1} of {len(groups)}</summary>"
        f"{_group(group, decode, images=images)}</details>"
        for i, group in enumerate(groups)
    ]
    return f'{STYLE}<div class="atropos">{"".join(parts)}</div>'


def note(text: str) -> str:
    """Return a fragment with a message in place of a group."""
    return f'{STYLE}<div class="atropos"><p class="note">{html.escape(text)}</p></div>'


def _group(group: ScoredGroup, decode: Decode, *, images: bool) -> str:
    prefix, completions = texts_of(group, decode)
    scores = group.scores.tolist()
    rows = [
        f'<div class="row"><div class="score {_side(score, scores)}">{score:.4g}</div>'
        f"{_text(completion, images=images)}</div>"
        for score, completion in zip(scores, completions, strict=True)
    ]
    attached = "".join(map(_image, images_in(group.images))) if images else ""
    return (
        f'<p class="note">{html.escape(_facts(group, scores))}</p>{attached}'
        f"<h3>Common prefix</h3>{_text(prefix, images=images)}"
        f"<h3>Continuations and scores</h3>{''.join(rows)}"
    )


def _facts(group: ScoredGroup, scores: Sequence[float]) -> str:
    facts = [
        "no environment" if group.env_id is None else f"environment {group.env_id}",
        f"{group.num_sequences} sequences",
        f"{group.num_tokens} tokens, {group.num_trained} of them trained",
    ]
    if scores:
        facts.append(f"mean score {sum(scores) / len(scores):.4g}")
    if group.policy_version is not None:
        facts.append(f"policy version {group.policy_version}")
    return ", ".join(facts)


def _side(score: float, scores: Sequence[float]) -> str:
    """Return the class of the best and the worst score; "" for others, and if all are equal."""
    if min(scores) == max(scores):
        return ""
    return {max(scores): "high", min(scores): "low"}.get(score, "")


def _text(text: str, *, images: bool) -> str:
    found = _DATA_URI.findall(text) if images else []
    shown = _DATA_URI.sub("[image]", text) if images else text
    pictures = "".join(map(_image, found))
    return f"<div><pre>{html.escape(shown) or '&nbsp;'}</pre>{pictures}</div>"


def _image(uri: str) -> str:
    return f'<img src="{html.escape(uri)}" alt="image of the group">'


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
    if _DATA_URI.fullmatch(text):
        return text
    for start, kind in _BASE64_STARTS.items():
        if text.startswith(start) and _BASE64.fullmatch(text):
            return f"data:image/{kind};base64,{''.join(text.split())}"
    return None
