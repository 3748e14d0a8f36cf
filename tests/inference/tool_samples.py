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
