"""Which engine and which bridge a configuration makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atroposlib.errors import ConfigError
from example_trainer.bridges import CheckpointBridge, make_bridge
from example_trainer.config import TrainerConfig
from example_trainer.model import load_policy
from example_trainer.vllm_process import make_engine, transfer_backend
from example_trainer.weights import WeightsDirectory
from tests.tiny_model import make_tiny_model


def command_of(**settings: Any) -> list[str]:
    config = TrainerConfig(model_name="org/name", device="cpu", vllm_port=9123, **settings)
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
            {"--distributed-executor-backend": "uni", "--logprobs-mode": "processed_logprobs"},
            {"--gpu-memory-utilization", "--enable-lora"},
        ),
        ({"logprobs_mode": "raw"}, {"--enforce-eager": ""}, {"--logprobs-mode"}),
        ({"bridge": "lora", "lora_r": 40}, {"--max-lora-rank": "64", "--max-loras": "1"}, set()),
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


def test_an_adapter_of_a_rank_beyond_vllms_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lora_r 513.*512"):
        command_of(engine="vllm", bridge="lora", lora_r=513)


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
    ],
)
def test_memory_is_handed_over_where_engine_and_trainer_share_a_gpu(
    settings: dict[str, Any], num_gpus: int, expected: str
) -> None:
    config = TrainerConfig(model_name="m", bridge="transfer", **settings)
    assert transfer_backend(config, num_gpus=num_gpus) == expected


class Unused:
    take = take_adapter = None


def test_the_flag_chooses_the_bridge() -> None:
    for name in ("restart", "reload", "transfer", "lora"):
        config = TrainerConfig(model_name="m", bridge=name)  # type: ignore[arg-type]
        bridge = make_bridge(config, Unused(), is_stopping=lambda: False)  # type: ignore[arg-type]
        assert bridge.name == name
        bridge.close()


class Engines:
    """Takes every checkpoint, and serves the version that it is told to."""

    name = "fake"

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
        assert bridge.publish(policy, 1) == 1
        engines.serves = 1
        assert bridge.publish(policy, 2) == 1, "the version served is what is announced"
        assert engines.taken[1] == (tmp_path / "weights" / "version_1", 1)
        before, after = (load_file(d / "model.safetensors") for d in (model, engines.taken[1][0]))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".self_attn.")[2] for name in changed} == {
        "q_proj.weight",
        "v_proj.weight",
    }
