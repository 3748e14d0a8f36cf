"""The command `atropos`: start, render and watch a run that one YAML file describes (README.md in this folder)."""

from typing import Literal, TypeAlias, get_args

Target: TypeAlias = Literal["slurm", "kubernetes", "skypilot"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""What `atropos render` writes files for."""

__all__ = ["TARGETS", "Target", "parts", "render", "run_file", "status", "supervisor"]
