"""The tags that models write around their thoughts, and the thought at the beginning of a text.

Pure. The only table of tags: sessions recognise turns by it, parsers of tool calls pass over thoughts, and the proxy
keeps thoughts apart from answers. The channels of gpt-oss are not tags.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Spoken(NamedTuple):
    """A text without the tags around its thought."""

    thought: str
    content: str


class ThinkTags(NamedTuple):
    """What a model writes before and after a thought."""

    opening: str
    closing: str

    def is_opened_in(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of a thought, as the templates of some models do."""
        return prompt.rstrip().endswith(self.opening)

    def divide(self, text: str, *, is_opened: bool) -> Spoken:
        """Return the thought at the beginning of a text and the rest; a thought that does not end is all there is.

        White space around the thought belongs to neither. Tags later in the text are text.

        >>> THINK.divide("<think>2 + 2</think>\\n\\n4", is_opened=False)
        Spoken(thought='2 + 2', content='4')
        >>> THINK.divide("2 + 2</think>4", is_opened=True)
        Spoken(thought='2 + 2', content='4')
        """
        begin = text.lstrip()
        if begin.startswith(self.opening):
            begin = begin.removeprefix(self.opening)
        elif not is_opened:
            return Spoken("", text)
        thought, _, content = begin.partition(self.closing)
        return Spoken(thought.strip(), content.lstrip())


THINK = ThinkTags("<think>", "</think>")
"""Those of most models, and of models that were only told to think."""
THINK_TAGS = (
    THINK,
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThinkTags("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThinkTags("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    ThinkTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ThinkTags("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
"""Of the reasoning parsers of vLLM 0.32, and of Apertus' chat template."""


def tags_known_to(template: str, tokens: Collection[str]) -> ThinkTags | None:
    """Return the tags that a chat template mentions, else those among a tokenizer's added tokens; None for neither."""
    for known in (template, tokens):
        for tags in THINK_TAGS:
            if tags.closing in known:
                return tags
    return None
