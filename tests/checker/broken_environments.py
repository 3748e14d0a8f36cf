"""Sums for the conformance check: sound environments, and broken ones that each break one rule.

`breaks` and `faults` add to `BROKEN`. Where two rules could see a fault, the environment is written so that only one
does: the corpus measures that the check names the cause, not a consequence.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.inference.manager import ServerManager

E = TypeVar("E", bound=type[BaseEnv])


class Broken(NamedTuple):
    """One broken environment."""

    rule: str
    """The rule that must fail, and no other."""
    env_cls: type[BaseEnv]
    hint: str
    """Part of what the report advises."""


BROKEN: list[Broken] = []
NOTED: list[Broken] = []
"""Sound environments about which the report of a rule has a note."""


def breaks(rule: str, hint: str = "", *, cases: list[Broken] = BROKEN) -> Callable[[E], E]:
    """Add a class to the cases."""

    def add(env_cls: E) -> E:
        cases.append(Broken(rule, env_cls, hint))
        return env_cls

    return add


def faults(
    base: type[BaseEnv],
    rule: str,
    hint: str = "",
    *,
    method: str = "score",
    cases: list[Broken] = BROKEN,
) -> Callable[..., None]:
    """Return a function that adds classes to the cases, each `base` with another `method`: `add(Name=function)`."""

    def add(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            breaks(rule, hint, cases=cases)(
                type(name, (base,), {"__module__": base.__module__, method: function})
            )

    return add


async def nothing(*_: Any) -> None:
    """Do nothing, in place of any method."""


async def never(*_: Any) -> None:
    """Wait for ever."""
    await asyncio.Event().wait()


def raising(error: type[BaseException]) -> Any:
    """Return a method that raises `error`."""

    def fail(*_: Any) -> Any:
        raise error

    return fail


def leaving(make: Callable[[], Any]) -> Any:
    """Return a method `change` that leaves behind what `make` returns."""

    def change(self: Any, group: Any, nodes: Any) -> Any:
        self.held.append(make())
        return group

    return change


def masked(mask: Callable[[list[int], list[int]], list[int]]) -> Any:
    """Return a method `change` that makes new masks from the masks and tokens of each sequence."""
    return lambda self, group, nodes: {
        **group,
        "masks": [*map(mask, group["masks"], group["tokens"])],
        "inference_logprobs": None,
    }


def right(item: Any, text: str) -> float:
    return float(text.strip() == item["answer"])


def keep(group: Any, sequences: Iterable[int]) -> dict[str, Any]:
    """Return a group with these of its sequences."""
    places = list(sequences)
    return {field: [values[i] for i in places] for field, values in group.items()}


def training(split: str, rows: list[Any]) -> list[Any] | None:
    """Return training rows; some of them are held out for evaluation."""
    return rows if split == "train" else None


class Offline:
    """Uses the defaults of its environment, and a server that is never asked."""

    env_config_cls: type[BaseEnvConfig]

    @classmethod
    def config_init(cls) -> Any:
        server = APIServerConfig(model_name="m", base_url="http://127.0.0.1:9/v1")
        return cls.env_config_cls(use_wandb=False), [server]


class Sums(Offline, BaseEnv):
    """Sound: adds two numbers; the answer is the sum and nothing else."""

    name = "sums"
    held: ClassVar[list[Any]] = []
    """What broken environments forget to close."""

    async def setup(self) -> None:
        self.rows = [{"question": f"{n} + {n + 1} = ?", "answer": str(2 * n + 1)} for n in range(9)]
        self.position = 0

    async def get_next_item(self) -> Any:
        self.position += 1
        return self.rows[self.position % len(self.rows)]

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            completion = await managed.chat_completion(
                messages=[{"role": "user", "content": item["question"]}], n=self.num_answers()
            )
            nodes = managed.get_state()["nodes"]
        texts = [choice.message.content for choice in completion.choices]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[self.score(item, text, i) for i, text in enumerate(texts)],
        )
        return self.change(group, nodes), []

    def num_answers(self) -> int:
        return self.config.group_size

    def score(self, item: Any, text: str, place: int) -> float:
        return right(item, text)

    def change(self, group: Any, nodes: Any) -> Any:
        return group

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.evaluate_log({"eval/percent_correct": 0.5})

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "position": self.position})


class TextOnly(Sums):
    """Sound, written without a managed server: chat completions, then its own tokens."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        messages = [{"role": "user", "content": item["question"]}]
        completion = await self.server.chat_completion(messages=messages, n=self.config.group_size)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        for i, choice in enumerate(completion.choices):
            text = choice.message.content
            answer = self.tokenizer.encode(text + "<eos>", add_special_tokens=False)
            group["tokens"].append(prompt + answer)
            group["masks"].append([-100] * len(prompt) + answer)
            group["scores"].append(self.score(item, text, i))
        return group, []


