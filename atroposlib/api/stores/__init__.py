"""Stores of runs: `base` is the contract; `memory`, `disk` and `postgres` implement it."""

__all__ = ["base", "disk", "memory", "postgres", "run_file", "runs", "space"]
