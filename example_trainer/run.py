"""`atropos-grpo-run`: run engine and trainer, and optionally hub and environment, in one command.

The engine is started once and reloads new weights in place; with `--bridge restart` the trainer starts it. If a process
dies, the trainer finishes its step and saves, and the command fails with the end of that process's log; `--resume`
resumes the run. Only processes started here are stopped.

    atropos-grpo-run --model m --run_hub --environment environments/gsm8k_server.py -- --env.group_size 8
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from atroposlib.config import parse_flags
from atroposlib.errors import ConfigError, EngineError, cli_boundary
from atroposlib.utils.model_choice import check_model_path
from atroposlib.utils.owned_process import OwnedProcess
from example_trainer.config import TrainerConfig
from example_trainer.grpo import start_command

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 1.0
END_GRACE_S = 120.0
"""Time for the trainer to finish a step and save after another process died; then it is interrupted."""

ENGINE_RETRY_S = 5.0


class RunConfig(TrainerConfig):
    """Settings of the trainer and of the processes beside it."""

    run_hub: bool = False
    """Also start the hub (run-api), at --hub_url."""
    environment: Path | None = None
    """File of an environment to serve as well; its flags follow after --."""

    @property
    def starts_engine(self) -> bool:
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run all processes and return the trainer's exit code; 1 if another process died."""
    return cli_boundary(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(argv: list[str]) -> None:
    at = argv.index("--") if "--" in argv else len(argv)
    own, environment_flags = argv[:at], argv[at + 1 :]
    config = parse_flags(
        RunConfig,
        own,
        prog="atropos-grpo-run",
        description="Start an engine on the model, train, and stop the engine. Flags of --environment come after --.",
    )
    if not {"bridge", "weight_bridge_mode"} & config.model_fields_set:
        config = config.model_copy(update={"bridge": "reload"})
    if config.logprobs_mode == "auto" and config.engine == "vllm":
        config = config.model_copy(update={"logprobs_mode": "processed"})
    _check(config, environment_flags)
    start_command()
    from example_trainer.training import train
    from example_trainer.vllm_process import make_engine

    check_model_path(config.model_name, flag="--model_name")
    parts: list[OwnedProcess] = []
    with ExitStack() as stack:
        if config.run_hub:
            parts.append(stack.enter_context(_hub(config)))
        if config.bridge != "restart":
            parts.append(stack.enter_context(make_engine(config, Path(config.model_name))))
        if config.environment is not None:
            parts.append(stack.enter_context(_environment(config, environment_flags)))
        stack.enter_context(_watching(parts))
        # An unreachable engine that was started here has died, so long retries are useless.
        train(config.model_copy(update={"engine_retry_s": ENGINE_RETRY_S}))


@contextmanager
def _watching(parts: Sequence[OwnedProcess]) -> Iterator[None]:
    """Send SIGTERM to this process when a part dies; then raise EngineError with the end of its log."""
    is_over = threading.Event()
    died: list[OwnedProcess] = []

    def watch() -> None:
        while not died:
            if is_over.wait(WATCH_INTERVAL_S):
                return
            # Exit code 0: an environment has sent everything, which may be enough for the trainer.
            died.extend(part for part in parts if part.poll() not in (None, 0))
        logger.error("%s has died; the trainer is asked to stop", died[0].name)
        os.kill(os.getpid(), signal.SIGTERM)
        if not is_over.wait(END_GRACE_S):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, name="parts watcher", daemon=True)
    thread.start()
    try:
        yield
    except (SystemExit, EngineError):
        for part in died:
            part.check_alive()
        raise
    else:
        for part in died:
            part.check_alive()
    finally:
        is_over.set()
        thread.join()


def _check(config: RunConfig, environment_flags: Sequence[str]) -> None:
    if config.bridge != "restart" and config.engine_url:
        raise ConfigError(
            "--engine_url: atropos-grpo-run starts its own engine; use atropos-grpo for running ones"
        )
    if config.engine == "local" and config.bridge not in ("restart", "reload"):
        raise ConfigError(
            f"--engine local takes no weights by --bridge {config.bridge}; use reload, or --engine vllm"
        )
    if environment_flags and config.environment is None:
        raise ConfigError(f"{environment_flags[0]}: flags after -- are for --environment FILE")
    if config.environment is not None and not config.environment.is_file():
        raise ConfigError(f"--environment {config.environment}: there is no such file")
    if config.run_hub and urlsplit(config.hub_url).hostname not in ("localhost", "127.0.0.1"):
        raise ConfigError(f"--run_hub: --hub_url {config.hub_url} is no address of this machine")


def _hub(config: RunConfig) -> OwnedProcess:
    from example_trainer.vllm_process import EngineProcess

    port = urlsplit(config.hub_url).port or 80
    return EngineProcess(
        [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(port)],
        what="hub",
        url=f"http://127.0.0.1:{port}",
        health_route="/",
        log_path=config.log_dir / "hub.log",
        stop_grace_s=15.0,
    )


def _environment(config: RunConfig, flags: Sequence[str]) -> OwnedProcess:
    """Return the environment's process; addresses, model and tokenizer are set unless its flags set them."""
    defaults = {
        "env.rollout_server_url": config.hub_url,
        "env.tokenizer_name": config.model_name,
        "openai.base_url": f"http://127.0.0.1:{config.vllm_port}/v1",
        "openai.model_name": config.lora_name if config.bridge == "lora" else config.model_name,
        "openai.server_type": "vllm",
    }
    given = {flag.split("=")[0].lstrip("-").replace("--", ".").replace("-", "_") for flag in flags}
    added = [f"--{name}={value}" for name, value in defaults.items() if name not in given]
    return OwnedProcess(
        [sys.executable, str(config.environment), "serve", *added, *flags],
        name="environment",
        log_path=config.log_dir / "environment.log",
        stop_grace_s=15.0,
    )


if __name__ == "__main__":
    sys.exit(main())
