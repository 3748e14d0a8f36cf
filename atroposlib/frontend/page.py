"""Write the viewer and view groups (`view_groups.py`) as one HTML file that loads nothing.

The page holds, in this order, its head, an index with a few figures of every group, the viewer's code, and the groups
in compressed chunks that the viewer opens when it shows them. Memory does not grow with the groups, except for the
index.
"""

from __future__ import annotations

import binascii
import html
import logging
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from isal import igzip

from atroposlib.frontend.evaluations import Evaluation
from atroposlib.frontend.rendering import with_trees
from atroposlib.frontend.view_groups import text_in
from atroposlib.frontend.vocabulary import Decode, Vocabulary
from atroposlib.samples import rollout_scores
from atroposlib.utils.files import replacing
from atroposlib.utils.wording import counted

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent

ViewGroup: TypeAlias = Mapping[str, Any]
"""A group as the viewer reads it; `view_groups.py` makes them."""

GROUPS_PER_CHUNK = 50
BYTES_PER_CHUNK = 1_000_000
"""Of JSON; a chunk ends with the group that reaches it."""
PROGRESS_S = 5.0
"""Time between the lines that say how far a page is."""
ITEM_CHARS = 40
PREVIEW_CHARS = 80


@dataclass(frozen=True, slots=True)
class Curve:
    """One value of a run over its steps."""

    run: int
    """0, or 1 for the second of two runs."""
    name: str
    steps: list[int]
    values: list[float]
    outliers: list[int]
    """Places in `values`."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A diagram for the top of the page."""

    title: str
    is_log: bool
    curves: list[Curve]


@dataclass(frozen=True, slots=True)
class Compared:
    """Two runs on one page."""

    names: list[str]
    settings: list[tuple[str, str | None, str | None]]
    """Those that differ: path and values."""
    num_settings: int
    """Of both runs together."""


def write_page(
    target: Path,
    groups: Iterable[ViewGroup],
    *,
    title: str,
    about: str,
    charts: Sequence[Chart] = (),
    compared: Compared | None = None,
    decode: Decode | None = None,
    evaluation: Evaluation | None = None,
    render: str | None = None,
) -> None:
    """Write the page in one step; `about` is a line under the title, to which the number of groups is added.

    `decode` gives the tokens' texts (`vocabulary.decoder`); without it the page shows ids. Group ids that occur again
    get a suffix. `render` is the URL that a served page asks for the trees of texts.
    """
    vocabulary = Vocabulary(decode)
    index = Index()
    groups = with_trees(groups if evaluation is None else evaluation.noting(groups))
    said_at = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target.parent) as chunks:
        for number, members in enumerate(_chunks(groups, index)):
            content = b'{"groups":[%b],"vocabulary":%b}' % (
                b",".join(each.json for each in members),
                msgspec.json.encode(vocabulary.of(each.group for each in members)),
            )
            chunks.write(b'<script type="text/plain" id="chunk-%d">' % number)
            chunks.write(_compressed(content))
            chunks.write(b"</script>\n")
            if time.monotonic() - said_at > PROGRESS_S:
                said_at = time.monotonic()
                logger.info("%s: %d groups so far", target, len(index.columns["id"]))
        if evaluation is not None:
            index.evaluation = evaluation.content()
        head = {
            "title": title,
            "about": index.told(about),
            "charts": charts,
            "compared": compared,
            "render": render,
        }
        with replacing(target) as file:
            for piece in _template():
                if piece == "$chunks":
                    chunks.seek(0)
                    shutil.copyfileobj(chunks, file)
                else:
                    file.write(_filled(piece, head=head, index=index))
            size = file.tell()
    logger.info("%s: %d groups, %.1f MB", target, len(index.columns["id"]), size / 1e6)


def served_page(head: Mapping[str, Any], index: Index) -> bytes:
    """Return a page without its groups.

    The viewer gets them from the URL in `head["chunks"]` and a chunk's number, or asks `head["live"]["poll"]` for new
    ones every `every_s` seconds. The other keys are those of `write_page`.
    """
    return b"".join(_filled(piece, head=head, index=index) for piece in _template())


