"""Read written pages as the viewer does."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple


class Page(NamedTuple):
    head: dict[str, Any]
    columns: dict[str, Any]
    chunks: list[dict[str, Any]]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for chunk in self.chunks for group in chunk["groups"]]


def read_page(path: Path) -> Page:
    """Read a page's data as the viewer does."""
    text = path.read_text(encoding="utf-8")
    found = dict(re.findall(r'<script type="[^"]*" id="([^"]*)">([^<]*)</script>', text))
    unpacked = {
        name: json.loads(gzip.decompress(base64.b64decode(packed)))
        for name, packed in found.items()
        if name != "head"
    }
    chunks = [unpacked[f"chunk-{i}"] for i in range(len(unpacked) - 1)]
    return Page(json.loads(found["head"]), unpacked["index"], chunks)
