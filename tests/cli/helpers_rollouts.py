"""An environment in a file whose reward tests rewrite, and the rollouts that it made before."""

import asyncio
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

from atroposlib.cli.environments import load
from atroposlib.inference.harness import HarnessRequest, ServerHarness
from atroposlib.runtime.process import process

SOURCE = '''"""Sums: add two numbers."""

from atroposlib.envs import DatasetEnv
from atroposlib.inference.scripted_answers import ByteTokenizer


class Sums(DatasetEnv):
    name = "sums"

    def load_tokenizer(self):
        return ByteTokenizer()

    def load_rows(self, split):
        return [{{"a": i, "b": 3}} for i in range(20)] if split == "train" else []

    def prompt(self, row):
        return {prompt}

    def score(self, row, answer):
        return {score}


if __name__ == "__main__":
    Sums.cli()
'''
PROMPT = """f"{row['a']} + {row['b']}?\""""
RIGHT = """float(answer == str(row["a"] + row["b"]))"""


@dataclass(frozen=True, kw_only=True)
class SumsFolder:
    """The file `sums.py` and the rollouts in `data/sums.jsonl`."""

    folder: Path

    @property
    def env(self) -> Path:
        return self.folder / "sums.py"

    @property
    def rollouts(self) -> Path:
        return self.folder / "data" / "sums.jsonl"

    def write(self, *, score: str = RIGHT, prompt: str = PROMPT) -> None:
        """Write the environment with this reward and prompt."""
        self.env.write_text(SOURCE.format(score=score, prompt=prompt))
        sys.modules.pop("sums", None)
        importlib.invalidate_caches()
        for compiled in self.folder.glob("__pycache__/*"):
            compiled.unlink()  # the file may change twice within the resolution of its time

    def roll_out(self, *, num_groups: int = 3) -> None:
        """Write groups of two answers; the first is right in every second group, the other always 3."""
        env_cls = load(str(self.env))
        config, servers = env_cls.config_init()
        settings = {
            "total_steps": num_groups,
            "group_size": 2,
            "include_messages": True,
            "ensure_scores_are_not_same": False,
            "data_path_to_save_groups": str(self.rollouts),
        }
        env = env_cls(config.model_copy(update=settings), servers)
        env.server.servers = [ServerHarness(respond=_answer)]
        asyncio.run(process(env))


def _answer(request: HarnessRequest) -> str:
    first, _, second = request.prompt.removesuffix("?<eos><assistant>").rpartition("+")
    number = int(first.rpartition(">")[2])
    return str(number + int(second)) if request.choice == 0 and request.call % 2 == 0 else "3!"