def _template() -> list[str]:
    """Return viewer.html in pieces: text and markers."""
    return re.split(r"(\$[a-z]+)", (_FOLDER / "viewer.html").read_text(encoding="utf-8"))


def _filled(piece: str, *, head: Mapping[str, Any], index: Index) -> bytes:
    """Return a piece of viewer.html as it stands in a page."""
    match piece:
        case "$title":
            return html.escape(head["title"]).encode()
        case "$css":
            return (_FOLDER / "viewer.css").read_bytes()
        case "$head":
            return msgspec.json.encode(head).replace(b"<", b"\\u003c")
        case "$index":
            return _compressed(msgspec.json.encode(index.content()))
        case "$js":
            return b"\n".join(file.read_bytes() for file in sorted(_FOLDER.glob("viewer/*.js")))
        case "$chunks":
            return b""
    return piece.encode()


def _compressed(content: bytes) -> bytes:
    return binascii.b2a_base64(igzip.compress(content), newline=False)


class _Member(NamedTuple):
    """A group of a chunk and its JSON."""

    group: ViewGroup
    json: bytes


def _chunks(groups: Iterable[ViewGroup], index: Index) -> Iterator[list[_Member]]:
    """Yield the groups in chunks, each with an id of its own, and add them to the index."""
    members: list[_Member] = []
    number = num_bytes = 0
    for group in groups:
        unique = {**group, "id": index.add(row_of(group), chunk=number)}
        json = msgspec.json.encode(unique)
        members.append(_Member(unique, json))
        num_bytes += len(json)
        if len(members) == GROUPS_PER_CHUNK or num_bytes >= BYTES_PER_CHUNK:
            yield members
            members, num_bytes, number = [], 0, number + 1
    if members:
        yield members


_COLUMNS = (
    *("id", "chunk", "environment", "item_id", "item", "step", "policy_version"),
    *("score_mean", "score_min", "score_max", "num_rollouts", "num_sequences"),
    *("tokens_mean", "characters_mean", "length_correlation", "gap_mean", "staleness"),
    *("advantage_max", "fate", "loss_share", "suspicious", "preview"),
)


