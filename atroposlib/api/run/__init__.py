"""One run of the hub, without HTTP and without files: queue, batches, leases, environments, and the ledger."""
