"""The hooks that an author overrides, with their defaults, and the state of an environment that runs.

`atroposlib.runtime` and `atroposlib.checker` run environments through this class; authors subclass `BaseEnv`
(`base.py`), which adds the commands. Hooks are called through the instance, so an override may extend the default
(`super()`) or replace it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from atroposlib.envs import checkpoint
from atroposlib.envs.env_config import BaseEnvConfig, max_workers
from atroposlib.envs.eval import evaluate_log
from atroposlib.envs.eval_run import EvalRun, Sample, evaluate_items
from atroposlib.envs.sandbox import ProcessSandbox, local_sandbox
from atroposlib.errors import ConfigError, EnvError
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.api_server import APIServer
from atroposlib.inference.servers.reasoning import ReasoningConfig
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.scored_data import OPTIONAL_ROWS, ScoredDataGroup, ScoredDataItem
from atroposlib.type_definitions import UUID, Item
from atroposlib.utils.metrics import get_std_min_max_avg
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.utils.tokenizers.backends import decode

logger = logging.getLogger(__name__)

Servers = ServerBaseline | APIServerConfig | list[APIServerConfig]


class ExtraServers(NamedTuple):
    """Servers of an environment other than the policy's (a teacher, a judge)."""

    keyword: str
    """The constructor's parameter for them."""
    default: Servers | None
    """None: the parameter is omitted unless YAML or flags configure the servers."""


class GroupSink(Protocol):
    """Receives finished groups; the runtime sets it before the first item."""

    async def accept(
        self,
        scored_data: Any,
        item: Any = None,
        *,
        send: bool = True,
        abort_on_max_length: bool = True,
    ) -> int:
        """Check, record and send; return the number of groups accepted."""

    async def post(self, scored_data: Any) -> None:
        """Send one group or a list that was accepted before."""


class Runtime(Protocol):
    """The defaults of the hooks of `serve`, which sets it before `setup`."""

    async def start_wandb(self) -> None: ...
    async def register(self) -> None: ...
    async def ask_for_id(self) -> dict[str, Any]: ...
    async def read_info(self) -> None: ...
    async def poll_status(self) -> None: ...
    async def check_step(self) -> None: ...
    async def start_items(self) -> None: ...
    async def run_item(self, key: UUID) -> Any: ...


