"""Mix supervised examples into reinforcement learning: each row of a data set is a group to train by likelihood.

No model is asked. A group has one sequence with the override `sft` and advantage 1. `dataset_format` says what a row
holds: a text (`completion`), a prefix and its continuation (`prefix_completion`), or a conversation (`oai_format`,
`sharegpt_format`), of which the assistant's messages are trained, or the last message only.

Data: AlignmentLab-AI/open-instruct-sharegpt, another data set of the Hugging Face hub, or JSONL rows.
Needs: extra datasets.

    python environments/sft_loader_server.py serve --env.max_sft_per_step 8 ...
    python environments/sft_loader_server.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Split
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles in ShareGPT's format; others, such as system, are the same."""

NUM_MEASURED = 1000
"""Rows that `evaluate` measures."""


class SFTConfig(DatasetEnvConfig):
    group_size: int = 1
    max_token_length: int = 2048
    ensure_scores_are_not_same: bool = False
    inference_weight: float = -1.0
    """Claims no share of the inference servers."""
    seed: int = 42
    dataset_name: str = "AlignmentLab-AI/open-instruct-sharegpt"
    dataset_config_name: str | None = None
    dataset_format: Literal["completion", "prefix_completion", "oai_format", "sharegpt_format"] = (
        "sharegpt_format"
    )
    dataset_column_name: str = "conversations"
    """Column of the text, the continuation or the conversation."""
    prefix_column_name: str | None = None
    """Column of the prefix in `prefix_completion`."""
    mask_everything_but_assistant_answer: bool = True
    """Whether only the assistant's messages, or what follows the prefix, are trained; false: all tokens."""
    mask_everything_but_last_step: bool = False
    """Whether only the last message of a conversation is trained."""
    max_sft_per_step: int = -1
    """Rows per step of the trainer, next to other environments; -1: as many as `max_batches_offpolicy` allows."""
    add_every_n_steps: int = Field(default=1, ge=1)
    """Rows are added in every step whose number this divides."""


class SFTEnv(DatasetEnv):
    """Rows as supervised groups."""

    name = "sft_loader"
    env_config_cls = SFTConfig
    config: SFTConfig
    needs_token_ids = False

    @classmethod
    def detectors(cls) -> list[str]:
        """Return none: nothing is judged."""
        return []

    async def setup(self) -> None:
        self.counted_step = -1
        """Step that `num_this_step` belongs to."""
        self.num_this_step = 0
        await super().setup()

    def hub_rows(self, split: Split) -> HubRows | None:
        return HubRows(path=self.config.dataset_name, config=self.config.dataset_config_name)

    def load_rows(self, split: Split) -> Any:
        """Return the rows; there are none to evaluate on."""
        return super().load_rows(split) if split == "train" else []

    async def get_next_item(self) -> dict[str, Any] | None:
        """Return the next row; None if this step has its rows."""
        if self.curr_step != self.counted_step:
            self.counted_step, self.num_this_step = self.curr_step, 0
        limit = self.config.max_sft_per_step
        is_full = 0 <= limit <= self.num_this_step
        if is_full or self.curr_step % self.config.add_every_n_steps:
            return None
        self.num_this_step += 1
        row: dict[str, Any] = await super().get_next_item()
        return row

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup, list[Any]]:
        """Return the row as a group of one supervised sequence."""
        tokens, masks, messages = self.tokenize(item)
        return ScoredDataGroup(
            tokens=[tokens],
            masks=[masks],
            scores=[1.0],
            advantages=[[1.0] * len(tokens)],
            messages=[messages],
            overrides=[{"sft": True}],
            group_overrides={"sft": True, "group_size": 1},
        ), []

    def tokenize(self, row: dict[str, Any]) -> tuple[list[int], list[int], list[dict[str, Any]]]:
        """Return tokens, labels and messages of a row."""
        config = self.config
        content = self.column(row, config.dataset_column_name)
        if config.dataset_format in ("completion", "prefix_completion"):
            prefix = ""
            if config.dataset_format == "prefix_completion":
                prefix = self.column(row, config.prefix_column_name)
            messages = [{"role": "user", "content": prefix}] if prefix else []
            messages.append({"role": "assistant", "content": content})
            num_masked = len(begin := self.tokenizer.encode(prefix) if prefix else [])
            end = self.tokenizer.encode(content, add_special_tokens=not prefix)
            eos = self.tokenizer.eos_token_id
            tokens = [*begin, *end, *([] if eos is None else [eos])]
            masks = [IGNORE_INDEX] * num_masked + tokens[num_masked:]
        else:
            messages = [message_of(turn) for turn in content]
            is_last_only = config.mask_everything_but_last_step
            chat = tokenize_for_trainer(
                self.tokenizer, messages, train_on_all_assistant_turns=not is_last_only
            )
            tokens, masks = chat["tokens"], chat["masks"]
        has_masks = (
            config.mask_everything_but_assistant_answer or config.mask_everything_but_last_step
        )
        return tokens, masks if has_masks else list(tokens), messages

    def column(self, row: dict[str, Any], name: str | None) -> Any:
        """Return a column of a row; ConfigError if there is none of that name."""
        if name not in row:
            raise ConfigError(f"a row has no column {name!r}; it has {', '.join(row)}")
        return row[name]

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Report how long the first rows are; there are no answers to judge."""
        rows = [self.tokenize(row) for row in self.train_rows[:NUM_MEASURED]]
        lengths = [len(tokens) for tokens, *_ in rows]
        trained = [sum(label != IGNORE_INDEX for label in masks) for _, masks, _ in rows]
        too_long = [length > self.config.max_token_length for length in lengths]
        metrics = {
            "eval/mean_tokens": sum(lengths) / len(rows),
            "eval/mean_trained_tokens": sum(trained) / len(rows),
            "eval/share_longer_than_max_token_length": sum(too_long) / len(rows),
        }
        await self.evaluate_log(metrics)
        return metrics

    def train_metrics(self) -> dict[str, float]:
        return {"train/idx": self.num_items}


def message_of(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form.

    >>> message_of({"from": "gpt", "value": "Hi"})
    {'role': 'assistant', 'content': 'Hi'}
    """
    if "from" not in turn:
        return {"role": turn["role"], "content": turn["content"]}
    return {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}


if __name__ == "__main__":
    SFTEnv.cli()