class TwoTurns(Sums):
    """Sound: asks once more after the first answer; both answers are trained and the last one counts."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages = [{"role": "user", "content": item["question"]}]
            for turn in range(2):
                completion = await managed.chat_completion(messages=messages)
                text = completion.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                if turn == 0:
                    messages.append({"role": "user", "content": "Are you sure?"})
            (node,) = managed.get_state()["nodes"]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": self.score(item, text, 0),
        }, []

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        return await BaseEnv.collect_trajectories(self, item)


class NormalizedRewards(Sums):
    """Sound: rewards are centred in their group, and empty answers are left out, as the group says."""

    def change(self, group: Any, nodes: Any) -> Any:
        mean = sum(group["scores"]) / len(group["scores"])
        group["scores"] = [score - mean for score in group["scores"]]
        group = keep(group, [i for i, n in enumerate(nodes) if n.masked_tokens[-2] != -100])
        return {**group, "group_overrides": {"group_size": len(group["scores"])}}


class ListOfGroups(Sums):
    """Sound: a list of groups with a None in it, and items for later."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group, _ = await super().collect_trajectories(item)
        return [group, None], [item]


class FixedData(Sums):
    """Sound: hands out stored sequences and asks no model."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        tokens = self.tokenizer.encode(item["question"] + item["answer"])
        size = self.config.group_size
        return {"tokens": [tokens] * size, "masks": [tokens] * size, "scores": [1.0] * size}, []


class SomeItemsAreWorthless(Sums):
    """Sound: every second item is not worth training on."""

    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        return {**item, "number": self.position}

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group, later = await super().collect_trajectories(item)
        return (group if item["number"] % 2 else None), later


class LazyPool(Sums):
    """Sound: a task and a handle that the first item opens and all items share."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        if "pool" not in vars(self):
            self.pool = asyncio.create_task(asyncio.sleep(3600))
            self.sockets = socket.socketpair()
        return await super().collect_trajectories(item)

    def close(self) -> Any:
        for end in self.sockets if "sockets" in vars(self) else ():
            end.close()
        return super().close()


@breaks("checkpoint_restores")
class SavesUnderAnotherName(Sums):
    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        BaseEnv.save_checkpoint(self, step, {"iter": self.position})


class OwnRestore(SavesUnderAnotherName):
    """Sound: saves under another name and restores with a hook of its own."""

    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.position = vars(self).pop("iter")


class Rows(Offline, DatasetEnv):
    """Sound: rows, a prompt and a score."""

    def load_rows(self, split: Any) -> Any:
        return training(split, [f"{n} + {n}" for n in range(9)])

    def prompt(self, row: Any) -> str:
        return f"{row} = ?"

    def gold_answer(self, row: Any) -> str:
        return str(2 * int(row[0]))

    def score(self, row: Any, answer: str) -> float:
        return float(answer.strip() == self.gold_answer(row))


class Judged(Offline, JudgeEnv):
    """Sound: the policy's own engine marks the answers."""

    def load_rows(self, split: Any) -> Any:
        return training(split, ["a poem about soup", "a joke about pigeons"])

    def prompt(self, row: Any) -> str:
        return f"Write {row}."


class JudgedInPairs(Judged):
    """Sound: the answers of a group are compared."""

    judging = "pairwise"

    def reference(self, row: Any) -> str:
        return "The best there is."


class OwnJudge(Sums):
    """Sound: a judge with a server and words of its own."""

    def __init__(self, config: Any, servers: Any, slurm: bool = False, testing: bool = False):
        super().__init__(config, servers, slurm, testing)
        self.judge = ServerManager([APIServerConfig(model_name="judge")], testing=True)

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group, _ = await super().collect_trajectories(item)
        for i, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
            answer = self.tokenizer.decode([t for t, m in zip(tokens, masks, strict=True) if m > 2])
            asked = [{"role": "user", "content": f"Is {answer!r} right? It is {item['answer']}."}]
            said = await self.judge.chat_completion(messages=asked)
            group["scores"][i] = float(said.choices[0].message.content == "yes")
        return group, []

    def example_verdict(self, prompt: str) -> str | None:
        found = re.search(r"Is '(.*)' right\? It is (\d+)\.", prompt)
        return None if found is None else "yes" if found[1] == found[2] else "no"


# Starting and items.


@breaks("starts", "local data")
class SetupFails(Sums):
    async def setup(self) -> None:
        raise FileNotFoundError("rows.jsonl")


