"""Episodes with `reset` and `step`, for trainers that sample the completions themselves.

An environment drives its own completions: `collect_trajectories(item)` calls the server. With OpenEnv or verifiers the
trainer samples, and the environment waits for it. Here the environment's code runs unchanged on a server that samples
nothing: `reset` and `step` return its requests, and the waiting code gets the answer that the trainer gives to `step`.
When the code returns its group, the episode ends with the group's score.

An episode is a group of one, because the trainer compares the episodes of a prompt itself; `DatasetEnv.shape_group`,
which changes or drops whole groups, is not called. Otherwise tokens, masks and scores are those of the same answers in
`serve`. Refused: a judge that is the policy, chats with images, several groups per item. Follow-up items are dropped.
"""

from __future__ import annotations

import asyncio
import copy
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from atroposlib.envs.collecting import close, collect, next_item
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.hooks import EnvHooks
from atroposlib.envs.in_process_policy import InProcessPolicy, answerer, current_answerer
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.errors import ConfigError, EngineProtocolError, EnvError
from atroposlib.inference.answerer import (
    Answers,
    Ask,
    Completion,
    Sampled,
    end_at_stop,
    sample_text,
    with_prompt,
)
from atroposlib.inference.servers.sampling_notes import run_together
from atroposlib.inference.servers.token_ids import check_sampled
from atroposlib.inference.tools.messages import as_dict
from atroposlib.scored_data import ScoredDataGroup, Strictness, check_group

MAX_ITEMS_DRAWN = 100_000
"""Largest seed of an environment that generates its items in order."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the environment asks the policy next."""

    messages: list[dict[str, Any]]
    """The conversation; empty if the environment continues the text `prompt`."""
    prompt: str
    """The same as one text."""
    prompt_ids: list[int]
    """The same as token ids: sample after exactly these. Later turns repeat the ids of earlier ones."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that the chat template describes in the prompt."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The environment's parameters with the names of the OpenAI API, such as `max_tokens` and `stop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The policy's completion: `token_ids` where they are known, else its `text`."""

    text: str = ""
    """With the stop string that ended it. Tokenised here, with EOS, and cut by the request's limit and stops."""
    token_ids: list[int] | None = None
    """[T] as sampled, with EOS."""
    logprobs: list[float] | None = None
    """[T] of `token_ids`; the group has `inference_logprobs` if every answer has them."""
    finish_reason: str = "stop"
    """Of `token_ids`: stop, length or abort (not completed; gives no score)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    reward: float | None
    """The mean score of the episode's sequences; None: the environment gave none, which is not a reward of 0."""
    group: ScoredDataGroup | None
    """The checked group of this episode alone; None without a reward."""
    reason: str = ""
    """Why there is no reward."""


class _Pending(NamedTuple):
    request: Request
    answer: asyncio.Future[Answer]


