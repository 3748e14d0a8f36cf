"""Ids and texts of `backends` are those of transformers itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from atroposlib.utils.tokenizers.backends import decode, encode
from tests.inference.helpers_templates import CHATML, make_tokenizer
from tests.tiny_model import make_tiny_tokenizer


def make_odd_tokenizer() -> Any:
    """Byte-level BPE with added tokens that are special, plain, and not spelled in the vocabulary's characters."""
    tokenizer = make_tokenizer(CHATML)
    tokenizer.add_tokens(
        [AddedToken(text) for text in ("\u3042 \u00e9", "caf\u00e9", " ", "\ud7ff")]
    )
    return tokenizer


@pytest.mark.parametrize("make", [make_odd_tokenizer, make_tiny_tokenizer])
@pytest.mark.parametrize("skips", [False, True])
def test_the_text_of_any_tokens_is_that_of_transformers(make: Any, skips: bool) -> None:
    tokenizer, rng = make(), random.Random(1)
    vocabulary = range(len(tokenizer) + 3)  # ids that are not in it are left out
    for _ in range(500):
        tokens = rng.choices(vocabulary, k=rng.randrange(12))
        assert decode(tokenizer, tokens, skip_special_tokens=skips) == tokenizer.decode(
            tokens, skip_special_tokens=skips
        )
    for token in vocabulary:
        assert decode(tokenizer, np.array([token])) == tokenizer.decode([token])


def test_bytes_that_are_no_text_are_replaced_as_by_transformers() -> None:
    tokenizer, rng = make_tokenizer(CHATML), random.Random(2)
    bytes_ = [
        tokenizer.backend_tokenizer.token_to_id(c)
        for c in "\u0142\u0142\u00a1\u00ed\u0141\u00f0\u00f4aC"
    ]
    single = [i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1]
    for _ in range(2000):
        tokens = rng.choices(single + [token for token in bytes_ if token is not None], k=6)
        assert decode(tokenizer, tokens) == tokenizer.decode(tokens)


def test_a_token_that_is_added_later_is_decoded() -> None:
    tokenizer = make_tokenizer(CHATML)
    added = len(tokenizer)
    assert decode(tokenizer, [added]) == ""
    tokenizer.add_tokens(["<new>"])
    assert decode(tokenizer, [added]) == tokenizer.decode([added]) == "<new>"


def test_a_replaced_decode_is_the_one_that_is_asked() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.decode = lambda tokens, **options: f"{len(tokens)} tokens"
    assert decode(tokenizer, [5, 6]) == "2 tokens"


@pytest.mark.parametrize("text", ["", "<|im_end|> a<think> b", "caf\u00e9 \u3042"])
@pytest.mark.parametrize("special", [False, True])
def test_the_ids_of_a_text_are_those_of_transformers(text: str, special: bool) -> None:
    for set_up in (lambda t: t, lambda t: t("a b c", truncation=True, max_length=2)):
        tokenizer = make_odd_tokenizer()
        set_up(tokenizer)  # leaves its limit in the backend
        expected = make_odd_tokenizer().encode(text, add_special_tokens=special)
        assert encode(tokenizer, text, add_special_tokens=special) == expected


def test_control_tokens_can_be_split_into_their_characters() -> None:
    tokenizer = make_tokenizer(CHATML)
    split = tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert len(split) > 1
    whole = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encode(tokenizer, "<|im_end|>") == [whole]