faults(Sums, "gives_items", "None", method="get_next_item")(NoItems=nothing)
faults(Sums, "gives_items", method="get_next_item")(ItemsNeverCome=never)


@breaks("gives_items", "return None at the end: next(items, None)")
class ItemsRunOut(Sums):
    async def get_next_item(self) -> Any:
        return next(iter(()))


@breaks("gives_items")
class ItemsSpin(Sums):
    async def get_next_item(self) -> Any:
        while self.position >= 0:  # rejection sampling that rejects everything
            self.position += 1


faults(Sums, "collects")(
    CollectFails=lambda self, item, *_: item["gold"],
    ExitsInScoring=lambda *_: sys.exit(0),
    CancelsItself=raising(asyncio.CancelledError),
)
faults(Sums, "collects", method="change")(NeverAGroup=lambda *_: None)
faults(Sums, "group_size", "group_overrides", method="change")(
    OneSequenceShort=lambda self, group, nodes: keep(group, range(len(nodes) - 1))
)


@breaks("collects")
class SpinsInATask(Sums):
    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        async with asyncio.TaskGroup() as tasks:
            result = tasks.create_task(super().collect_trajectories(item))
        return result.result()

    def score(self, item: Any, text: str, place: int) -> float:
        while place >= 0:
            place += 1
        return 0.0


# Tokens.

faults(Sums, "aligned", method="change")(
    MasksShifted=masked(lambda masks, tokens: [*masks[1:], -100]),
    OneMaskShort=lambda self, group, nodes: {
        **group,
        "masks": [group["masks"][0][:-1], *group["masks"][1:]],
    },
    NothingTrained=masked(lambda masks, tokens: [-100] * len(masks)),
)
faults(Sums, "aligned", "mask the prompt", method="change")(
    PromptTrained=masked(lambda masks, tokens: tokens)
)


@breaks("aligned", "mask the prompt")
class RetokenizedAndPromptTrained(Sums):
    """Turns the whole conversation into tokens again, and trains all of them."""

    def change(self, group: Any, nodes: Any) -> Any:
        texts = [self.tokenizer.decode(node.tokens) for node in nodes]
        group["tokens"] = [self.tokenizer.encode(text) for text in texts]
        group["masks"] = [list(tokens) for tokens in group["tokens"]]
        group["inference_logprobs"] = None
        return group


@breaks("aligned", "mask the prompt")
class TextOnlyPromptTrained(TextOnly):
    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        group, later = await super().collect_trajectories(item)
        return {**group, "masks": group["tokens"]}, later


@breaks("aligned")
class LogprobsShifted(Sums):
    def change(self, group: Any, nodes: Any) -> Any:
        for masks, logprobs in zip(group["masks"], group["inference_logprobs"], strict=True):
            start = sum(mask == -100 for mask in masks)
            logprobs[start:] = [-0.001, *logprobs[start:-1]]
        return group


@breaks("token_exact")
class AnswerRetokenized(Sums):
    def change(self, group: Any, nodes: Any) -> Any:
        group["inference_logprobs"] = None
        for i, node in enumerate(nodes):
            start = sum(mask == -100 for mask in node.masked_tokens)
            text = self.tokenizer.decode(node.tokens[start:])
            answer = self.tokenizer.encode(text, add_special_tokens=False)
            group["tokens"][i] = node.tokens[:start] + answer
            group["masks"][i] = [-100] * start + answer
        return group


