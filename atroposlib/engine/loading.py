"""Load a model and its tokenizer for the engine, and check that it can be served."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from atroposlib.engine.bodies import EngineLimits
from atroposlib.engine.config import EngineConfig
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import Engine
from atroposlib.engine.sequences import EngineRequest
from atroposlib.errors import ConfigError, EngineError
from atroposlib.utils.model_choice import check_model_path, torch_device

logger = logging.getLogger(__name__)

_UNKNOWN_CONTEXT_LEN = 4096
"""Context length, with a warning, if the model's config has none."""


class LoadedModel(NamedTuple):
    engine: Engine
    tokenizer: Any
    limits: EngineLimits
    model_name: str


def load(config: EngineConfig) -> LoadedModel:
    """Load model and tokenizer; the engine is not started. Raises ConfigError if they cannot be loaded."""
    check_model_path(config.model, flag="--model")
    device = torch_device(config.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
        model_config = AutoConfig.from_pretrained(config.model)
        model = AutoModelForCausalLM.from_pretrained(
            config.model, config=model_config, dtype=getattr(torch, dtype)
        )
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"--model {config.model!r} cannot be loaded: {e}") from e
    model = model.to(device).eval().requires_grad_(False)
    text_config = model.config.get_text_config()
    vocab_size = model.get_input_embeddings().num_embeddings
    engine = Engine(
        model,
        tokenizer,
        eos_token_ids=[i for i in _eos_token_ids(model, tokenizer) if i < vocab_size],
        max_num_seqs=config.max_num_seqs,
        seed=config.seed,
        weight_version=config.weight_version,
    )
    return LoadedModel(
        engine,
        tokenizer,
        EngineLimits(context_len=_context_len(config, text_config), vocab_size=vocab_size),
        config.served_model_name or config.model,
    )


def warm_up(engine: Engine) -> None:
    """Generate a few tokens for prompts of different lengths; ConfigError if the model cannot be served."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    work = [engine.submit(EngineRequest([1] * length, params)) for length in (1, 3)]
    try:
        for future in work:
            future.result()
    except EngineError as e:
        raise ConfigError(f"this model cannot be served: {e}") from e


def _eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end-of-sequence id first, then those of the generation config."""
    configured = model.generation_config.eos_token_id
    more = configured if isinstance(configured, list) else [configured]
    found = [tokenizer.eos_token_id, *more]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def _context_len(config: EngineConfig, text_config: Any) -> int:
    own = getattr(text_config, "max_position_embeddings", None)
    if config.max_model_len is None:
        if own is None:
            logger.warning(
                "the model's config has no max_position_embeddings; using %s", _UNKNOWN_CONTEXT_LEN
            )
        return int(own or _UNKNOWN_CONTEXT_LEN)
    if own is not None and config.max_model_len > own:
        raise ConfigError(
            f"--max_model_len {config.max_model_len} exceeds the model's context of {own} tokens"
        )
    return config.max_model_len