class Index:
    """A few figures of every group, as one list per figure."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.evaluation: dict[str, Any] | None = None
        """What `evaluations.py` has for the first page."""
        self._ids: set[str] = set()
        self._environments: dict[str, int] = {}
        self._fates: dict[str, int] = {}
        self._score_sum, self._num_scores = 0.0, 0

    def add(self, row: IndexRow, *, chunk: int = 0) -> str:
        """Add a group and return its id, which is another one if an earlier group has it."""
        name, copy = row.id, 1
        while name in self._ids:
            copy += 1
            name = f"{row.id}~{copy}"
        self._ids.add(name)
        self._score_sum += sum(row.scores)
        self._num_scores += len(row.scores)
        values = row.values | {
            "id": name,
            "chunk": chunk,
            "environment": _number_of(row.environment, self._environments),
            "fate": _number_of(row.fate, self._fates),
        }
        for column, values_of in self.columns.items():
            values_of.append(values[column])
        return name

    def told(self, about: str) -> str:
        """Add to a line the numbers of groups, sequences and, if they are fewer, rollouts, and the mean score."""
        rollouts, sequences = (
            sum(self.columns[f"num_{kind}"]) for kind in ("rollouts", "sequences")
        )
        parts = [
            counted(len(self._ids), "group"),
            *([counted(rollouts, "rollout")] if rollouts < sequences else []),
            counted(sequences, "sequence"),
        ]
        if self._num_scores:
            parts.append(f"mean score {self._score_sum / self._num_scores:.3f}")
        return ". ".join(filter(None, [about, ", ".join(parts)]))

    def content(self) -> dict[str, Any]:
        """Return the columns and the names that two of them refer to."""
        names = {"environments": list(self._environments), "fates": list(self._fates)}
        answers = {"evaluation": self.evaluation} if self.evaluation else {}
        return {**self.columns, **names, **answers}


def _number_of(name: Any, numbers: dict[str, int]) -> int:
    """Return the number of a name, a new one if it has none; -1 for no name."""
    return -1 if name is None else numbers.setdefault(str(name), len(numbers))


class IndexRow(NamedTuple):
    """What the index holds of a group."""

    id: str
    environment: str | None
    fate: str | None
    values: dict[str, Any]
    scores: list[float]
    """Of its rollouts, those that are finite."""


def row_of(group: ViewGroup) -> IndexRow:
    sequences: Sequence[Mapping[str, Any]] = group["sequences"]
    has_tokens = bool(sequences) and all(each.get("tokens") for each in sequences)
    lengths = [len(each["tokens"]) if has_tokens else _characters(each) for each in sequences]
    rollout_of = [each.get("rollout", number) for number, each in enumerate(sequences)]
    length_of = dict.fromkeys(rollout_of, 0)
    for rollout, length in zip(rollout_of, lengths, strict=True):
        length_of[rollout] += length
    given: list[Any] = [each.get("score") for each in sequences]
    scored = [i for i, score in enumerate(given) if score is not None and math.isfinite(score)]
    rollouts, scores = [rollout_of[i] for i in scored], [given[i] for i in scored]
    if len(set(rollouts)) < len(rollouts):
        scores = rollout_scores(np.array(scores), np.array(rollouts, int))[0].tolist()
        rollouts = sorted(set(rollouts))
    gaps = [
        abs(trainer - sampled)
        for each in sequences
        if "trainer" in each
        for trainer, sampled in zip(each["trainer"], each.get("sampled") or (), strict=False)
        if trainer is not None and sampled is not None
    ]
    advantages = [abs(a) for each in sequences if (a := each.get("advantage")) is not None]
    notes = [each.get("notes", {}) for each in sequences]
    suspicions = {str(each["suspicious"]) for each in notes if each.get("suspicious")}
    return IndexRow(
        str(group["id"]),
        group.get("environment"),
        group.get("fate"),
        {
            "item_id": group.get("item_id"),
            "item": _item_text(group),
            "step": group.get("step"),
            "policy_version": group.get("policy_version"),
            "score_mean": _mean(scores),
            "score_min": min(scores, default=None),
            "score_max": max(scores, default=None),
            "num_rollouts": len(length_of),
            "num_sequences": len(sequences),
            "tokens_mean": _mean(lengths) if has_tokens else None,
            "characters_mean": None if has_tokens else _mean(lengths),
            "length_correlation": _correlation([length_of[of] for of in rollouts], scores),
            "gap_mean": sum(gaps) / len(gaps) if gaps else None,
            "staleness": group.get("staleness"),
            "advantage_max": max(advantages, default=None),
            "loss_share": group.get("loss_share"),
            "suspicious": " ".join(sorted(suspicions)),
            "preview": preview(sequences[0].get("messages") or (), sequences[0].get("text"))
            if sequences
            else "",
        },
        scores,
    )


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _correlation(lengths: Sequence[float], scores: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None if all lengths or all scores are equal."""
    if min(lengths, default=0) == max(lengths, default=0) or min(scores) == max(scores):
        return None
    return round(correlation(lengths, scores), 3)


def _characters(sequence: Mapping[str, Any]) -> int:
    messages = sequence.get("messages") or ()
    return len(sequence.get("text") or "") + sum(len(text_in(m.get("content"))) for m in messages)


def _item_text(group: ViewGroup) -> str:
    """Return the item's number and the start of the item.

    >>> _item_text({"item_id": 3, "item": {"question": "1 + 1?"}})
    '3 {"question":"1 + 1?"}'
    """
    item = group.get("item")
    is_text = item is None or isinstance(item, str)
    text = (item or "") if is_text else msgspec.json.encode(item).decode()
    number = group.get("item_id")
    return " ".join(filter(None, [None if number is None else str(number), text]))[:ITEM_CHARS]


def preview(messages: Sequence[Any], text: str | None = "") -> str:
    """Return the beginning of the first user message or plain text, else of `text`, on one line."""
    for message in messages:
        if isinstance(message, str):
            text = message
        elif isinstance(message, Mapping) and message.get("role") == "user":
            text = text_in(message.get("content"))
        else:
            continue
        break
    return " ".join((text or "")[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]
