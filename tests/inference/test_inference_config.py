"""Server configuration and reasoning options."""

from __future__ import annotations

import logging

import pytest

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.manager import ServerManager, expand_configs
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.vllm import VLLMServer


def test_defaults_are_the_originals() -> None:
    config = APIServerConfig()
    assert config.model_dump(exclude={"health_wait_s", "adaptive_concurrency"}) == {
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


def test_unknown_keys_are_ignored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = APIServerConfig(base_url="http://h/v1", weight=2.0, colour="red")  # type: ignore[call-arg]
    assert not hasattr(config, "weight")
    assert "colour, weight" in caplog.text


def test_a_url_without_scheme_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="write http://localhost:9001"):
        APIServerConfig(base_url="localhost:9001")


def test_a_bare_config_means_the_four_local_ports_and_keeps_the_type() -> None:
    entries = expand_configs(ServerBaseline(model_name="m", server_type="vllm"), slurm=False)
    assert [entry.base_url for entry in entries] == [
        f"http://localhost:{port}/v1" for port in (9004, 9005, 9006, 9007)
    ]
    assert {(e.model_name, e.server_type, e.api_key) for e in entries} == {("m", "vllm", "x")}


def test_one_config_with_a_url_stays_as_it_is() -> None:
    config = APIServerConfig(base_url="http://h:1/v1", api_key="k", server_type="vllm")
    manager = ServerManager(config)
    assert [type(server) for server in manager.servers] == [VLLMServer]
    assert manager.servers[0].config is config


def test_a_training_server_without_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs base_url"):
        ServerManager([APIServerConfig(server_type="vllm")])


def test_no_servers_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="server_configs is empty"):
        ServerManager([])


def test_slurm_nodes_after_the_training_nodes_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.inference.manager.list_hostnames", lambda: ["a", "b", "c"])
    monkeypatch.setenv("NUM_TRAINING_NODES", "1")
    monkeypatch.setenv("INFER_TP", "4")
    entries = expand_configs([APIServerConfig(base_url="http://h/v1", api_key="k")], slurm=True)
    assert [(entry.base_url, entry.api_key) for entry in entries] == [
        (f"http://{host}:{port}/v1", "k") for host in "bc" for port in (9000, 9001)
    ]
    monkeypatch.setenv("INFER_TP", "four")
    with pytest.raises(ConfigError, match="INFER_TP='four' is not a whole number"):
        expand_configs([APIServerConfig(base_url="http://h/v1")], slurm=True)


def test_reasoning_is_told_to_each_api_in_its_own_words() -> None:
    body = {"max_tokens": 9, "temperature": 0.3}
    openai = ReasoningConfig(effort="high").apply(body, base_url="https://api.openai.com/v1")
    assert openai == {
        "temperature": 1.0,
        "max_completion_tokens": 9,
        "reasoning_effort": "high",
    }
    other = ReasoningConfig(max_tokens=2000).apply(body, base_url="http://h/v1")
    assert other == {**body, "reasoning": {"enabled": True, "max_tokens": 2000}}
    assert ReasoningConfig().apply(body, base_url=None) == body
    with pytest.raises(ValueError, match="'hardest'"):
        ReasoningConfig(effort="hardest")
