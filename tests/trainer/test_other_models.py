"""Models that are more than attention and an MLP, and the precision that all compute in."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import example_trainer.step
from atroposlib.errors import ConfigError
from example_trainer.contract import check_files
from example_trainer.data import make_batch
from example_trainer.model import (
    Policy,
    attention_kernel,
    base_model,
    load_policy,
    reference_of,
)
from example_trainer.parallel import whole
from example_trainer.step import data_options
from example_trainer.weights import WeightsDirectory
from tests.trainer.helpers_dry_run import config_for_dry_run
from tests.trainer.helpers_models import CHANGES, make_model
from tests.trainer.helpers_trainer import make_group, one_step

EVERYTHING = ["embed_tokens", "q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(Qwen3NextConfig, tmp_path_factory.mktemp("hybrid"))


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
    monkeypatch.setattr(example_trainer.step, "uses_flash", lambda model: True)
    policy = load_policy(alone)
    assert "linear_attention" in base_model(policy.model).config.layer_types
    expected, found = logprobs(policy, alone), logprobs(policy, chosen)
    assert found.keys() == expected.keys()
    for labels, values in expected.items():
        torch.testing.assert_close(found[labels], values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CHANGES)
def test_packing_changes_no_logprob_or_is_refused(kind: Any, tmp_path: Path) -> None:
    """gpt-oss makes its mask without the positions, so that the second sequence would be off by 2 nats."""
    model_dir = make_model(kind, tmp_path / "model")
    padded, packed = (config_for_dry_run(model_dir, tmp_path, packing=p) for p in ("off", "on"))
    refused = {Qwen3NextConfig: "hand a state on", GptOssConfig: "mask ignores borders"}
    if kind in refused:
        with pytest.raises(ConfigError, match=f"^--packing on: .*{refused[kind]}.*--packing off"):
            load_policy(packed)
        return
    expected, found = (logprobs(load_policy(config), config) for config in (padded, packed))
    assert found.keys() == expected.keys()
    for labels, values in expected.items():
        torch.testing.assert_close(found[labels], values, rtol=0, atol=1e-4)


def test_a_model_of_experts_takes_a_step_on_stale_sequences(tmp_path: Path) -> None:
    config = config_for_dry_run(make_model(Qwen3MoeConfig, tmp_path / "experts"), tmp_path)
    policy = load_policy(config)
    result = one_step(policy, config, [make_group([1.0, 0.0], policy_version=1)], version=2)
    assert result.grad_norm is not None
    assert result.gap.maximum is None


@pytest.mark.parametrize("kind", [Qwen3Config, Qwen3MoeConfig])
@pytest.mark.parametrize("targets", [["all-linear"], EVERYTHING], ids=len)
def test_a_published_model_is_the_trained_one(
    kind: Any, targets: list[str], tmp_path: Path
) -> None:
    """peft adapts fused experts by one wrapper around another, and an embedding by other matrices than a layer."""
    source = make_model(kind, tmp_path / "source")
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
    tied = make_model(Qwen3MoeConfig, tmp_path / "tied", tie_word_embeddings=True)
    adapters: dict[str, Any] = {"lora": True, "lora_target_modules": ["embed_tokens"]}
    config = config_for_dry_run(tied, tmp_path, **adapters)
    with pytest.raises(ConfigError, match=r"^--lora_target_modules.*are one matrix"):
        load_policy(config)


@pytest.mark.parametrize("kind", [GptOssConfig, Gemma2Config])
def test_a_model_without_sdpa_takes_a_step_and_is_published(kind: Any, tmp_path: Path) -> None:
    source = make_model(kind, tmp_path / "source")
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
    source = make_model(Qwen3Config, tmp_path / "source")
    for name in ("flash_attention_3", "kernels-community/vllm-flash-attn3", "flex_attention"):
        config = config_for_dry_run(source, tmp_path, attention=name)
        assert attention_kernel(config, Qwen3Config()) == name
    with pytest.raises(ConfigError, match="cannot be loaded.*flash_attention_7"):
        load_policy(config_for_dry_run(source, tmp_path, attention="flash_attention_7"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    chosen = config_for_dry_run(source, tmp_path, device="cuda")
    assert attention_kernel(chosen, Qwen3Config()) == "flash_attention_2"
    assert attention_kernel(chosen, GptOssConfig()) is None
    assert (
        attention_kernel(config_for_dry_run(source, tmp_path, device="cpu"), Qwen3Config()) is None
    )


class Products(TorchDispatchMode):
    """Notes the dtypes of the grouped products, which compute all experts of a layer, and counts them."""

    num_grouped = 0
    dtypes: set[torch.dtype]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.num_grouped += 1
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [Qwen3MoeConfig, GptOssConfig])
def test_experts_are_computed_in_bfloat16_forward_and_backward(kind: Any, tmp_path: Path) -> None:
    model_dir = make_model(kind, tmp_path / "experts")
    config = config_for_dry_run(model_dir, tmp_path, dtype="bfloat16", attention="eager")
    policy = load_policy(config)
    (micro_batch,) = make_batch([make_group([1.0, 0.0])], data_options(config)).micro_batches
    with Products() as products:
        products.dtypes = set()
        policy.logprobs(micro_batch).logprobs_N.sum().backward()
    assert products.num_grouped == 2 * 2 * 3  # layers, matrices, forward and two gradients
    assert products.dtypes == {torch.bfloat16}
    assert {p.grad.dtype for p in policy.model.parameters() if p.grad is not None} == {
        torch.float32
    }


@pytest.mark.parametrize(
    "kind", [Qwen3Config, Gemma2Config, Qwen3MoeConfig, GptOssConfig, DeepseekV3Config]
)
@pytest.mark.parametrize("lora", [False, True])
def test_equal_weights_give_policy_and_reference_equal_logprobs(
    kind: Any, lora: bool, tmp_path: Path
) -> None:
    """DeepSeek's routers stay float32 when it is loaded in bfloat16; they are computed as the policy's are."""
    config = config_for_dry_run(
        make_model(kind, tmp_path / "model"),
        tmp_path,
        dtype="bfloat16",
        attention="eager",
        lora=lora,
        lora_target_modules=["o_proj"],
        kl_coef=0.1,
    )
    policy = load_policy(config)
    reference = reference_of(policy, config)
    for micro_batch in make_batch(
        [make_group([1.0, 0.0], seed=s, length=9) for s in range(4)], data_options(config, policy)
    ).micro_batches:
        own = policy.logprobs(micro_batch)
        with torch.no_grad():
            assert torch.equal(own.logprobs_N, reference.logprobs(micro_batch).logprobs_N)
        own.logprobs_N.sum().backward()
    trained = {p.dtype for p in policy.model.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    frozen = [p.dtype for p in policy.model.parameters() if not p.requires_grad]
    assert frozen.count(torch.bfloat16) >= 0.9 * len(frozen)


def test_one_process_needs_no_rendezvous(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read from torchrun's variables, and a group that exists is used."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = config_for_dry_run(hybrid, tmp_path, dtype="bfloat16")
    for _ in range(2):
        one_step(load_policy(config), config, [make_group([1.0, 0.0])])
        assert dist.get_world_size() == 1


def test_offloaded_weights_take_the_same_steps(hybrid: Path, tmp_path: Path) -> None:
    results = []
    for cpu_offload in (False, True):
        config = config_for_dry_run(hybrid, tmp_path, dtype="bfloat16", cpu_offload=cpu_offload)
        policy = load_policy(config)
        offloaded = [isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups_of(policy)]
        assert offloaded == 5 * [cpu_offload]
        result = one_step(policy, config, [make_group([1.0, 0.0])])
        after = [whole(p.detach()) for p in policy.model.parameters()]
        results.append((result.loss, result.grad_norm, *after))
    for plain, other in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(plain), torch.as_tensor(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_on_the_host_give_the_same_gradient(
    hybrid: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointing little but the inputs of the layers is copied, and no weight."""
    copied: list[torch.Size] = []
    real = torch.empty_like

    def empty_like(value: torch.Tensor, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            copied.append(value.shape)
        return real(value, **options)

    results = []
    for activation_offload in (False, True):
        changes = {"activation_offload": activation_offload, "gradient_checkpointing": True}
        config = config_for_dry_run(hybrid, tmp_path, dtype=dtype, **changes)
        policy = load_policy(config)
        (micro_batch,) = make_batch([make_group([1.0, 0.0])], data_options(config)).micro_batches
        monkeypatch.setattr(torch, "empty_like", empty_like)
        policy.logprobs(micro_batch).logprobs_N.sum().backward()
        monkeypatch.undo()
        assert bool(copied) == activation_offload
        results.append([whole(p.grad) for p in policy.model.parameters() if p.grad is not None])
    assert copied.count(torch.Size([*micro_batch.tokens_BT.shape, 32])) >= 4  # layers
    weights = {p.shape for p in policy.model.parameters() if p.dim() > 1}
    assert weights.isdisjoint(copied)
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


def groups_of(policy: Policy) -> list[Any]:
    """Return FSDP's parameter groups: one for each layer, and the root's."""
    states = [m._get_fsdp_state() for m in policy.module.modules() if isinstance(m, FSDPModule)]
    assert len(states) == 1 + 4
    return [state._fsdp_param_group for state in states]
