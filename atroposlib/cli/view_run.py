"""`view-run` shows the groups of a run in the browser: prompt, completions, scores.

By default it only reads: it shows the group that was queued last and takes nothing from the trainer. With `--consume`
it acts as the trainer, like the original viewer: shown batches are consumed. Needs the extra `view`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.cli._group_page import note, page_of
from atroposlib.cli._rows import Decode, decoder
from atroposlib.client import TrainerClient, TrainerNotRegistered, TrainerRegistration
from atroposlib.config import parse_flags
from atroposlib.errors import AtroposError, GroupError, HubError, HubRejected, cli_boundary, require
from atroposlib.scored_data import ScoredGroup

GROUPS_PER_STEP = 8
RETRY_FOR_S = 3.0
"""Short, because a person waits for the page."""


class ViewConfig(BaseModel):
    """Flags of `view-run`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    api_url: str = "http://localhost:8000"
    """Address of the hub."""
    host: str = "127.0.0.1"
    """Address to serve the page on."""
    port: int = Field(default=9001, ge=0, le=65535)
    """Port to serve the page on."""
    tokenizer: str = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    """Name or path."""
    consume: bool = False
    """Take batches as a trainer does, instead of only reading."""
    group_size: int = Field(default=2, ge=1)
    """With --consume: sequences per group."""
    max_token_len: int = Field(default=2048, ge=1)
    """With --consume: longest sequence."""
    share: bool = False
    """Publish the page through Gradio's servers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C; 2 for a wrong flag, 1 without the extra `view`."""
    return cli_boundary(lambda: run(argv, ViewConfig, prog="view-run", images=False))


def run(argv: Sequence[str] | None, model: type[ViewConfig], *, prog: str, images: bool) -> int:
    config = parse_flags(
        model, argv, prog=prog, description="Show the groups of a run in the browser."
    )
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    gradio = require("gradio", extra="view")
    decode = decoder(config.tokenizer)
    with TrainerClient(config.api_url, retry_for_s=RETRY_FOR_S) as hub:
        page = build_page(
            gradio, lambda: read_page(hub, config, decode, images=images), config=config
        )
        try:
            page.launch(
                server_name=config.host, server_port=config.port or None, share=config.share
            )
        except OSError as e:  # gradio's message does not name the flag
            raise AtroposError(
                f"cannot serve the page on {config.host}:{config.port}: {e}; choose another --port"
            ) from e
    return 0


def build_page(gradio: Any, read: Callable[[], str], *, config: ViewConfig) -> Any:
    """Build the page; `read` returns its content."""
    what = "Take the next batch" if config.consume else "Show the group queued last"
    with gradio.Blocks(title="Atropos run", analytics_enabled=False) as page:
        gradio.Markdown(f"## Run at {config.api_url}")
        button = gradio.Button(what, variant="primary")
        shown = gradio.HTML()
        button.click(read, outputs=shown)
        if not config.consume:
            page.load(read, outputs=shown)
    return page


def read_page(hub: TrainerClient, config: ViewConfig, decode: Decode, *, images: bool) -> str:
    """Return the page's content, or a note with the error."""
    try:
        found = _take(hub, config) if config.consume else [hub.latest_example()]
    except (HubError, GroupError) as e:
        return note(f"Cannot read from the hub: {e}")
    groups = [group for group in found if group is not None]
    if not groups:
        return note("There is no group yet. Try again when the environments have sent some.")
    return page_of(groups, decode, images=images)


def _take(hub: TrainerClient, config: ViewConfig) -> list[ScoredGroup]:
    try:
        batch = hub.lease_batch()
    except TrainerNotRegistered:
        hub.register(
            TrainerRegistration(
                batch_size=config.group_size * GROUPS_PER_STEP,
                max_token_len=config.max_token_len,
                checkpoint_dir="checkpoints",
                save_checkpoint_interval=0,
                starting_step=0,
                num_steps=-1,
            )
        )
        batch = hub.lease_batch()
    if batch is None:
        return []
    try:
        hub.ack(batch)
    except HubRejected as e:
        print(f"the hub may deliver these groups again: {e}", file=sys.stderr)
    return batch.groups


if __name__ == "__main__":
    sys.exit(main())
