"""The demo's rows, tokenizer and warm-up."""

import math
from itertools import islice
from pathlib import Path

import pytest
import torch

from atroposlib.cli._demo import tiny_model, warm_up
from atroposlib.errors import AtroposError
from atroposlib.utils.letter_reversal import (
    Split,
    answer_to,
    distinct_prompts,
    is_correct,
    prompts,
    split_of,
)


def test_splits_never_overlap_and_do_not_depend_on_the_seed() -> None:
    samples = {
        (split, seed): set(islice(prompts(split, seed=seed), 500))
        for split in Split
        for seed in (0, 1)
    }
    for (split, _), drawn in samples.items():
        assert {split_of(prompt) for prompt in drawn} == {split}
    assert samples[Split.TRAIN, 0] != samples[Split.TRAIN, 1]


def test_prompts_repeat_for_a_seed_and_distinct_prompts_are_distinct() -> None:
    assert list(islice(prompts(Split.TRAIN, seed=3), 20)) == list(
        islice(prompts(Split.TRAIN, seed=3), 20)
    )
    assert len(set(distinct_prompts(Split.HELDOUT, count=500, seed=0))) == 500


@pytest.mark.parametrize(
    ("completion", "finished", "right"),
    [
        ("edcba", True, True),
        ("edcba", False, False),
        ("edcb", True, False),
        ("edcbaa", True, False),
        ("", True, False),
        (" edcba", True, False),
    ],
)
def test_only_the_exact_finished_answer_is_correct(
    completion: str, finished: bool, right: bool
) -> None:
    assert is_correct("abcde>", completion, finished=finished) is right


def test_the_conversation_prompt_is_token_exact() -> None:
    tokenizer = tiny_model.build_tokenizer()
    plain = tokenizer.encode("abcde>")
    templated = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abcde>"}], add_generation_prompt=True, return_dict=False
    )
    assert len(plain) == 6
    assert templated == plain
    assert tokenizer.decode(plain) == "abcde>"


def test_the_tokenizer_survives_saving_and_knows_every_character(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_model.build_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = tiny_model.CHARACTERS
    assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded.encode("Z")) == 1
    assert loaded.eos_token_id == len(text) + 1
    assert loaded.pad_token_id == len(text)


def test_the_model_has_the_shape_vllm_accepts() -> None:
    model = tiny_model.build_model(tiny_model.build_tokenizer(), seed=0)
    assert 1.0e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.2e6
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.config.tie_word_embeddings is False


def test_sampling_accuracy_is_what_sampling_would_measure() -> None:
    tokenizer = tiny_model.build_tokenizer()
    model = tiny_model.build_model(tokenizer, seed=0)
    rows = warm_up.encode_rows(tokenizer, ["abcde>", "jihgf>"])
    tokens, labels = rows
    with torch.no_grad():
        logprobs = model(tokens).logits.double().log_softmax(-1)
    expected = 0.0
    for row in range(2):
        total = 0.0
        for position in range(tokens.shape[1]):
            if labels[row, position] != -100:
                total += logprobs[row, position - 1, tokens[row, position]].item()
        expected += math.exp(total) / 2
    assert (labels != -100).sum(1).tolist() == [6, 6]
    assert warm_up.sampling_accuracy(model, rows) == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def _short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATCH_SIZE", "NUM_VALIDATION_PROMPTS"):
        monkeypatch.setattr(warm_up, name, 4)
    monkeypatch.setattr(warm_up, "CHECK_EVERY_STEPS", 2)


@pytest.mark.usefixtures("_short_warm_up")
def test_a_warm_up_that_does_not_reach_its_target_says_so_and_saves_nothing(tmp_path: Path) -> None:
    config = warm_up.WarmUpConfig(out=tmp_path / "model", max_steps=3)
    with pytest.raises(AtroposError, match=r"in 3 steps.*--max_steps"):
        warm_up.warm_up(config)
    assert not (tmp_path / "model").exists()


@pytest.mark.usefixtures("_short_warm_up")
def test_a_warm_up_saves_a_model_and_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = warm_up.WarmUpConfig(
        out=tmp_path / "model", progress=tmp_path / "p.jsonl", target_accuracy=1e-12
    )
    warm_up.warm_up(config)
    model = AutoModelForCausalLM.from_pretrained(config.out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.out)
    rows = warm_up.encode_rows(tokenizer, [f"{answer_to('abcde>')}>"])
    assert warm_up.sampling_accuracy(model, rows) > 0
    assert (tmp_path / "p.jsonl").read_text().count("\n") == 1
