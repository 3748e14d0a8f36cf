"""Flags, exit codes and messages of atropos-grpo and atropos-grpo-run."""

import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, install_command
from example_trainer import grpo, run
from example_trainer.config import TrainerConfig
from example_trainer.training import stop_on_signals
from tests.builders.programs import refusal, run_python
from tests.processes import Process, wait_for
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_engine import recorded_engine


def parse(*argv: str) -> TrainerConfig:
    return parse_flags(TrainerConfig, list(argv), prog="atropos-grpo")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--training-steps 7 --atropos-url http://hub:1/ --batch-size 2 --gradient-accumulation-steps 32"
            " --vllm-restart-interval=5 --weight-bridge-mode none --vllm-gpu-memory-utilization 0.3 --use-wandb",
            {"num_steps": 7, "hub_url": "http://hub:1", "sequences_per_step": 64, "use_wandb": True}
            | {"steps_per_publish": 5, "bridge": "restart", "gpu_memory_utilization": 0.3},
        ),
        ("--weight-bridge-mode=shared_vllm", {"bridge": "reload", "steps_per_publish": 1}),
        ("--weight-bridge-mode=lora_only", {"bridge": "lora", "lora": True}),
        ("--weight-bridge-mode=lora_restart", {"bridge": "restart", "lora": True}),
        ("--engine_url=http://a:1/v1,http://b:2/", {"engine_urls": ["http://a:1", "http://b:2"]}),
        ("--vllm_port=77", {"engine_urls": ["http://127.0.0.1:77"]}),
        ("--objective=dapo", {"clip_eps": 0.2, "clip_eps_high": 0.28, "loss_mean": "token"}),
        ("--objective=gspo", {"ratio_level": "sequence", "clip_eps": 0.03, "clip_eps_high": 0.04}),
        (
            "--objective=gspo --loss_mean=token --clip-eps=0.1",
            {"ratio_level": "sequence", "loss_mean": "token", "clip_eps": 0.1},
        ),
        ("--vllm-gpu=1 --engine_args=--tensor-parallel-size=2", {"vllm_gpu": [1]}),
        ("--vllm_gpu 6 7", {"vllm_gpu": [6, 7]}),
        ("--bridge=restart", {"reports_processed": True}),
        ("--bridge=restart --engine=local", {"reports_processed": False}),
        ("--bridge=reload", {"reports_processed": False}),
        ("--bridge=reload --logprobs_mode=processed", {"reports_processed": True}),
        ("--bridge=restart --logprobs_mode=raw", {"reports_processed": False}),
    ],
)
def test_flags_and_what_they_stand_for(flags: str, expected: dict[str, Any]) -> None:
    config = parse("--model=m", *flags.split())
    assert {name: getattr(config, name) for name in expected} == expected


ORIGINAL_FLAGS = """--lr 1e-5|--training-steps 10|--batch-size 2|--seq-len 2048|--gradient-accumulation-steps 32
--warmup-steps 0|--optimizer adamw_8bit|--adafactor-scale-parameter|--adafactor-relative-step|--device cpu|--save-path t
--checkpoint-interval 3|--clip-eps 0.2|--vllm-port 9001|--vllm-gpu 1|--gpu-memory-utilization 0.45
--vllm-gpu-memory-utilization 0.45|--max-model-len 4096|--dtype bfloat16|--vllm-restart-interval 3
--atropos-url http://localhost:8000|--use-wandb|--wandb-project p|--wandb-group g|--vllm-config-path p
--weight-bridge-mode shared_vllm|--weight-bridge-mode lora_only|--weight-bridge-mode lora_restart
--train-layer-indices 0-3,28-31|--lora-r 16|--lora-alpha 32|--lora-dropout 0.05|--lora-target-modules q_proj v_proj
--lora-layer-indices 1|--trainer-rank 0|--world-size 1|--init-method env://|--num-inference-nodes 0|--debug-loading
--benchmark|--log-dir ./logs"""


@pytest.mark.parametrize("flag", ORIGINAL_FLAGS.replace("\n", "|").split("|"))
def test_every_flag_of_the_original_is_accepted(flag: str) -> None:
    parse("--model", "m", *flag.split())


def test_every_20th_step_is_saved_and_two_checkpoints_are_kept_unless_told_otherwise() -> None:
    config = parse("--model=m")
    assert (config.checkpoint_interval, config.keep_last) == (20, 2)
    as_the_original = parse("--model=m", "--checkpoint-interval=3", "--keep-last=None")
    assert (as_the_original.checkpoint_interval, as_the_original.keep_last) == (3, None)


