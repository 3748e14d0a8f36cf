"""A hub in this process, and a tokenizer on the disk."""

from collections.abc import Iterator

import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.cli.helpers_cli import TOKENIZER, HubServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving(create_app()) as url:
        yield HubServer(url)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return str(path)
