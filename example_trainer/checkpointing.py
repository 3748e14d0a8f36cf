"""Checkpoints that resume a run exactly: `step_<N>/` is a model that engines can load; `training/` holds the rest.

    step_12/config.json, model.safetensors, tokenizer.json, ...
    step_12/training/state.json       step, its metrics, random states
    step_12/training/*.safetensors    float32 master weights and optimizer state, one file per process

Guarantees: a directory with this name is complete; the previous one stays until then. The newest belongs to the current
run: checkpoints of steps that a run repeats are moved aside. A checkpoint can be loaded with any number of processes.
It is taken as a copy, which another thread may write while training continues. Nothing is pickled. Called by
`training.py`.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.host_memory import free_host_bytes
from example_trainer.memory import GIB
from example_trainer.model import Policy, remove_directory, written_directory
from example_trainer.optim import stored_parts
from example_trainer.parallel import World, host_copy

logger = logging.getLogger(__name__)

FORMAT = 1
RECORDS = ("metrics.jsonl", "trained_groups.jsonl", "group_fates.jsonl")
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


class Part(NamedTuple):
    """The part of a tensor that this process holds, and the offset of each dimension in the whole."""

    tensor: Tensor
    offsets: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    save_path: Path
    world: World
    """With a control group that no other thread uses."""
    keep_last: int | None = None
    """Number to keep; None: all."""
    reference: Policy | None = None
    """A reference that changes during the run, and so is part of the state."""

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

    def take(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        experiment: str | None = None,
    ) -> Callable[[], Path]:
        """Copy the state after `step` steps, with that step's metrics; return what writes it and returns the directory.

        Every process must call both, the second in any thread while training continues; that raises AtroposError if
        the checkpoint cannot be written; earlier ones stay. The copy needs the weights and the optimizer once more in
        host memory: if that is more than half of what is free, `take` writes at once, without a copy. `experiment` is
        the hub's id of this training; only the first process needs it.
        """
        state = {
            "format": FORMAT,
            "step": step,
            "metrics": metrics,
            "experiment": experiment,
            "optimizer_has_state": bool(optimizer.state),
            "random": _random_states(),
        }
        weights = policy.gather()
        parts = _parts(_tensors(policy, optimizer, self.reference), self.world)
        num_bytes = sum(part.tensor.nbytes for part in parts.values())
        has_room = num_bytes < free_host_bytes() / 2
        if has_room:
            parts = {name: Part(host_copy(part), at) for name, (part, at) in parts.items()}

        def write() -> Path:
            target = self.directory(step)
            try:
                with written_directory(target, self.world) as directory:
                    training = directory / "training"
                    training.mkdir(exist_ok=True)
                    if self.world.is_main:
                        policy.write(directory, weights)
                        (training / "state.json").write_text(json.dumps(state), encoding="utf-8")
                    _write_parts(training / f"rank_{self.world.rank}.safetensors", parts)
            except (OSError, SafetensorError) as error:
                newest = self.directory(self.steps()[-1]).name if self.steps() else "none"
                raise AtroposError(
                    f"the checkpoint of step {step} could not be written to {target}: {error}; "
                    f"the newest there is {newest}. Make room, then --resume"
                ) from error
            return target

        if has_room:
            return write
        logger.warning(
            "training waits for the checkpoint of step %d: a copy of %.1f GiB is more than half of the free memory",
            *(step, num_bytes / GIB),
        )
        path = write()
        return lambda: path

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
            _load_tensors(training, policy, optimizer, self.reference)
        except (RuntimeError, ValueError, KeyError, checkpoint.CheckpointException) as error:
            raise ConfigError(
                f"{directory} is of another model or optimizer than configured: {str(error)[:400]}"
            ) from error
        _restore_random_states(state["random"])
        return Start(int(state["step"]), state.get("metrics"), state.get("experiment"))


def _tensors(
    policy: Policy, optimizer: torch.optim.Optimizer, reference: Policy | None = None
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name: trained parameters, their optimizer state and their reference.

    They share their memory with policy and optimizer, and none with another. Frozen parameters come from the initial
    model, settings such as the learning rate from the configuration.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(policy):
        tensors[f"model.{name}"] = parameter.detach()
        if reference is not None:
            tensors[f"reference.{name}"] = reference.model.get_parameter(name).detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            for suffix, tensor in stored_parts(value).items():
                tensors[f"optimizer.{name}.{key}{suffix}"] = tensor
    return tensors


def _trained(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a fresh optimizer create its state, by a step that changes no weight; each later one sets its own rate."""
    for settings in optimizer.param_groups:
        settings["lr"] = 0.0
        for parameter in settings["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _parts(tensors: Mapping[str, Tensor], world: World) -> dict[str, Part]:
    """Return what this process writes: its part of split tensors, and the others only in the first process."""
    parts: dict[str, Part] = {}
    for name, value in tensors.items():
        if not isinstance(value, DTensor):
            if world.is_main:
                parts[name] = Part(value, [0] * value.dim())
        elif value.to_local().numel() or world.is_main:
            [chunk] = value.__create_chunk_list__()
            parts[name] = Part(value.to_local(), list(chunk.offsets))
    return parts


def _write_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Write a file for torch's `HuggingFaceStorageReader`; torch's own writer would hold the interpreter lock."""
    offsets = {name: {"saved_offsets": part.offsets} for name, part in parts.items()}
    tensors = {name: part.tensor.contiguous() for name, part in parts.items()}
    save_file(tensors, path, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})


def _load_tensors(
    directory: Path, policy: Policy, optimizer: torch.optim.Optimizer, reference: Policy | None
) -> None:
    reader = checkpoint.HuggingFaceStorageReader(str(directory))
    stored = reader.read_metadata().state_dict_metadata
    for name, parameter in _trained(policy):
        if not any(key.startswith(f"optimizer.{name}.") for key in stored):
            # It never had a gradient, as an expert that was never routed to.
            optimizer.state.pop(parameter, None)
        if f"reference.{name}" not in stored:
            reference = None  # a run that did not refresh it: it is the initial model
    tensors = _tensors(policy, optimizer, reference)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a single process
        checkpoint.load(tensors, storage_reader=reader, no_dist=policy.world.size == 1)


def _random_states() -> dict[str, list[int]]:
    """Return torch's: a step draws from no other generator."""
    states = {"torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))
