"""`DatasetEnv`: rows, a prompt and a score function. Subclass it, define `load_rows`, `prompt` and `score`.

It owns the order of the rows (shuffled by seed and epoch, resumed from a checkpoint), the split into training and
evaluation rows, sampling through the managed server, and `evaluate`. Invariants: an answer that breaks its grader
(`outcome_of`) is a wrong answer, unless the row's gold answer breaks it too; an answer that could not be judged (None,
a faulty row, an answer that the engine aborted) has no score; it is dropped, masked or judged again, as configured,
and counted. It affects neither the scores nor the advantages of other answers, and is not correct in any accuracy.
`MultiTurnEnv`, `ToolEnv`, `JudgeEnv` and `AgentEnv` build on it. It does not send, batch or retry items.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import logging
import random
import statistics
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.envs.audit import COUNTERFACTUALS, JUNK, Audit, Budget, Graders, Judged
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.eval import score_metrics
from atroposlib.envs.eval_run import Sample, hash_of
from atroposlib.envs.item_choice import (
    NUM_CANDIDATES,
    Beliefs,
    most_promising,
    num_solved,
    plain_place,
    updated,
)
from atroposlib.envs.rewards import Canary, JsonValue, RewardFailure, RewardWorkers
from atroposlib.envs.rollouts import (
    ABORTED,
    ChatSession,
    Outcome,
    Rollout,
    Row,
    Split,
    join_rollouts,
    note,
    noting,
    number_of,
    raise_if_all_raised,
    shown_fields,
)
from atroposlib.envs.rows import (
    SAMPLE,
    RowSource,
    epoch_order,
    hold_out,
    read_jsonl,
    sample_path,
    without_evaluated,
)
from atroposlib.errors import AtroposError, ConfigError, EnvError, Suspicion
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.utils.estimates import estimate_mean

__all__ = [
    "ABORTED",
    "ChatSession",
    "DatasetEnv",
    "DatasetEnvConfig",
    "Outcome",
    "Rollout",
    "Row",
    "Split",
]

logger = logging.getLogger(__name__)

_split_judged: contextvars.ContextVar[Split | Literal["probe"]] = contextvars.ContextVar(
    "split_judged", default="train"
)
"""The split of the row that the current task samples and judges; "probe" for answers that no model gave."""

NUM_GOLD_ANSWERS_CHECKED = 100
LOCAL_SANDBOX = "atroposlib.envs.sandbox:local_sandbox"
MAX_FAULTY_ROWS_NAMED = 20
_CAUSED_BY_TEXT = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError),
    *(SyntaxError, TypeError, ValueError, EnvError),
)
"""Exceptions that a text can cause in the code that reads it; others, such as OSError, come from elsewhere.

EnvError is that of a score that is no finite number; `guarded` raises the others of this library.
"""


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull of a row, whose answers are judged together."""

    scope: str
    """Of the calls in reward workers."""
    verdicts: dict[int, _KnownVerdicts] = field(default_factory=dict)
    """By the id of the row that was judged."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One answer has the known answers of its row judged, the others wait for it."""


@dataclass(frozen=True, slots=True)
class _KnownVerdicts:
    """What the grader of a row makes of answers whose verdict is known."""

    gold_passes: bool | None
    """None: no right answer is known."""
    wrong_score: float | None
    """Of the empty answer; None if the grader fails on that too."""


_pull: contextvars.ContextVar[_Pull | None] = contextvars.ContextVar("pull", default=None)
_pulls = itertools.count()


