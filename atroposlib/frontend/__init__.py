"""Rollouts as HTML pages."""

__all__ = ["jsonl2html"]
