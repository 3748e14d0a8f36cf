"""The inference layer: chat calls become token sequences with masks and logprobs attached.

Environments reach it through `BaseEnv.server`, a `ServerManager`. Nothing here knows rewards, groups or the hub.
"""

__all__ = ["config", "harness", "manager", "scripted_engine", "servers", "sessions", "tools"]