class _Done:
    """An awaitable that is already finished, so it may also be ignored."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class EnvHooks(ABC):
    """What `BaseEnv` is without its commands."""

    name: ClassVar[str | None] = None
    """Used at the hub and in file names; None: the class name."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer  # type: ignore[type-abstract]
    """A concrete subclass here overrides `server_type`."""
    needs_token_ids: ClassVar[bool] = False
    """Whether training needs an engine that returns token ids; `serve` and `process` then refuse others."""
    runs_model_code: ClassVar[bool] = False
    """Whether it runs programs that a model or a data set wrote; `--require-isolation` then asks `is_isolated`."""

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: Servers,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server = ServerManager(
            server_configs,
            slurm=slurm,
            testing=testing,
            server_class=self.server_cls,
            reasoning_config=ReasoningConfig(
                enabled=config.thinking_mode,
                effort=config.reasoning_effort,
                max_tokens=config.max_reasoning_tokens,
            ),
        )
        self.extra_managers: dict[str, ServerManager] = {}
        """Those of `extra_servers` that are configured; the runtime checks them at the start and closes them."""
        if self.server.gives_token_ids:
            self.tokenizer = self.load_tokenizer()
        self.env_id: int | None = None
        self.group_sink: GroupSink | None = None
        self.runtime: Runtime | None = None
        self.wandb_run: Any = None
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.wandb_prepend: str | None = None
        self.jsonl_writer: Any = None
        self.process_options: Any = None
        self.curr_step = 0
        self.max_token_len = -1
        self.max_num_workers = max_workers(config, num_servers=len(self.server.servers))
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.status_dict: dict[str, Any] = {}
        self.items_sent_this_step = 0
        self.backlog: list[Item] = []
        self.running_items: dict[UUID, dict[str, Any]] = {}
        self.workers: set[asyncio.Task[Any]] = set()
        self.eval_workers: set[asyncio.Task[Any]] = set()
        self.eval_runner: asyncio.Task[None] | None = None
        self.eval_run: EvalRun | None = None
        """Directory of the command `evaluate`; None in other commands."""
        self.last_loop_time: float | None = None
        self.last_completed_item: Any = None
        self.rollouts_for_wandb: list[Any] = []
        self.completion_lengths: list[int] = []
        self.task_duration: list[float] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_successful: list[int] = []
        self.mainloop_timings: list[float] = []
        self.workers_added_list: list[int] = []

    def is_isolated(self) -> bool:
        """Whether programs of a model run in namespaces or containers; by default, whether `local_sandbox` has them."""
        return not isinstance(local_sandbox(), ProcessSandbox)

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Servers]:
        """Return the defaults that YAML and flags override. Must be cheap and free of side effects."""
        return cls.env_config_cls(), ServerBaseline()

    @classmethod
    def extra_servers(cls) -> dict[str, ExtraServers]:
        """Return the extra servers by namespace: `{"judge": ExtraServers("judge_configs", default)}`.

        Their flags are `--judge.<field>`, their YAML section is `judge:`.
        """
        return {}

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Loaded at construction; on first use if all servers return text alone: most such runs need none."""
        return self.load_tokenizer()

    def load_tokenizer(self) -> Any:
        """Return the tokenizer of `config.tokenizer_name`; override for one built in code."""
        return load_tokenizer(self.config.tokenizer_name)

    @property
    def registered_name(self) -> str:
        """Name requested from the hub: `wandb_name`, else `name`, else the class name."""
        return self.config.wandb_name or self.name or type(self).__name__

    @property
    def derived_batch_size(self) -> int:
        """Sequences of a batch that this environment may contribute; -1 while unknown."""
        if self.config.batch_size == -1 or not self.status_dict:
            return self.config.batch_size
        reserved = self.config.min_batch_allocation or 0.0
        return int(self.config.batch_size * (self.status_dict["unallocated_fraction"] + reserved))

    async def setup(self) -> None:
        """Load data; called once, before the other hooks."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def setup(self)`")

    @abstractmethod
    async def get_next_item(self) -> Item | None:
        """Return the next item; None means none now (ends `process`)."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the current policy; runs concurrently with training every `steps_per_eval` steps."""

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """Return one scored sequence for `item`, and items to ask later."""
        raise NotImplementedError(
            f"{type(self).__name__} must define collect_trajectory or collect_trajectories"
        )

    async def collect_trajectories(self, item: Item) -> tuple[Any, list[Item]]:
        """Return a group, a list of groups or None, and items to ask later.

        The default runs `collect_trajectory` `group_size` times concurrently and joins the results; an exception in
        one cancels the others. Optional fields that no sequence has are None.
        """
        runs = await run_together(
            [self.collect_trajectory(item) for _ in range(self.config.group_size)]
        )
        backlog = [later for _, run_backlog in runs for later in run_backlog]
        return join_items([sequence for sequence, _ in runs]), backlog

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Change groups before they are checked; default: unchanged."""
        return trajectories

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item | None = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """Check and send groups; return the number accepted. Override to change groups before they are sent."""
        if self.group_sink is None:
            raise EnvError("no runtime is attached; start the environment with serve or process")
        return await self.group_sink.accept(
            scored_data,
            item,
            send=do_send_to_api,
            abort_on_max_length=abort_on_any_max_length_exceeded,
        )

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        """Send one accepted group, or a list; default: hold it until the hub has stored it.

        Called only if overridden, with dicts that have `env_id` and `group_id`.
        """
        if self.group_sink is None:
            raise EnvError("no runtime is attached; start the environment with serve or process")
        await self.group_sink.post(scored_data)

    # Hooks of `serve`, in the order of their first call.

    async def setup_wandb(self) -> None:
        """Start the wandb run in the trainer's project and group, if `use_wandb`."""
        await self._driver.start_wandb()

    async def register_env(self) -> None:
        """Register until the hub gives an id; called again when the hub no longer knows the id."""
        await self._driver.register()

    async def _register_env(self) -> dict[str, Any]:
        """Request an id from the hub once; return its answer, with `status` "success" if it gave one."""
        return await self._driver.ask_for_id()

    async def get_server_info(self) -> None:
        """Read the trainer's batch size and token limit into `config.batch_size` and `max_token_len`."""
        await self._driver.read_info()

    async def get_status(self) -> None:
        """Wait for the hub's next status and store it in `status_dict`; called in a loop."""
        await self._driver.poll_status()

    async def env_step_checks(self) -> None:
        """Evaluate, save and log if `status_dict["current_step"]` passed a boundary; then update `curr_step`."""
        await self._driver.check_step()

    async def add_train_workers(self) -> None:
        """Start as many items as the staleness bound and the workers allow."""
        await self._driver.start_items()

    async def handle_env(self, item_uuid: UUID) -> Any:
        """Run `running_items[item_uuid]`: collect, clean up, postprocess, send; return the groups.

        None when there were none, or when the item failed: the failure is counted and the item retried.
        """
        return await self._driver.run_item(item_uuid)

    async def cleanup(self) -> None:  # noqa: B027
        """Called after every item, including failed ones; default: nothing."""

    def gold_answer(self, item: Item) -> str | None:
        """Return an answer to `item` that is right; None if none is known."""
        return None

    def num_epoch_items(self) -> int | None:
        """Return the number of items that `get_next_item` gives before it repeats one; None: it has no epochs."""
        return None

    def known_rows(self) -> dict[str, Sequence[Any]]:
        """Return the rows of "train" and "eval" that `check` walks; {}: items are not the rows of a `DatasetEnv`."""
        return {}

    def known_tools(self) -> dict[str, Any]:
        """Return the tools that `check` calls, by name; {}: it is no `ToolEnv`."""
        return {}

    def scoring_errors(self) -> Counter[str]:
        """Return the exceptions of scoring that were counted instead of raised, by type."""
        return Counter()

    def lost_answers(self) -> dict[str, int]:
        """Return what kept answers out of groups, by reason, since the start; shown while the environment runs."""
        return {}

    def suspicions(self) -> dict[str, int]:
        """Return the suspicious answers by the detector of `audit.py` whose alarm is raised."""
        return {}

    def close(self) -> Any:
        """Called at the end of every run. May be plain or async; `super().close()` need not be awaited."""
        return _Done()

    @abstractmethod
    async def env_manager(self) -> None:
        """Serve until the trainer is done, as `python env.py serve` does."""

    @abstractmethod
    async def process_manager(self) -> None:
        """Write `total_steps` groups to a file and a page, as `python env.py process` does."""

    @property
    def _driver(self) -> Runtime:
        if self.runtime is None:
            raise EnvError("no runtime is attached; this hook belongs to serve (env_manager)")
        return self.runtime

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Write `data` for `step`; None writes nothing. Subclasses add data and call super."""
        if data is None:
            logger.debug("step %d: the environment has nothing to save", step)
            return
        checkpoint.save(self._checkpoint_folder, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes saved at the newest step up to the current one."""
        for key, value in checkpoint.load(self._checkpoint_folder, self.curr_step).items():
            setattr(self, key, value)

    @property
    def _checkpoint_folder(self) -> Path:
        name = self.wandb_prepend or self.registered_name
        return checkpoint.checkpoint_folder(self.checkpoint_dir, name)

    def decode_tokens(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`."""
        return decode(self.tokenizer, tokens)

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Item | None = None) -> None:
        """Keep text and score of some sequences of a group for the rollout table."""
        if not self.config.use_wandb:
            return
        wanted = self.config.num_rollouts_per_group_for_logging
        rows = list(zip(scored_data["tokens"], scored_data["scores"], strict=True))
        rows = rows if wanted == -1 else rows[:wanted]
        self.rollouts_for_wandb.append([(self.decode_tokens(t), s) for t, s in rows])
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add `train/rollouts`, a table of text and score, to the metrics."""
        if self.rollouts_for_wandb and self._open_wandb_run() is not None:
            import wandb

            table = wandb.Table(columns=["text", "score"])
            for group in self.rollouts_for_wandb:
                for row in group:
                    table.add_data(row[0], row[1])
            wandb_metrics["train/rollouts"] = table
        self.rollouts_for_wandb = []
        return wandb_metrics

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the durations and counts since the last call to the metrics, and clear them."""
        for name, values in (
            ("task_duration", self.task_duration),
            ("succeeded_task_duration", self.succeeded_task_duration),
            ("failed_task_duration", self.failed_task_duration),
            ("mainloop_timings", self.mainloop_timings),
            ("workers_added_per_attempt", self.workers_added_list),
        ):
            if len(values) > 1:
                get_std_min_max_avg(f"train_perf/{name}", values, metrics_dict)
                values.clear()
        if self.task_successful:
            succeeded = sum(self.task_successful)
            metrics_dict["train/items_sent_to_api"] = succeeded
            metrics_dict["train/items_rejected"] = len(self.task_successful) - succeeded
            self.task_successful.clear()
        return metrics_dict

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the author's and the runtime's metrics. Subclasses add theirs and call super last."""
        metrics = dict(wandb_metrics or {})
        if self.completion_lengths:
            lengths = np.array(self.completion_lengths)
            metrics["train/completion_lengths"] = float(lengths.mean())
            for stat in ("std", "max", "min"):
                metrics[f"train/completion_lengths_{stat}"] = float(getattr(np, stat)(lengths))
            if self.max_token_len > 0:
                near = lengths > 0.95 * self.max_token_len
                metrics["train/completion_lengths_p95"] = float(near.mean())
            self.completion_lengths.clear()
        metrics = self.perf_stats(await self.create_rollout_table(metrics))
        if self.wandb_prepend:
            metrics = {f"{self.wandb_prepend}_{key}": value for key, value in metrics.items()}
        run = self._open_wandb_run()
        if run is not None:
            for index, server in enumerate(self.server.servers):
                metrics.update(await server.wandb_metrics({}, f"server_{index}"))
            run.log(metrics, step=self.curr_step)

    def _open_wandb_run(self) -> Any:
        """Return the runtime's run, else one that the author started with `wandb.init`; None without either."""
        if self.wandb_run is None and self.config.use_wandb and "wandb" in sys.modules:
            return sys.modules["wandb"].run
        return self.wandb_run

    async def evaluate_items(
        self,
        items: Sequence[Any],
        measure: Callable[[Any], Awaitable[Sample | Sequence[Sample]]],
    ) -> list[Sample]:
        """Call `measure(item)` for every item, `max_eval_workers` at a time; return the samples in order of the items.

        `measure` returns one dict for `samples.jsonl` or several. In the command `evaluate` the samples of an item are
        written as soon as it is finished, and `--resume` skips it.
        """
        return await evaluate_items(
            items, measure, run=self.eval_run, max_workers=self.config.max_eval_workers
        )

    async def rescore(self, samples: Sequence[Sample]) -> Any:
        """Score the stored samples of an evaluation again, for `evaluate --rescore`; ConfigError by default."""
        raise ConfigError(
            f"--rescore: {type(self).__name__} cannot score stored answers; it has no method rescore"
        )

    async def evaluate_log(
        self,
        metrics: dict[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write `metrics.json` and `samples.jsonl` into `config.data_dir_to_save_evals`.

        `evaluate_log` of `atroposlib.envs.eval` has the details. The command `evaluate` always prints the table.
        """
        model = model_name or getattr(self.config, "model_name", None)
        if model is None and self.server.servers:
            model = self.server.servers[0].config.model_name
        evaluate_log(
            metrics,
            eval_dir=self.config.data_dir_to_save_evals,
            task_name=task_name or f"{self.name or type(self).__name__}_eval",
            model_name=model,
            start_time=start_time,
            end_time=end_time,
            generation_parameters={
                "max_new_tokens": self.config.max_token_length,
                **(generation_parameters or {}),
            },
            samples=samples,
            verbose=verbose or self.eval_run is not None,
        )


def join_items(items: Sequence[Any]) -> ScoredDataGroup:
    """Join single sequences into one group, keeping every optional field that at least one of them has.

    A sequence that lacks `overrides` gets `{}`; one that lacks another of these fields gets None, which
    `check_group` refuses with the field's path. `policy_version` is the oldest one.
    """
    for index, member in enumerate(items):
        if not isinstance(member, dict):
            raise ValueError(
                f"collect_trajectory must return a ScoredDataItem dict as its first value; "
                f"call {index} returned {type(member).__name__}"
            )
    group: dict[str, Any] = {
        key: [member[key] for member in items] for key in ("tokens", "masks", "scores")
    }
    for key in (*OPTIONAL_ROWS, "images"):
        values = [member.get(key) for member in items]
        if any(value is not None for value in values):
            if key == "overrides":
                values = [value if value is not None else {} for value in values]
            group[key] = values
        else:
            group[key] = None
    group["group_overrides"] = {}
    for member in items:
        group["group_overrides"].update(member.get("group_overrides") or {})
    for key, choose in (("generation_params", lambda found: found[0]), ("policy_version", min)):
        found = [member[key] for member in items if member.get(key) is not None]
        group[key] = choose(found) if found else None
    return group  # type: ignore[return-value]  # built key by key