class DatasetEnvConfig(BaseEnvConfig):
    dataset_path: str | None = None
    """JSONL file of training rows, or "sample" for the few rows that come with the environment; None: `train_data`."""
    eval_dataset_path: str | None = None
    """JSONL file of evaluation rows; None: `eval_data` if the training rows are `train_data`, else held-out rows."""
    num_eval_rows: int = Field(default=100, ge=0)
    """Training rows held out if there are no evaluation rows; at most half of them."""
    seed: int = 0
    """Determines the order of the training rows and which rows are held out."""
    item_choice: Literal["order", "posterior"] = "posterior"
    """Which rows `serve` asks after the first epoch. order: each row once an epoch. posterior: more often those whose
    answers will probably have different scores, judged by their earlier groups (`atroposlib/envs/item_choice.py`); what
    it saves: `benchmarks/README.md`. Rows whose results are unknown stay in order, as do all with `group_size` 1."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature in training."""
    num_eval_samples: int = Field(default=1, ge=1)
    """Answers per row in `evaluate`; with k > 1 it also reports pass@k."""
    eval_temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature in `evaluate`; None: 0 for one answer per row, `temperature` for several."""
    min_trained_tokens: int = Field(default=1, ge=0)
    """Answers with fewer sampled tokens are dropped from the group and counted."""
    on_reward_failure: Literal["drop", "mask", "retry"] = "drop"
    """For an answer that could not be judged (one that breaks its grader is wrong). drop: remove it from its group.
    mask: keep it without trained positions, with the mean score of the others; the group keeps its size, and the
    trainer computes the others' advantages without it. retry: judge it once more, then drop it."""
    on_suspicion: Literal["log", "drop", "stop"] = "log"
    """What an alarm of the audit (`audit.py`) does. log: it is named. drop: from an alarm of a grader on, all rewarded
    answers are examined, and those that a grader finds suspicious are left out of their groups. stop: the environment
    ends."""
    audit_share: float = Field(default=0.02, ge=0, le=1)
    """Share of the grader calls, or of the CPU time, that the audit may add; 0: it only reads."""
    use_wandb: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    reward_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit of one `in_worker` call in seconds; then its worker is killed."""
    num_reward_workers: int = Field(default=2, ge=1)
    """Processes of `in_worker`; they start on first use."""
    child_variables: list[str] = Field(default_factory=list)
    """Names of environment variables that reward workers and agents get besides those of `child_variables`."""


class DatasetEnv(BaseEnv):
    """Rows, a prompt and a score."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = DatasetEnvConfig
    needs_token_ids: ClassVar[bool] = True
    config: DatasetEnvConfig

    train_data: RowSource | None = None
    """Training rows without `--env.dataset_path`; of the class, or set in `__init__`."""
    eval_data: RowSource | None = None
    """Evaluation rows that belong to `train_data`; None holds out some of the training rows."""
    system_prompt: ClassVar[str | None] = None
    """System message of a prompt that is a string."""
    success_score: float = 1.0
    """Smallest score that counts as solved in pass@k."""
    trains_on_evaluation: ClassVar[bool] = False
    """Whether training rows may be evaluation rows; otherwise those that are equal are left out of training."""
    truncated_score: ClassVar[float | None] = None
    """Score of an answer that was cut at the token limit; None: `score` judges it like any other."""
    silences_truncated: bool = False
    """Whether an answer that was cut at the token limit gets no advantage; of the class, or set in `__init__`."""
    checkpointed: ClassVar[tuple[str, ...]] = ()
    """Attributes that a checkpoint stores, as JSON, and that are set again at a restart."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Further names of metrics, as in the dashboards of existing environments: name -> metric with the same value."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that reward workers import when they start, so that imports do not use up `reward_timeout_s`."""
    canary: ClassVar[Canary | None] = None
    """A call in a worker whose value is known; None: chosen by `setup` where gold answers are judged in workers."""
    judges_text: ClassVar[bool] = True
    """Whether `score` of the last answer is what a rollout earns, so that the audit may ask it about other rows."""
    isolates_graders: ClassVar[bool] = False
    """Whether reward workers run in bubblewrap where it works: for graders that need neither network nor files."""

    def __init__(
        self,
        config: DatasetEnvConfig,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.train_rows: list[Row] = []
        self.eval_rows: list[Row] = []
        self.num_items = 0
        """Total of rows returned by `get_next_item`; determines epoch and position."""
        self.item_beliefs: Beliefs = {}
        """How often the items that were asked are solved, by `item_class`."""
        self.reward_workers = RewardWorkers(
            num_workers=config.num_reward_workers,
            # Where model-written programs run, a worker finds out once which sandbox works.
            preload=(*self.preload, *([LOCAL_SANDBOX] if self.runs_model_code else [])),
            canary=self.canary,
            variables=config.child_variables,
            is_isolated=self.isolates_graders,
        )
        self._num_faulty = 0
        self._calls: list[tuple[Any, ...]] | None = None
        """Calls in reward workers and their values, while `setup` looks for a canary."""
        self.num_reward_failures = 0
        """Answers that could not be judged, after the retry if configured."""
        self.score_errors: Counter[str] = Counter()
        """Exceptions of the author's judging code, by type."""
        self.num_too_short = 0
        self.train_scores: list[float] = []
        """Scores since the last log."""
        self._counts = {split: Counter[str]() for split in ("train", "eval", "probe")}
        self._logged_counts: Counter[str] = Counter()
        """Events in training before the last log."""
        self._recorded: defaultdict[str, list[float]] = defaultdict(list)
        """Values in training since the last log, by name."""
        self.eval_metrics: dict[str, float] = {}
        self.audit = Audit(
            self.detectors(), success_score=self.success_score, budget=Budget(config.audit_share)
        )
        self._num_alarms_told = 0
        self._num_suspicious = 0
        """Answers that `on_suspicion` dropped."""

    @classmethod
    def detectors(cls) -> list[str]:
        """Return the detectors of `audit.py` that apply to the class."""
        has_gold = cls.judges_text and cls.gold_answer is not DatasetEnv.gold_answer
        has_example = cls.judges_text and cls.example_answers is not DatasetEnv.example_answers
        grades = (has_gold or has_example) and cls.score is not DatasetEnv.score
        has_second = cls.audit_score is not DatasetEnv.audit_score
        return [
            *(["swap_gold", "canary"] if grades else []),
            *(["second_grader"] if has_second else []),
            *(["gold_absent", "told_by_error"] if has_gold else []),
            *([] if grades or has_second else ["new_form"]),
            *("equal_answers", "unscored", "length", "evaluation"),
        ]

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        """Return the default configuration, and an engine on port 9001 that serves the model of its tokenizer."""
        config = cls.env_config_cls()
        server = APIServerConfig(
            model_name=config.tokenizer_name,
            base_url="http://localhost:9001/v1",
            server_type="vllm",
        )
        return config, [server]

    def load_rows(self, split: Split) -> Any:
        """Return the rows of a split (any iterable, or an awaitable of one); None for "eval" holds out training rows.

        The default reads the configured JSONL files, else `train_data` and `eval_data`, and calls `parse_row`.
        """
        config = self.config
        is_train = split == "train"
        path = config.dataset_path if is_train else config.eval_dataset_path
        if path is not None:
            raw = self.read_file(path, flag="dataset_path" if is_train else "eval_dataset_path")
        elif config.dataset_path is None and (hub_rows := self.hub_rows(split)) is not None:
            raw = hub_rows.load()
        elif split == "eval":
            return None
        else:
            raise ConfigError(
                f"{self.registered_name}: there are no rows; define load_rows or give --env.dataset_path"
            )
        return [row for each in raw if (row := self.parse_row(each)) is not None]

    def hub_rows(self, split: Split) -> RowSource | None:
        """Return the data set of a split; override it to take its name from the configuration."""
        return self.train_data if split == "train" else self.eval_data

    def read_file(self, path: str, *, flag: str = "dataset_path") -> list[Any]:
        """Read the rows of a JSONL file, or of the environment's sample if `path` is "sample"."""
        if path == SAMPLE:
            path = sample_path(type(self), self.name or self.registered_name)
        return read_jsonl(path, flag=flag)

    def parse_row(self, row: Any) -> Row | None:
        """Convert a row of a file or data set to the form that the other methods get; None skips it."""
        return row

    def prompt(self, row: Row) -> str | list[dict[str, Any]]:
        """Return the prompt: a string, or a list of messages that is sent unchanged."""
        raise NotImplementedError(f"{type(self).__name__} must define prompt(self, row)")

    def offered_tools(self, row: Row) -> list[dict[str, Any]]:
        """Return tools for the chat template, in OpenAI's format; the answer has the calls as the model writes them."""
        return []

    def text_of(self, message: Any) -> str:
        """Return the text of an answer; override it if an API without token ids has the calls beside the text."""
        return message.content or ""

    def score(self, row: Row, answer: str) -> Outcome | Awaitable[Outcome]:
        """Judge one answer, plain or async; None or a `RewardFailure` if it could not be judged."""
        raise NotImplementedError(f"{type(self).__name__} must define score(self, row, answer)")

    def audit_score(self, row: Row, answer: str) -> Outcome | Awaitable[Outcome]:
        """Judge a sample of the rewarded answers in another way than `score`; never trained on. None: it cannot say."""
        return None

    def gold_answer(self, row: Row) -> str | None:
        """Return an answer that must reach `success_score`; `setup` checks the first rows. None: no check."""
        return None

    def example_answers(self, item: Row) -> Sequence[str | Callable[[str], str]]:
        """Return answers that `check` tries, or functions from the prompt to one; default: the gold answer."""
        gold = self.gold_answer(item)
        return [] if gold is None else [gold]

    def shape_group(self, row: Row, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Change a judged group before it is sent, for example by a length penalty; None drops it."""
        return group

    async def setup(self) -> None:
        """Load both splits and check the gold answers."""
        self.audit.success_score = self.success_score
        train = list(await awaited(self.load_rows("train")))
        if not train:
            raise ConfigError(f"{self.registered_name}: load_rows('train') has no rows")
        own = await awaited(self.load_rows("eval"))
        if own is not None:
            self.train_rows, self.eval_rows = train, list(own)
        else:
            wanted = self.config.num_eval_rows
            self.train_rows, self.eval_rows = hold_out(train, wanted, seed=self.config.seed)
        if not self.trains_on_evaluation:
            self.train_rows = without_evaluated(self.train_rows, self.eval_rows)
        rows = self.train_rows[:NUM_GOLD_ANSWERS_CHECKED]
        pairs = [(row, gold) for row in rows if (gold := self._gold_of(row)) is not None]
        outcomes = await run_together([self._probe(row, gold) for row, gold in pairs])
        if pairs and self.reward_workers.num_calls and self.canary is None:
            await self._choose_canary(*pairs[0])
        for (row, _), outcome in zip(pairs, outcomes, strict=True):
            score = number_of(outcome)
            if score is None or score < self.success_score:
                raised = outcome.error if isinstance(outcome, RewardFailure) else None
                raise EnvError(
                    f"the gold answer of {row} does not pass its reward: {outcome}"
                ) from raised

    def _gold_of(self, row: Row) -> str | None:
        """Return the row's gold answer; EnvError if the hook raises, or returns anything but a text or None."""
        try:
            gold = self.gold_answer(row)
        except Exception as error:
            what = f"raised {type(error).__name__}: {error}"
            raise EnvError(f"gold_answer {what} for the row {str(row)[:500]}") from error
        if isinstance(gold, str | None):
            return gold
        what = f"returned {gold!r:.100}, which is no text"
        raise EnvError(f"gold_answer {what}, for the row {str(row)[:500]}")

    async def _choose_canary(self, row: Row, gold: str) -> None:
        """Have workers repeat a call that finds an answer wrong after every other call, if there is one."""
        self._calls = []
        await self._probe(row, JUNK.sub("zzz", gold))
        calls, self._calls = self._calls, None
        for function, args, value in calls[:1]:
            if value == await self.in_worker(function, *args):
                self.reward_workers.canary = Canary(function, args, value)

    def item_class(self, item: Row) -> str:
        """Return which items are equally difficult: their results are counted together. Default: equal ones alone.

        Called with rows and with items; both must have the same class if `get_next_item` changes a row.
        """
        return hash_of(item)

    async def get_next_item(self) -> Row:
        """Return the next row. The first epoch, and without a run every epoch, has each row once, in its own order.

        Later epochs of a run have rows as `item_choice` says.
        """
        row = self._chosen_row() if self._chooses_items else None
        if row is None:
            epoch, position = divmod(self.num_items, len(self.train_rows))
            row = self.train_rows[self._order(epoch)[position]]
        if self._chooses_items:
            self.item_beliefs.setdefault(self.item_class(row), [0.0, 0.0])
        self.num_items += 1
        return row

    def _order(self, epoch: int) -> list[int]:
        return epoch_order(len(self.train_rows), seed=self.config.seed, epoch=epoch)

    @property
    def _chooses_items(self) -> bool:
        """Whether results decide about items. Outside of `serve` no policy learns, and reruns repeat the items."""
        learns = self.runtime is not None and self.config.group_size > 1
        return learns and self.config.item_choice == "posterior"

    def _chosen_row(self) -> Row | None:
        """Return the next row by the beliefs; None in the first epoch, and if nothing is known of the candidates."""
        num_rows = len(self.train_rows)
        if (number := self.num_items - num_rows) < 0:
            return None
        rng = random.Random(f"{self.config.seed}:item {self.num_items}")
        rows = rng.sample(self.train_rows, k=min(NUM_CANDIDATES, num_rows))
        classes = list(map(self.item_class, rows))
        if not any(any(self.item_beliefs.get(name, ())) for name in classes):
            return None
        if (place := plain_place(number, num_rows)) is not None:
            return self.train_rows[self._order(0)[place]]
        return rows[self._most_promising(classes, rng)]

    def choose_class(self, classes: Sequence[str]) -> str:
        """Return the class of the next item, for a `get_next_item` that generates it and increases `num_items`.

        With `item_choice` "order", and outside of `serve`, they take turns.
        """
        if not self._chooses_items:
            return classes[self.num_items % len(classes)]
        rng = random.Random(f"{self.config.seed}:item {self.num_items}")
        names = rng.sample(classes, k=min(NUM_CANDIDATES, len(classes)))
        place = plain_place(self.num_items, len(classes))
        name = names[self._most_promising(names, rng)] if place is None else classes[place]
        self.item_beliefs.setdefault(name, [0.0, 0.0])
        return name

    def _most_promising(self, classes: Sequence[str], rng: random.Random) -> int:
        size = self.config.group_size
        return most_promising(classes, self.item_beliefs, group_size=size, rng=rng)

    def note_scores(self, item: Row, scores: Sequence[float]) -> None:
        """Update the belief about an item by the scores of a group.

        Items that were not chosen here, such as those of a backlog, have no belief.
        """
        if not self._chooses_items or not scores:
            return
        if (belief := self.item_beliefs.get(name := self.item_class(item))) is not None:
            solved = num_solved(scores, success_score=self.success_score)
            unsolved = len(scores) - solved
            self.item_beliefs[name] = updated(belief, solved=solved, unsolved=unsolved)

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Any]]:
        """Sample and judge one group; None if fewer than two answers could be judged (one if `group_size` is 1).

        Raises the first exception of the judging code if it raised for every answer.
        """
        _pull.set(_Pull(scope=f"item {next(_pulls)}"))
        published = self.status_dict.get("policy_version")
        sampled = await self.roll_out(item, self.config.group_size, split="train")
        rollouts = [rollout for rollout in sampled if self._is_long_enough(rollout)]
        num_needed = min(2, len(sampled))
        if num_aborted := sum(rollout.finish_reason == ABORTED for rollout in rollouts):
            self.counts["aborted"] += num_aborted
        if len(rollouts) - num_aborted < num_needed:
            self.num_reward_failures += num_aborted
            return None, []
        outcomes = await self._judge(item, rollouts)
        raise_if_all_raised(outcomes)
        self.num_reward_failures += sum(number_of(outcome) is None for outcome in outcomes)
        group_id = uuid.uuid4().hex
        outcomes = await self._audited(item, rollouts, outcomes, group_id)
        scores = [number_of(outcome) for outcome in outcomes]
        judged = [score for score in scores if score is not None]
        self.note_scores(item, judged)
        if len(judged) < num_needed:
            return None, []
        self.train_scores += judged
        masks_unjudged = self.config.on_reward_failure == "mask"
        group = join_rollouts(rollouts, scores, masks_unjudged=masks_unjudged)
        group["group_id"] = group_id
        if group["policy_version"] is None:
            group["policy_version"] = published
        shaped = self.shape_group(item, group)
        if shaped is None or not shaped["scores"]:
            self.counts["shape_group"] += len(rollouts)
            return None, []
        shaped["group_overrides"] = {
            **(shaped.get("group_overrides") or {}),
            "group_size": len(set(shaped.get("rollout") or range(len(shaped["scores"])))),
        }
        return shaped, []

    async def roll_out(self, row: Row, n: int, *, split: Split) -> list[Rollout]:
        """Sample `n` answers to a row."""
        messages = self.conversation(row)
        async with self.chat_session(split) as chat:
            completion = await chat.ask(messages, n=n, tools=self.offered_tools(row))
            nodes = chat.nodes()
        return [
            Rollout(
                messages=[
                    *messages,
                    {"role": "assistant", "content": self.text_of(choice.message)},
                ],
                nodes=nodes[i : i + 1],
                finish_reason=choice.finish_reason,
            )
            for i, choice in enumerate(completion.choices)
        ]

    async def score_group(self, row: Row, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Judge the rollouts of one row, in order; override to judge them against each other.

        Rollouts that the engine aborted, and in training those that are too short, are excluded.
        """

        async def judge(rollout: Rollout) -> Outcome:
            if self.truncated_score is not None and rollout.finish_reason == "length":
                return self.truncated_score
            with noting(rollout.overrides):
                return await self.outcome_of(row, rollout.completion)

        return await run_together([judge(rollout) for rollout in rollouts])

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Sample and judge every evaluation row; write the metrics and the samples."""

        async def sample(row: Row) -> list[Rollout]:
            return await self.roll_out(row, self.config.num_eval_samples, split="eval")

        return await self._evaluate_rows(self.eval_rows, sample)

    def eval_parameters(self) -> dict[str, Any]:
        """Return what an evaluation's results depend on, for `metrics.json`."""
        return {"temperature": self._temperature("eval")}

    async def rescore(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Judge the stored answers of an evaluation again; write the metrics and the samples.

        Evaluation rows without a stored answer are left out; ConfigError if all are.
        """
        stored: dict[str, list[list[Rollout]]] = defaultdict(list)
        for _, of_row in itertools.groupby(samples, key=lambda sample: sample["item_index"]):
            answers = list(of_row)
            stored[answers[0]["item_hash"]].append([_rollout_of(sample) for sample in answers])

        async def read(row: Row) -> list[Rollout]:
            return stored[hash_of(row)].pop()  # rows with the same hash are equal

        num_left = Counter({item_hash: len(listed) for item_hash, listed in stored.items()})
        rows = []
        for row in self.eval_rows:
            if num_left[hash_of(row)] > 0:
                num_left[hash_of(row)] -= 1
                rows.append(row)
        if not rows:
            raise ConfigError("none of the stored answers belongs to a row of the data")
        logger.info("scoring the stored answers to %d of %d rows", len(rows), len(self.eval_rows))
        return await self._evaluate_rows(rows, read)

    async def _evaluate_rows(
        self, rows: Sequence[Row], roll_out: Callable[[Row], Awaitable[list[Rollout]]]
    ) -> dict[str, float]:
        began = time.time()
        judged: list[Outcome] = []
        self._counts["eval"].clear()

        async def measure(row: Row) -> list[Sample]:
            _split_judged.set("eval")  # in the task of this row
            _pull.set(_Pull(scope=f"row {next(_pulls)}"))
            rollouts = await roll_out(row)
            outcomes = await self._judge(row, rollouts)
            judged.extend(outcomes)
            return [
                {
                    "row": row,
                    "messages": rollout.messages,
                    **self._verdict(rollout, outcome),
                    "finish_reason": rollout.finish_reason,
                    **({"num_tokens": rollout.num_tokens} if rollout.nodes else {}),
                    **rollout.overrides,
                    **self.sample_fields(row, rollout.completion),
                }
                for rollout, outcome in zip(rollouts, outcomes, strict=True)
            ]

        samples = await self.evaluate_items(rows, measure)
        self._counts["eval"].update(f"unscored_{s['unscored']}" for s in samples if "unscored" in s)
        if len(judged) == len(samples):
            raise_if_all_raised(judged)
        correct = [sample["correct"] for sample in samples if sample["correct"] is not None]
        self.audit.note_evaluation(sum(correct), len(correct), step=self.curr_step)
        context = contextvars.copy_context()
        context.run(_split_judged.set, "eval")
        counts = {f"eval/{name}": float(count) for name, count in self._counts["eval"].items()}
        summary = context.run(self.summarize_samples, samples)
        self.eval_metrics = self._with_aliases(
            {**counts, **summary, **self.rates_of_parts(rows, samples)}
        )
        await self.evaluate_log(
            self.eval_metrics,
            start_time=began,
            end_time=time.time(),
            generation_parameters=self.eval_parameters(),
            samples=samples,
        )
        return self.eval_metrics

    def _verdict(self, rollout: Rollout, outcome: Outcome) -> dict[str, Any]:
        """Return the verdict's fields in `samples.jsonl`.

        `correct` is False for an answer without a score, None if its row is faulty; `unscored` is the reason.
        """
        score = number_of(outcome)
        if score is not None:
            return {"score": score, "correct": score >= self.success_score}
        is_faulty = isinstance(outcome, RewardFailure) and outcome.is_faulty
        reason = str(outcome.reason) if isinstance(outcome, RewardFailure) else "unjudged"
        if is_faulty or rollout.finish_reason == ABORTED:
            reason = "faulty" if is_faulty else "aborted"
        return {"score": None, "correct": None if is_faulty else False, "unscored": reason}

    def sample_fields(self, row: Row, answer: str) -> dict[str, Any]:
        """Return further fields of an answer in rows and `samples.jsonl`, for example what was read out of it."""
        return {}

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return metrics of the samples of an evaluation, in order of the rows; default: `summarize` of the scores."""
        sound = [sample for sample in samples if sample.get("unscored") != "faulty"]
        by_row = itertools.groupby(sound, key=lambda sample: sample["item_index"])
        return self.summarize([[sample["score"] for sample in of_row] for _, of_row in by_row])

    def summarize(self, scores: Sequence[Sequence[float | None]]) -> dict[str, float]:
        """Return metrics of the scores of every evaluation row (`[num_rows][num_eval_samples]`, None: not judged).

        Rows that are faulty are left out. An answer without a score is not correct: pass@k is over all answers, and
        percent_correct, the name in the dashboards of existing environments, is pass@1. Where there are such answers,
        percent_correct_judged leaves them out, as the mean of the scores does.
        Means have their standard error and interval, with the answers of a row as one cluster.
        """
        return score_metrics(
            scores, success_score=self.success_score, num_samples=self.config.num_eval_samples
        )

    def parts_of(self, row: Row) -> Sequence[str]:
        """Return the names of metrics that are success rates of parts of the evaluation, for each part of a row."""
        return ()

    def rates_of_parts(self, rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, float]:
        """Return the share of successes in every part of an evaluation."""
        found: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample["correct"] is not None:
                for part in self.parts_of(rows[sample["item_index"]]):
                    found[part].append(sample)
        return {
            part: estimate_mean(
                [float(sample["correct"]) for sample in of_part],
                clusters=[sample["item_index"] for sample in of_part],
            )
            for part, of_part in sorted(found.items())
        }

    def train_metrics(self) -> dict[str, float]:
        """Return further metrics for a log; called once, before `train_scores` and `counts` are cleared."""
        return {}

    def note(self, **values: JsonValue) -> None:
        """Note what the score that `score` is about to return is made of, such as its parts or an `explanation`.

        The viewer shows the notes of rows and of samples beside the score.
        """
        note(**values)

    def record(self, name: str, value: float) -> None:
        """Add a value of training to those whose mean the next log shows as `name`; in `score`, note it too."""
        note(**{name.rpartition("/")[2]: float(value)})
        if not self.is_evaluating:
            self._recorded[name].append(value)

    def _with_aliases(self, metrics: dict[str, Any]) -> dict[str, Any]:
        known = {name: metrics[of] for name, of in self.aliases.items() if of in metrics}
        return {**metrics, **known}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add scores, failures, `train_metrics` and the last evaluation."""
        counts = self._counts["train"]
        metrics = {
            **(wandb_metrics or {}),
            **self.eval_metrics,
            **self.train_metrics(),
            "train/reward_failures": self.num_reward_failures,
            "train/too_short": self.num_too_short,
            **{f"train/score_error_{kind}": n for kind, n in self.score_errors.items()},
            "train/epoch": self.num_items / max(1, len(self.train_rows)),
            **{f"train/{name}": count for name, count in counts.items()},
        }
        if self.train_scores:
            solved = [score >= self.success_score for score in self.train_scores]
            metrics["train/mean_score"] = sum(self.train_scores) / len(self.train_scores)
            metrics["train/percent_correct"] = sum(solved) / len(solved)
        metrics |= self.audit.metrics()
        metrics |= {name: statistics.fmean(values) for name, values in self._recorded.items()}
        self._recorded.clear()
        self.train_scores, self.eval_metrics = [], {}
        self._logged_counts.update(counts)
        counts.clear()
        await super().wandb_log(self._with_aliases(metrics))

    def num_epoch_items(self) -> int:
        return len(self.train_rows)

    def known_rows(self) -> dict[str, Sequence[Row]]:
        gives_rows = type(self).get_next_item is DatasetEnv.get_next_item
        return {"train": self.train_rows, "eval": self.eval_rows} if gives_rows else {}

    async def row_fault(self, row: Row) -> str | None:
        """Return why a row's gold answer does not pass, for `check`; "" if it does, None if the row has none.

        Raises what the hooks that read the row raise, EnvError for `gold_answer`.
        """
        if type(self).prompt is not DatasetEnv.prompt:  # agents begin in another way
            self.conversation(row)
        gold = self._gold_of(row)
        self.example_answers(row)
        if gold is None:
            return None
        outcome = await self._probe(row, gold)
        if isinstance(outcome, RewardFailure):
            return f"scoring the gold answer failed: {outcome.reason}: {outcome.detail[-200:]}"
        score = number_of(outcome)
        is_right = score is not None and score >= self.success_score
        return (
            ""
            if is_right
            else f"the gold answer earns {score}, and success is {self.success_score:g}"
        )

    def scoring_errors(self) -> Counter[str]:
        in_workers = self.reward_workers.failures["exception"]
        return self.score_errors + Counter({"an exception in a worker": in_workers})

    def lost_answers(self) -> dict[str, int]:
        """Count the answers that were too short, aborted, not judged or removed by `shape_group`."""
        aborted = self.total("aborted")
        return {
            "too_short": self.num_too_short,
            "aborted": aborted,
            "unjudged": max(0, self.num_reward_failures - aborted),
            "shape_group": self.total("shape_group"),
            "suspicious": self._num_suspicious,
        }

    def suspicions(self) -> dict[str, int]:
        return self.audit.suspicions()

    @property
    def is_evaluating(self) -> bool:
        """Whether the current task samples and judges for an evaluation."""
        return _split_judged.get() != "train"

    @property
    def counts(self) -> Counter[str]:
        """Events since the last log, by name, logged as `train/<name>`; in an evaluation its own, as `eval/<name>`."""
        return self._counts[_split_judged.get()]

    def total(self, event: str) -> int:
        """Return how often an event of `counts` happened in training since the start."""
        return self._logged_counts[event] + self._counts["train"][event]

    def load_checkpoint(self) -> None:
        """Set the saved attributes; those that are a `Counter` stay one, with texts as keys."""
        counters = [x for x in self.checkpointed if isinstance(getattr(self, x, None), Counter)]
        super().load_checkpoint()
        for name in counters:
            setattr(self, name, Counter(getattr(self, name)))

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Save `checkpointed` and the position in the rows. Rows in flight at a crash are skipped for that epoch."""
        state = {
            name: getattr(self, name) for name in ("num_items", "item_beliefs", *self.checkpointed)
        }
        super().save_checkpoint(step, {**(data or {}), **state})

    async def close(self) -> None:
        await self.reward_workers.close()
        await super().close()

    async def outcome_of(self, row: Row, answer: str) -> Outcome:
        """Judge one answer with `score`; judge it again if that fails and `on_reward_failure` is "retry".

        The only place that decides what a failure of the grader means. If the row's gold answer (`gold_answer`, else
        the first of `example_answers`) passes, the text is what fails: it is a wrong answer, with the score of an empty
        one. If the gold answer fails, the row is faulty: it is named in the log, and its answers have no score. Without
        a gold answer, the text is wrong if an empty answer can be judged. None from `score`, and an exception in this
        process that a text hardly causes, such as OSError, leave the answer without a score.
        """
        outcome = await self._score_of(row, answer)
        if number_of(outcome) is None and self.config.on_reward_failure == "retry":
            outcome = await self._score_of(row, answer)
        if number_of(outcome) is not None:
            return outcome
        failure = outcome if isinstance(outcome, RewardFailure) else None
        if failure is not None and not isinstance(failure.error, (*_CAUSED_BY_TEXT, type(None))):
            return failure
        if failure is None and self._reference(row) is None:
            return None
        known = await self._known_verdicts(row)
        if known.gold_passes is False:
            if failure is None:
                failure = RewardFailure(reason="exception", detail="score returned None")
            return replace(failure, is_faulty=True)
        if failure is None or known.wrong_score is None:
            return outcome
        self.counts[f"wrong_by_{failure.reason}"] += 1
        return known.wrong_score

    async def _known_verdicts(self, row: Row) -> _KnownVerdicts:
        """Judge the row's gold answer and an empty one, once in a pull."""
        pull = _pull.get() or _Pull(scope="")
        async with pull.lock:
            if id(row) not in pull.verdicts:
                pull.verdicts[id(row)] = await self._judge_known_answers(row)
            return pull.verdicts[id(row)]

    def _reference(self, row: Row) -> str | None:
        """Return an answer that should be right; None if none is known."""
        gold = self._gold_of(row)
        texts = (text for text in self.example_answers(row) if isinstance(text, str))
        return next(texts, None) if gold is None else gold

    async def _probe(self, row: Row, answer: str) -> Outcome:
        """Judge an answer that no model gave: it counts nowhere, and is judged in a process of its own."""
        outcome: Outcome = await self._aside(self._score_of, row, answer)
        return outcome

    async def _aside(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call a hook with `guarded` so that it counts nowhere."""
        split, pull = _split_judged.set("probe"), _pull.set(None)
        try:
            with noting(None):
                return await self.guarded(hook, *args)
        finally:
            _split_judged.reset(split)
            _pull.reset(pull)

    async def _judge_known_answers(self, row: Row) -> _KnownVerdicts:
        passes = None
        if (reference := self._reference(row)) is not None:
            score = number_of(await self._probe(row, reference))
            passes = score is not None and score >= self.success_score
            if score is not None and self._gold_of(row) is None:
                passes = passes or None  # examples may be wrong
            elif not passes:
                self._num_faulty += 1
                logger.log(
                    logging.WARNING if self._num_faulty <= MAX_FAULTY_ROWS_NAMED else logging.DEBUG,
                    "faulty row: its gold answer does not pass its reward; its answers have no score: %.500s",
                    row,
                )
        wrong = number_of(await self._probe(row, ""))
        if wrong is None or wrong >= self.success_score:
            wrong = min(0.0, self.truncated_score or 0.0) if passes else None
        return _KnownVerdicts(passes, wrong)

    async def guarded(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call the author's judging code, plain or async; return a `RewardFailure` if it raises.

        Raises this library's own errors: the engine or the environment caused them, not the answer. Others are counted
        by type; the first of each type is logged with its traceback.
        """
        try:
            return await awaited(hook(*args))
        except AtroposError:
            raise
        except Exception as error:  # noqa: BLE001 - boundary: the judging of one answer
            return self._failure_of(hook.__name__, error)

    async def in_worker(self, function: Callable[..., JsonValue] | str, *args: JsonValue) -> Any:
        """Call a module-level function in a process that is killed after `reward_timeout_s`.

        Arguments and result are JSON. Returns a `RewardFailure` if the function raises.
        """
        pull = _pull.get()
        value = await self.reward_workers.run(
            function,
            *args,
            timeout_s=self.config.reward_timeout_s,
            scope=None if pull is None else pull.scope,
        )
        if self._calls is not None:
            self._calls.append((function, args, value))
        return value

    def conversation(self, row: Row) -> list[dict[str, Any]]:
        """Return the first messages of a rollout of `row`."""
        prompt = self.prompt(row)
        if not isinstance(prompt, str):
            return [dict(message) for message in prompt]
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    @asynccontextmanager
    async def chat_session(self, split: Split) -> AsyncIterator[ChatSession]:
        """Open a conversation; evaluation falls back to plain chat if the API has no token ids."""
        async with AsyncExitStack() as stack:
            target: Any = self.server
            try:
                tokenizer = self.tokenizer if self.server.gives_token_ids else None
                managed = self.server.managed_server(tokenizer=tokenizer)
                target = await stack.enter_async_context(managed)
            except NotImplementedError:
                if split == "train":
                    raise
            if split == "train" and self.max_token_len > 0:
                # A prompt and its answer must be shorter than the trainer's limit, or the whole group is dropped.
                target.max_context_tokens = self.max_token_len - 1
            yield ChatSession(
                target=target,
                split=split,
                temperature=self._temperature(split),
                max_tokens=self.config.max_token_length,
            )

    def _temperature(self, split: Split) -> float:
        if split == "train":
            return self.config.temperature
        if self.config.eval_temperature is not None:
            return self.config.eval_temperature
        return 0.0 if self.config.num_eval_samples == 1 else self.config.temperature

    def _failure_of(self, where: str, error: Exception) -> RewardFailure:
        kind = type(error).__name__
        if _split_judged.get() == "probe":
            return RewardFailure(reason="exception", detail=f"{kind}: {error}", error=error)
        self.score_errors[kind] += 1
        is_first = self.score_errors[kind] == 1
        logger.log(
            logging.ERROR if is_first else logging.DEBUG,
            "%s.%s raised %s; errors of this type are counted as train/score_error_%s",
            type(self).__name__,
            where,
            kind,
            kind,
            exc_info=error if is_first else None,
        )
        return RewardFailure(reason="exception", detail=f"{kind}: {error}", error=error)

    async def _score_of(self, row: Row, answer: str) -> Outcome:
        outcome: Outcome = await self.guarded(self.score, row, answer)
        is_unjudged = outcome is None or isinstance(outcome, RewardFailure)
        if not is_unjudged and number_of(outcome) is None:
            error = EnvError(f"score returned {outcome!r:.200}, which is not a finite number")
            return self._failure_of("score", error)
        return outcome

    async def _audited(
        self, row: Row, rollouts: Sequence[Rollout], outcomes: Sequence[Outcome], group_id: str
    ) -> list[Outcome]:
        """Show a judged group to the audit; return the outcomes, without those that `on_suspicion` drops."""
        audit, kept = self.audit, list(outcomes)
        at: dict[str, Any] = {"step": self.curr_step, "group": group_id}
        ended = [i for i, rollout in enumerate(rollouts) if rollout.finish_reason != ABORTED]
        answers = [_judged(rollouts[i], outcomes[i]) for i in ended]
        gold = await audit.ask(self._aside, self._gold_of, row)
        found = audit.note(answers, item=hash_of(row), gold=gold, **at)
        drops = self.config.on_suspicion == "drop" and COUNTERFACTUALS & audit.suspicions().keys()
        for i in audit.sample(answers, whole=bool(drops)):
            hit = await audit.examine(self.graders, row, answers[i].text, **at)
            if hit is not None:
                found[i] = hit
            if drops and hit in audit.suspicions():
                kept[ended[i]] = None
                self._num_suspicious += 1
        for i, name in found.items():
            rollouts[ended[i]].overrides["suspicious"] = name
        alarms = audit.alarms[self._num_alarms_told :]
        self._num_alarms_told += len(alarms)
        for alarm in alarms:
            logger.warning("audit: %s", alarm)
        if alarms and self.config.on_suspicion == "stop":
            raise Suspicion(f"{'; '.join(alarms)} (--env.on_suspicion stop)")
        return kept

    @property
    def graders(self) -> Graders:
        """What the audit may ask."""
        hooks = (self._score_of, self._reference, self.audit_score)
        return Graders(*(functools.partial(self._aside, hook) for hook in hooks))

    def _is_long_enough(self, rollout: Rollout) -> bool:
        trained = rollout.num_tokens
        if trained >= self.config.min_trained_tokens or rollout.finish_reason == ABORTED:
            return True
        has_failed = isinstance(rollout.outcome, RewardFailure)
        self.num_reward_failures += has_failed
        self.num_too_short += not has_failed
        if self.num_too_short == 1 and not has_failed:
            logger.warning(
                "an answer with %d trained tokens is left out, as will be all with fewer than min_trained_tokens (%d)",
                trained,
                self.config.min_trained_tokens,
            )
        return False

    async def _judge(self, row: Row, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """Judge all rollouts except those that the engine aborted, whose outcome is None."""
        ended = [rollout for rollout in rollouts if rollout.finish_reason != ABORTED]
        for rollout in ended:
            if self.silences_truncated and rollout.finish_reason == "length":
                rollout.overrides["set_advantage_to_zero"] = True
        outcomes = iter(await self.score_group(row, ended) if ended else [])
        if not self.is_evaluating:
            for rollout in ended:
                fields = await self.guarded(self.sample_fields, row, rollout.completion)
                shown = fields if isinstance(fields, Mapping) else {}
                rollout.overrides |= shown_fields(shown)
        return [
            None if rollout.finish_reason == ABORTED else next(outcomes) for rollout in rollouts
        ]


async def awaited(value: Any) -> Any:
    """Return `value`, awaited if it is awaitable: hooks may be plain or async."""
    return await value if inspect.isawaitable(value) else value


def _judged(rollout: Rollout, outcome: Outcome) -> Judged:
    reason = outcome.reason if isinstance(outcome, RewardFailure) else "unjudged"
    text = rollout.completion
    length = rollout.num_tokens or len(text)
    return Judged(text, number_of(outcome), length, reason, rollout.messages)


def _rollout_of(sample: Sample) -> Rollout:
    return Rollout(messages=sample["messages"], nodes=[], finish_reason=sample.get("finish_reason"))
