"""Texts of messages as trees: what has a form, and that nothing of a hostile text passes."""

import time
from typing import Any

import pytest

from atroposlib.frontend import rendering
from atroposlib.frontend.rendering import MAX_CHARS, render, with_trees

pytest.importorskip("latex2mathml", reason="needs the extra view")
PNG = "data:image/png;base64,iVBORw0KGgo="


def inside(text: str) -> list[Any]:
    """Return the trees in the first paragraph."""
    tree = render(text)
    assert isinstance(tree, list)
    found: list[Any] = tree[2][2:]
    return found


def elements(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(tree, list):
        return []
    return [(tree[0], tree[1]), *(each for child in tree[2:] for each in elements(child))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**a** *b* ~~c~~ `d`", ["strong", "em", "s", "code"]),
        ("- a\n- b", ["ul", "li", "li"]),
        ("| a |\n|---|\n| 1 |", ["table", "thead", "tr", "th", "tbody", "tr", "td"]),
        ("> a\n\n---", ["blockquote", "hr"]),
        ("one $x$ costs $5 and $6", ["math", "mrow", "mi"]),
        (r"so \(x\)", ["math", "mrow", "mi"]),
        ("so\n\\[\nx\n\\]", ["br", "math", "mrow", "mi"]),
        ("$$x$$", ["math", "mrow", "mi"]),
        ("```py\nif 1: pass\n```", ["pre", "span", "span", "span"]),
    ],
)
def test_markdown_mathematics_and_code_become_elements(text: str, expected: list[str]) -> None:
    found = [tag for tag, _ in elements(render(text))]
    assert [tag for tag in found if tag not in ("div", "p")] == expected


def test_code_is_whole_and_a_list_keeps_its_first_number() -> None:
    [_, _, pre] = render("```python\ndef f():\n    return 1  # one\n```")  # type: ignore[misc]
    pieces = [piece if isinstance(piece, str) else piece[2] for piece in pre[2:]]
    assert "".join(pieces) == "def f():\n    return 1  # one\n"
    assert render("3. a")[2][:2] == ["ol", {"start": 3}]  # type: ignore[index]


@pytest.mark.parametrize(
    "text", ["", "plain\ntext", "a < b & c", "<b>bold</b>", "x" * (MAX_CHARS + 1) + " **a**"]
)
def test_a_text_without_a_form_and_a_long_one_stay_as_they_are(text: str) -> None:
    assert render(text) is None


def test_mathematics_that_cannot_be_read_is_code() -> None:
    for source in (r"\frac{1}{", "x^2^3", "{" * 900, r"\sqrt" * 900, r"\begin{x}", "&"):
        [tree] = inside(f"${source}$")
        assert tree == ["code", {}, source] or tree[0] == "math"
    assert inside(r"$\mathop$") == [["code", {}, r"\mathop"]]
    assert inside(r"$\frac{1}{$") == [["code", {}, r"\frac{1}{"]]


def test_only_images_in_data_urls_are_shown_and_addresses_are_text() -> None:
    assert inside(f"![a]({PNG})") == [["img", {"src": PNG, "alt": "a"}]]
    assert inside("**a** ![b](https://x.org/y.png)")[2] == "[image: b] (https://x.org/y.png)"
    assert inside("[b](https://x.org)") == ["b", ["small", {}, " (https://x.org)"]]


@pytest.mark.parametrize("piece", ["[", "*a", "`a``b", "$a", "\\(", ">", "![", "<a ", "_a__b", "&"])
def test_a_text_made_to_be_slow_takes_seconds_at_most(piece: str) -> None:
    began = time.process_time()
    render((piece * MAX_CHARS)[:MAX_CHARS])
    assert time.process_time() - began < 8


def view(*contents: Any) -> dict[str, Any]:
    messages = [{"role": "assistant", "content": content} for content in contents]
    return {"id": "g", "sequences": [{"messages": messages}, {"messages": messages}]}


def test_a_group_has_the_trees_of_the_texts_that_are_shown() -> None:
    call = "Look: *b*\n<tool_call>{}</tool_call>\n**c**"
    parts = [{"type": "text", "text": "`d`"}, {"type": "image_url"}]
    tool = {"sequences": [{"messages": [{"role": "tool", "content": "**e**"}]}]}
    plain = view("text", None)
    first, second, third = with_trees(
        [view("<think>*no*</think>\n\n**a**", call, parts), tool, plain]
    )
    assert [text for text, _ in first["rendered"]] == ["**a**", "Look: *b*", "**c**", "`d`"]
    assert (second, third) == (tool, plain)


def test_only_the_first_groups_of_a_page_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "PAGE_CHARS", 8)
    assert ["rendered" in each for each in with_trees([view("**abc**"), view("*b*")] * 2)] == [
        *(True, True, False, False),
    ]
    monkeypatch.setattr(rendering, "PAGE_CHARS", 1000)
    monkeypatch.setattr(rendering, "PAGE_S", 0.0)
    assert not any("rendered" in each for each in with_trees([view("**abc**")]))
