"""Server configuration and reasoning options."""

from __future__ import annotations

import logging

import pytest

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig
from atroposlib.inference.manager import ServerManager


def test_defaults_are_the_originals() -> None:
    originals = {
        "timeout": 1200,
        "num_max_requests_at_once": 512,
        "num_requests_for_eval": 64,
        "model_name": "default",
        "rolling_buffer_length": 1000,
        "server_type": "openai",
        "tokenizer_name": "none",
        "api_key": "",
        "base_url": "",
        "n_kwarg_is_ignored": False,
        "health_check": True,
    }
    assert APIServerConfig().model_dump(include=set(originals)) == originals


def test_unknown_keys_are_ignored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = APIServerConfig(base_url="http://h/v1", weight=2.0, colour="red")  # type: ignore[call-arg]
    assert not hasattr(config, "weight")
    assert "colour, weight" in caplog.text


def test_a_url_without_scheme_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="write http://localhost:9001"):
        APIServerConfig(base_url="localhost:9001")


def test_a_training_server_without_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs base_url"):
        ServerManager([APIServerConfig(server_type="vllm")])


def test_no_servers_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="server_configs is empty"):
        ServerManager([])
