"""Any environment as an agent loop of verl (0.9), for its trainers, the fully asynchronous one too.

verl samples; the environment's own code makes the prompts and the score (`atroposlib.envs.stepwise`). A row of verl's
dataset names its item by `extra_info.index`; its prompt is not used. verl compares the `n` episodes of a row.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from atroposlib.cli.environments import build
from atroposlib.envs.stepwise import Answer, Request, SteppedEnv
from atroposlib.errors import EnvError
from atroposlib.scored_data import ScoredDataGroup

__all__ = ["AtroposLoop"]

MAX_EPISODES = 3
"""Episodes without a score in a row, after which the run fails: verl has no sample without a reward."""

_environments: dict[str, asyncio.Task[SteppedEnv]] = {}
"""Those of this process, by their command: verl constructs a loop for each episode."""


class AtroposLoop(AgentLoopBase):  # type: ignore[misc]
    """One episode; `environment` is a name of `atropos-env list` or a file, `flags` are those of `process`."""

    def __init__(self, *args: Any, environment: str, flags: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = environment
        self._flags = OmegaConf.to_container(OmegaConf.create(flags))
        self._longest = int(self.rollout_config.response_length)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play the item of a row; raises EnvError if `MAX_EPISODES` have no score."""
        command = repr((self._name, self._flags))
        if command not in _environments:
            _environments[command] = asyncio.create_task(self._open(), name="environment")
        episode = (await _environments[command]).episode()
        reason = ""
        for _ in range(MAX_EPISODES):
            fields: dict[str, Any] = {}
            started, num_turns = time.perf_counter(), 0
            try:
                turn = await episode.reset(int(row["extra_info"]["index"]))
                while isinstance(turn, Request):
                    answer, last = await self._sample(turn, sampling_params)
                    fields = {**last, **fields, "max_global_steps": last.get("max_global_steps")}
                    turn = await episode.step(answer)
                    num_turns += 1
            finally:
                await episode.close()
            if turn.group is not None:
                return AgentLoopOutput(
                    **self._sequence(turn.group),
                    reward_score=turn.reward,
                    num_turns=2 * num_turns,
                    metrics={"generate_sequences": time.perf_counter() - started},
                    extra_fields=fields,
                )
            reason = turn.reason
        raise EnvError(f"{self._name}: {MAX_EPISODES} episodes without a score: {reason}")

    async def _open(self) -> SteppedEnv:
        return await SteppedEnv(build(self._name, self._flags, prog="verl")).__aenter__()

    async def _sample(
        self, request: Request, sampling_params: dict[str, Any]
    ) -> tuple[Answer, dict[str, Any]]:
        """Sample at verl's temperature, which its trainer assumes; return the answer and verl's own fields."""
        asked = request.sampling
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or self._longest
        limit = min(limit, self._longest)
        limits: dict[str, Any] = {"max_tokens": limit}
        limits |= {name: asked[name] for name in ("stop", "stop_token_ids") if name in asked}
        output = await self.server_manager.generate(
            uuid.uuid4().hex,
            prompt_ids=request.prompt_ids,
            sampling_params=sampling_params | limits,
        )
        reason = "length" if len(output.token_ids) >= limit else "stop"
        if output.stop_reason == "aborted":
            reason = "abort"
        answer = Answer(token_ids=output.token_ids, logprobs=output.log_probs, finish_reason=reason)
        return answer, output.extra_fields

    def _sequence(self, group: ScoredDataGroup) -> dict[str, Any]:
        """Split the one sequence into a prompt and a response of sampled and other tokens."""
        if len(group["tokens"]) != 1:
            raise EnvError(f"{self._name}: an episode of several sequences, and verl trains one")
        trained = [token != -100 for token in group["masks"][0]]
        start = trained.index(True)
        rows = slice(start, start + self._longest)
        logprobs = group.get("inference_logprobs")
        return {
            "prompt_ids": group["tokens"][0][:start],
            "response_ids": group["tokens"][0][rows],
            "response_mask": [int(is_trained) for is_trained in trained[rows]],
            "response_logprobs": logprobs
            and [p if t else 0.0 for p, t in zip(logprobs[0][rows], trained[rows], strict=True)],
        }
