"""Shared by `atropos-sft-gen` and `atropos-dpo-gen`: read groups from a hub or files, write rows of JSON to a file.

A live run is joined, never reset; the groups read count as trained. Invariant: a batch is acknowledged after its rows
are in the file, so an interrupted one is delivered again. The callers decide which rows a group gives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.cli._rows import Source, first_answer
from atroposlib.client import (
    LeasedBatch,
    TrainerClient,
    TrainerNotRegistered,
    TrainerRegistration,
)
from atroposlib.errors import ConfigError, GroupError, HubRejected, HubUnavailable
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.json_lines import on_one_line, read_lines
from atroposlib.utils.wording import columns_of, counted, wrapped

logger = logging.getLogger(__name__)

WAIT_S = 10.0
"""Duration of one long poll; an original hub answers at once, and the client then waits a second."""
GIVE_UP_AFTER_S = 600.0
"""Longest outage of the hub before giving up."""

Row: TypeAlias = dict[str, Any]
LeftOut: TypeAlias = Counter[str]
"""Numbers of sequences or rows that are not written, by reason."""
RowsOf: TypeAlias = Callable[[Source, LeftOut], list[Row]]
"""Returns the rows of a group, and counts what it leaves out."""


class RowsConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    filepath: Path
    """File to write, one JSON object per line."""
    from_file: list[Path] = []
    """JSONL files of `process` or `serve` to read instead of a hub."""
    api_url: str = "http://localhost:8000"
    """Address of the hub."""
    group_size: int = Field(default=2, ge=1)
    """Sequences per group that environments send."""
    max_token_len: int = Field(default=2048, ge=1)
    """Longest sequence."""
    tokenizer: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    """Name or path; not needed with --save-messages or --format chat."""
    save_messages: bool = False
    """Write messages instead of text; environments must send them."""
    format: Literal["original", "chat"] = "original"
    """Keys of the rows; `chat`: those that TRL reads, with prompt and answers as messages."""
    num_seqs_to_save: int = Field(default=100, ge=1)
    """Rows to write before stopping; from files all rows, unless given."""
    allow_negative_scores: bool = False
    """Also take scores of zero and below."""
    min_score: float | None = None
    """Lowest score of an answer to imitate, instead of above zero."""
    max_per_item: int | None = Field(default=None, ge=1)
    """Most rows per item, from a hub per prompt; None: no limit."""
    dedup: bool = False
    """Leave out rows that differ from an earlier one of this run at most in their scores."""
    append_to_previous: bool = False
    """Append to an existing file."""

    def takes(self, score: float) -> bool:
        """Whether an answer with this score may be imitated."""
        if self.min_score is not None:
            return score >= self.min_score
        return self.allow_negative_scores or score > 0


class Selection:
    """The rows of all groups that the flags ask for, and what they leave out."""

    def __init__(self, config: RowsConfig, rows_of: RowsOf) -> None:
        self._config = config
        self._rows_of = rows_of
        self._seen: set[bytes] = set()
        self._num_of: Counter[bytes] = Counter()
        """Rows by item."""
        self.left_out: LeftOut = Counter()

    def of(self, source: Source) -> Iterator[Row]:
        """Yield the rows of a group."""
        for row in self._rows_of(source, self.left_out):
            content = {k: v for k, v in row.items() if not k.startswith("score")}
            item = source.line.get("item", row.get("prompt", row.get("prefix")))
            if item is None:  # messages alone
                messages = next(iter(content.values()))
                item = messages[: first_answer(messages) or 1]
            if self._config.dedup and not self._is_new(content):
                self.left_out["repeats an earlier row"] += 1
            elif self._config.max_per_item and self._is_full(item):
                self.left_out["beyond --max-per-item"] += 1
            else:
                yield row

    def _is_new(self, content: Row) -> bool:
        num_before = len(self._seen)
        self._seen.add(_digest(content))
        return len(self._seen) > num_before

    def _is_full(self, item: Any) -> bool:
        key = _digest(item)
        self._num_of[key] += 1
        return self._num_of[key] > (self._config.max_per_item or 0)

    def to_text(self) -> str:
        """Return what was left out, after a semicolon, or ""."""
        found = [f"{count:,} ({reason})" for reason, count in self.left_out.most_common() if count]
        return f"; left out: {', '.join(found)}" if found else ""


def _digest(value: Any) -> bytes:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).digest()[:16]


def write_rows(config: RowsConfig, rows_of: RowsOf, *, groups_per_step: int) -> None:
    """Write exactly `num_seqs_to_save` rows, or as many as the files give.

    Raises ConfigError before anything is read if the output cannot be written, and EnvError if messages are required
    and a group has none.
    """
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s"
    )
    with _output(config.filepath, append=config.append_to_previous) as file:
        selection = Selection(config, rows_of)
        if config.from_file:
            _from_files(config, selection, file)
        else:
            _from_hub(config, selection, file, groups_per_step)


def _from_files(config: RowsConfig, selection: Selection, file: TextIO) -> None:
    wanted = config.num_seqs_to_save if "num_seqs_to_save" in config.model_fields_set else None
    sources = itertools.chain.from_iterable(map(_groups_in, config.from_file))
    num_saved = 0
    for row in itertools.islice(itertools.chain.from_iterable(map(selection.of, sources)), wanted):
        file.write(_line(row))
        num_saved += 1
    if num_saved:
        _say(f"{counted(num_saved, 'row')} in {config.filepath}{selection.to_text()}")
    else:
        _say(
            "no rows: no score is high enough; --allow-negative-scores, --min-score and"
            f" --minimum-score-diff-max-min change what is taken{selection.to_text()}"
        )


def _groups_in(path: Path) -> Iterator[Source]:
    """Read the groups of a file, except a last line that was cut off; ConfigError names a line that is not a group."""
    for number, line in enumerate(read_lines(path), start=1):
        given = line
        if line.get("has_token_ids") is False:  # lists of tokens are empty
            given = {**line, "inference_logprobs": None}
            given |= dict.fromkeys(("tokens", "masks"), [[0]] * len(line.get("scores") or ()))
        try:
            yield Source(check_group(given, strictness=Strictness.MEANING), line)
        except GroupError as e:
            raise ConfigError(f"{path}, line {number}: not a group: {e}") from e


def _from_hub(config: RowsConfig, selection: Selection, file: TextIO, groups_per_step: int) -> None:
    registration = TrainerRegistration(
        batch_size=config.group_size * groups_per_step,
        max_token_len=config.max_token_len,
        checkpoint_dir="checkpoints",
        save_checkpoint_interval=10,
        starting_step=0,
        num_steps=2 * config.num_seqs_to_save,  # environments may use it as total_steps
    )
    with TrainerClient(config.api_url) as hub:
        if hub.info().batch_size != -1:
            _say("this hub has a trainer; it will not get the groups taken here")
        hub.register(registration)
        num_saved = 0
        while num_saved < config.num_seqs_to_save:
            batch = _next_batch(hub, registration)
            with hub.holding(batch):
                try:
                    rows = [
                        row for group in batch.groups for row in selection.of(Source(group, {}))
                    ]
                    rows = rows[: config.num_seqs_to_save - num_saved]
                    file.writelines(map(_line, rows))
                    file.flush()
                except Exception:
                    hub.release(batch)
                    raise
            num_saved += len(rows)
            try:
                hub.ack(batch)
            except HubRejected as e:
                logger.warning("the hub may deliver these groups again: %s", e)
            wanted = f"{num_saved} of {config.num_seqs_to_save} rows"
            _say(f"{wanted} in {config.filepath}{selection.to_text()}")


def _line(row: Row) -> str:
    return on_one_line(json.dumps(row, ensure_ascii=False).encode()).decode() + "\n"


@contextmanager
def _output(path: Path, *, append: bool) -> Iterator[TextIO]:
    """Open the file; remove it afterwards if it was created here and is empty."""
    existed = path.exists()
    if existed and not append:
        raise ConfigError(f"{str(path)!r} exists; give another name or --append-to-previous")
    try:
        file = path.open("a" if existed else "x", encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {str(path)!r}: {e.strerror}") from e
    try:
        with file:
            if existed and not _ends_with_newline(path):
                file.write("\n")
            yield file
    finally:
        if not existed and path.stat().st_size == 0:
            path.unlink()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def _next_batch(hub: TrainerClient, registration: TrainerRegistration) -> LeasedBatch:
    """Wait for a batch without a time limit; raise after `GIVE_UP_AFTER_S` without an answer from the hub."""
    last_answer = time.monotonic()
    has_explained = False
    while True:
        try:
            batch = hub.lease_batch(wait_s=WAIT_S)
        except TrainerNotRegistered:
            hub.register(registration)  # the hub was reset, or has restarted without its data
            continue
        except GroupError as e:
            logger.warning("batch skipped: %s", e)
            continue
        except HubUnavailable as e:
            if time.monotonic() - last_answer > GIVE_UP_AFTER_S:
                raise
            logger.warning("waiting for the hub: %s", e)
            time.sleep(1.0)
            continue
        if batch is not None:
            return batch
        last_answer = time.monotonic()
        if not has_explained:
            has_explained = True
            _say("waiting for groups; GET /explain at the hub shows what is missing")


def _say(line: str) -> None:
    print(wrapped(line, columns_of(sys.stderr)), file=sys.stderr, flush=True)
