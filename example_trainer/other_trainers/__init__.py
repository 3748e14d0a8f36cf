"""Adapters that train on the hub's batches with other trainers; each a loop on `atroposlib.client.samples`.

Every module imports its trainer's package, which is installed beside ours: the README says which and how.
"""

__all__ = ["tinker_client", "trl_worker"]
