"""One evaluation over items, and the directory of one `evaluate` command.

The directory holds evaluate_config.yaml, versions.json, samples.jsonl (lines are appended as items finish), and at the
end metrics.json and samples.html. Invariant: samples.jsonl without metrics.json is an evaluation in progress or
interrupted; `EvalRun(is_resumed=True)` continues it without repeating or losing an item. It computes no metrics.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import logging
import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self, TypeAlias

import yaml

from atroposlib.errors import ConfigError
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.utils.files import replace_file
from atroposlib.utils.json_lines import read_lines

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.json"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "evaluate_config.yaml"
VERSIONS_FILE = "versions.json"
PAGE_FILE = "samples.html"

INDEX_KEYS = ("item_index", "item_hash", "num_samples", "sample_index")
"""Keys that `evaluate_items` adds to a sample."""

Sample: TypeAlias = dict[str, Any]

_MAY_CHANGE = frozenset(
    {
        *("data_dir_to_save_evals", "max_eval_workers", "max_num_workers", "rollout_server_url"),
        *("max_num_workers_per_node", "num_reward_workers", "use_wandb", "wandb_name"),
    }
)
"""Settings of the environment that do not affect its answers or scores."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class EvalRun:
    """The directory of one `evaluate` command."""

    def __init__(
        self,
        folder: str | Path | None,
        *,
        name: str = "",
        config: str,
        is_resumed: bool = False,
        rescored: Sequence[Sample] | None = None,
    ) -> None:
        """Write nothing yet; refuse (ConfigError) a resumed run with other settings.

        Without a `folder`, entering makes a directory in `evals/` that has the evaluation's `name` and the time.
        `config` is the configuration as YAML, with secrets masked.
        """
        self._is_dated = not folder
        self.folder = Path(folder) if folder else _dated_folder(name)
        self.rescored = rescored
        """Samples of another evaluation that are scored again; None: new ones are made."""
        self.num_items = 0
        """Items of the calls of `evaluate_items` so far; numbers the items of the next one."""
        self.num_done = 0
        """Items whose samples are in the file."""
        self._config = config
        self._is_resumed = is_resumed
        self._stored: dict[int, list[Sample]] = {}
        if is_resumed:
            _refuse_other_settings(self.folder, config)

    def __enter__(self) -> Self:
        """Create the directory with configuration and versions; read the complete items of a resumed one.

        Earlier results in a directory that is not resumed are kept under a number. ConfigError if another process has
        it open.
        """
        first = self.folder
        for number in itertools.count(2):
            try:
                self.folder.mkdir(parents=True, exist_ok=not self._is_dated)
                break
            except FileExistsError:
                if not self._is_dated:
                    raise ConfigError(f"{self.folder} is not a directory") from None
                # Another evaluation began in the same second.
                self.folder = first.with_name(f"{first.name}-{number}")
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._prepare()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"{self.folder}: another process is evaluating there") from error
            raise
        return self

    def _prepare(self) -> None:
        path = self.folder / SAMPLES_FILE
        if self._is_resumed:
            self._stored = _complete_items(path)
            replace_file(path, "".join(map(lines_of, self._stored.values())))
            (self.folder / METRICS_FILE).unlink(missing_ok=True)
            logger.info("resumed: %d items are in %s", len(self._stored), path)
        else:
            names = (METRICS_FILE, SAMPLES_FILE, CONFIG_FILE, VERSIONS_FILE, PAGE_FILE)
            keep_earlier(self.folder, names)
            replace_file(self.folder / CONFIG_FILE, self._config)
            replace_file(self.folder / VERSIONS_FILE, json.dumps(_versions(), indent=2) + "\n")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        os.close(self._lock)
        if kind is not None and self.num_done:
            logger.warning(
                "not finished: %d of %d items are in %s; to continue: evaluate --resume %s",
                self.num_done,
                self.num_items,
                self.folder / SAMPLES_FILE,
                self.folder,
            )

    def take_stored(self, index: int, item_hash: str) -> list[Sample] | None:
        """Return the samples of an item that was finished before the resume; ConfigError if it was another item."""
        samples = self._stored.pop(index, None)
        if samples is not None and samples[0].get("item_hash") != item_hash:
            raise ConfigError(
                f"--resume {self.folder}: the data has changed: item {index} is not the one in {SAMPLES_FILE}; "
                "start a new evaluation"
            )
        return samples

    def add(self, samples: Sequence[Sample]) -> None:
        with (self.folder / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(lines_of(samples))
        self.num_done += 1


async def evaluate_items(
    items: Sequence[Any],
    measure: Callable[[Any], Awaitable[Sample | Sequence[Sample]]],
    *,
    run: EvalRun | None,
    max_workers: int,
) -> list[Sample]:
    """Call `measure` for every item, `max_workers` at a time, and return the samples in order of the items.

    `measure` returns one sample or several. Each gets the keys `item_index`, `item_hash`, `sample_index` and
    `num_samples` (of its item). With a run they are appended to its file as soon as their item is finished; items that
    are in a resumed file are not measured. An exception in one item cancels the others.
    """
    first = 0
    stored: dict[int, list[Sample]] = {}
    hashes = [hash_of(item) for item in items]
    if run is not None:
        first = run.num_items
        run.num_items += len(items)
        for index, item_hash in enumerate(hashes, start=first):
            if (samples := run.take_stored(index, item_hash)) is not None:
                stored[index] = samples
        run.num_done += len(stored)
    limit = asyncio.Semaphore(max(1, max_workers))

    async def samples_of(index: int, item: Any, item_hash: str) -> list[Sample]:
        if index in stored:
            return stored[index]
        async with limit:
            measured = await measure(item)
        found = [measured] if isinstance(measured, Mapping) else measured
        keys = {"item_index": index, "item_hash": item_hash, "num_samples": len(found)}
        samples = [{**sample, **keys, "sample_index": i} for i, sample in enumerate(found)]
        if run is not None:
            run.add(samples)
        return samples

    per_item = await run_together(
        [
            samples_of(index, item, item_hash)
            for index, (item, item_hash) in enumerate(zip(items, hashes, strict=True), start=first)
        ]
    )
    return [sample for samples in per_item for sample in samples]


def _dated_folder(name: str) -> Path:
    plain_name = re.sub(r"[^\w.-]+", "_", name)
    return Path("evals", f"{plain_name}-{time.strftime('%Y%m%d-%H%M%S')}")


def hash_of(item: Any) -> str:
    """Return 16 hexadecimal digits that depend on the item's content alone, also in another process.

    >>> hash_of({"question": "1+1"}) == hash_of({"question": "1+1"}) != hash_of({"question": "1+2"})
    True
    """
    text = json.dumps(item, skipkeys=True, default=_stable)
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16]


