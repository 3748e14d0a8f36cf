"""Groups as HTML pages: one viewer for files, runs, evaluations and a hub."""

__all__ = ["jsonl2html", "page"]
