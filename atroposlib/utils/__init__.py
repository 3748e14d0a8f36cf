"""Utilities for authors of environments and trainers, and for this package's processes."""

__all__ = [
    "advantages",
    "best_of_n_selection",
    "cli",
    "display",
    "event_loop",
    "force_diverse_samples",
    "garbage",
    "io",
    "letter_reversal",
    "message_history_utils",
    "metrics",
    "off_loop",
    "owned_process",
    "tokenize_for_trainer",
    "tokenizers",
    "tool_call_parser",
]
