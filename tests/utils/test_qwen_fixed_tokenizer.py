"""The fixed chat template: nothing sampled is changed, and earlier turns are a prefix of later ones."""

import copy
from pathlib import Path
from typing import Any

import pytest

from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import QwenFixedTokenizer
from tests.tiny_model import make_tiny_tokenizer

CALL = {"function": {"name": "look", "arguments": {"at": "it's \u00e9"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>\n\n hm </think>\n ok ", "tool_calls": [CALL]},
    {"role": "tool", "content": "a sea"},
    {"role": "tool", "content": "a ship"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    {"role": "assistant", "content": "<think>x</think>Done"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> QwenFixedTokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer().save_pretrained(path)
    return QwenFixedTokenizer(str(path))


def test_every_message_is_rendered_as_it_is(tokenizer: QwenFixedTokenizer) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it\'s \u00e9"}}\n</tool_call>'
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n hm </think>\n ok \n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\na sea\n</tool_response>"
        "\n<tool_response>\na ship\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n<think>x</think>Done<|im_end|>\n"
    )


def test_earlier_turns_are_a_prefix_of_later_ones(tokenizer: QwenFixedTokenizer) -> None:
    whole = tokenizer.apply_chat_template(CHAT)
    assert isinstance(whole, list)
    for length in (1, 2, 3, 5, 6, 7):
        part = tokenizer.apply_chat_template(CHAT[:length])
        assert whole[: len(part)] == part


def test_tools_are_described_to_the_model(tokenizer: QwenFixedTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for chat in (CHAT[:2], CHAT[1:2]):
        text = tokenizer.apply_chat_template(
            chat, tools=[tool], tokenize=False, add_generation_prompt=True
        )
        assert '"name": "look"' in text
        assert text.count("<|im_start|>system") == 1
        assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_everything_else_is_the_tokenizers_own(tokenizer: QwenFixedTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("abc")["input_ids"] == tokenizer.encode("abc")
    assert len(tokenizer) == 260
    assert copy.copy(tokenizer).eos_token == tokenizer.eos_token
    with pytest.raises(AttributeError):
        _ = tokenizer.no_such_thing
