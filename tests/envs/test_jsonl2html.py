"""The rollout page: self-contained, everything escaped, errors named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.frontend.jsonl2html import generate_html, get_score_class


def write(path: Path, *groups: object) -> Path:
    path.write_text("\n".join(json.dumps(group) for group in groups) + "\n")
    return path


def test_page_shows_messages_and_scores_and_escapes_them(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & $about"
    messages = [[{"role": "user", "content": evil}, {"role": "assistant", "content": "4"}]]
    group = {"scores": [1.0], "messages": messages}
    page = generate_html(write(tmp_path / "a<b.jsonl", group, group))
    text = page.read_text()
    assert page == tmp_path / "a<b.html"
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt; &amp; $about") == 4
    assert "2 groups, 2 sequences, mean score 1.000" in text
    assert "a&lt;b" in text
    assert text.count('class="score good"') == 4
    assert "http" not in text  # nothing is loaded from elsewhere


def test_page_names_parts_that_are_not_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    group = {"scores": [0.0], "messages": [[{"role": "user", "content": parts}]]}
    text = generate_html(write(tmp_path / "g.jsonl", group), tmp_path / "p.html").read_text()
    assert "look\n[image_url]" in text


@pytest.mark.parametrize(("score", "name"), [(1, "good"), (0.5, "fair"), (0, "bad"), (-1, "bad")])
def test_score_colours(score: float, name: str) -> None:
    assert get_score_class(score) == name


def test_group_without_messages_says_so(tmp_path: Path) -> None:
    assert (
        "no messages were saved"
        in generate_html(write(tmp_path / "g.jsonl", {"scores": [1.0]})).read_text()
    )


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1: not JSON"), ("[]", "expected an object")]
)
def test_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        generate_html(path)
    with pytest.raises(ConfigError, match="cannot read"):
        generate_html(tmp_path / "absent.jsonl")
