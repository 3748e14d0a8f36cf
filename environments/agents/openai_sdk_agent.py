"""A typical agent: OpenAI's SDK, a tool, a loop. It has no training code and prints its answer.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python openai_sdk_agent.py "What is 17 * 23?"
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

from openai import OpenAI

MAX_TURNS = 8
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Value of an expression of whole numbers with + - * and brackets.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def calculate(expression: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return int(ast.literal_eval(node))

    return value(ast.parse(expression, mode="eval").body)


def use_tool(arguments: str) -> str:
    try:
        return str(calculate(**json.loads(arguments)))
    except (ValueError, SyntaxError, TypeError, KeyError) as error:
        return f"Error: {error}"


def answer(question: str) -> str:
    client = OpenAI(max_retries=0)  # the proxy and its engine client retry
    messages: list[Any] = [
        {"role": "developer", "content": "Calculate with the tool, then answer with the number."},
        {"role": "user", "content": question},
    ]
    for _ in range(MAX_TURNS):
        completion = client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=TOOLS, temperature=0
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            result = use_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(answer(sys.argv[1]))  # noqa: T201 - a separate program
