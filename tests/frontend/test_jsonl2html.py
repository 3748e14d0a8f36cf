"""The original's functions: the page of a file, and a group as a block of HTML."""

import json
import re
from pathlib import Path

import pytest

from atroposlib.frontend.jsonl2html import (
    create_html_for_group,
    generate_html,
    get_score_class,
    main,
)
from tests.builders.rows import write_rows
from tests.frontend.helpers_pages import read_page


def test_the_page_of_a_file_holds_its_conversations_and_scores(tmp_path: Path) -> None:
    group = {"messages": [[ASKED], [ANSWERED]], "scores": [1, "n/a"]}
    path = generate_html(write_rows(tmp_path / "a<b.jsonl", group, group))
    assert path == tmp_path / "a<b.html"
    assert "<title>Rendered Messages - a&lt;b</title>" in path.read_text()
    page = read_page(path)
    assert page.head["about"] == "2 groups, 4 sequences, mean score 1.000"
    assert [each["id"] for each in page.groups] == ["line-1", "line-2"]
    assert [(s["score"], s["messages"]) for s in page.groups[1]["sequences"]] == [
        (1.0, [ASKED]),
        (None, [ANSWERED]),
    ]
    assert page.groups[0]["facts"] == {"scores that are no numbers": "sequence 2: n/a"}


def test_the_page_of_a_run_directory_is_written_into_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "groups.jsonl", {"messages": [[ASKED]], "scores": [1]})
    assert generate_html(tmp_path) == tmp_path / "run.html"
    assert len(read_page(tmp_path / "run.html").groups) == 1


def test_the_command_prints_the_path_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path / "g.jsonl", {"messages": ["text"], "scores": [1]})
    monkeypatch.setattr("sys.argv", ["jsonl2html", str(source), str(tmp_path / "page.html")])
    assert main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert read_page(tmp_path / "page.html").groups[0]["sequences"][0]["text"] == "text"


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", True),
        ("https://example.org/tracker.png", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        ('data:image/png;base64,iVBO" onerror="alert(1)', False),
    ],
)
def test_page_shows_images_that_are_in_the_messages_and_loads_no_others(
    url: str, is_shown: bool
) -> None:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "look"}]
    group = {"scores": [0.0], "messages": [[{"role": "user", "content": parts}]]}
    text = create_html_for_group(group, 0)
    assert (f'<img src="{url}"' in text) == is_shown
    assert ("<img" in text) == is_shown
    assert ("<pre>look</pre>" if is_shown else "<pre>[image_url]\nlook</pre>") in text


@pytest.mark.parametrize(
    ("score", "name"),
    [
        (1, "reward-positive"),
        ("0.5", "reward-positive"),
        (0, "reward-zero"),
        (-1, "reward-negative"),
        ("n/a", ""),
        (None, ""),
    ],
)
def test_score_classes_are_the_originals(score: object, name: str) -> None:
    assert get_score_class(score) == name


def shown(group: dict[str, object]) -> list[str]:
    """What stands in the `<pre>` blocks of a group's page."""
    return re.findall(r"<pre>(.*?)</pre>", create_html_for_group(group_data=group, index=3))


ASKED = {"role": "user", "content": "How?"}
ANSWERED = {"role": "assistant", "content": "So."}


@pytest.mark.parametrize(
    ("messages", "scores", "texts"),
    [
        ("one text", [1], ["one text"]),
        (["first text", "second text"], [1, 0], ["first text", "second text"]),
        ([["How?", "So."]], [1], ["How?", "So."]),
        ([ASKED, ANSWERED], [1], ["How?", "So."]),
        ([ASKED, ANSWERED], [1, 0], ["How?", "So."]),
        ([[[ASKED], [ANSWERED]]], [1], ["How?", "So."]),
        ([[[ASKED, ["deep"]], "flat"], [ANSWERED]], [1, 0], ["How?", "deep", "flat", "So."]),
    ],
)
def test_messages_may_be_texts_or_nested_lists(
    messages: object, scores: list[float], texts: list[str]
) -> None:
    assert shown({"messages": messages, "scores": scores}) == texts


def test_of_messages_and_scores_the_shorter_list_counts(caplog: pytest.LogCaptureFixture) -> None:
    assert shown({"messages": ["a1", "a2", "a3"], "scores": [0.5]}) == ["a1"]
    assert shown({"messages": ["a1"], "scores": [0.5, 0.25]}) == ["a1"]
    assert "group 3: messages of 3 sequences, scores of 1" in caplog.text
    assert create_html_for_group({"messages": [], "scores": []}, 0) == ""


def test_a_block_of_html_has_the_originals_ids_and_roles_and_escapes_text() -> None:
    evil = {"role": "user", "content": "<script>alert(1)</script> &"}
    text = create_html_for_group({"messages": [[evil], [ANSWERED]], "scores": [1, "n/a"]}, 1)
    assert re.findall(r'id="(group-.*?)"', text) == ["group-1-item-0", "group-1-item-1"]
    assert re.findall(r'class="role">(\w+)<', text) == ["User", "Assistant"]
    assert "<script" not in text
    assert "<pre>&lt;script&gt;alert(1)&lt;/script&gt; &amp;</pre>" in text
    assert "no messages were saved" in create_html_for_group({"scores": [1.0]}, 0)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r"])
def test_characters_that_only_look_like_line_ends_are_text(tmp_path: Path, separator: str) -> None:
    group = {"scores": [1.0], "messages": [[{"role": "user", "content": f"a{separator}b"}]]}
    path = tmp_path / "g.jsonl"
    line = json.dumps(group, ensure_ascii=False)
    path.write_text(f"{line}\r\n{line}\n", encoding="utf-8", newline="")
    groups = read_page(generate_html(path)).groups
    assert [each["sequences"][0]["messages"][0]["content"] for each in groups] == [
        f"a{separator}b"
    ] * 2
