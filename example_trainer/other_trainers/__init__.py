"""Adapters that train on the hub's batches with other trainers, using `atroposlib.client.samples`.

Each module imports its trainer's package, which is installed separately: see the README.
"""

__all__ = ["tinker_client", "trl_worker"]