class SteppedEnv:
    """An environment whose episodes are stepped from outside; several may run at once.

    `async with` sets it up and closes it.
    """

    def __init__(self, env: EnvHooks) -> None:
        """Take over `env`: it must not run in another way afterwards."""
        env.config.group_size = 1
        _OuterPolicy(env.tokenizer).serve(env.server)
        if isinstance(env, DatasetEnv):
            env.shape_group = lambda row, group: group  # type: ignore[method-assign]
        if isinstance(env, JudgeEnv) and env.judge is env.server:
            env.judge = _NoJudge()  # type: ignore[assignment]
        self.env = env
        self._items: list[Any] = []
        self._num_unseeded = 0
        self._drawing = asyncio.Lock()
        """Held while items are drawn: their order is that of their seeds."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Episodes that have not ended."""

    async def __aenter__(self) -> Self:
        await self.env.setup()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await close(self.env)

    def start(self, item: Any, context: Context) -> asyncio.Task[tuple[Any, list[Any]]]:
        """Run the environment's code on an item."""
        task = asyncio.create_task(collect(self.env, item), name="episode", context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def episode(self) -> SteppedEpisode:
        """Return an episode to `reset`."""
        return SteppedEpisode(self)

    async def item(self, seed: int | None) -> Any:
        """Return the item with this number in the order of `get_next_item`, from 0; None: the next without a seed.

        Raises EnvError if the environment has no such item.
        """
        async with self._drawing:
            if seed is None:
                seed = self._num_unseeded
                self._num_unseeded += 1
            if seed < 0:
                raise EnvError(f"seed {seed}: the first item has seed 0")
            env = self.env
            if isinstance(env, DatasetEnv) and type(env).get_next_item is DatasetEnv.get_next_item:
                env.num_items = seed
                return await env.get_next_item()
            if seed >= MAX_ITEMS_DRAWN:
                raise EnvError(
                    f"seed {seed}: {env.registered_name} generates its items in order, so seeds must be small;"
                    f" the largest is {MAX_ITEMS_DRAWN - 1}"
                )
            while len(self._items) <= seed:
                item = await next_item(env)
                if item is None:
                    raise EnvError(
                        f"seed {seed}: {env.registered_name} has only {len(self._items)} items now"
                    )
                self._items.append(item)
            # An environment may write to its item, and episodes with the same seed may run at once.
            return copy.deepcopy(self._items[seed])


class SteppedEpisode:
    """One episode at a time; `reset` abandons the one before, and `worker_timeout` limits its duration."""

    def __init__(self, stepped: SteppedEnv) -> None:
        self._stepped = stepped
        self._waiting: asyncio.Queue[_Pending | None] = asyncio.Queue()
        """Requests in the order they were made; None at the end of the episode."""
        self._pending: _Pending | None = None
        self._task: asyncio.Task[tuple[Any, list[Any]]] | None = None
        self._has_all_logprobs = True

    async def reset(self, seed: int | None = None) -> Request | EpisodeEnd:
        """Start the episode of the item with number `seed` (None: the next one) and return its first request.

        Raises what the environment raises before it asks for a completion.
        """
        await self.close()
        item = await self._stepped.item(seed)
        self._waiting, self._has_all_logprobs = asyncio.Queue(), True
        context = copy_context()
        context.run(answerer.set, self)
        waiting = self._waiting
        self._task = self._stepped.start(item, context)
        self._task.add_done_callback(lambda _: waiting.put_nowait(None))
        return await self._next()

    async def step(self, answer: Answer | str) -> Request | EpisodeEnd:
        """Answer the last request; return the next one, or the end. Raises what the environment raises."""
        if self._pending is None:
            raise EnvError("no request waits for an answer: call reset first")
        if isinstance(answer, str):
            answer = Answer(text=answer)
        if answer.token_ids is not None and not answer.token_ids:
            raise EngineProtocolError("step: the answer has no token ids; at least EOS is sampled")
        if answer.token_ids is not None and answer.logprobs is not None:
            check_sampled(answer.token_ids, answer.logprobs, where="step")
        else:
            self._has_all_logprobs = False
        pending, self._pending = self._pending, None
        if not pending.answer.done():
            pending.answer.set_result(answer)
        return await self._next()

    async def close(self) -> None:
        """Cancel the episode, if it has not ended."""
        task, self._task, self._pending = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ask(self, request: Request) -> Answer:
        """Wait for the answer to a request; called by the environment's code."""
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(pending)
        return await pending.answer

    async def _next(self) -> Request | EpisodeEnd:
        task, waiting = self._task, self._waiting
        while (pending := await waiting.get()) is not None:
            if not pending.answer.done():  # else the environment no longer waits
                self._pending = pending
                return pending.request
        if task is None or task.cancelled():
            raise EnvError("the episode was abandoned")
        self._task = None
        groups, _ = await task
        return self._end(groups)

    def _end(self, groups: Any) -> EpisodeEnd:
        name = self._stepped.env.registered_name
        found = groups if isinstance(groups, list) else [groups] if groups else []
        if not found:
            return EpisodeEnd(
                reward=None, group=None, reason=f"{name} gave no group: the answer has no score"
            )
        if len(found) > 1:
            raise EnvError(
                f"{name} gave {len(found)} groups for one item; an episode has one reward"
            )
        group = {**found[0]}
        if not self._has_all_logprobs:
            group["inference_logprobs"] = None
        checked = check_group(group, strictness=Strictness.MEANING, environment=name)
        return EpisodeEnd(reward=float(checked.scores.mean()), group=checked.to_dict())


class _OuterPolicy(InProcessPolicy):
    """The policy of a stepped environment: the trainer answers its requests."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__("outer-policy")
        self.tokenizer = tokenizer

    async def answer(self, ask: Ask) -> Answers:
        episode: SteppedEpisode | None = current_answerer()
        if episode is None:
            raise EnvError("a completion was asked for outside of an episode, for example in setup")
        shown = self._shown(ask)
        answers = await run_together([episode.ask(shown) for _ in range(ask.n)])
        return Answers(shown.prompt_ids, [self._completed(answer, ask) for answer in answers])

    def _shown(self, ask: Ask) -> Request:
        """Return a request as the trainer sees it."""
        if ask.prompt_tokens is None and ask.messages and ask.wants_tokens:
            raise EnvError(
                "an episode cannot have images: only the engine knows their tokens, and the trainer samples"
            )
        ask = with_prompt(self.tokenizer, ask)
        given = {**ask.keywords, **(ask.keywords.get("extra_body") or {})}
        return Request(
            messages=_dicts(ask.messages),
            prompt=str(ask.prompt),
            prompt_ids=ask.prompt_tokens or [],
            tools=_dicts(ask.keywords.get("tools")),
            sampling={name: given[name] for name in _SAMPLING if given.get(name) is not None},
        )

    def _completed(self, answer: Answer, ask: Ask) -> Completion:
        """Return an answer with tokens; unknown logprobs are 0, and the group leaves all out."""
        if answer.token_ids is None:
            sampled = sample_text(self.tokenizer, answer.text, ask.max_tokens)
        else:
            sampled = Sampled(answer.token_ids, answer.finish_reason)
        completion = end_at_stop(self.tokenizer, ask, sampled)
        if answer.token_ids is not None:  # stay as they were sampled, also after a stop
            completion.tokens, completion.finish_reason = sampled
            completion.logprobs = answer.logprobs or []
        completion.logprobs = completion.logprobs or [0.0] * len(completion.tokens)
        return completion


class _NoJudge:
    """Stands in for the judge of an environment that has no server for it."""

    async def chat_completion(self, **kwargs: Any) -> Any:
        raise ConfigError(
            "the judge must not be the policy, which the trainer samples: give --judge.base_url"
        )


def _dicts(entries: Any) -> list[dict[str, Any]]:
    return [as_dict(entry) for entry in entries or ()]
