"""The original's import paths of the inference layer, which is `atroposlib.inference`."""

import pkgutil

__all__ = [module.name for module in pkgutil.iter_modules(__path__)]
