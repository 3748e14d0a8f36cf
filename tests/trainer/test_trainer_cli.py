"""Flags, exit codes and messages of atropos-grpo and atropos-grpo-run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.config import parse_flags
from example_trainer import grpo, run
from example_trainer.config import TrainerConfig
from tests.processes import Process, wait_for
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_reload import fake_engine


def parse(*argv: str) -> TrainerConfig:
    return parse_flags(TrainerConfig, list(argv), prog="atropos-grpo")


def test_the_originals_flags_still_work() -> None:
    config = parse(
        *("--model", "m", "--training-steps", "7", "--atropos-url", "http://hub:1/"),
        *("--batch-size", "2", "--gradient-accumulation-steps", "32", "--vllm-restart-interval=5"),
        *("--weight-bridge-mode", "none", "--vllm-gpu-memory-utilization", "0.3", "--use-wandb"),
    )
    assert (config.model_name, config.num_steps, config.hub_url) == ("m", 7, "http://hub:1")
    assert (config.sequences_per_step, config.steps_per_publish) == (64, 5)
    assert (config.bridge, config.gpu_memory_utilization, config.use_wandb) == (
        "restart",
        0.3,
        True,
    )


def test_shared_vllm_becomes_reload_after_every_step() -> None:
    config = parse("--model=m", "--weight-bridge-mode=shared_vllm")
    assert (config.bridge, config.steps_per_publish) == ("reload", 1)


def test_engine_urls_are_a_comma_list_with_or_without_v1() -> None:
    config = parse("--model=m", "--engine_url=http://a:1/v1, http://b:2/")
    assert config.engine_urls == ["http://a:1", "http://b:2"]
    assert parse("--model=m", "--vllm_port=77").engine_urls == ["http://127.0.0.1:77"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["model", "required"]),
        (["--model=m", "--num_step=3"], ["--num_step", "--num_steps"]),
        (["--model=m", "--batch_size=0"], ["--batch_size", "0", "greater than or equal to 1"]),
        (["--model=m", "--hub_url=ftp://hub"], ["--hub_url", "ftp://hub", "http://"]),
        (["--model=m", "--engine_url=localhost:9001"], ["localhost:9001", "http://"]),
        (["--model=m", "--weight-bridge-mode=lora_only"], ["lora_only", "shared_vllm"]),
        (["--model=m", "--bridge=reload", "--weight-bridge-mode=none"], ["contradicts"]),
        (["--model=/no/such/dir"], ["/no/such/dir", "does not exist"]),
        (["--model=m", "--lr=fast"], ["--lr", "fast"]),
    ],
)
@pytest.mark.parametrize("command", [grpo.main, run.main])
def test_bad_input_is_one_line_and_exit_code_2(
    command: Any, argv: Sequence[str], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(list(argv)) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_missing_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert grpo.main(["--model=m"]) == 1
    assert "pip install 'atroposlib[trainer]'" in capsys.readouterr().err


def test_a_missing_engine_ends_with_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_engine() as engine:
        pass  # gone
    model = make_tiny_model(tmp_path / "model")
    argv = [f"--model={model}", "--bridge=reload", f"--engine_url={engine.url}"]
    argv += ["--engine_timeout_s=0.3", "--device=cpu", f"--save_path={tmp_path / 'out'}"]
    assert grpo.main(argv) == 1
    assert engine.url in capsys.readouterr().err


def test_sigterm_ends_the_trainer_with_143_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with fake_engine() as engine:
        engine.faults["/health"] = (503, b"")
        argv = ["-m", "example_trainer.grpo", f"--model={model}", "--bridge=reload"]
        argv += [f"--engine_url={engine.url}", f"--weights_dir={tmp_path / 'weights'}"]
        process = Process("trainer", argv, log_path=tmp_path / "trainer.log")
        try:
            wait_for(lambda: "/health" in engine.calls, timeout_s=40, process=process)
        finally:
            status = process.stop(signal.SIGTERM)
    assert status == 143, process.log()
    assert "Traceback" not in process.log()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, example_trainer.grpo as g\n"
        "try: g.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max_logprob_gap" in done.stdout