def test_flags_without_a_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    parse("--model=m", "--trainer-rank=1", "--debug-loading")
    assert "ignored: --debug_loading, --trainer_rank" in caplog.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--objective=gspo", "--clip-eps=3e-4"], "most sequences would have no gradient"),
        (["--objective=gspo", "--clip-eps=3e-4", "--correction=tis"], "most sequences would"),
        (["--objective=dapo", "--correction=tis"], None),
        (["--objective=gspo"], None),
        (["--objective=dapo"], None),
    ],
)
def test_a_clip_that_does_too_much_is_warned_of(
    flags: list[str], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    parse("--model=m", *flags)
    if words is None:
        assert caplog.text == ""
    else:
        assert words in caplog.text


def test_a_trainer_under_torchrun_says_how_long_it_may_take_to_end_and_passes_over_repeats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal to the whole job reaches it twice: from the sender, and from torchrun, which passes its own on."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    stopping = threading.Event()
    with caplog.at_level("INFO"), stop_on_signals(stopping):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert stopping.is_set()
    assert "after its --shutdown-timeout, 30 s unless given" in caplog.text


def test_adafactor_is_refused_with_what_replaces_it() -> None:
    with pytest.raises(ConfigError, match="--optimizer.*adamw_8bit saves about as much memory"):
        parse("--model=m", "--optimizer=adafactor")


def test_every_torchrun_in_the_documentation_leaves_time_to_save() -> None:
    """It kills its processes 30 s after it is asked to stop, else."""
    root = Path(__file__).parents[2]
    files = [root / "README.md", *(root / "example_trainer").rglob("*.*")]
    lines = [
        line
        for path in files
        if path.suffix in (".md", ".yaml")
        for line in path.read_text().splitlines()
        if "torchrun --nproc" in line
    ]
    assert lines
    assert all("--shutdown-timeout" in line for line in lines)


def test_plot_is_passed_on_to_its_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert grpo.main(["plot", str(tmp_path)]) == 2
    assert "hold no groups, samples of an evaluation or metrics" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["model", "required"]),
        (["--model=m", "--num_step=3"], ["--num_step", "--num_steps"]),
        (["--model=m", "--batch_size=0"], ["--batch_size", "0", "greater than or equal to 1"]),
        (["--model=m", "--hub_url=ftp://hub"], ["--hub_url", "ftp://hub", "http://"]),
        (["--model=m", "--engine_url=localhost:9001"], ["localhost:9001", "http://"]),
        (["--model=m", "--weight-bridge-mode=lora"], ["lora", "shared_vllm"]),
        (["--model=m", "--device=gpu"], ["--device", "gpu"]),
        (["--model=m", "--dtype=float16"], ["--dtype", "float16", "bfloat16"]),
        (["--model=m", "--lora", "--train_layer_indices=0"], ["lora_layer_indices"]),
        (["--model=m", "--bridge=reload", "--weight-bridge-mode=none"], ["contradicts"]),
        (["--model=/no/such/dir"], ["/no/such/dir", "does not exist"]),
        (["--model=m", "--lr=fast"], ["--lr", "fast"]),
    ],
)
@pytest.mark.parametrize("command", [grpo.main, run.main])
def test_bad_input_is_one_line_and_exit_code_2(
    command: Any, argv: Sequence[str], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(command(list(argv)), capsys)
    assert message.startswith("error: ")
    for word in words:
        assert word in message


def test_missing_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert grpo.main(["--model=m"]) == 1
    assert install_command("trainer") in capsys.readouterr().err


def test_a_missing_engine_ends_with_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded_engine() as engine:
        pass  # gone
    model = make_tiny_model(tmp_path / "model")
    argv = [f"--model={model}", "--bridge=reload", f"--engine_url={engine.url}"]
    argv += ["--engine_timeout_s=0.3", "--device=cpu", f"--save_path={tmp_path / 'out'}"]
    assert grpo.main(argv) == 1
    assert engine.url in capsys.readouterr().err


@pytest.mark.drill
def test_sigterm_ends_the_trainer_with_143_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with recorded_engine() as engine:
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
    assert "--max_logprob_gap" in run_python("-c", code)


@pytest.mark.parametrize("name", ["small", "7b", "lora"])
def test_the_example_configurations_are_read(name: str) -> None:
    path = Path(grpo.__file__).with_name("configs") / f"{name}.yaml"
    config = parse("--config", str(path), "--num_steps=3")
    assert (config.num_steps, config.save_path) == (3, Path(f"runs/{name}"))
    assert config.lora == (name == "lora")
