"""Tool calls in the text of models: one `Style` per format, parsed and rendered without vLLM.

A style is two pure functions, text -> text and calls in order, and calls -> text; each reads what the other writes.
Text that is not a well-formed call stays text: nothing a model writes raises or is repaired. Called by
`ToolCallTranslator` and `ToolEnv`.
"""

from __future__ import annotations

from typing import Any

from atroposlib.errors import ConfigError
from atroposlib.inference.tools.parsers.borrowed import vllm_names, vllm_style
from atroposlib.inference.tools.parsers.harmony import HARMONY
from atroposlib.inference.tools.parsers.json_styles import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    KIMI_K2,
    LLAMA,
    MISTRAL,
    MISTRAL_V11,
)
from atroposlib.inference.tools.parsers.style import Call, Parsed, Style
from atroposlib.inference.tools.parsers.tagged import DEEPSEEK_V32, GLM, MINIMAX_M2, QWEN3_CODER
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
    **dict.fromkeys(["deepseek_v32", "deepseek_v3_2", "deepseekv32"], DEEPSEEK_V32),
    **dict.fromkeys(["glm45", "glm47", "glm"], GLM),
    "kimi_k2": KIMI_K2,
    **dict.fromkeys(["minimax_m2", "minimax"], MINIMAX_M2),
    **dict.fromkeys(["gpt_oss", "openai", "harmony"], HARMONY),
}
"""Parser names of vLLM and SGLang -> styles."""


_VLLM = "vllm:"


def style_named(name: str, *, tokenizer: Any = None) -> Style:
    """Return the style for a parser name; vLLM's parser if `STYLES` has none and vLLM is installed.

    A name that begins with `vllm:` is always vLLM's own, to read what a deployed vLLM would, including its repairs of
    broken calls. Raises ConfigError for an unknown name, and for `vllm:` without vLLM.
    """
    if name.startswith(_VLLM):
        own = name.removeprefix(_VLLM)
        if own in vllm_names():
            return vllm_style(own, tokenizer)
        raise ConfigError(f"{name!r} needs vLLM with a tool parser {own!r}, beside this package")
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
