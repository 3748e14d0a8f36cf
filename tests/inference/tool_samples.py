"""One call to one tool, as models of every style write it: weather(city="Paris", days=2)."""

from __future__ import annotations

# DeepSeek's tokens, spelled with their bars and blocks.
DS = {
    word: "<\uff5c" + word.replace(" ", "\u2581") + "\uff5c>"
    for word in [
        "tool calls begin",
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
    ]
}


def deepseek(text: str) -> str:
    for word, token in DS.items():
        text = text.replace(f"<{word}>", token)
    return text


SAMPLED = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris", "days": 2}}]',
    "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": deepseek(
        "<tool calls begin><tool call begin>function<tool sep>weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<tool call end><tool calls end>'
    ),
    "deepseek_v31": deepseek(
        "<tool calls begin><tool call begin>weather<tool sep>"
        '{"city": "Paris", "days": 2}<tool call end><tool calls end>'
    ),
    "deepseek_v32": (
        '<|DSML|function_calls>\n<|DSML|invoke name="weather">\n'
        '<|DSML|parameter name="city" string="true">Paris</|DSML|parameter>\n'
        '<|DSML|parameter name="days" string="false">2</|DSML|parameter>\n'
        "</|DSML|invoke>\n</|DSML|function_calls>"
    ).replace("|", "\uff5c"),
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n'
    '<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "gpt_oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Paris", "days": 2}<|call|>',
}
"""What models of each style write."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
