"""The viewer's page: what the written file holds."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.page import GROUPS_PER_CHUNK, Chart, Curve, row_of, write_page
from atroposlib.frontend.vocabulary import Vocabulary, decoder
from tests.frontend.helpers_pages import read_page
from tests.tiny_model import make_tiny_tokenizer


def group(number: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is {number} + 1?"}]
    sequences = [{"score": 1.0, "messages": messages, "advantage": -0.5}, {"score": 0.0}]
    return {"id": f"g{number}", "sequences": sequences, **more}


def test_a_page_holds_its_head_an_index_and_every_group_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    groups = [group(i, environment="sums", item_id=i, step=i // 8) for i in range(120)]
    chart = Chart("reward", is_log=False, curves=[Curve(0, "reward_mean", [1], [0.5], [])])
    write_page(path, iter(groups), title="A run", about="About", charts=[chart])
    page = read_page(path)
    assert page.head == {
        "title": "A run",
        "about": "About. 120 groups, 240 sequences, mean score 0.500",
        "charts": [asdict(chart)],
        "compared": None,
        "render": None,
    }
    assert page.groups == groups
    assert [len(chunk["groups"]) for chunk in page.chunks] == [GROUPS_PER_CHUNK] * 2 + [20]
    assert {len(page.columns[name]) for name in ("id", "chunk", "preview", "fate")} == {120}
    row = {name: values[119] for name, values in page.columns.items() if len(values) == 120}
    assert row == {
        "id": "g119",
        "chunk": 2,
        "environment": 0,
        "item_id": 119,
        "item": "119",
        "step": 14,
        "policy_version": None,
        "score_mean": 0.5,
        "score_min": 0.0,
        "score_max": 1.0,
        "num_rollouts": 2,
        "num_sequences": 2,
        "tokens_mean": None,
        "characters_mean": 8.0,
        "length_correlation": 1.0,
        "gap_mean": None,
        "staleness": None,
        "advantage_max": 0.5,
        "fate": -1,
        "loss_share": None,
        "suspicious": "",
        "preview": "What is 119 + 1?",
    }
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("scores", "lengths", "rollouts", "expected"),
    [
        ((0.0, 1.0, 1.0), (3, 5, 5), None, 1.0),
        ((0.0, 1.0, 0.5), (5, 3, 4), None, -1.0),
        ((0.0, 0.0, 1.0), (1, 9, 5), None, 0.0),
        ((1.0, 1.0, 0.0), (2, 2, 3), (0, 0, 1), 1.0),  # the first rollout has four tokens
        ((1.0, 1.0), (2, 3), None, None),
        ((0.0, 1.0), (2, 2), None, None),
        ((None, 1.0), (2, 3), None, None),
    ],
)
def test_score_and_length_are_correlated_within_a_group(
    scores: Sequence[float | None],
    lengths: Sequence[int],
    rollouts: Sequence[int] | None,
    expected: float | None,
) -> None:
    sequences: list[dict[str, Any]] = [
        {"score": score, "tokens": [1] * length}
        for score, length in zip(scores, lengths, strict=True)
    ]
    for sequence, rollout in zip(sequences, rollouts or (), strict=False):
        sequence["rollout"] = rollout
    found = row_of({"id": "g", "sequences": sequences}).values["length_correlation"]
    assert found == expected


def test_text_of_a_group_or_a_title_cannot_end_an_element(tmp_path: Path) -> None:
    evil = "</script></title><script>alert(1)</script>$chunks"
    messages = [{"role": "user", "content": evil}]
    shown = {"id": evil, "sequences": [{"score": 1.0, "messages": messages}], "environment": evil}
    write_page(tmp_path / "p.html", [shown], title=evil, about=evil)
    text = (tmp_path / "p.html").read_text()
    assert "alert(1)</script>" not in text
    assert "<script>alert" not in text
    page = read_page(tmp_path / "p.html")
    assert page.groups == [shown]
    assert page.head["title"] == evil
    assert page.columns["environments"] == [evil]


def test_group_ids_are_unique_in_a_page(tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", [group(1), group(1), group(1)], title="t", about="")
    page = read_page(tmp_path / "p.html")
    assert page.columns["id"] == [each["id"] for each in page.groups] == ["g1", "g1~2", "g1~3"]


def test_long_groups_are_alone_in_their_chunk(tmp_path: Path) -> None:
    long = {"id": "long", "sequences": [{"score": 0.0, "text": "x" * 1_000_000}]}
    write_page(tmp_path / "p.html", [long, group(1), group(2)], title="t", about="")
    chunks = read_page(tmp_path / "p.html").chunks
    assert [[each["id"] for each in chunk["groups"]] for chunk in chunks] == [
        ["long"],
        ["g1", "g2"],
    ]


def test_groups_are_written_while_they_are_read(tmp_path: Path) -> None:
    alive: list[int] = []

    class Counted(dict[str, Any]):
        def __del__(self) -> None:
            alive.remove(self["number"])

    def groups() -> Iterator[Counted]:
        for i in range(300):
            alive.append(i)
            assert len(alive) <= 2 * GROUPS_PER_CHUNK
            yield Counted(id=f"g{i}", sequences=[{"score": 1.0}], number=i)

    write_page(tmp_path / "p.html", groups(), title="t", about="")
    assert len(read_page(tmp_path / "p.html").groups) == 300


def test_a_long_page_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.frontend.page.PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO)
    groups = [group(i) for i in range(2 * GROUPS_PER_CHUNK)]
    write_page(tmp_path / "p.html", groups, title="t", about="")
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said[:2] == ["50 groups so far", "100 groups so far"]


def test_a_chunk_names_the_pieces_of_its_own_tokens(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    first, second = tokenizer.encode("a <|im_end|>"), tokenizer.encode("\u20ac")
    groups = [
        {"id": f"g{i}", "sequences": [{"score": 1.0, "tokens": first if i < 50 else second}]}
        for i in range(51)
    ]
    write_page(tmp_path / "p.html", groups, title="t", about="", decode=decoder(tokenizer))
    pieces = [chunk["vocabulary"] for chunk in read_page(tmp_path / "p.html").chunks]
    assert [pieces[0][str(token)] for token in first] == ["a", " ", "<|im_end|>"]
    assert [pieces[1][str(token)] for token in second] == ["\\xe2", "\\x82", "\\xac"]


def test_a_token_is_decoded_once_and_a_leading_space_is_kept() -> None:
    class SentencePieces:
        num_decoded = 0

        def decode(self, tokens: list[int]) -> str:
            self.num_decoded += 1
            return "".join(["yes", "no"][token] for token in tokens)

        def convert_ids_to_tokens(self, token: int) -> str:
            return ["\u2581yes", "no"][token]

    tokenizer = SentencePieces()
    vocabulary = Vocabulary(decoder(tokenizer))
    shown = [{"sequences": [{"tokens": [0, 1, 0]}, {"score": 1.0}]}]
    assert vocabulary.of(shown) == vocabulary.of(shown) == {"0": " yes", "1": "no"}
    assert tokenizer.num_decoded == 2
    assert Vocabulary(None).of(shown) == {}
