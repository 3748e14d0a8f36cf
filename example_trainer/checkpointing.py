"""Checkpoints that resume a run exactly: `step_<N>/` is a model that engines can load; `training/` holds the rest.

    step_12/config.json, model.safetensors, tokenizer.json, ...
    step_12/training/state.json       step, its metrics, random states
    step_12/training/*.safetensors    float32 master weights and optimizer state, one file per process

Guarantees: a directory with this name is complete; the previous one stays until then. The newest belongs to the current
run: checkpoints of steps that a run repeats are moved aside. A checkpoint can be loaded with any number of processes.
Nothing is pickled. Called by `training.py`.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import checkpoint

from atroposlib.errors import AtroposError, ConfigError
from example_trainer.model import Policy, remove_directory, written_directory
from example_trainer.optim import stored_parts
from example_trainer.parallel import World

logger = logging.getLogger(__name__)

FORMAT = 1
RECORDS = ("metrics.jsonl", "trained_groups.jsonl")
_STEP = re.compile(r"step_(\d+)$")
_UNFINISHED = re.compile(r"\.(step_\d+|final_model|final_adapter)-")
"""Left by a killed process: a directory half written or half removed."""


class Start(NamedTuple):
    """State from which a run starts."""

    step: int
    metrics: dict[str, Any] | None = None
    """Metrics of the last step, if its checkpoint has them."""
    experiment: str | None = None
    """The hub's id of the resumed training; None for a new run, or if the checkpoint has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    save_path: Path
    world: World
    keep_last: int | None = None
    """Number to keep; None: all."""

    def begin(self, start: int, *, is_resumed: bool = False) -> None:
        """Prepare the directory for a run that continues after step `start`; every process must call it.

        `is_resumed`: the records are this run's own, also before its first checkpoint. Removes directories that a
        killed process left, and checkpoints beyond `keep_last`. Moves checkpoints of later steps to `earlier_run_<n>/`,
        with copies of the records, which lose the steps that this run repeats: it must not resume from the abandoned
        run. Raises ConfigError if the directory cannot be changed.
        """
        if self.world.is_main and self.save_path.is_dir():
            try:
                self._tidy(start, is_another=start == 0 and not is_resumed)
            except OSError as error:
                raise ConfigError(f"--save_path {self.save_path}: {error.strerror}") from error
        self.world.barrier()

    def _tidy(self, start: int, *, is_another: bool) -> None:
        for path in list(self.save_path.iterdir()):
            if _UNFINISHED.match(path.name):
                remove_directory(path)
        later = [step for step in self.steps() if step > start]
        records = [path for name in RECORDS if (path := self.save_path / name).is_file()]
        if later or (is_another and any(path.stat().st_size for path in records)):
            self._set_aside(later, records)
        self.remove_old()

    def _set_aside(self, steps: list[int], records: list[Path]) -> None:
        names = (self.save_path / f"earlier_run_{number}" for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        aside.mkdir()
        for step in reversed(steps):
            self.directory(step).rename(aside / f"step_{step}")
        for path in records:
            shutil.copy2(path, aside)
        logger.warning(
            "steps that this run takes again are now in %s: %s (--resume resumes from the newest checkpoint)",
            aside,
            ", ".join([f"step_{step}" for step in steps] or [path.name for path in records]),
        )

    def save(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        experiment: str | None = None,
    ) -> Path:
        """Write the state after `step` steps, with that step's metrics, and return the directory.

        `experiment` is the hub's id of this training; only the first process needs it. Every process must call this.
        Raises AtroposError if the checkpoint cannot be written; earlier ones stay.
        """
        target = self.directory(step)
        try:
            with written_directory(target, self.world) as directory:
                policy.write(directory)
                training = directory / "training"
                _save_tensors(training, _tensors(policy, optimizer), world=self.world)
                if self.world.is_main:
                    state = {
                        "format": FORMAT,
                        "step": step,
                        "metrics": metrics,
                        "experiment": experiment,
                        "optimizer_has_state": bool(optimizer.state),
                        "random": _random_states(),
                    }
                    (training / "state.json").write_text(json.dumps(state), encoding="utf-8")
        except (OSError, SafetensorError, checkpoint.CheckpointException) as error:
            newest = self.directory(self.steps()[-1]).name if self.steps() else "none"
            raise AtroposError(
                f"the checkpoint of step {step} could not be written to {target}: {_reason(error)}; "
                f"the newest there is {newest}. Make room, then --resume"
            ) from error
        return target

    def remove_old(self) -> None:
        """Remove all but the last `keep_last` checkpoints; call it after reporting the newest to the hub."""
        if self.keep_last is None or not self.world.is_main:
            return
        for step in self.steps()[: -self.keep_last]:
            # Renamed first: after a crash, `step_<N>` must not be incomplete.
            dying = self.save_path / f".step_{step}-removed"
            remove_directory(dying)
            self.directory(step).rename(dying)
            remove_directory(dying)

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint to resume from, ascending."""
        if not self.save_path.is_dir():
            return []
        found = [_STEP.match(path.name) for path in self.save_path.iterdir()]
        steps = sorted(int(match[1]) for match in found if match)
        return [s for s in steps if (self.directory(s) / "training/state.json").is_file()]

    def directory(self, step: int) -> Path:
        return self.save_path / f"step_{step}"

    def load(self, directory: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Start:
        """Load model and optimizer state; raise ConfigError if the checkpoint does not fit."""
        training = directory / "training"
        try:
            state = json.loads((training / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory} cannot be resumed from: {error}") from error
        if state.get("format") != FORMAT:
            raise ConfigError(
                f"{directory} has checkpoint format {state.get('format')}, this trainer reads {FORMAT}"
            )
        if state["optimizer_has_state"]:
            _make_state(optimizer)
        try:
            _load_tensors(training, policy, optimizer, world=self.world)
        except (RuntimeError, ValueError, KeyError, checkpoint.CheckpointException) as error:
            raise ConfigError(
                f"{directory} is of another model or optimizer than configured: {str(error)[:400]}"
            ) from error
        _restore_random_states(state["random"])
        return Start(int(state["step"]), state.get("metrics"), state.get("experiment"))


def _reason(error: BaseException) -> str:
    if isinstance(error, checkpoint.CheckpointException):  # its text is one traceback per process
        error = next(iter(error.failures.values()))[0]
    return str(error)


def _tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name: trained parameters and their optimizer state.

    They share their memory with policy and optimizer, and none with another.

    Frozen parameters come from the initial model, settings such as the learning rate from the configuration.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(policy):
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            for suffix, tensor in stored_parts(value).items():
                tensors[f"optimizer.{name}.{key}{suffix}"] = tensor
    return tensors


def _trained(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a fresh optimizer create its state, by a step that changes no weight."""
    rates = [settings["lr"] for settings in optimizer.param_groups]
    for settings in optimizer.param_groups:
        settings["lr"] = settings["lr"] and 0.0
        for parameter in settings["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for settings, rate in zip(optimizer.param_groups, rates, strict=True):
        settings["lr"] = rate


def _save_tensors(directory: Path, tensors: dict[str, Tensor], *, world: World) -> None:
    writer = checkpoint.HuggingFaceStorageWriter(str(directory), save_distributed=True)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process
        checkpoint.save(tensors, storage_writer=writer, no_dist=world.size == 1)


def _load_tensors(
    directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, *, world: World
) -> None:
    reader = checkpoint.HuggingFaceStorageReader(str(directory))
    stored = reader.read_metadata().state_dict_metadata
    for name, parameter in _trained(policy):
        if not any(key.startswith(f"optimizer.{name}.") for key in stored):
            # It never had a gradient, as an expert that was never routed to.
            optimizer.state.pop(parameter, None)
    tensors = _tensors(policy, optimizer)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process
        checkpoint.load(tensors, storage_reader=reader, no_dist=world.size == 1)


def _random_states() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
