"""The command `atropos`: start, render and watch a run that one YAML file describes (README.md in this folder)."""

__all__ = ["parts", "render", "run_file", "status", "supervisor"]
