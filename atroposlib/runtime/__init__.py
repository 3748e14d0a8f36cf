"""Drives a `BaseEnv` from outside: serve to a hub, process to a file, evaluate once."""

import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]
