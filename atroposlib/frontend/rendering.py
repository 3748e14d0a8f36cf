"""Markdown, mathematics and code of messages as trees of elements, which the viewer builds without parsing HTML.

A tree is a text, or a list: a tag, its attributes, and the trees inside. HTML in a text stays text, no link leads
anywhere, and only images in data URLs are shown. Commands of LaTeX can name any attribute: `viewer/4_rendered.js` takes
the tags and attributes of its lists alone. Mathematics needs the extra `view`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import unescape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree.ElementTree import Element

from atroposlib.frontend.view_groups import DATA_URI

if TYPE_CHECKING:  # loaded when a page is written
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.tree import SyntaxTreeNode

Tree: TypeAlias = "str | list[Any]"

MAX_CHARS = 20_000
"""A longer text is shown as it is."""
MAX_MATH_CHARS = 4000
PAGE_CHARS, PAGE_S = 400_000, 5.0
"""Texts that are rendered into a stored page, those of its first groups, and the time after which it has no more."""

_DEPTH = 60
_FAILURES = (AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
"""What latex2mathml raises beside its own exceptions."""
_LANGUAGES = re.compile(
    "bash|c|cpp|csharp|css|diff|go|html|http|ini|java|javascript|js|json|julia|kotlin|latex|lua|makefile|php|python3?|"
    "py|r|ruby|rust|sh|sql|swift|tex|toml|ts|typescript|xml|ya?ml"
)
"""Those whose lexers are tried; others are shown without colours."""
_COLOURS = {
    "Keyword": "k",
    "Comment": "c",
    "Literal.String": "s",
    "Literal.Number": "m",
    "Name.Function": "f",
    "Name.Class": "f",
    "Name.Builtin": "f",
}


_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


def render(text: str) -> Tree | None:
    """Return the tree of a text; None if it has nothing to render, or is too long."""
    if len(text) > MAX_CHARS:
        return None
    from markdown_it.tree import SyntaxTreeNode

    tree: Tree = ["div", {}, *_inside(SyntaxTreeNode(_parser().parse(text)))]
    return tree if _has_form(tree) else None


def with_trees(groups: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield view groups, the first ones with `rendered`: a text and its tree for each that has one."""
    room, took_s = PAGE_CHARS, 0.0
    for group in groups:
        began = time.perf_counter()
        texts = dict.fromkeys(_texts_of(group)) if room > 0 and took_s < PAGE_S else {}
        trees = [(text, tree) for text in texts if (tree := render(text)) is not None]
        room -= sum(map(len, texts))
        took_s += time.perf_counter() - began
        yield {**group, "rendered": trees} if trees else group


