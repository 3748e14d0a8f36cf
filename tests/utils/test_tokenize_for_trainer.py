"""Labels of a finished chat, against the byte positions of its rendered text."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from transformers import BatchEncoding

from atroposlib.utils.tokenize_for_trainer import UNMASKED_ROLES, tokenize_for_trainer
from tests.tiny_model import IM_END, make_tiny_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3 + 3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tiny_tokenizer()


def trained_text(tokenizer: Any, result: Any) -> str:
    return str(tokenizer.decode([label for label in result["masks"] if label != -100]))


def test_only_the_last_message_is_trained(tokenizer: Any) -> None:
    result = tokenize_for_trainer(tokenizer, CHAT)
    assert set(result) == {"tokens", "masks"}
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert result["tokens"] == tokenizer.encode(text)
    start = len(tokenizer.encode(text[: text.rindex("<|im_start|>")] + "<|im_start|>assistant\n"))
    assert result["masks"] == [-100] * start + result["tokens"][start:]


def test_default_mask_of_an_assistant_message_is_its_text_and_end(tokenizer: Any) -> None:
    result = tokenize_for_trainer(tokenizer, CHAT[:3])
    assert trained_text(tokenizer, result) == "4<|im_end|>\n"
    assert all(
        label in (-100, token)
        for label, token in zip(result["masks"], result["tokens"], strict=True)
    )


def test_all_turns_mode_trains_every_message_of_the_model(tokenizer: Any) -> None:
    class AgentIsAssistant:
        eos_token_id = tokenizer.eos_token_id

        def apply_chat_template(self, chat: Any, **options: Any) -> list[int]:
            named = [{**m, "role": m["role"].replace("agent", "assistant")} for m in chat]
            ids: list[int] = tokenizer.apply_chat_template(named, **options)
            return ids

    assert UNMASKED_ROLES == ["assistant", "agent"]
    chat = [*CHAT[:4], {"role": "agent", "content": "six"}, {"role": "user", "content": "thanks"}]
    result = tokenize_for_trainer(AgentIsAssistant(), chat, False, True)
    assert trained_text(tokenizer, result) == "4<|im_end|>\nsix<|im_end|>\n"
    assert len(result["masks"]) == len(result["tokens"])


def test_masks_are_as_long_as_the_tokens_even_if_the_template_disagrees(tokenizer: Any) -> None:
    # The prompt opens an assistant's turn, and "assistant" is longer than "agent" and all it says.
    chat = [CHAT[1], {"role": "agent", "content": ""}]
    result = tokenize_for_trainer(tokenizer, chat)
    assert result["masks"] == [-100] * len(result["tokens"])


def test_length_removes_the_end_token_that_the_template_added(tokenizer: Any) -> None:
    class EndsWithEos:
        eos_token_id = tokenizer.convert_tokens_to_ids(IM_END)

        def apply_chat_template(self, chat: Any, **options: Any) -> list[int]:
            ids: list[int] = tokenizer.apply_chat_template(chat, **options)
            return ids if options["add_generation_prompt"] else ids[:-1]  # without the line break

    whole = tokenize_for_trainer(EndsWithEos(), CHAT[:3], finish_reason="stop")
    cut = tokenize_for_trainer(EndsWithEos(), CHAT[:3], finish_reason="length")
    assert whole["tokens"][-1] == EndsWithEos.eos_token_id
    assert cut["tokens"] == whole["tokens"][:-1]
    assert cut["masks"] == whole["masks"][:-1]


def test_messages_are_included_on_request(tokenizer: Any) -> None:
    # Third parties pass the finish reason as the third positional argument of an older signature: any text is true.
    assert tokenize_for_trainer(tokenizer, CHAT, "stop")["messages"] == CHAT  # type: ignore[arg-type]


def test_a_tokenizer_that_returns_a_mapping_is_understood(tokenizer: Any) -> None:
    class Mapped:
        eos_token_id = 256

        def apply_chat_template(self, chat: Any, **options: Any) -> BatchEncoding:
            assert options["return_dict"] is False
            return BatchEncoding({"input_ids": tokenizer.apply_chat_template(chat, **options)})

    assert tokenize_for_trainer(Mapped(), CHAT) == tokenize_for_trainer(tokenizer, CHAT)


def test_template_that_rewrites_earlier_turns_is_reported(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Rewriting:
        eos_token_id = 256

        def apply_chat_template(self, chat: Any, **options: Any) -> list[int]:
            chat = [*({**m, "content": ""} for m in chat[:-1]), *chat[-1:]]
            ids: list[int] = tokenizer.apply_chat_template(chat, **options)
            return ids

    with caplog.at_level(logging.WARNING):
        tokenize_for_trainer(Rewriting(), CHAT, train_on_all_assistant_turns=True)
    assert "message 2: the chat template renders earlier messages differently" in caplog.text
