"""The hub over HTTP: the table of routes, rights, limits, bodies and metrics."""

import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]
