"""Tool calls in the text of models: one `Style` per format, parsed and rendered without vLLM.

A style is two pure functions, text -> text and calls in order, and calls -> text; each reads what the other writes.
Text that is not a well-formed call stays text: nothing a model writes raises or is repaired. Called by
`ToolCallTranslator` and `ToolEnv`.
"""

from __future__ import annotations

from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.parsers.borrowed import vllm_names, vllm_style
from atroposlib.inference.tools.parsers.json_styles import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
)
from atroposlib.inference.tools.parsers.qwen_coder import QWEN3_CODER
from atroposlib.inference.tools.parsers.style import Call, Parsed, Style
from atroposlib.utils.wording import nearest

__all__ = ["STYLES", "Call", "Parsed", "Style", "style_named"]

STYLES: dict[str, Style] = {
    **dict.fromkeys(["hermes", "qwen", "qwen25", "qwen2_5", "qwen3", "qwen3_json"], HERMES),
    **dict.fromkeys(["llama3_json", "llama4_json", "llama3", "llama4"], LLAMA),
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    **dict.fromkeys(["qwen3_coder", "qwen3_xml"], QWEN3_CODER),
    **dict.fromkeys(["deepseek_v3", "deepseek_r1", "deepseekv3"], DEEPSEEK_V3),
    **dict.fromkeys(["deepseek_v31", "deepseek_v3_1", "deepseekv31"], DEEPSEEK_V31),
}
"""Parser names of vLLM and SGLang -> styles."""


def style_named(name: str, *, tokenizer: Any = None) -> Style:
    """Return the style for a parser name; vLLM's parser if `STYLES` has none and vLLM is installed.

    Raises ConfigError for an unknown name.
    """
    wanted = name.strip().lower().replace("-", "_").replace(".", "_")
    if wanted in STYLES:
        return STYLES[wanted]
    borrowed = vllm_names()
    if name in borrowed:
        return vllm_style(name, tokenizer)
    known = sorted({*STYLES, *borrowed})
    raise ConfigError(
        f"there is no tool parser {name!r}; {nearest(wanted, known, otherwise='none is similar.')}"
        f" Known: {', '.join(known)}" + ("" if borrowed else " (and more where vLLM is installed)")
    )
