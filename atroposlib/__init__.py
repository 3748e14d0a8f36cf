"""Reinforcement-learning environments for language models.

Importing this package loads nothing heavy. The README's reading order says where to start.
"""

__version__ = "0.5.0"

__all__ = ["__version__"]
