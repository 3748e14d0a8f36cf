"""The files of a run as one page: groups, the trainer's metrics, and what it knows of the groups it trained.

Files are recognised by the keys of their first line, because their names are settings. The trainer's lines
(`group_fates.jsonl`, `trained_groups.jsonl`) join the groups by their group id. Only complete lines are read, so a run
may be in progress. What a trainer that began anew set aside in `earlier_run_<n>/` is another run's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from atroposlib.errors import ConfigError
from atroposlib.frontend.charts import charts_of
from atroposlib.frontend.evaluations import Evaluation, stored_metrics
from atroposlib.frontend.page import Compared, write_page
from atroposlib.frontend.run_settings import compare_runs
from atroposlib.frontend.view_groups import rounded, view_of_row, views_of_samples
from atroposlib.frontend.vocabulary import Decode, decoder
from atroposlib.utils.json_lines import decode_object, placed_lines, read_lines
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.wording import counted

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_RECEIVED = "not received"
"""Fate of a group that the trainer has not recorded: it is queued, or the hub or the environment dropped it."""
NOT_TRACED = "not traced"
"""Fate where the trainer recorded only the groups whose tokens it traced."""

_DEPTH = 3
"""Folders below the run's own in which files are looked for: a trainer's save_path, a part's folder."""

