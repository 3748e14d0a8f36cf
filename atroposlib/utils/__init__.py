"""Utilities for authors of environments and trainers, and for this package's processes."""

import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]
