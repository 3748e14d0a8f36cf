"""Follow an instruction with one constraint that a program can check, such as "exactly three paragraphs".

The reward is 1 if the text after the only `<think>` block is not empty and keeps the constraint, else 0. A curriculum
repeats the instructions that the model does not follow yet: one whose group exceeds a mean score is solved and returns
only after all others are. The groups of solved instructions are dropped.

Data: allenai/RLVR-IFeval, or JSONL rows with `messages`, `ground_truth` (JSON with `func_name` and the arguments), and
optionally `answer`, a text that keeps the constraint. `instruction_following_constraints.py` has the 25 rules.
Needs: extras datasets, examples.

    python environments/instruction_following_algorithm_environment.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any, NamedTuple

from atroposlib.environments.instruction_following_constraints import RLVR

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Split, epoch_order
from atroposlib.envs.eval_run import hash_of
from atroposlib.envs.rows import HubRows, read_jsonl
from atroposlib.utils.files import replace_file

logger = logging.getLogger(__name__)

UNSOLVED_FILE = "remaining_unsolved.jsonl"


class Instruction(NamedTuple):
    prompt: str
    function: str
    """Name of the constraint in `RLVR`."""
    args: dict[str, Any]
    raw: dict[str, Any]

    @property
    def key(self) -> str:
        """Identify the row in checkpoints."""
        return hash_of(self.raw)


class IFConfig(DatasetEnvConfig):
    group_size: int = 32
    max_token_length: int = 15360
    min_trained_tokens: int = 10
    seed: int = 42
    temperature: float = 0.8
    eval_temperature: float | None = 0.2
    dataset_name: str = "allenai/RLVR-IFeval"
    dataset_config_name: str | None = None
    max_group_average_for_training: float = 0.75
    """An instruction is solved, and its group dropped, above this mean score."""
    solve_on_single_correct: bool = False
    """Whether one right answer is enough for an instruction to be solved; its group is still trained on."""
    resume_from_unsolved_dataset: str | None = None
    """JSONL file of the training rows, in place of all: `remaining_unsolved.jsonl` of an earlier run's checkpoints."""


class InstructionFollowingEnv(DatasetEnv):
    """Single turn, reward by program, a queue of unsolved instructions."""

    name = "instruction_following"
    env_config_cls = IFConfig
    config: IFConfig
    system_prompt = THINK_FIRST
    truncated_score = 0.0

    async def setup(self) -> None:
        """Load the rows and queue those for training."""
        await super().setup()
        if (path := self.config.resume_from_unsolved_dataset) is not None:
            rows = map(self.parse_row, read_jsonl(path, flag="resume_from_unsolved_dataset"))
            self.train_rows = [row for row in rows if row is not None]
        order = epoch_order(len(self.train_rows), seed=self.config.seed, epoch=0)
        self.instructions: dict[str, Instruction] = {
            (row := self.train_rows[i]).key: row for i in order
        }
        """Training rows by key."""
        self.active_train_queue = list(self.instructions)
        """Keys of the unsolved instructions that wait for their next attempt."""
        self.in_flight: list[str] = []
        """Keys of the instructions that are being attempted."""
        self.solved_items: list[str] = []
        self.item_attempt_counts: dict[str, int] = {}
        """Attempts by key."""

    def hub_rows(self, split: Split) -> HubRows | None:
        """Return the configured data set; evaluation rows are held out from it."""
        config = self.config
        hub_rows = HubRows(path=config.dataset_name, config=config.dataset_config_name)
        return hub_rows if split == "train" else None

    def parse_row(self, row: dict[str, Any]) -> Instruction | None:
        """Return the instruction; None (logged) if its constraint is unknown or lacks an argument."""
        args = {k: v for k, v in json.loads(row["ground_truth"]).items() if v is not None}
        function = args.pop("func_name")
        try:
            inspect.signature(RLVR[function]).bind("", **args)
        except (KeyError, TypeError) as error:
            logger.warning("an instruction with %s is left out: %r", function, error)
            return None
        return Instruction(row["messages"][0]["content"], function, args, row)

    def prompt(self, row: Instruction) -> str:
        return row.prompt

    def gold_answer(self, row: Instruction) -> str | None:
        example = row.raw.get("answer")
        return None if example is None else f"<think>I keep to the constraint.</think>{example}"

    def score(self, row: Instruction, answer: str) -> float:
        text = (after_thinking_once(answer) or "").strip()
        return float(bool(text) and RLVR[row.function](text, **row.args))

    async def get_next_item(self) -> Instruction:
        """Return the instruction that has waited longest; all of them again once none is left."""
        self.num_items += 1
        if not self.active_train_queue:
            self.active_train_queue = self.solved_items or list(self.instructions)
            self.solved_items, self.item_attempt_counts = [], {}
        key = self.active_train_queue.pop(0)
        self.in_flight.append(key)
        self.item_attempt_counts[key] = self.item_attempt_counts.get(key, 0) + 1
        return self.instructions[key]

    async def collect_trajectories(
        self, item: Instruction
    ) -> tuple[ScoredDataGroup | None, list[Any]]:
        """Attempt an instruction, and queue it again if it is not solved, also after an error."""
        try:
            return await super().collect_trajectories(item)
        finally:
            if item.key in self.in_flight:
                self.in_flight.remove(item.key)
            known = (*self.in_flight, *self.active_train_queue, *self.solved_items)
            if item.key not in known:
                self.active_train_queue.append(item.key)

    def shape_group(self, row: Instruction, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Drop the group of a solved instruction."""
        mean = sum(group["scores"]) / len(group["scores"])
        is_solved = mean > self.config.max_group_average_for_training
        is_enough = self.config.solve_on_single_correct and max(group["scores"]) == 1.0
        if (is_solved or is_enough) and row.key not in self.solved_items:
            self.solved_items.append(row.key)
        return None if is_solved else group

    def train_metrics(self) -> dict[str, float]:
        """Return the state of the curriculum."""
        num_solved, num_items = len(self.solved_items), len(self.instructions)
        metrics = {
            "curriculum/active_items": num_items - num_solved,
            "curriculum/solved_items": num_solved,
            "curriculum/total_items": num_items,
            "curriculum/percent_solved": num_solved / num_items,
        }
        active = self.instructions.keys() - set(self.solved_items)
        attempts = [self.item_attempt_counts.get(key, 0) for key in active]
        if attempts:
            metrics["curriculum/avg_attempts_active"] = sum(attempts) / len(attempts)
        return metrics

    def load_checkpoint(self) -> None:
        """Restore the queue, without rows that are gone, and with new ones at its end."""
        super().load_checkpoint()
        rows = self.instructions
        self.solved_items = [key for key in self.solved_items if key in rows]
        unsolved = [key for key in self.active_train_queue if key in rows]
        known = {*self.solved_items, *unsolved}
        self.active_train_queue = [*unsolved, *(key for key in rows if key not in known)]

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save the queue, with the instructions in flight at its front, and the unsolved rows."""
        unsolved = list(dict.fromkeys([*self.in_flight, *self.active_train_queue]))
        state = {
            "active_train_queue": unsolved,
            "solved_items": self.solved_items,
            "item_attempt_counts": self.item_attempt_counts,
        }
        super().save_checkpoint(step, {**(data or {}), **state})
        lines = [json.dumps(self.instructions[key].raw) + "\n" for key in unsolved]
        replace_file(self._checkpoint_folder / UNSOLVED_FILE, "".join(lines))


if __name__ == "__main__":
    InstructionFollowingEnv.cli()
