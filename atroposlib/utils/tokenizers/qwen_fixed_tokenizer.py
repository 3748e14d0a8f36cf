"""A Qwen tokenizer whose chat template does not change sampled text.

Qwen's templates strip thinking from earlier turns and trim text, so the tokens of a conversation change with every
turn. This one renders every message verbatim, in the same ChatML format with Hermes tool calls.
"""

from __future__ import annotations

from typing import Any

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is none or content is not defined -%}
    {%- elif content is string -%}{{ content }}
    {%- else -%}{%- for part in content -%}{{ part.text if part.text is defined else '' }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
    {{- 'You can call these functions; their signatures, one JSON object a line:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nTo call one, write its name and its arguments as JSON between tags:\\n' -}}
    {{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif has_system -%}
    {{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and has_system -%}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class QwenFixedTokenizer:
    """A transformers tokenizer with `CHAT_TEMPLATE`; other attributes are delegated to the tokenizer."""

    def __init__(self, model_name_or_path: str, **kwargs: Any) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        self.tokenizer.chat_template = CHAT_TEMPLATE

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        tokenize: bool = True,
        *,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Render messages; returns token ids as a list unless `return_dict` is set."""
        return self.tokenizer.apply_chat_template(
            conversation, tools=tools, tokenize=tokenize, return_dict=return_dict, **kwargs
        )

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not set yet while copying or unpickling
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)
