"""Which engine and which bridge a configuration makes."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from atroposlib.errors import ConfigError
from example_trainer.bridges import CheckpointBridge, make_bridge
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.running import LoraBridge, ReloadBridge
from example_trainer.bridges.transfer import TransferBridge
from example_trainer.config import TrainerConfig
from example_trainer.model import load_policy
from example_trainer.vllm_process import (
    UNIPROC,
    make_engine,
    require_gpu_for_engine,
    shares_gpu,
    transfer_backend,
)
from example_trainer.weights import WeightsDirectory
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_models import make_model


def command_of(model: Path | str = "org/name", **settings: Any) -> list[str]:
    config = TrainerConfig(model_name=str(model), device="cpu", vllm_port=9123, **settings)
    return make_engine(config, Path("/weights/version_3")).argv


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_the_local_engine_computes_in_the_trainers_dtype() -> None:
    command = command_of(engine="local", seed=4)
    assert "atroposlib.engine" in command
    assert value_of(command, "--model") == "/weights/version_3"
    assert value_of(command, "--served_model_name") == "org/name"
    assert (value_of(command, "--dtype"), value_of(command, "--device")) == ("float32", "cpu")
    assert (value_of(command, "--port"), value_of(command, "--seed")) == ("9123", "4")


def test_vllm_runs_in_its_own_python_and_keeps_the_models_name() -> None:
    command = command_of(engine="vllm", vllm_python="/venv/bin/python", max_model_len=77)
    assert command[0] == "/venv/bin/python"
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert value_of(command, "--model") == "/weights/version_3"
    assert value_of(command, "--served-model-name") == "org/name"
    assert (value_of(command, "--host"), value_of(command, "--port")) == ("127.0.0.1", "9123")
    assert (value_of(command, "--dtype"), value_of(command, "--max-model-len")) == ("float32", "77")


@pytest.mark.parametrize(
    ("settings", "expected", "lacks"),
    [
        (
            {"gpu_memory_utilization": 0.5},
            {"--distributed-executor-backend": UNIPROC, "--logprobs-mode": "processed_logprobs"},
            {"--gpu-memory-utilization", "--enable-lora"},
        ),
        ({"logprobs_mode": "raw"}, {"--enforce-eager": ""}, {"--logprobs-mode"}),
        ({"bridge": "restart", "lora": True}, {}, {"--enable-lora", "--max-lora-rank"}),
        (
            {"bridge": "transfer", "transfer_backend": "ipc"},
            {"--weight-transfer-config": '{"backend": "ipc"}'},
            set(),
        ),
        ({"bridge": "reload"}, {}, {"--weight-transfer-config"}),
    ],
)
def test_vllm_on_the_cpu_is_started_with_the_flags_of_its_bridge(
    settings: dict[str, Any], expected: dict[str, str], lacks: set[str]
) -> None:
    command = command_of(engine="vllm", **settings)
    assert lacks.isdisjoint(command)
    for flag, value in expected.items():
        assert flag in command
        assert value in ("", value_of([*command, ""], flag))


def test_vllm_is_started_for_the_rank_of_the_adapters_that_are_written(tmp_path: Path) -> None:
    """It is twice `lora_r` for experts, whose matrices `gate_proj` and `up_proj` are one for transformers."""
    dense = make_tiny_model(tmp_path / "dense")
    experts = make_model(Qwen3MoeConfig, tmp_path / "experts")
    for model, targets, expected in (
        (dense, ["gate_proj"], 40),
        (experts, ["q_proj"], 40),
        (experts, ["q_proj", "gate_proj", "up_proj", "down_proj"], 80),
    ):
        settings: dict[str, Any] = {"bridge": "lora", "lora_r": 40, "lora_target_modules": targets}
        command = command_of(model, engine="vllm", **settings)
        config = TrainerConfig(model_name=str(model), device="cpu", **settings)
        load_policy(config).save(tmp_path / "adapter")
        written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert max(written["r"], *written["rank_pattern"].values(), 0) == expected
        assert value_of(command, "--max-lora-rank") == {40: "64", 80: "128"}[expected]
        assert value_of(command, "--max-loras") == "1"
    with pytest.raises(ConfigError, match="--lora_r makes adapters of rank 514.*512"):
        command_of(experts, engine="vllm", **settings | {"lora_r": 257})


@pytest.mark.parametrize(
    ("settings", "num_gpus", "expected"),
    [
        ({}, 1, "ipc"),
        ({}, 2, "nccl"),
        ({"vllm_gpu": 0}, 2, "ipc"),
        ({"vllm_gpu": 1}, 2, "nccl"),
        ({"vllm_gpu": 1, "device": "cuda:1"}, 2, "ipc"),
        ({"engine_url": "http://elsewhere:9001"}, 1, "nccl"),
        ({"transfer_backend": "nccl"}, 1, "nccl"),
        ({"vllm_gpu": [2, 3]}, 4, "nccl"),
        ({"vllm_gpu": [0, 1]}, 4, "ipc"),
        ({"num_processes": 8}, 8, "ipc"),
        ({"num_processes": 6}, 8, "nccl"),
        ({"num_processes": 6, "vllm_gpu": [5, 6]}, 8, "ipc"),
        ({"num_processes": 6, "vllm_gpu": [6, 7]}, 8, "nccl"),
    ],
)
def test_memory_is_handed_over_where_engine_and_trainer_share_a_gpu(
    settings: dict[str, Any], num_gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NCCL cannot do: two processes of one group on one GPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(settings.pop("num_processes", 1)))
    config = TrainerConfig(model_name="m", bridge="transfer", **settings)
    assert transfer_backend(config, num_gpus=num_gpus) == expected


@pytest.mark.parametrize(
    ("settings", "num_processes", "shares"),
    [
        ({}, 1, True),
        ({"device": "cuda:1"}, 1, False),
        ({"vllm_gpu": 1}, 1, False),
        ({}, 4, True),
        ({"vllm_gpu": [3, 4]}, 4, True),
        ({"vllm_gpu": [4, 5]}, 4, False),
        ({"vllm_gpu": 0, "bridge": "reload"}, 4, True),
    ],
)
def test_an_engine_started_beside_several_processes_needs_a_gpu_of_its_own(
    settings: dict[str, Any], num_processes: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the first one, which is the first process's."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    config = TrainerConfig(model_name="m", **{"bridge": "restart"} | settings)
    assert shares_gpu(config, num_gpus=8) is shares
    is_named = config.vllm_gpu is not None
    with (
        nullcontext()
        if is_named or num_processes == 1
        else pytest.raises(ConfigError, match="--vllm_gpu.*take GPU 0.*have GPUs 0 to 3")
    ):
        require_gpu_for_engine(config)


def test_an_engine_takes_further_flags_and_several_gpus() -> None:
    command = command_of(
        engine="vllm",
        engine_args="--tensor-parallel-size 2 --override-generation-config '{\"top_k\": 5}'",
        vllm_gpu=[6, 7],
    )
    assert command[-4:] == [
        *("--tensor-parallel-size", "2"),
        *("--override-generation-config", '{"top_k": 5}'),
    ]


class Unused:
    def take(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("restart", RestartBridge),
        ("reload", ReloadBridge),
        ("lora", LoraBridge),
        ("transfer", TransferBridge),
    ],
)
def test_the_flag_chooses_the_bridge(name: Any, kind: type) -> None:
    config = TrainerConfig(model_name="m", bridge=name)
    bridge = make_bridge(config, Unused(), is_stopping=lambda: False)  # type: ignore[arg-type]
    chosen = bridge._engines if isinstance(bridge, CheckpointBridge) else bridge
    assert type(chosen) is kind
    bridge.close()


class Engines:
    """Takes every checkpoint, and serves the version that it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[Path, int]] = []
        self.serves: int | None = None

    def start(self, checkpoint_dir: Path, version: int) -> None:
        self.taken.append((checkpoint_dir, version))

    def publish(self, checkpoint_dir: Path, version: int) -> int:
        self.start(checkpoint_dir, version)
        return version if self.serves is None else self.serves

    def check(self) -> None: ...

    def close(self) -> None: ...


def test_lora_restart_hands_over_the_whole_model_with_the_adapter_merged(tmp_path: Path) -> None:
    """The original starts the engine with the adapter beside the model; any engine can serve a merged one."""
    model = make_tiny_model(tmp_path / "model")
    config = TrainerConfig(
        model_name=str(model),
        device="cpu",
        weight_bridge_mode="lora_restart",
        weights_dir=tmp_path / "weights",
    )
    assert (config.bridge, config.lora) == ("restart", True)
    policy, engines = load_policy(config), Engines()
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.5)
    with WeightsDirectory(config, policy) as weights:
        bridge = CheckpointBridge(weights.take, engines)  # type: ignore[arg-type]
        bridge.start(policy, 0)
        assert bridge.begin(policy, 1)() == 1
        engines.serves = 1
        assert bridge.begin(policy, 2)() == 1, "the version served is what is announced"
        assert engines.taken[1] == (tmp_path / "weights" / "version_1", 1)
        before, after = (load_file(d / "model.safetensors") for d in (model, engines.taken[1][0]))
    assert before.keys() == after.keys()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith("_proj.weight")
    }
