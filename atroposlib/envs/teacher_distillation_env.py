"""An environment that adds a teacher's logprobs for every token to its groups, for distillation on the policy's text.

The teacher gets only groups that pass the gate and the drop rules. If it fails on a group, the group is sent without
the distillation fields.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.author_groups import drop_rule, in_thread_if_large, plain_group
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.env_config import BaseEnvConfig
from atroposlib.envs.hooks import ExtraServers, Servers
from atroposlib.errors import ConfigError, GroupError
from atroposlib.inference.config import APIServerConfig, ServerBaseline
from atroposlib.inference.manager import ServerManager
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.scored_data import ScoredGroup, Strictness, check_group
from atroposlib.type_definitions import Item
from atroposlib.utils.off_loop import off_loop
from atroposlib.utils.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


class TeacherDistillationConfig(BaseEnvConfig):
    teacher_enabled: bool = False
    """Request logprobs from the teacher servers."""
    teacher_top_k: int = Field(default=0, ge=-1)
    """Most likely tokens to keep per position; 0: only the sequence's own token; -1: no request."""


class TeacherDistillationEnv(BaseEnv):
    """A `BaseEnv` with a second set of servers: flags `--teacher.<field>`, YAML section `teacher:`.

    Per group, `group_overrides` may hold `skip_teacher_top_k: true` or another `teacher_top_k`.
    """

    env_config_cls: ClassVar[type[BaseEnvConfig]] = TeacherDistillationConfig
    teacher_namespace: ClassVar[str] = "teacher"
    config: TeacherDistillationConfig

    def __init__(
        self,
        config: TeacherDistillationConfig,
        server_configs: Servers,
        teacher_server_configs: Servers | None = None,
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Build both sets of servers; ConfigError if the teacher is missing or its vocabulary differs."""
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        self.teacher_server: ServerManager | None = None
        self.num_teacher_failures = 0
        """Groups sent without the distillation fields because the teacher failed."""
        if not config.teacher_enabled:
            return
        if not teacher_server_configs:
            raise ConfigError(
                "teacher_enabled is set but there are no teacher servers; give --teacher.base_url and"
                " --teacher.model_name, a YAML section `teacher:`, or teacher_config_init()"
            )
        if isinstance(teacher_server_configs, APIServerConfig):
            teacher_server_configs = [teacher_server_configs]
        self._check_vocabulary(teacher_server_configs)
        self.teacher_server = ServerManager(teacher_server_configs, testing=testing)
        self.extra_managers[self.teacher_namespace] = self.teacher_server

    @classmethod
    def teacher_config_init(cls) -> Servers | None:
        """Return the default teacher servers; None if they must be configured."""
        return None

    @classmethod
    def extra_servers(cls) -> dict[str, ExtraServers]:
        return {
            **super().extra_servers(),
            cls.teacher_namespace: ExtraServers(
                "teacher_server_configs", cls.teacher_config_init()
            ),
        }

    def load_teacher_tokenizer(self, source: str) -> Any:
        """Return a teacher's tokenizer; override for one built in code."""
        return load_tokenizer(source)

    def _check_vocabulary(self, configs: ServerBaseline | Sequence[APIServerConfig]) -> None:
        entries = [configs] if isinstance(configs, ServerBaseline) else configs
        for source in dict.fromkeys(entry.tokenizer_source for entry in entries):
            if source == self.config.tokenizer_name:
                continue
            if self.load_teacher_tokenizer(source).get_vocab() != self.tokenizer.get_vocab():
                raise ConfigError(
                    f"the vocabulary of the teacher's tokenizer {source!r} differs from that of"
                    f" {self.config.tokenizer_name!r}: token ids would not match"
                )

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Item | None = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> int:
        """Add `distill_token_ids` and `distill_logprobs` to the groups that will be kept, then send all groups."""
        if self.teacher_server is not None:
            abort = abort_on_any_max_length_exceeded
            if isinstance(scored_data, Mapping):
                scored_data = await self._annotated(scored_data, abort)
            else:
                groups = scored_data or []
                scored_data = await run_together([self._annotated(g, abort) for g in groups])
        return await super().handle_send_to_api(
            scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded
        )

    async def _annotated(
        self, group: Mapping[str, Any] | None, abort_on_max_length: bool
    ) -> Mapping[str, Any] | None:
        teacher = self.teacher_server
        if group is None or teacher is None:
            return group
        if not await in_thread_if_large(group, self._is_kept, group, abort_on_max_length):
            return group
        overrides = group.get("group_overrides") or {}
        if overrides.get("skip_teacher_top_k"):
            return group
        try:
            top_k = self._top_k(overrides.get("teacher_top_k"))
            if top_k < 0:
                return group
            asked = [
                teacher.get_logprobs(
                    input_ids=[int(token) for token in tokens],
                    top_k=top_k,
                    max_tokens=1,
                    split="train",
                )
                for tokens in group["tokens"]
            ]
            answers = await run_together(asked)
            annotated = {
                **group,
                "distill_token_ids": [answer["prompt_topk_token_ids"] for answer in answers],
                "distill_logprobs": [answer["prompt_topk_logprobs"] for answer in answers],
            }
            await off_loop(_check, annotated)
        except Exception as error:
            self.num_teacher_failures += 1
            logger.warning(
                "no teacher logprobs for a group (%d so far); it is sent without them: %s: %s",
                self.num_teacher_failures,
                type(error).__name__,
                error,
                exc_info=self.num_teacher_failures == 1,
            )
            return {**group, "distill_token_ids": None, "distill_logprobs": None}
        return annotated

    def _top_k(self, override: Any) -> int:
        if override is None:
            return self.config.teacher_top_k
        if isinstance(override, bool) or not isinstance(override, int):
            raise ConfigError(f"group_overrides.teacher_top_k: {override!r}, expected an integer")
        return override

    def _is_kept(self, group: Mapping[str, Any], abort_on_max_length: bool) -> bool:
        """Whether the outbox will keep the group; the outbox logs the reason if not."""
        try:
            checked = _check(group)
        except GroupError:
            return False
        verdict = drop_rule(
            checked,
            config=self.config,
            max_token_len=self.max_token_len,
            abort_on_max_length=abort_on_max_length,
        )
        return verdict is None

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = dict(wandb_metrics or {})
        if self.teacher_server is not None:
            metrics["train/teacher_failures"] = self.num_teacher_failures
        await super().wandb_log(metrics)


def _check(group: Mapping[str, Any]) -> ScoredGroup:
    return check_group(plain_group(group), strictness=Strictness.MEANING)
