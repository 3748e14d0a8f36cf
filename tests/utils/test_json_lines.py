"""Files with one JSON value per line that grow, shrink or end in the middle of a line."""

from pathlib import Path

from atroposlib.utils.json_lines import LineTail


def test_added_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert LineTail(path).read() == []
    path.write_text("of an earlier run\n")
    tail, whole = LineTail(path, skip_existing=True), LineTail(path)
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
    assert tail.read() == ["one", "two"]
    assert whole.read() == ["of an earlier run", "one", "two"]
    with path.open("a") as file:
        file.write("ee\n")
    assert tail.read() == whole.read() == ["three"]
    assert tail.read() == []


def test_lines_after_a_cut_are_read(tmp_path: Path) -> None:
    """A resumed trainer removes the steps after its checkpoint."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("1\n2\n3\n")
    tail = LineTail(path)
    assert tail.read() == ["1", "2", "3"]
    path.write_text("1\n")
    assert tail.read() == []
    with path.open("a") as file:
        file.write("2\n")
    assert tail.read() == ["2"]