def _texts_of(group: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the viewer shows of the messages as rendered text: no tool results, and no reasoning."""
    for sequence in group.get("sequences", ()):
        for message in sequence.get("messages") or ():
            if not isinstance(message, Mapping) or message.get("role") == "tool":
                continue
            content = message.get("content")
            for part in content if isinstance(content, list) else [content]:
                text = part.get("text") if isinstance(part, Mapping) else part
                if not isinstance(text, str):
                    continue
                if message.get("role") == "assistant":
                    answer = text.partition("</think>")[2].lstrip() if "</think>" in text else text
                    pieces = _CALL.split(answer)
                    yield from map(str.strip, pieces) if len(pieces) > 1 else pieces
                else:
                    yield text


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "breaks": True})
    parser.enable(["table", "strikethrough"])
    if find_spec("latex2mathml") and find_spec("mdit_py_plugins"):
        from mdit_py_plugins.amsmath import amsmath_plugin
        from mdit_py_plugins.dollarmath import dollarmath_plugin

        parser.use(dollarmath_plugin, allow_space=False, allow_digits=False, double_inline=True)
        parser.use(amsmath_plugin)
        parser.inline.ruler.before("escape", "brackets", _bracketed_math)
    return parser


def _bracketed_math(state: StateInline, silent: bool) -> bool:
    r"""Read `\(...\)` and `\[...\]`."""
    opening = state.src[state.pos : state.pos + 2]
    closing = {"\\(": "\\)", "\\[": "\\]"}.get(opening)
    end = -1 if closing is None else state.src.find(closing, state.pos + 2)
    if end < 0:
        return False
    if not silent:
        token = state.push("math_inline" if opening == "\\(" else "math_block", "math", 0)
        token.content = state.src[state.pos + 2 : end]
    state.pos = end + 2
    return True


def _has_form(tree: Tree) -> bool:
    if isinstance(tree, str):
        return False
    return tree[0] not in ("div", "p", "br") or any(map(_has_form, tree[2:]))


def _inside(node: SyntaxTreeNode) -> list[Tree]:
    return [tree for child in node.children for tree in _trees(child) if tree]


def _trees(node: SyntaxTreeNode) -> list[Tree]:
    """Return the trees of a node: one, or those of its children if it has no element of its own."""
    kind = node.type
    if kind in ("inline", "root") or (kind == "paragraph" and node.hidden):
        return _inside(node)
    if kind in ("text", "html_inline", "html_block"):
        return [node.content]
    if kind in ("softbreak", "hardbreak"):
        return [["br", {}]]
    if kind == "code_inline":
        return [["code", {}, node.content]]
    if kind in ("fence", "code_block"):
        return [["pre", {"class": "code"}, *_code(node.content, node.info)]]
    if kind.startswith(("math", "amsmath")):
        return [_math(node.content, is_block=kind != "math_inline")]
    if kind == "image":
        return [_image(str(node.attrs.get("src", "")), node.content)]
    if kind == "link":
        return [*_inside(node), _address(node)]
    if kind == "heading":
        return [["p", {"class": "heading-text"}, *_inside(node)]]
    attributes = {"start": node.attrs["start"]} if "start" in node.attrs else {}
    return [[node.tag, attributes, *_inside(node)]]


def _image(source: str, alt: str) -> Tree:
    if DATA_URI.fullmatch(source):
        return ["img", {"src": source, "alt": alt}]
    return f"[image: {alt}] ({source})"


def _address(node: SyntaxTreeNode) -> Tree:
    """Return the address of a link as text: a completion must not lead a person anywhere."""
    return ["small", {}, f" ({node.attrs.get('href', '')})"]


def _code(text: str, language: str) -> list[Tree]:
    name = language.split()[0].lower() if language.split() else ""
    if not _LANGUAGES.fullmatch(name):
        return [text]
    from pygments.lexers import get_lexer_by_name

    lexer = get_lexer_by_name(name, stripnl=False, ensurenl=False)
    return [_coloured(str(kind)[len("Token.") :], value) for kind, value in lexer.get_tokens(text)]


def _coloured(kind: str, value: str) -> Tree:
    css = next((css for start, css in _COLOURS.items() if kind.startswith(start)), None)
    return value if css is None else ["span", {"class": f"code-{css}"}, value]


def _math(source: str, *, is_block: bool) -> Tree:
    """Return MathML; the source as code if it cannot be converted."""
    from latex2mathml import exceptions
    from latex2mathml.converter import convert_to_element

    known = vars(exceptions).values()
    own = [e for e in known if isinstance(e, type) and issubclass(e, Exception)]
    failures: tuple[type[Exception], ...] = (*own, *_FAILURES)
    plain: Tree = ["code", {}, source]
    if len(source) > MAX_MATH_CHARS:
        return plain
    try:
        element = convert_to_element(source, display="block" if is_block else "inline")
        return _element(element, _DEPTH)
    except failures:
        return plain


def _element(element: Element, depth: int) -> Tree:
    """Return the tree of a MathML element; ValueError if it is nested too deeply."""
    if depth == 0:
        raise ValueError("nested too deeply")
    inside: list[Tree] = [unescape(element.text)] if element.text else []
    return [
        element.tag,
        dict(element.attrib),
        *inside,
        *(_element(child, depth - 1) for child in element),
    ]