Kind: TypeAlias = Literal["groups", "samples", "metrics", "trained", "fates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run or evaluation, in order of their paths."""

    source: Path
    """The directory or the file that was named."""
    groups: list[Path] = field(default_factory=list)
    samples: list[Path] = field(default_factory=list)
    metrics: list[Path] = field(default_factory=list)
    trained: list[Path] = field(default_factory=list)
    fates: list[Path] = field(default_factory=list)

    @property
    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Return a value that changes when a file does."""
        paths = [*self.groups, *self.samples, *self.metrics, *self.trained, *self.fates]
        found = [(path, path.stat()) for path in paths]
        return tuple((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)


def find_run_files(source: Path) -> RunFiles:
    """Return the files of a run's directory, or one JSONL file, which is read as groups if it is nothing else.

    Raises ConfigError if there is nothing of the kind in the directory, or no such file.
    """
    if not source.exists():
        raise ConfigError(f"{source}: there is no such file or directory")
    if not source.is_dir():
        return RunFiles(source=source, **{_kind_of(source) or "groups": [source]})
    found: dict[Kind, list[Path]] = {}
    for path in _json_files(source):
        kind = _kind_of(path)
        if kind is not None:
            found.setdefault(kind, []).append(path)
    if not found.keys() - {"trained", "fates"}:
        raise ConfigError(
            f"{source}: its *.jsonl files hold no groups, samples of an evaluation or metrics of a trainer; "
            "environments write groups to --env.data_path_to_save_groups"
        )
    return RunFiles(source=source, **found)


def write_run_page(
    files: RunFiles,
    target: Path,
    *,
    other: RunFiles | None = None,
    title: str | None = None,
    about: str = "",
    tokenizer: Any = None,
    render: str | None = None,
) -> None:
    """Write the page of a run; `title` None: the name of its directory or file; `render` as in `write_page`.

    Without a tokenizer, that of a model in the directory is used, if there is one. With `other`, the page has both
    runs: their curves in the same charts, the settings that differ, and the groups of both.
    """
    decode = decode_of(files, tokenizer)
    runs = [files] if other is None else [files, other]
    shown = shown_of(*runs, title=title, about=about)
    groups = (
        in_run(view, shown["compared"], number)
        for number, run in enumerate(runs)
        for view in view_groups(run, decode)
    )
    evaluation = _evaluation(files)
    try:
        write_page(target, groups, **shown, decode=decode, evaluation=evaluation, render=render)
    except RecursionError as error:
        raise ConfigError(f"{files.source}: a value is nested too deeply") from error


def decode_of(files: RunFiles, tokenizer: Any) -> Decode | None:
    """Return the function that decodes tokens; `tokenizer` None: that of a model in the directory, if there is one."""
    if tokenizer is None and files.source.is_dir():
        tokenizer = _tokenizer_of(files.source)
    return None if tokenizer is None else decoder(tokenizer)


def shown_of(*runs: RunFiles, title: str | None = None, about: str = "") -> dict[str, Any]:
    """Return what a page shows beside the groups: its title and line, the charts, and how two runs differ."""
    compared = compare_runs(*(run.source for run in runs)) if len(runs) == 2 else None
    names = compared.names if compared else [runs[0].source.resolve().name]
    steps = [[step for path in run.metrics for step in read_lines(path)] for run in runs]
    num_steps = " and ".join(counted(len(each), "optimizer step") for each in steps)
    return {
        "title": title or " and ".join(names),
        "about": ". ".join(filter(None, [about, num_steps if any(steps) else ""])),
        "charts": charts_of(*steps),
        "compared": compared,
    }


def in_run(view: dict[str, Any], compared: Compared | None, number: int) -> dict[str, Any]:
    """Return a view group, one of two runs with the name of its run before that of its environment."""
    if compared is None:
        return view
    names = [compared.names[number], view.get("environment")]
    return {**view, "environment": ": ".join(str(name) for name in names if name)}


def _evaluation(files: RunFiles) -> Evaluation | None:
    """Return what collects the verdicts of an evaluation; None for a run and for several evaluations."""
    if files.groups or len(files.samples) != 1:
        return None
    samples = files.samples[0]
    beside = samples.with_name(samples.stem.replace("samples", "metrics") + ".json")
    return Evaluation(stored_metrics(beside))


def view_groups(files: RunFiles, decode: Decode | None) -> Iterator[dict[str, Any]]:
    """Yield the view groups of a run, one at a time."""
    trained = Trained(files)
    for path in files.groups:
        for number, row in enumerate(read_lines(path), start=1):
            view = view_of_row(row, name=f"line-{number}", decode=decode)
            if view is not None:
                trained.add_to(view)
                yield view
    for path in files.samples:
        yield from views_of_samples(read_lines(path))


def _json_files(folder: Path) -> list[Path]:
    patterns = ["*/" * depth + "*.jsonl" for depth in range(_DEPTH + 1)]
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return [
        path
        for path in found
        if not any(part.startswith("earlier_run_") for part in path.relative_to(folder).parts)
    ]


def _kind_of(path: Path) -> Kind | None:
    """Return what a file holds by its first line; None for anything else."""
    try:
        with path.open("rb") as file:
            line = file.readline()
        keys = {key for key, value in decode_object(line).items() if value is not None}
    except (OSError, ValueError):
        return None
    if "scores" in keys:
        return "groups"
    if "item_index" in keys or path.name == "samples.jsonl":
        return "samples"
    if {"group_id", "step", "sequences"} <= keys:
        return "trained"
    if {"fate", "step", "loss_share"} <= keys:
        return "fates"
    return "metrics" if {"step", "reward_mean"} <= keys else None


def _tokenizer_of(folder: Path) -> Any:
    """Return the tokenizer of a model in a run's directory; None without one."""
    for depth in range(_DEPTH):
        for path in sorted(folder.glob("*/" * depth + "*/tokenizer_config.json")):
            return load_tokenizer(str(path.parent.resolve()), flag="--tokenizer")
    return None


def fates_of(files: RunFiles) -> dict[str, Fate]:
    """Return the last fate of each group by its id; one without an id gets a number."""
    found: dict[str, Fate] = {}
    for path in files.fates:
        for _, fate in placed_lines(path, partial(_decoded, _fate)):
            found[fate.group or f"unnamed-{len(found)}"] = fate
    return found


class Trained:
    """What the trainer recorded. Of `trained_groups.jsonl` memory holds the places of the lines only."""

    def __init__(self, files: RunFiles) -> None:
        self._fates = fates_of(files)
        self._other = NOT_RECEIVED if files.fates else NOT_TRACED if files.trained else None
        """The fate of a group without a line."""
        self._at: dict[str, tuple[Path, int]] = {}
        """File and first byte of the last line of each group id."""
        for path in files.trained:
            for start, group in placed_lines(path, partial(_decoded, _group_id)):
                self._at[group.group_id] = (path, start)

    def has_tokens_of(self, group_id: str) -> bool:
        return group_id in self._at

    def add_to(self, view: dict[str, Any]) -> None:
        """Add the fate of a view group, and what the trainer knows of its tokens, if it has it."""
        view["fate"] = self._other
        if fate := self._fates.get(view["id"]):
            view |= {"step": fate.step, "fate": fate.fate, "loss_share": fate.loss_share}
            if isinstance(view["policy_version"], int):
                view["staleness"] = fate.step - 1 - view["policy_version"]
        place = self._at.get(view["id"])
        if place is None:
            return
        path, start = place
        with path.open("rb") as file:
            file.seek(start)
            add_training(view, _decoded(_trained_group, file.readline()))


class _TrainedSequence(msgspec.Struct):
    """A sequence of `trained_groups.jsonl`; the lists are as long as `at`, the indices of its trained tokens."""

    index: int
    skipped: str | None = None
    advantage: float | None = None
    clip_fraction: float | None = None
    logprob_gap: float | None = None
    at: list[int] = []
    logprobs: list[float | None] = []
    entropies: list[float | None] = []
    advantages: float | list[float | None] | None = None
    clipped: list[int] = []


class Fate(msgspec.Struct):
    """A line of `group_fates.jsonl`."""

    step: int
    fate: str
    loss_share: float
    group: str | None = None
    too_old_tokens: int = 0


class _GroupId(msgspec.Struct):
    group_id: str


class _TrainedGroup(_GroupId):
    step: int
    sequences: list[_TrainedSequence]
    policy_version: int | None = None


_fate = msgspec.json.Decoder(Fate)
_group_id = msgspec.json.Decoder(_GroupId)
_trained_group = msgspec.json.Decoder(_TrainedGroup)


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{line[:60]!r} is no line of a trainer: {error}") from error


def add_training(view: dict[str, Any], line: _TrainedGroup) -> None:
    """Add a trainer's line of a group to its view group: step, staleness, and figures of its sequences and tokens."""
    view["step"] = line.step
    if line.policy_version is not None:
        view["policy_version"] = line.policy_version
        view["staleness"] = line.step - 1 - line.policy_version
    reasons = [entry.skipped for entry in line.sequences]
    if view["fate"] in (None, NOT_TRACED):  # a trainer that records no fates
        view["fate"] = reasons[0] if reasons and all(reasons) else "trained"
    for entry in line.sequences:
        if 0 <= entry.index < len(view["sequences"]):
            _add_entry(view["sequences"][entry.index], entry)


def _add_entry(sequence: dict[str, Any], entry: _TrainedSequence) -> None:
    if entry.skipped:
        sequence["metrics"] = {"not trained": entry.skipped}
        return
    sequence["advantage"] = rounded(entry.advantage)
    sequence["metrics"] = {"clip_fraction": entry.clip_fraction, "logprob_gap": entry.logprob_gap}
    num_tokens = len(sequence.get("tokens") or ())
    if not all(0 <= at < num_tokens for at in entry.at):
        return  # another sequence: the file belongs to another run
    for name, values in (
        ("trainer", entry.logprobs),
        ("entropy", entry.entropies),
        ("token_advantages", entry.advantages),
        ("clipped", entry.clipped),
    ):
        if isinstance(values, list) and len(values) == len(entry.at):
            by_token: list[Any] = [None] * num_tokens
            for at, value in zip(entry.at, values, strict=True):
                by_token[at] = value if name == "clipped" else rounded(value)
            sequence[name] = by_token
