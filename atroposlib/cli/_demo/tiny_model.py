"""The demo's model, built locally: a one-million-parameter Qwen2 and a one-character-per-token tokenizer.

The smallest shape that learned the task reliably and that vLLM's CPU attention accepts (head size 32). Embeddings are
untied: vLLM's CPU backend keeps a packed copy of a tied output head across a weight reload. torch and transformers are
imported inside the functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz:> ,.-?\n"
UNKNOWN = "?"
"""Characters outside the vocabulary are read as this one."""
PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Turns are concatenated without markers: the conversation [user: `abcde>`] is exactly the six tokens of `abcde>`."""

MAX_POSITIONS = 256


def build_tokenizer(characters: str = CHARACTERS, *, whole_texts: Sequence[str] = ()) -> Any:
    """Return a fast tokenizer with one token per character and whole text, plus padding and end of sequence.

    Where several whole texts match, the longest counts.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*characters, *whole_texts, PAD_TOKEN, EOS_TOKEN]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = sorted(map(re.escape, whole_texts), key=len, reverse=True)
    pattern = Regex("|".join([*longest_first, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: Any, *, seed: int, architecture: Literal["Qwen2", "Llama"] = "Qwen2"
) -> Any:
    """Return a float32 model with random weights drawn from `seed`.

    With a tokenizer of another pattern, a saved Qwen2 is no use: AutoTokenizer gives each one Qwen's own.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return getattr(transformers, f"{architecture}ForCausalLM")(config).to(torch.float32)
