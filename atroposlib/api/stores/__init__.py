"""Stores of runs: `base` is the contract; `memory` and `disk` implement it."""

__all__ = ["base", "disk", "memory", "runs", "segments", "space", "state"]
