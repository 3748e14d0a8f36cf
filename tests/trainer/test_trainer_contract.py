"""The publish contract: what a publication holds is compared with the initial checkpoint and the trainer's memory."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3MoeConfig

from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import load
from atroposlib.engine.server import create_app
from atroposlib.engine.weights import copy_weights
from atroposlib.errors import EngineError, EngineProtocolError
from example_trainer.bridges.restart import RestartBridge
from example_trainer.bridges.running import LoraBridge, ReloadBridge
from example_trainer.config import TrainerConfig
from example_trainer.contract import CHECKSUMS, EngineCheck, check_files, source_shapes
from example_trainer.model import base_model, load_policy
from example_trainer.vllm_process import make_engine
from example_trainer.weights import WeightsDirectory
from tests.api.helpers_api import serving
from tests.processes import free_port
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import recorded_engine
from tests.trainer.helpers_models import make_model
from tests.trainer.helpers_run import make_checkpoint
from tests.trainer.test_other_models import EVERYTHING


def published(model: Path, out: Path, **settings: Any) -> Path:
    config = TrainerConfig(model_name=str(model), device="cpu", weights_dir=out, **settings)
    with WeightsDirectory(config, load_policy(config)) as weights:
        return weights.take(1)()


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"lora": True, "lora_target_modules": EVERYTHING}],
    ids=str,
)
@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_a_publication_has_the_form_of_the_initial_checkpoint(
    kind: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    source = make_model(kind, tmp_path / "source")
    directory = published(source, tmp_path / "weights", **settings)
    before, after = (load_file(each / "model.safetensors") for each in (source, directory))
    assert {n: v.shape for n, v in after.items()} == {n: v.shape for n, v in before.items()}
    check_files(directory)


@pytest.mark.parametrize("keeps_head", [False, True])
def test_tied_weights_and_what_the_model_does_not_read_may_be_missing(
    keeps_head: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = make_tiny_model(tmp_path / "source", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    if keeps_head:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["mtp.layers.0.weight"] = torch.ones(2)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    check_files(published(source, tmp_path / "weights"))
    assert "not published or checked" in caplog.text
    assert "mtp.layers.0.weight" in caplog.text


def test_experts_under_wrong_names_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes such a checkpoint with a warning, and makes up the experts."""

    def linear_layers_alone(state: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        names = {n: n.removeprefix("base_model.model.").replace(".base_layer.", ".") for n in state}
        return {names[n]: value for n, value in state.items() if ".lora_" not in n}

    monkeypatch.setattr("example_trainer.model.merged_weights", linear_layers_alone)
    source = make_model(Qwen3MoeConfig, tmp_path / "source")
    settings: dict[str, Any] = {"lora": True, "lora_target_modules": EVERYTHING[2:5]}
    with pytest.raises(
        EngineError, match=r"not those of the initial.*experts\.0\.\w+\.weight is missing, and \["
    ):
        published(source, tmp_path / "weights", **settings)


def test_a_shape_of_another_model_is_not_published(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    config = TrainerConfig(model_name=str(source), device="cpu", weights_dir=tmp_path / "weights")
    policy = load_policy(config)
    make_tiny_model(source, hidden_size=64)
    with (
        WeightsDirectory(config, policy) as weights,
        pytest.raises(
            EngineError,
            match=r"lm_head\.weight is \[260, 32\], and \[260, 64\].*; \.\.\. \(\d+ in all",
        ),
    ):
        weights.take(0)()


def test_a_source_without_safetensors_is_compared_with_the_model(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    config = TrainerConfig(model_name=str(source), device="cpu")
    model = base_model(load_policy(config).model)
    expected = source_shapes(model, str(source))
    assert expected["lm_head.weight"] == [260, 32]
    (source / "model.safetensors").unlink()
    assert source_shapes(model, str(source)) == expected


def test_a_file_that_differs_from_the_trainers_memory_reaches_no_engine(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "version_1")
    check_files(directory)
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(EngineError, match=re.escape("head.weight is float32[2, 3] ")):
        check_files(directory)
    path.write_bytes(whole[:-1])
    with pytest.raises(EngineError, match="cannot be read.*no engine was touched"):
        check_files(directory)
    path.write_bytes(whole)
    (directory / CHECKSUMS).unlink()
    with pytest.raises(EngineError, match=f"cannot be read.*{CHECKSUMS}"):
        check_files(directory)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("targets", [["all-linear"], EVERYTHING], ids=len)
@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
def test_an_adapters_files_are_compared_with_the_trainers_memory(
    kind: Any, targets: list[str], tmp_path: Path
) -> None:
    """As those of a whole model, before an engine is touched."""
    source = make_model(kind, tmp_path / "source")
    adapters: dict[str, Any] = {"lora": True, "lora_target_modules": targets}
    config = TrainerConfig(
        model_name=str(source), device="cpu", weights_dir=tmp_path / "out", **adapters
    )
    with WeightsDirectory(config, load_policy(config)) as weights, recorded_engine() as engine:
        directory = weights.take(1, merged=False)()
        bridge = LoraBridge(urls=[engine.url], lora_name="policy")
        bridge.publish(directory, 1)
        assert engine.adapters == {"policy": str(directory)}
        path = directory / "adapter_model.safetensors"
        tensors = load_file(path)
        name = sorted(tensors)[-1]
        save_file(tensors | {name: tensors[name] + 1}, path)
        engine.calls.clear()
        with pytest.raises(EngineError, match=rf"no engine was touched: {re.escape(name)} is "):
            bridge.publish(directory, 2)
        save_file({other: tensors[other] for other in tensors if other != name}, path)
        with pytest.raises(EngineError, match=rf"{re.escape(name)} is missing, and float32"):
            bridge.publish(directory, 2)
        assert engine.calls == []
        bridge.close()


@pytest.mark.drill
@pytest.mark.timeout(120)
def test_a_restarted_engine_that_serves_something_else_ends_the_run(tmp_path: Path) -> None:
    """It is not rolled back, as an engine that does not start is: the next one would do the same."""
    source = make_tiny_model(tmp_path / "source")
    first = published(source, tmp_path / "first")
    other = published(make_tiny_model(tmp_path / "other", seed=1), tmp_path / "second")
    config = TrainerConfig(
        model_name=str(source),
        device="cpu",
        engine="local",
        vllm_port=free_port(),
        log_dir=tmp_path / "logs",
    )
    bridge = RestartBridge(start_engine=lambda model: make_engine(config, first))
    try:
        bridge.start(first, 0)
        with pytest.raises(
            EngineProtocolError, match=r"has not loaded.*lm_head\.weight is float32"
        ):
            bridge.publish(other, 1)
        (other / "config.json").unlink()
        with pytest.raises(EngineError, match=r"cannot be read: it lacks config\.json"):
            RestartBridge(start_engine=lambda model: make_engine(config, model)).start(other, 1)
    finally:
        bridge.close()


@contextmanager
def atropos_engine(model: Path, **settings: Any) -> Iterator[str]:
    loaded = load(EngineConfig(model=str(model), device="cpu", **settings))
    loaded.engine.start()
    with serving(create_app(loaded)) as url:
        yield url
    loaded.engine.close()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_proves_what_it_has_loaded(
    is_tied: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time, in its own dtype, and whether or not it has the head once more."""
    source = make_tiny_model(tmp_path / "source", tie_word_embeddings=is_tied)
    directory = published(source, tmp_path / "weights")
    with atropos_engine(source, dtype=dtype) as url:
        bridge = ReloadBridge(urls=[url])
        for version in range(3):
            bridge.publish(directory, version)

        def forgets_one(model: Any, tensors: dict[str, torch.Tensor]) -> None:
            copy_weights(model, tensors)
            with torch.no_grad():
                model.model.norm.weight[3] += 0.25

        monkeypatch.setattr("atroposlib.engine.scheduler.copy_weights", forgets_one)
        with pytest.raises(EngineProtocolError, match=rf"model\.norm\.weight is {dtype}\[32\] "):
            bridge.publish(directory, 3)
        bridge.close()


def sha256(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()


def test_vllms_checksums_are_compared_where_it_keeps_what_was_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stacks matrices, pads the vocabulary, and takes a second per GB: it is asked after two publications."""
    caplog.set_level("INFO")
    directory = published(make_tiny_model(tmp_path / "source", num_layers=1), tmp_path / "weights")
    weights = load_file(directory / "model.safetensors")
    layer = "model.layers.0.self_attn"
    qkv = [weights[f"{layer}.{name}_proj.weight"] for name in "qkv"]
    embedding = weights["model.embed_tokens.weight"]
    checksums = {
        f"{layer}.qkv_proj.weight": sha256(*qkv),
        f"{layer}.o_proj.weight": sha256(weights[f"{layer}.o_proj.weight"]),
        "model.embed_tokens.weight": sha256(embedding, torch.zeros(60, 32)),
        "model.rotary.cache": sha256(torch.ones(1)),
    }
    with recorded_engine() as engine:
        engine.checksums = {f"dp0:pp0:pcp0:tp0:{name}": each for name, each in checksums.items()}
        bridge = ReloadBridge(urls=[engine.url])
        bridge.publish(directory, 0)
        assert "2 loaded tensors are compared" in caplog.text
        assert re.search("not compared: .*embed_tokens.weight; .*rotary.cache$", caplog.text, re.M)
        engine.checksums[f"dp0:pp0:pcp0:tp0:{layer}.qkv_proj.weight"] = sha256(*reversed(qkv))
        with pytest.raises(EngineProtocolError, match="has not loaded.*:tp0:.*qkv_proj.weight is"):
            bridge.publish(directory, 1)
        bridge.publish(directory, 2)
        bridge.close()


def test_an_engine_without_checksums_is_used_and_told_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = make_checkpoint(tmp_path / "version_1")
    with recorded_engine() as vllm, recorded_engine("sglang") as sglang:
        bridge = ReloadBridge(urls=[vllm.url, sglang.url])
        for version in (1, 2):
            bridge.publish(directory, version)
        bridge.close()
    assert caplog.text.count("not compared: all, because it reports no checksums") == 2


@pytest.mark.parametrize("line", ["00ff", "float32[1] 00ff"])
def test_an_engine_whose_tensors_are_all_unknown_is_warned_of(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    EngineCheck("e").check({"of.another.model": line}, {"lm_head.weight": torch.ones(1)})
    [record] = caplog.records
    assert (record.levelname, "0 loaded tensors are compared" in record.message) == (
        "WARNING",
        True,
    )