def read_config(folder: Path) -> str:
    """Return the configuration of the evaluation in a directory, as YAML; ConfigError if there is none."""
    try:
        return (folder / CONFIG_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder}: there is no {CONFIG_FILE}; give a directory that evaluate made"
        ) from error


def stored_samples(path: Path) -> list[Sample]:
    """Return the samples in a file, or in the directory of an evaluation, in order of their items.

    ConfigError if the file cannot be read, or has no samples or one that does not name its item.
    """
    source = path / SAMPLES_FILE if path.is_dir() else path
    samples = _read_samples(source)
    if not samples:
        raise ConfigError(f"{source}: the file has no samples")
    return sorted(samples, key=lambda sample: int(sample["item_index"]))


def keep_earlier(folder: Path, names: Sequence[str]) -> None:
    """Rename the existing files; those of one evaluation get the same number, the oldest evaluation 1."""
    existing = [name for name in names if (folder / name).exists()]
    if not existing:
        return
    number = 1
    while any(_numbered(folder / name, number).exists() for name in names):
        number += 1
    for name in existing:
        (folder / name).rename(_numbered(folder / name, number))
    logger.info(
        "%s: earlier results are kept as *_%d; without a number is the latest", folder, number
    )


def lines_of(samples: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(sample, default=plain) + "\n" for sample in samples)


def plain(value: Any) -> Any:
    """Convert numpy and torch values to numbers and lists, any other value to its text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)


def _stable(value: Any) -> Any:
    """Like `plain`; the order of a set differs between processes."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else plain(value)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}_{number}{path.suffix}")


def _read_samples(path: Path) -> list[Sample]:
    """Return the samples of a file without a line cut off by a kill; ConfigError if one does not name its item."""
    samples = list(read_lines(path))
    if not all("item_index" in sample for sample in samples):
        raise ConfigError(
            f"{path}: the samples do not name their items: evaluate() did not use evaluate_items"
        )
    return samples


def _complete_items(path: Path) -> dict[int, list[Sample]]:
    """Return the items of which all samples are in the file, by index; {} without a file."""
    by_item: dict[int, list[Sample]] = defaultdict(list)
    for sample in _read_samples(path) if path.exists() else ():
        by_item[sample["item_index"]].append(sample)
    return {
        index: samples
        for index, samples in by_item.items()
        if len(samples) == samples[0]["num_samples"]
    }


def _refuse_other_settings(folder: Path, config: str) -> None:
    """Raise ConfigError if a setting that affects answers or scores is not that of the directory."""
    before, now = (yaml.safe_load(_ADDRESS.sub("", text)) for text in (read_config(folder), config))
    if not isinstance(before, Mapping):
        raise ConfigError(f"--resume {folder}: {CONFIG_FILE} is not a configuration")
    changes = [
        f"{section}.{name}: {was!r} -> {values[name]!r}"
        for section, values in _settings(now).items()
        for name, was in _settings(before).get(section, {}).items()
        if name in values and values[name] != was
    ]
    if changes:
        raise ConfigError(
            f"--resume {folder}: other settings would mix two evaluations: {'; '.join(changes)}"
        )


def _settings(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what affects the result: the environment's settings, and the models of every section of servers."""
    env = {k: v for k, v in document.get("env", {}).items() if k not in _MAY_CHANGE}
    servers = {
        section: {"model_name": [server.get("model_name") for server in listed]}
        for section, listed in document.items()
        if isinstance(listed, list)
    }
    return {"env": env, **servers}


def _versions() -> dict[str, Any]:
    packages = {dist.name: dist.version for dist in metadata.distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }
