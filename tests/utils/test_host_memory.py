"""How much memory a process may still take."""

from pathlib import Path

import pytest

from atroposlib.utils.host_memory import free_host_bytes


@pytest.mark.parametrize(
    ("limit", "processes", "expected"),
    [("max", "1", 4096_000), ("3000000", "1", 2500_000), ("3000000", "2", 1250_000)],
)
def test_free_memory_is_that_of_the_host_or_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, processes: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 500000\n")
    monkeypatch.setattr("atroposlib.utils.host_memory._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("atroposlib.utils.host_memory._CGROUP", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert free_host_bytes() == expected
