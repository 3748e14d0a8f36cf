"""One run of the hub, without HTTP and without files: queue, batches, leases, environments, and the ledger."""

__all__ = [
    "accounts",
    "admission",
    "batching",
    "coordinator",
    "dead_letters",
    "environments",
    "experiments",
    "hub",
    "leases",
    "queue",
    "saved",
    "state",
    "sums",
    "types",
]