@breaks("token_exact")
class HistoryRetokenized(TwoTurns):
    """Sends the first turn back as text, so that the second is sampled after other tokens."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        prompt = added = f"<user>{item['question']}<eos><assistant>"
        tokens: list[int] = []
        masks: list[int] = []
        for _ in range(2):
            given = self.tokenizer.encode(added, add_special_tokens=False)
            input_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            answer = await self.server.tokens_and_logprobs_completion(input_ids=input_ids)
            sampled = answer.output_tokens[0]
            tokens += given + sampled
            masks += [-100] * len(given) + sampled
            text = self.tokenizer.decode(sampled, skip_special_tokens=True)
            added = "<user>Are you sure?<eos><assistant>"
            prompt += text + "<eos>" + added
        return {"tokens": tokens, "masks": masks, "scores": self.score(item, text, 0)}, []


# Rewards.

faults(Sums, "reward_repeatable", "random")(
    RandomReward=lambda self, item, text, _: right(item, text) + random.random() / 100,
    CoinFlip=lambda *_: float(random.random() < 0.5),
)


@breaks("reward_repeatable", "without memory")
class NoveltyReward(Sums):
    """An answer earns less when it was seen before."""

    async def setup(self) -> None:
        await super().setup()
        self.seen: list[str] = []

    def score(self, item: Any, text: str, place: int) -> float:
        self.seen.append(text)
        return super().score(item, text, place) / self.seen.count(text)


faults(Sums, "reward_ignores_order")(
    EarlyBird=lambda self, item, text, place: right(item, text) - 0.01 * place,
    LastWins=lambda self, item, text, place: float(place == self.config.group_size - 1),
)
faults(Sums, "reward_varies")(ConstantReward=lambda *_: 1.0)
faults(Sums, "reward_varies", "example_answers")(  # the parser looks for what no model writes
    WrongField=lambda self, item, text, _: float(text == f"#### {item['question']} ####")
)
faults(Sums, "reward_finite")(  # a score that is no number makes the whole group useless
    NanForWords=lambda self, item, text, _: right(item, text) if text.isdigit() else math.nan
)
faults(
    Sums, "grader_survives"
)(  # raises for the first answer that is no number, and loses the group
    FloatOfAnyText=lambda self, item, text, _: float(float(text) == float(item["answer"]))
)
faults(Sums, "empty_unrewarded")(
    EmptyIsRight=lambda self, item, text, _: float(text.strip() in item["answer"])
)


@breaks("empty_unrewarded")
class EmptyOfFiveIsRight(Sums):
    """Samples five answers, which have no echo among them."""

    def score(self, item: Any, text: str, place: int) -> float:
        return float(text.strip() in item["answer"])

    def num_answers(self) -> int:
        return 5

    def change(self, group: Any, nodes: Any) -> Any:
        return {**group, "group_overrides": {"group_size": 5}}


@breaks("echo_unrewarded")
class EchoIsRight(Sums):
    async def setup(self) -> None:
        await super().setup()
        for row in self.rows:
            row["question"] += f" Is it {row['answer']} or 2?"

    def score(self, item: Any, text: str, place: int) -> float:
        return float(item["answer"] in text)


# What is left behind.


@breaks("no_leaked_tasks")
class TaskForgotten(Sums):
    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        self.held.append(asyncio.create_task(asyncio.sleep(3600)))
        return await super().collect_trajectories(item)


SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
faults(Sums, "no_leaked_handles", method="change")(
    FileLeftOpen=leaving(functools.partial(open, __file__)), SocketLeftOpen=leaving(socket.socket)
)
faults(Sums, "no_leaked_processes", method="change")(
    ProcessLeftRunning=leaving(lambda: subprocess.Popen(SLEEP, stdin=subprocess.PIPE))
)


@breaks("no_leaked_handles")
class CloseFails(Sums):
    async def close(self) -> None:
        raise RuntimeError("the pool is gone")


# The loop. Blocked in the first runs only, more than the rule needs, because the check runs an item dozens of times.

NUM_BLOCKING_RUNS = 6


@breaks("loop_stays_free")
class SleepsInScoring(Sums):
    num_runs = 0

    def change(self, group: Any, nodes: Any) -> Any:
        self.num_runs += 1
        if self.num_runs <= NUM_BLOCKING_RUNS:
            self.block()
        return group

    def block(self) -> None:
        time.sleep(0.25)


@breaks("loop_stays_free")
class ComputesInScoring(SleepsInScoring):
    def block(self) -> None:
        until = time.thread_time() + 0.25
        while time.thread_time() < until:
            sum(range(100))


# Evaluating and checkpoints.


@breaks("evaluates")
class EvaluateFails(Sums):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.evaluate_log({"eval/percent_correct": 1 / (self.position - self.position)})


faults(Sums, "evaluates", "evaluate_log", method="evaluate")(EvaluateSilent=nothing)
faults(Sums, "evaluates", method="evaluate")(EvaluateHangs=never)
faults(Sums, "checkpoint_is_json", method="save_checkpoint")(
    SavesAnObject=lambda self, step: Sums.save_checkpoint(self, step, {"it": random.Random(0)})
)
faults(SavesUnderAnotherName, "checkpoint_restores", method="load_checkpoint")(
    LoadsUnderAnotherName=lambda self: BaseEnv.load_checkpoint(self)
)
faults(Sums, "checkpoint_restores", method="load_checkpoint")(LoadsNothing=lambda self: None)


@breaks("checkpoint_restores")
class SavesIntegerKeys(Sums):
    async def setup(self) -> None:
        await super().setup()
        self.tries = {0: 1, 1: 5}

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {"tries": self.tries})


@breaks("checkpoint_restores")
class LoadFails(Sums):
    def load_checkpoint(self) -> None:
        super().load_checkpoint()
        self.rows[self.position + 10_000]
