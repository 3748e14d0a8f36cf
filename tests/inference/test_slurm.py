"""Finding the inference servers of a SLURM job."""

from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.manager import ServerManager, expand_configs
from atroposlib.inference.slurm import inference_urls, list_hostnames


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A job of four nodes, two of which train."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames n[0-3]" ] && printf "n%s\\n" 0 1 2 3\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-3]")
    monkeypatch.setenv("NUM_TRAINING_NODES", "2")
    monkeypatch.delenv("INFER_TP", raising=False)
    return monkeypatch


def urls_of(manager: ServerManager) -> list[str | None]:
    return [server.config.base_url for server in manager.servers]


def test_hosts_come_from_scontrol(job: pytest.MonkeyPatch) -> None:
    assert list_hostnames() == ["n0", "n1", "n2", "n3"]
    job.delenv("SLURM_JOB_NODELIST")
    assert list_hostnames() == []


def test_scontrol_that_fails_is_a_configuration_error(job: pytest.MonkeyPatch) -> None:
    job.setenv("SLURM_JOB_NODELIST", "other[0-3]")
    with pytest.raises(ConfigError, match=r"'other\[0-3\]' but its hosts cannot be listed"):
        list_hostnames()
    job.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="cannot be listed"):
        list_hostnames()


@pytest.mark.parametrize(("infer_tp", "num_ports"), [(None, 8), ("1", 8), ("2", 4), ("8", 1)])
def test_infer_tp_gpus_form_one_server(
    job: pytest.MonkeyPatch, infer_tp: str | None, num_ports: int
) -> None:
    if infer_tp is not None:
        job.setenv("INFER_TP", infer_tp)
    assert inference_urls(["n0", "n1", "n2"]) == [
        f"http://n2:{9000 + i}/v1" for i in range(num_ports)
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("INFER_TP", "16", "more than the 8 GPUs of a node"),
        ("INFER_TP", "0", "must be at least 1"),
        ("INFER_TP", "two", "not a whole number"),
        ("NUM_TRAINING_NODES", "-1", "must be at least 0"),
        ("NUM_TRAINING_NODES", "4", "leaves none of the job's 4 nodes"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    job: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    job.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        inference_urls(list_hostnames())


def test_number_of_training_nodes_must_be_known(job: pytest.MonkeyPatch) -> None:
    job.delenv("NUM_TRAINING_NODES")
    with pytest.raises(ConfigError, match="NUM_TRAINING_NODES must be set"):
        inference_urls(list_hostnames())
    job.setenv("NUM_TRAINING_NODES", "0")
    assert len(inference_urls(list_hostnames())) == 32


def test_a_bare_config_in_a_job_means_the_servers_of_the_job(job: pytest.MonkeyPatch) -> None:
    job.setenv("INFER_TP", "4")
    manager = ServerManager(ServerBaseline(model_name="m", server_type="vllm", timeout=7))
    assert urls_of(manager) == [f"http://{h}:{p}/v1" for h in ("n2", "n3") for p in (9000, 9001)]
    assert {(s.config.model_name, s.config.timeout) for s in manager.servers} == {("m", 7)}


def test_a_list_is_copied_to_the_servers_of_the_job_only_when_slurm_is_set(
    job: pytest.MonkeyPatch,
) -> None:
    job.setenv("INFER_TP", "8")
    given = [
        APIServerConfig(base_url=f"http://h{i}/v1", api_key="k", health_check=False)
        for i in range(2)
    ]
    assert expand_configs(given, slurm=False) == given
    found = expand_configs(given, slurm=True)
    assert [config.base_url for config in found] == ["http://n2:9000/v1", "http://n3:9000/v1"]
    assert {(config.api_key, config.health_check) for config in found} == {("k", False)}


def test_slurm_outside_a_job_keeps_the_servers_as_given(job: pytest.MonkeyPatch) -> None:
    job.delenv("SLURM_JOB_NODELIST")
    given = [APIServerConfig(base_url="http://h/v1")]
    assert expand_configs(given, slurm=True) == given


def test_one_server_with_a_url_keeps_it_in_a_job_too(job: pytest.MonkeyPatch) -> None:
    assert urls_of(ServerManager(APIServerConfig(base_url="http://h:1/v1"))) == ["http://h:1/v1"]
