"""`view-run-multimodal`: `view-run` for groups with images, in their `images` or as data URIs in their text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atroposlib.cli.view_run import ViewConfig, run
from atroposlib.errors import cli_boundary


class ViewMultimodalConfig(ViewConfig):
    """Flags of `view-run-multimodal`."""

    tokenizer: str = "Qwen/Qwen2-VL-2B-Instruct"
    """Name or path."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; 2 for a wrong flag, 1 without the extra `view`."""
    return cli_boundary(
        lambda: run(argv, ViewMultimodalConfig, prog="view-run-multimodal", images=True)
    )


if __name__ == "__main__":
    sys.exit(main())
