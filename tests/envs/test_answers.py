"""Reading the one answer of a text; a text that hedges has none."""

from __future__ import annotations

import ast
import time

import pytest

from atroposlib.envs.answers import (
    after_thinking_once,
    code_blocks,
    last_block,
    only_tagged,
    read_choice,
    read_tag,
    solution_of,
)

COLOURS = ["red", "blue", "a reddish blue", "none of these"]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("<think>a</think>b", "b"),
        ("x<Think>a</THINK>b", "b"),
        ("a</think>b", None),
        ("</think>a<think>b", None),
        ("<think>a", None),
        ("<think>a</think>b<think>c</think>d", None),
        ("<think><think>a</think>b", None),
    ],
)
def test_thinking_is_one_block(text: str, after: str | None) -> None:
    assert after_thinking_once(text) == after


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<a> b </a>", "b"),
        ("<A>b</A> c", "b"),
        ("<a>line\nline</a>", "line\nline"),
        ("<a></a>", ""),
        ("</a>b<a>", None),
        ("<a>b", None),
        ("<a>b</a><a>", None),
        ("<a><a>b</a></a>", None),
        ("b", None),
    ],
)
def test_a_tag_is_read_where_it_is_the_only_one(text: str, inside: str | None) -> None:
    assert only_tagged(text, "a") == inside


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The best answer is: B", "B"),
        ("the correct answer is (C).", "C"),
        ("**The answer is B**", "B"),
        ("Final answer: **D**", "D"),
        ("the final answer is \\boxed{B}", "B"),
        ("\\boxed{\\text{C}}", "C"),
        ("The best answer is: blue", "B"),
        ("The best answer is: a reddish blue.", "C"),
        ("The best answer is a compromise", None),
        ("The best answer is: bluebird", None),
        ("The answer is A. The answer is B.", None),
        ("The best answer is A, B, C or D", None),
        ("The answer is A, so \\boxed{B}", None),
        ("The best answer is: LETTER", None),
    ],
)
def test_a_choice_is_stated_once(text: str, letter: str | None) -> None:
    assert read_choice(text, COLOURS)[0] == letter


@pytest.mark.parametrize(
    ("stated", "options", "letter"),
    [
        ("New York City", ["New York", "New York City"], "B"),
        ("A red car", ["a blue car", "A red car"], "B"),
        ("1.5", ["1", "1.5"], "B"),
        ("1.5", ["1", "2"], None),
        ("C", ["C", "D"], "A"),
        ("A", ["C", "A"], "A"),
    ],
)
def test_the_longest_option_that_is_stated_is_the_choice(
    stated: str, options: list[str], letter: str | None
) -> None:
    assert read_choice(f"The best answer is: {stated}", options)[0] == letter


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


@pytest.mark.parametrize(
    "unit",
    [
        "The ",
        "the answer is A ",
        "The answer is",
        " ",
        "\n",
        "\\boxed{",
        "\\boxed{A",
        "\\text{a{x}",
        "A ",
        "A, ",
        "A or ",
        "A\n",
        "(",
        "[",
        "*",
        "*a",
        "`",
        "`a",
        "$",
        '"',
        "it's ",
        "or maybe ",
        "Answer: A ",
        "wait, ",
        "could be ",
        "not ",
        "Paris ",
        "```",
        "```py\n",
        "~~~\n",
        "```\n",
        "- ",
        "1. ",
        "<answer>",
        "</answer>",
        "<think>",
    ],
)
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


@pytest.mark.parametrize(
    "text",
    [
        "<answer>```python\nright\n```</answer>",
        "```python\nright\n```.",
        "```py\nright\n```\nIt prints:\n```\n1\n```",
        "```\nright\n```",
        "```python\nwrong\n```\nNo:\n```python\nright\n```",
    ],
)
def test_last_block_that_names_python_is_the_program(text: str) -> None:
    assert last_block(text, "python", "py", "") == "right"
