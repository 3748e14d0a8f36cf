"""Tiny models of the architectures that are more than attention and an MLP, and of some that are not."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.tiny_model import make_tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,  # three gated delta layers, one of attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CHANGES: dict[type[PretrainedConfig], dict[str, Any]] = {
    LlamaConfig: {},
    MistralConfig: {},
    Phi3Config: {},
    Qwen3Config: {},
    GraniteConfig: {"logits_scaling": 2.0},
    Cohere2Config: {"logit_scale": 0.5},
    Gemma2Config: {},
    Gemma3TextConfig: {},
    Qwen3MoeConfig: EXPERTS,
    GptOssConfig: EXPERTS,
    DeepseekV3Config: EXPERTS | LATENT_ATTENTION,
    Qwen3NextConfig: EXPERTS | GATED_DELTA,
}


def make_model(kind: type[PretrainedConfig], directory: Path, **changes: Any) -> Path:
    """Save a model of the architecture with random weights and its tokenizer, and return the directory."""
    torch.manual_seed(0)
    config = kind(**SIZES | CHANGES[kind] | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return directory
