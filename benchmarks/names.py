"""How many functions and files of atroposlib does one group meet, from `collect_trajectories` to the acknowledged step?

`PYTHONPATH=. python benchmarks/names.py [--list PART]` prints a row per part; `--list` prints the functions of one. One
group of 8 (one `chat_completion` with `n=8` of a managed server) goes through the outbox, a hub over HTTP, the
trainer's client and `make_batch`, in this process; an engine process answers from prepared bytes. A first group is not
counted. A function is a code object under `atroposlib` or `example_trainer` that runs, comprehensions and lambdas
apart; one of two parts counts in both rows and once in the total.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvicorn

from atroposlib.api.server import create_app
from atroposlib.client import HubClient, TrainerClient, TrainerRegistration
from atroposlib.envs.base import APIServerConfig
from atroposlib.runtime.outbox import Outbox
from benchmarks._env_process import BenchmarkConfig, BenchmarkEnv
from benchmarks._env_text import save_tokenizer
from benchmarks._table import Table
from benchmarks.env import running_engine
from example_trainer.data import DataOptions, make_batch, require_trainable

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("atroposlib", "example_trainer"))
NUM_TOKENS = 2048
GROUP_SIZE = 8


class Profile:
    """The functions that ran, by part. A thread of the hub counts for the part of the hub."""

    def __init__(self) -> None:
        self.part = self.hub_part = ""
        """Of the main thread, and of all others; "" counts nothing."""
        self.ran: dict[str, set[CodeType]] = defaultdict(set)

    def install(self) -> None:
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        is_main = threading.current_thread() is threading.main_thread()
        part, code = self.part if is_main else self.hub_part, frame.f_code
        if part and code.co_name[0] != "<" and code.co_filename.startswith(PACKAGES):
            self.ran[part].add(code)

    @contextmanager
    def counting(self, part: str, hub_part: str = "") -> Iterator[None]:
        self.part, self.hub_part = part, hub_part
        try:
            yield
        finally:
            self.part = self.hub_part = ""


@contextmanager
def hub_thread() -> Iterator[str]:
    """Serve a hub that keeps its groups in memory; yield its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
        if not thread.is_alive():
            raise RuntimeError("the hub did not start")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def environment(engine_url: str, tokenizer: Path) -> BenchmarkEnv:
    config = BenchmarkConfig(
        group_size=GROUP_SIZE,
        use_wandb=False,
        tokenizer_name=str(tokenizer),
        max_token_length=NUM_TOKENS,
    )
    server = APIServerConfig(server_type="vllm", model_name="bench", base_url=engine_url)
    return BenchmarkEnv(config, [server])


async def one_group(
    profile: Profile, env: BenchmarkEnv, outbox: Outbox, hub: HubClient, trainer: TrainerClient
) -> None:
    """Take one group from the author's hook to the acknowledged step."""
    item = await env.get_next_item()
    with profile.counting("sample"):
        group, _ = await env.collect_trajectories(item)
    with profile.counting("outbox"):
        await outbox.accept(group, item)
    with profile.counting("send", "POST"):
        await outbox._send_some(hub, 1, _never)
    with profile.counting("lease", "GET batch"):
        batch = trainer.lease_batch(wait_s=10)
    assert batch is not None
    with profile.counting("make_batch"):
        for each in batch.groups:
            require_trainable(each, vocab_size=2**17)
        tensors = make_batch(
            batch.groups, DataOptions(seq_len=2**16, max_sequences=8, max_tokens=2**17)
        )
    assert tensors.num_sequences == GROUP_SIZE
    with profile.counting("acknowledge", "POST ack"):
        trainer.ack(batch, step=1)


async def _never(_: int) -> None:
    raise AssertionError("the hub forgot the environment")


async def measure(profile: Profile, directory: Path) -> None:
    tokenizer = directory / "tokenizer"
    save_tokenizer(tokenizer)
    with (
        running_engine(tokenizer, [NUM_TOKENS], directory=directory) as engine_url,
        hub_thread() as hub_url,
        TrainerClient(hub_url) as trainer,
    ):
        env = environment(engine_url, tokenizer)
        outbox = Outbox(env)
        trainer.register(
            TrainerRegistration(
                batch_size=GROUP_SIZE,
                max_token_len=2**16,
                num_steps=100,
                starting_step=0,
                checkpoint_dir="",
                save_checkpoint_interval=0,
            )
        )
        assert trainer.batch() is None
        async with HubClient(hub_url) as hub:
            registered = await hub.register_env(
                desired_name="names", max_token_length=2**16, weight=1.0, group_size=GROUP_SIZE
            )
            env.env_id = registered.env_id
            await one_group(profile, env, outbox, hub, trainer)
            profile.ran.clear()
            await one_group(profile, env, outbox, hub, trainer)
        await env.server.close()


def _where(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", help="print the functions of this part, or of all of them: all")
    arguments = parser.parse_args()
    profile = Profile()
    profile.install()
    with tempfile.TemporaryDirectory(prefix="names-") as folder:
        asyncio.run(measure(profile, Path(folder)))
    sys.setprofile(None)
    ran = {**profile.ran, "all": set().union(*profile.ran.values())}
    table = Table("Functions and files that one group meets", "part", "functions", "files")
    for part, codes in ran.items():
        table.row(part, len(codes), len({_where(code) for code in codes}))
    for line in sorted(f"{_where(c)} {c.co_qualname}" for c in ran.get(arguments.list, ())):
        print(line)


if __name__ == "__main__":
    main()
