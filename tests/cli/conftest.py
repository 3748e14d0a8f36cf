"""A hub in this process, a tokenizer on the disk, and an environment with rollouts that it made."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.api.server import create_app
from tests.api.helpers_api import serving
from tests.cli.helpers_cli import TOKENIZER, HubServer
from tests.cli.helpers_rollouts import RIGHT, SumsFolder


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving(create_app()) as url:
        yield HubServer(url)


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def sums(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> SumsFolder:
    """The environment, in the working folder, with the reward `BUG` of a module that has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = SumsFolder(folder=tmp_path)
    made.write(score=getattr(request.module, "BUG", RIGHT))
    made.roll_out()
    return made
