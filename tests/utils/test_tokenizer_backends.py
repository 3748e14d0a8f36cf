"""Ids and texts of `backends` are those of transformers itself."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from jinja2 import TemplateError
from tokenizers import AddedToken

from atroposlib.utils.tokenizers.backends import decode, encode, write_chat
from tests.inference import helpers_templates
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


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " a "}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>\nc"}],
    [
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c", "tool_call_id": "1"},
    ],
    # What transformers changes before it runs the template.
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
    [{"role": "assistant", "content": "b", "reasoning": "why"}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": None}],
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"tools": [CALL], "enable_thinking": False, "bos_token": "<b>"},
    {"chat_template": "{{ reasoning }}{{ messages | length }}{{ messages[0] | tojson }}"},
    {"continue_final_message": True},
    {"tools": [object()], "at": object()},
]
OTHERS = ["{% for m in messages %}{{ m.reasoning_content }}{{ at }}{% endfor %}", "{{ 1 / 0 }}"]


@pytest.mark.parametrize(
    "template",
    [*[t for n, t in vars(helpers_templates).items() if n.isupper() and "{%" in t], *OTHERS],
)
def test_a_chat_is_written_as_by_transformers(template: str) -> None:
    def result_of(write: Callable[..., str], *args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (ArithmeticError, TemplateError, TypeError, ValueError) as e:
            return type(e), str(e)

    tokenizer = make_tokenizer(template, bos="<|begin_of_text|>")
    transformers_own = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    for chat, variables, prompt in itertools.product(CHATS * 2, VARIABLES, (True, False)):
        given, how = copy.deepcopy(chat), {"add_generation_prompt": prompt}
        found = result_of(write_chat, tokenizer, given, variables=variables, **how)
        assert given == chat
        assert found == result_of(transformers_own, chat, **how, **variables)


def test_transformers_does_not_visit_plain_messages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(CHATML + "{# compared once #}")
    chat = [{"role": "user", "content": "a"}]
    texts = [write_chat(tokenizer, chat, add_generation_prompt=True, variables={})]
    monkeypatch.delattr("transformers.tokenization_utils_base.render_jinja_template")
    texts += [write_chat(tokenizer, chat, add_generation_prompt=True, variables={})]
    assert texts == ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_a_replaced_apply_chat_template_is_the_one_that_is_asked() -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.apply_chat_template = lambda messages, **options: f"{len(messages)} messages"
    chat = [{"role": "user", "content": "a"}]
    assert write_chat(tokenizer, chat, add_generation_prompt=True, variables={}) == "1 messages"


def test_a_template_that_comes_out_otherwise_is_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = make_tokenizer(CHATML + "{# another result #}")
    chat = [{"role": "user", "content": "a"}]
    monkeypatch.setattr(
        "transformers.tokenization_utils_base.render_jinja_template",
        lambda **_: (["later version"], [[]]),
    )
    texts = [write_chat(tokenizer, chat, add_generation_prompt=True, variables={}) for _ in "ab"]
    assert texts == ["later version"] * 2
