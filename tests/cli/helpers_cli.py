"""Groups of text, and a hub that takes them."""

from collections.abc import Sequence
from typing import Any

import httpx

from tests.api.helpers_api import registration
from tests.tiny_model import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


def text_group(
    prompt: str, answers: Sequence[str], scores: Sequence[float], **more: Any
) -> dict[str, Any]:
    """Make a group of answers to one prompt; only the answers are trained."""
    start = TOKENIZER.encode(prompt)
    rows = [TOKENIZER.encode(answer) for answer in answers]
    return {
        "tokens": [start + row for row in rows],
        "masks": [[-100] * len(start) + row for row in rows],
        "scores": list(scores),
        **more,
    }


class HubServer:
    """A real hub; `send` puts groups into its queue as an environment would."""

    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, *groups: dict[str, Any]) -> None:
        httpx.post(f"{self.url}/scored_data_list", json=groups).raise_for_status()

    def register(self, **changes: Any) -> None:
        httpx.post(f"{self.url}/register", json=registration(**changes)).raise_for_status()

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}").raise_for_status().json()
