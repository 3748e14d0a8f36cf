"""A tiny Qwen2 model and byte-level tokenizer on disk, for tests that need a real transformers checkpoint.

No hub, no download: about 35k random parameters in float32, one token per UTF-8 byte plus four
special tokens. head_dim is 32 because vLLM's CPU attention supports no smaller one, and embeddings
are untied because vLLM reloads tied ones wrongly on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD = "<|pad|>"
EOS = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte (ids 0-255), per merged pair, and four special tokens."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    dir: Path,
    *,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
    init_std: float = 0.15,
) -> Path:
    """Save a tiny Qwen2 causal LM with its tokenizer into `dir` and return `dir`.

    Models of different `seed` differ in every weight; the same arguments give the same bytes.
    `init_std` is large enough for clearly non-uniform next-token distributions.
    """
    tokenizer = make_tiny_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 32),
        num_key_value_heads=max(1, hidden_size // 32),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(dir)
    tokenizer.save_pretrained(dir)
    return dir
