"""Reading the one answer of a text; a text that hedges has none."""

import ast
import importlib
import time
from typing import Any

import pytest

from atroposlib.envs.answers import (
    code_blocks,
    last_block,
    only_tagged,
    read_choice,
    read_tag,
    solution_of,
)
from tests.builders.tables import table


@pytest.mark.parametrize(
    ("reader", "text", "arguments", "value"),
    [
        (each["reader"], text, each.get("arguments", {}), value)
        for each in table("envs/readers")
        for text, value in each["texts"]
    ],
)
def test_a_reader_returns_what_a_text_states(
    reader: str, text: str, arguments: dict[str, Any], value: Any
) -> None:
    module, _, name = reader.rpartition(".")
    read = getattr(importlib.import_module(f"atroposlib.envs.{module}"), name)
    assert read(text, **arguments) == value


PROGRAM = "for i in range(2):\n    print(i)"
BLOCK = f"```python\n{PROGRAM}\n```"
INDENTED = PROGRAM.replace("\n", "\n   ")


@pytest.mark.parametrize(
    "text",
    [
        BLOCK,
        f"```\n{PROGRAM}\n```",
        f"```py\n{PROGRAM}\n```",
        f"```Python3\n{PROGRAM}\n```",
        f"``` python\n{PROGRAM}\n```  ",
        f'```python title="a.py"\n{PROGRAM}\n```',
        f"````python\n{PROGRAM}\n````",
        f"~~~python\n{PROGRAM}\n~~~",
        f"```python\n{PROGRAM}```",
        BLOCK.replace("\n", "\r\n"),
        f"Here it is: {BLOCK}",
        f"Here is `main`: ```\n{PROGRAM}\n```",
        f"{BLOCK}\nIt prints 0 and 1.",
        f"1. The program:\n   ```python\n   {INDENTED}\n   ```",
        f"- ```python\n  {INDENTED}\n  ```",
        f"```python\nprint(2)\n```\nBetter:\n{BLOCK}",
        f"It prints\n```text\n0\n1\n```\n{BLOCK}",
        f"{BLOCK}\nIt prints\n```text\n0\n1\n```",
        f"```bash\npip list\n```\n```cpp\nint a;\n```\n```json\n{{}}\n```\n{BLOCK}",
        f"{BLOCK}\n```bash\npython a.py\n```",
        f"```text\nnever closed\n{BLOCK}",
        f"<think>\n```python\nprint(3)\n</think>\n{BLOCK}",
        f"<think>\n```python\nprint(3)\n```\n</think>\n{BLOCK}",
        f"Inline ```code``` and `more`.\n{BLOCK}",
        f"{BLOCK}\n```python\nprint('not closed')",
        f"<answer>{BLOCK}</answer>",
        f"{BLOCK}.",
        f"{BLOCK}\nIt prints:\n```\n1\n```",
    ],
)
def test_the_last_python_block_is_the_program(text: str) -> None:
    found = last_block(text, "python", "python3", "py", "")
    assert found is not None
    assert ast.dump(ast.parse(found)) == ast.dump(ast.parse(PROGRAM))


@pytest.mark.parametrize(
    "text",
    [
        "",
        PROGRAM,
        f"```python\n{PROGRAM}",
        f"```cpp\n{PROGRAM}\n```",
        f"```python {PROGRAM}",
        f"`{PROGRAM}`",
        f"<think>{BLOCK}</think> Done.",
        f"<think>{BLOCK} Done.",
    ],
)
def test_without_a_closed_python_block_there_is_no_program(text: str) -> None:
    assert last_block(text, "python", "python3", "py", "") is None


def test_fences_inside_of_a_program_belong_to_it() -> None:
    program = 's = """\n    ```text\n    a\n    ```\n"""\nt = "```"'
    assert code_blocks(f"````python\n```\n````\n```py\n{program}\n```") == [
        ("python", "```"),
        ("py", program),
    ]


@pytest.mark.parametrize("unit", table("envs/repeated")["answers"])
def test_reading_takes_linear_time(unit: str) -> None:
    def seconds(length: int) -> float:
        text = (unit * length)[:length]
        begin = time.process_time()
        for begin_of_text in ("", "The answer is A", "<answer>"):
            read_choice(begin_of_text + text, ["Paris", "London"])
        code_blocks(text)
        for read in (only_tagged, read_tag):
            read(solution_of(text), "answer")
        return time.process_time() - begin

    short = min(seconds(5_000) for _ in range(2))
    assert seconds(20_000) < 10 * short + 0.2  # quadratic: 16 times
