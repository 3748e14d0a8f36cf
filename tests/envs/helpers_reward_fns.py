"""A judge that hangs, for the workers of reward functions."""

from __future__ import annotations

import time


def hang_on_loop(gold: str, text: str) -> bool:
    while text == "loop":
        time.sleep(1)
    return True
