"""Pages for people: rollouts as HTML."""

__all__ = ["jsonl2html"]
