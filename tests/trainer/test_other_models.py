"""Models that are more than attention and an MLP: experts, and layers that hand a state on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from atroposlib.errors import ConfigError
from example_trainer.contract import check_files
from example_trainer.data import make_batch
from example_trainer.model import Policy, attention_kernel, load_policy
from example_trainer.step import data_options
from example_trainer.weights import WeightsDirectory
from tests.tiny_model import make_tiny_tokenizer
from tests.trainer.helpers_dry_run import config_for_dry_run
from tests.trainer.helpers_trainer import make_group, one_step

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.15,
}
GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,  # three gated delta layers, one of attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}


EXPERTS = Qwen3MoeConfig(**SIZES, num_hidden_layers=2)
DENSE = Qwen3Config(**SIZES, num_hidden_layers=2)
EVERYTHING = ["embed_tokens", "q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def save(config: Any, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3NextConfig(**SIZES, **GATED_DELTA)
    assert "linear_attention" in config.layer_types
    return save(config, tmp_path_factory.mktemp("hybrid"))


def logprobs(policy: Policy, config: Any) -> dict[tuple[int, ...], torch.Tensor]:
    """Return each sequence's by its labels."""
    groups = [make_group([1.0, 0.0, 0.3], seed=s, length=9 + 4 * s) for s in range(3)]
    found = {}
    for micro_batch in make_batch(groups, data_options(config, policy)).micro_batches:
        lengths = torch.bincount(micro_batch.positions.sequence_N).tolist()
        with torch.no_grad():
            own_N = policy.logprobs(micro_batch).logprobs_N
        labels = micro_batch.positions.labels_N.split(lengths)
        found |= {tuple(a.tolist()): b for a, b in zip(labels, own_N.split(lengths), strict=True)}
    return found


def test_sequences_of_a_hybrid_model_do_not_read_each_others_state(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where flash attention is used, which packs: every sequence has the logprobs that it has alone."""
    alone = config_for_dry_run(hybrid, tmp_path, packing="off", batch_size=1)
    chosen = config_for_dry_run(hybrid, tmp_path, batch_size=100)
    monkeypatch.setattr(Policy, "uses_flash", True)
    policy = load_policy(alone)
    expected, found = logprobs(policy, alone), logprobs(policy, chosen)
    assert found.keys() == expected.keys()
    for labels, values in expected.items():
        torch.testing.assert_close(found[labels], values, rtol=0, atol=1e-4)


def test_packing_is_refused_where_it_would_be_wrong(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--packing on: layers of Qwen3Next.*--packing off"):
        load_policy(config_for_dry_run(hybrid, tmp_path, packing="on"))


def test_a_model_of_experts_takes_a_step_on_stale_sequences(tmp_path: Path) -> None:
    config = config_for_dry_run(save(EXPERTS, tmp_path / "experts"), tmp_path)
    policy = load_policy(config)
    result = one_step(policy, config, [make_group([1.0, 0.0], policy_version=1)], version=2)
    assert result.grad_norm is not None
    assert result.gap.maximum is None


@pytest.mark.parametrize("kind", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("targets", [["all-linear"], EVERYTHING], ids=len)
def test_a_published_model_is_the_trained_one(
    kind: Any, targets: list[str], tmp_path: Path
) -> None:
    """peft adapts fused experts by one wrapper around another, and an embedding by other matrices than a layer."""
    source = save(kind, tmp_path / "source")
    adapters: dict[str, Any] = {"lora": True, "lora_target_modules": targets, "lr": 0.03}
    config = config_for_dry_run(source, tmp_path, **adapters)
    policy = load_policy(config)
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        before = policy.model(tokens).logits.log_softmax(-1)
    groups = [make_group([1.0, 0.0, 0.3], policy_version=None, length=12)]
    for step in range(3):  # the first moves only the matrices B, which are zero
        one_step(policy, config, groups, version=step)
    policy.save(tmp_path / "published", merged=True)
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "published")
    with torch.no_grad():
        trained = policy.model(tokens).logits.log_softmax(-1)
        found = published(tokens).logits.log_softmax(-1)
    assert (trained - before).abs().max() > 0.5
    torch.testing.assert_close(found, trained, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True")
def test_an_adapter_on_one_of_two_tied_matrices_is_refused(tmp_path: Path) -> None:
    tied = Qwen3MoeConfig(**SIZES, num_hidden_layers=1, tie_word_embeddings=True)
    adapters: dict[str, Any] = {"lora": True, "lora_target_modules": ["embed_tokens"]}
    config = config_for_dry_run(save(tied, tmp_path / "tied"), tmp_path, **adapters)
    with pytest.raises(ConfigError, match=r"^--lora_target_modules.*are one matrix"):
        load_policy(config)


@pytest.mark.parametrize("kind", [GptOssConfig, Gemma2Config])
def test_a_model_without_sdpa_takes_a_step_and_is_published(kind: Any, tmp_path: Path) -> None:
    settings = {name: size for name, size in SIZES.items() if "moe" not in name}
    source = save(kind(**settings, num_hidden_layers=2), tmp_path / "source")
    config = config_for_dry_run(source, tmp_path, weights_dir=tmp_path / "weights")
    policy = load_policy(config)
    assert policy.model.config._attn_implementation == "eager"
    assert one_step(policy, config, [make_group([1.0, 0.0])]).grad_norm is not None
    with WeightsDirectory(config, policy) as weights:
        check_files(weights.take(1)())


def test_attention_is_any_kernel_that_transformers_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash_attention_2 is not chosen for models that do not support it, or would download one of their own."""
    source = save(DENSE, tmp_path / "source")
    for name in ("flash_attention_3", "kernels-community/vllm-flash-attn3", "flex_attention"):
        config = config_for_dry_run(source, tmp_path, attention=name)
        assert attention_kernel(config, DENSE) == name
    with pytest.raises(ConfigError, match="cannot be loaded.*flash_attention_7"):
        load_policy(config_for_dry_run(source, tmp_path, attention="flash_attention_7"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    chosen = config_for_dry_run(source, tmp_path, device="cuda")
    assert attention_kernel(chosen, DENSE) == "flash_attention_2"
    assert attention_kernel(chosen, GptOssConfig()) is None
    assert attention_kernel(config_for_dry_run(source, tmp_path, device="cpu"), DENSE) is None
