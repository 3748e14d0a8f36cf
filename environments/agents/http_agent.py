"""An agent on plain HTTP: it drafts an answer, reviews the draft in a new conversation, and prints the result.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python http_agent.py "What is 17 * 23?"
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "gpt-4o", "messages": messages}).encode(),
        headers={
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def answer(question: str) -> str:
    draft = ask([{"role": "user", "content": question}])
    review = f"{question}\nAnother model answered: {draft}\nReply with the right number and nothing else."
    return ask([{"role": "user", "content": review}])


if __name__ == "__main__":
    print(answer(sys.argv[1]))  # noqa: T201 - a separate program
