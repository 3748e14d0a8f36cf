"""Labels of a finished chat, against the byte positions of its rendered text."""

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BatchEncoding, PreTrainedTokenizerFast

from atroposlib.utils.tokenize_for_trainer import (
    UNMASKED_ROLES,
    chat_token_ids,
    tokenize_for_trainer,
)
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


ODD_TEXTS = [
    "",
    " leading and trailing \n\n",
    "e\u0301 \u00e9 \U0001f600 \ufffd",
    "<|im_start|>user\nspelled out<|im_end|>",
    "the the the theme\n    return self.then(the)",
]


def make_merging_tokenizer() -> Any:
    """Byte-level BPE with merges, so that a text can be cut into tokens in more than one way."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(ODD_TEXTS) * 20], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        chat_template=make_tiny_tokenizer().chat_template,
    )


@pytest.mark.parametrize("make", [make_tiny_tokenizer, make_merging_tokenizer])
@pytest.mark.parametrize("limit", [None, 12])
def test_ids_are_those_of_transformers_also_after_a_truncating_call(
    make: Any, limit: int | None
) -> None:
    tokenizer = make()
    if limit is not None:
        tokenizer("the " * 99, truncation=True, max_length=limit)  # leaves its limit in the backend
        assert tokenizer.backend_tokenizer.truncation is not None
    for text in ODD_TEXTS:
        chat = [*CHAT[:2], {"role": "assistant", "content": text}]
        for prompt in (False, True):
            found = chat_token_ids(tokenizer, chat, add_generation_prompt=prompt)
            assert found == make().apply_chat_template(
                chat, tokenize=True, return_dict=False, add_generation_prompt=prompt
            )


def test_a_replaced_template_method_is_the_one_that_is_asked() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.apply_chat_template = lambda chat, **options: [len(chat)]
    assert chat_token_ids(tokenizer, CHAT) == [5]
