"""`view-run-multimodal`: `view-run` with a tokenizer of a model that reads images, as in the original.

Both commands show images: those of a group's `images`, and data URIs in its messages and texts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from atroposlib.cli.view_run import ViewConfig, run
from atroposlib.errors import cli_boundary


class ViewMultimodalConfig(ViewConfig):
    tokenizer: str = "Qwen/Qwen2-VL-2B-Instruct"
    """Name or path. For stored files the default is that of a model in the directory, if there is one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; 2 for a wrong flag or file, 1 without the extra `view`."""
    return cli_boundary(lambda: run(argv, ViewMultimodalConfig, prog="view-run-multimodal"))


if __name__ == "__main__":
    sys.exit(main())
