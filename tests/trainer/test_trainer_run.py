"""What `atropos-grpo-run` starts, and what it does when a part dies. The whole command runs in tests/e2e."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import EngineError
from atroposlib.utils.owned_process import OwnedProcess
from example_trainer import run
from example_trainer.run import RunConfig
from tests.builders.programs import refusal


def flags_of(part: OwnedProcess) -> dict[str, str]:
    pairs = [
        tuple(word[2:].split("=", 1)) for word in part.argv if word.startswith("--") and "=" in word
    ]
    return dict(pairs)  # type: ignore[arg-type]


def environment(*flags: str, **settings: Any) -> OwnedProcess:
    config = RunConfig(model_name="org/m", environment=Path("env.py"), vllm_port=77, **settings)
    return run._environment(config, flags)


def test_an_environment_is_told_where_hub_and_engine_are() -> None:
    part = environment(hub_url="http://localhost:8123")
    assert part.argv[1:3] == ["env.py", "serve"]
    assert flags_of(part) == {
        "env.rollout_server_url": "http://localhost:8123",
        "env.tokenizer_name": "org/m",
        "openai.base_url": "http://127.0.0.1:77/v1",
        "openai.model_name": "org/m",
        "openai.server_type": "vllm",
    }


def test_an_environment_asks_for_the_adapter_where_adapters_are_swapped() -> None:
    flags = flags_of(environment(bridge="lora", lora_name="mine"))
    assert (flags["openai.model_name"], flags["env.tokenizer_name"]) == ("mine", "org/m")


def test_flags_of_the_environment_win_in_either_spelling() -> None:
    part = environment("--env.tokenizer-name=other", "--openai--server_type", "sglang")
    assert flags_of(part).keys().isdisjoint({"env.tokenizer_name", "openai.server_type"})
    assert part.argv[-3:] == ["--env.tokenizer-name=other", "--openai--server_type", "sglang"]


def test_the_hub_is_served_at_the_port_of_its_address(tmp_path: Path) -> None:
    hub = run._hub(RunConfig(model_name="m", hub_url="http://localhost:8123", log_dir=tmp_path))
    assert hub.argv[-2:] == ["--port", "8123"]
    assert hub.log_path == tmp_path / "hub.log"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--run_hub", "--hub_url=http://far:1"], ["--run_hub", "http://far:1"]),
        (["--environment=no.py"], ["--environment no.py", "no such file"]),
        (["--", "--env.group_size=2"], ["--env.group_size=2", "--environment"]),
        (["--engine_url=http://a:1"], ["--engine_url", "atropos-grpo"]),
        (["--engine_url=http://a:1", "--bridge=lora"], ["--engine_url", "atropos-grpo"]),
        (["--engine=local", "--bridge=lora"], ["--engine local", "lora", "reload"]),
        (["--engine=local", "--bridge=transfer"], ["--engine local", "transfer"]),
    ],
)
def test_parts_that_cannot_be_started_are_refused_in_one_line(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(run.main(["--model=m", *argv]), capsys)
    for word in words:
        assert word in message


@pytest.fixture
def asked() -> Iterator[threading.Event]:
    """Set when this process is sent SIGTERM."""
    event = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    yield event
    signal.signal(signal.SIGTERM, before)


def part_that(code: str, directory: Path) -> OwnedProcess:
    return OwnedProcess(
        [sys.executable, "-S", "-c", code], name="the part", log_path=directory / "part.log"
    )


def test_a_part_that_dies_stops_the_trainer_and_is_named_with_its_log(
    tmp_path: Path, asked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WATCH_INTERVAL_S", 0.02)
    with part_that("print('the disk is full'); raise SystemExit(3)", tmp_path) as part:
        said = "the part exited with status 3.*the disk is full"
        with pytest.raises(EngineError, match=said), run._watching([part]):
            assert asked.wait(10)


def test_a_trainer_that_goes_on_for_too_long_is_asked_again(
    tmp_path: Path, asked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second SIGTERM ends a trainer at once: it may wait for the engine that died."""
    monkeypatch.setattr(run, "WATCH_INTERVAL_S", 0.02)
    monkeypatch.setattr(run, "END_GRACE_S", 0.02)
    with part_that("raise SystemExit(1)", tmp_path) as part:
        with suppress(EngineError), run._watching([part]):
            assert asked.wait(10)
            asked.clear()
            assert asked.wait(10)


def test_a_part_that_has_done_its_work_ends_nothing(
    tmp_path: Path, asked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WATCH_INTERVAL_S", 0.02)
    with part_that("pass", tmp_path) as part, run._watching([part]):
        while part.poll() is None:
            pass
        assert not asked.wait(0.2)
