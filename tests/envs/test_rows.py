"""Rows from files, from the sample next to an environment, and from a data set on the hub."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.rows import HubRows, read_jsonl, sample_path, without_evaluated
from atroposlib.errors import ConfigError, MissingDependency


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\n", "has no rows"),
        (b'{"a": 1}\n{', "line 2"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', "line 2"),
    ],
)
def test_unusable_row_files_name_the_flag(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--env\.dataset_path .*{message}"):
        read_jsonl(str(path))


def test_row_may_hold_any_line_separator_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x\u2028y"}\n', encoding="utf-8")
    assert read_jsonl(str(path)) == [{"a": "x\u2028y"}]


def test_an_environment_without_a_sample_says_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"no sample: .*/samples/mine\.jsonl does not exist"):
        sample_path(DatasetEnv, "mine")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is here")
def test_a_data_set_without_its_library_names_the_extra() -> None:
    with pytest.raises(MissingDependency, match=r"\[datasets\]"):
        HubRows(path="openai/gsm8k", config="main").load()


def test_a_data_set_that_cannot_be_loaded_names_what_to_give_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_dataset(path: str, config: str | None, *, split: str) -> Any:
        raise ConnectionError(f"Couldn't reach {path!r} on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    expected = r"data set 'openai/gsm8k' \(ConnectionError: Couldn't reach .*--env.dataset_path, or `sample`"
    with pytest.raises(ConfigError, match=expected):
        HubRows(path="openai/gsm8k", config="main").load()


class Opaque:
    """A row whose text does not tell its content."""


class Named(Opaque):
    def __str__(self) -> str:
        return "task"


@pytest.mark.parametrize(
    ("equal", "other"),
    [
        (lambda: {"a": [1, "x"], 2: None}, {"a": [1, "y"], 2: None}),
        (lambda: {(1, 2): "x"}, {(1, 3): "x"}),
        (lambda: 2**70, 2**71),
        (lambda: "\ud800", "\ud801"),
        (lambda: np.arange(2000), np.arange(2000) ** 2),
        (lambda: {"pixels": np.zeros((2, 2))}, {"pixels": np.ones((2, 2))}),
        (lambda: {"a": 1}, {"a": 1.0}),
        (lambda: {"a": None}, {"a": float("nan")}),
    ],
)
def test_rows_are_left_out_if_their_content_is_that_of_an_evaluation_row(
    equal: Any, other: Any
) -> None:
    (kept,) = without_evaluated([equal(), other], [equal()])
    assert kept is other


@pytest.mark.parametrize("row_cls", [Opaque, Named])
def test_rows_whose_content_is_not_known_are_kept(
    row_cls: type, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row_cls(), row_cls()]
    assert without_evaluated(rows, [row_cls()]) == rows
    assert not caplog.records
    assert without_evaluated(rows, rows[:1]) == rows[1:]
