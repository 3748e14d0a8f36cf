"""Where queued payloads live: `base` is the contract, `memory` keeps them in the process."""

__all__ = ["base", "disk", "memory", "runs", "segments", "space", "state"]
