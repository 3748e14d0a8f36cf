"""One run of the hub, without HTTP and without files: queue, batches, leases, environments, and the ledger."""

__all__ = [
    "admission",
    "backlog",
    "batching",
    "coordinator",
    "dead_letters",
    "environments",
    "experiments",
    "explaining",
    "hub",
    "leases",
    "queue",
    "signals",
    "sums",
    "types",
]
