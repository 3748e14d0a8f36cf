"""The text that the measured environment "samples", and a tokenizer trained on it.

Both come from this repository's sources, so that a benchmark downloads nothing. The tokenizer is byte-level BPE, as in
Llama 3 or Qwen, so that decoding costs the same, with a ChatML template.
"""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 8192
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus() -> str:
    """Return about 300,000 characters of code and prose."""
    folder = Path(__file__).resolve().parents[1] / "atroposlib"
    return "\n".join(path.read_text() for path in sorted(folder.glob("api/*.py")))


def save_tokenizer(directory: Path) -> None:
    """Train and save a tokenizer that `AutoTokenizer.from_pretrained` loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([corpus()], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
