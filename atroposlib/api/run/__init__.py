"""One run of the hub, without HTTP and without files: queue, batches, leases, environments, and the ledger."""

import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]
