"""Environments for the rules about rewards: each broken one scores answers with one known fault, sound ones do not.

The tasks are small on purpose: one function per fault. `broken_environments.py` says how they are declared.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import aiohttp
import yaml

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.base import APIServerConfig, BaseEnv, ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.judge_env import JudgeEnv
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, Step
from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.envs.tool_env import ToolEnv
from atroposlib.inference.servers.http_peer import HttpPeer
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tests.checker.broken_environments import BROKEN, NOTED, Offline, breaks, faults, training


def found(pattern: str, answer: str) -> list[str]:
    """Return what the pattern's group finds in an answer, without the commas of thousands."""
    return [text.replace(",", "") for text in re.findall(pattern, answer)]


class Products(Offline, DatasetEnv):
    """Sound: the number after the last "The answer is", or in the last box."""

    def load_rows(self, split: Any) -> Any:
        return training(
            split, [{"question": f"{n} * 37", "answer": str(n * 37)} for n in range(15, 27)]
        )

    def prompt(self, row: Any) -> Any:
        return f"{row['question']} = ? End with: The answer is <number>"

    def gold_answer(self, row: Any) -> str | None:
        return f"The answer is {row['answer']}"

    def score(self, row: Any, answer: str) -> Any:
        said = found(r"(?:answer is|boxed\{)\s*(-?[\d,]+)(?![\d,])", answer)
        return float(said[-1:] == [row["answer"]])


# Sound tasks of many kinds.


class Boxes(Products):
    """Sound: strips what may surround the number in a box."""

    def prompt(self, row: Any) -> str:
        return f"{row['question']} = ? Put the number into \\boxed{{}}."

    def gold_answer(self, row: Any) -> str:
        return f"\\boxed{{{row['answer']}}}"

    def score(self, row: Any, answer: str) -> Any:
        found = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", answer)
        number = re.match(r"\s*\\?\$?\s*(-?[\d,.]+)(?=\s|\\|$)", found[-1]) if found else None
        return float(number is not None and number[1].replace(",", "") == row["answer"])


class Fractions(Products):
    """Sound: the results of two items are equal, written differently."""

    def load_rows(self, split: Any) -> Any:
        results = ("1/2", "50%", "3/7", "9/4", "2/3", "40%")
        return training(
            split, [{"question": f"No. {i}", "answer": result} for i, result in enumerate(results)]
        )

    def score(self, row: Any, answer: str) -> Any:
        found = re.findall(r"answer is\s*(\S+)", answer)
        return float(bool(found) and self.value(found[-1]) == self.value(row["answer"]))

    def value(self, text: str) -> Fraction | None:
        found = re.fullmatch(r"(\d{1,4}(?:/[1-9]\d{0,3})?)(%?)\.?", text)
        return found and Fraction(found[1]) / (100 if found[2] else 1)


class Choices(Products):
    """Sound: one letter of four, and nothing else after the thinking."""

    def load_rows(self, split: Any) -> Any:
        return training(
            split,
            [{"question": f"Which? A, B, C or D ({n})", "answer": "ABCD"[n % 4]} for n in range(8)],
        )

    def prompt(self, row: Any) -> str:
        return str(row["question"])

    def gold_answer(self, row: Any) -> str:
        return f"<answer>{row['answer']}</answer>"

    def score(self, row: Any, answer: str) -> Any:
        found = re.findall(r"<answer>\s*([A-D])\s*</answer>", answer.rpartition("</think>")[2])
        return float(len(set(found)) == 1 and found[-1] == row["answer"])


CAPITALS = {"France": "Paris", "Chile": "Santiago", "Kenya": "Nairobi", "Japan": "Tokyo"}


class Capitals(Products):
    """Sound: words, compared without case and space."""

    def load_rows(self, split: Any) -> Any:
        return training(
            split, [{"country": land, "answer": city} for land, city in CAPITALS.items()]
        )

    def prompt(self, row: Any) -> str:
        return f"What is the capital of {row['country']}?"

    def gold_answer(self, row: Any) -> str:
        return f"<answer>{row['answer']}</answer>"

    def score(self, row: Any, answer: str) -> Any:
        found = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
        return float(len(found) == 1 and found[0].strip().lower() == row["answer"].lower())


class Overlap(Capitals):
    """Sound: partial credit for the words that answer and gold share (F1)."""

    def gold_answer(self, row: Any) -> str:
        return str(row["answer"])

    def score(self, row: Any, answer: str) -> Any:
        given, wanted = answer.lower().split(), row["answer"].lower().split()
        shared = len(set(given) & set(wanted))
        return 2 * shared / (len(given) + len(wanted)) if shared else 0.0


class EditDistance(Overlap):
    """Sound: partial credit for similar text."""

    def score(self, row: Any, answer: str) -> Any:
        return difflib.SequenceMatcher(None, answer.strip(), row["answer"]).ratio()


class Closeness(Products):
    """Sound: the nearer to the number, the better."""

    def score(self, row: Any, answer: str) -> Any:
        found = re.findall(r"answer is\s*(-?[\d,]+(?:\.\d+)?)", answer)
        if not found or not found[-1].strip(","):
            return 0.0
        gold = float(row["answer"])
        return max(0.0, 1.0 - abs(float(found[-1].replace(",", "")[:15]) - gold) / gold)


class FiveWords(Products):
    """Sound: any answer of five words is right, so there is no gold one."""

    def gold_answer(self, row: Any) -> None:
        return None

    def prompt(self, row: Any) -> str:
        return f"Write exactly five words about {row['question']}"

    def example_answers(self, item: Any) -> list[str]:
        return ["one two three four five"]

    def score(self, row: Any, answer: str) -> Any:
        return float(len(answer.split()) == 5)


class ThinksFirst(FiveWords):
    """Sound: rewards a format."""

    def example_answers(self, item: Any) -> list[str]:
        return ["<think>five</think> 5"]

    def score(self, row: Any, answer: str) -> Any:
        return float(re.fullmatch(r"<think>.+</think>.+", answer, re.DOTALL) is not None)


class FewShot(Products):
    """Sound: the prompt shows how another question is answered."""

    def prompt(self, row: Any) -> str:
        return f"Question: 2 * 3? The answer is 6\nQuestion: {row['question']}?"


class Guess(Offline, MultiTurnEnv):
    """Sound: a game in which the secret number is found by halves; its policy is an example answer."""

    def load_rows(self, split: Any) -> Any:
        return training(split, [11, 12, 13, 14, 9, 8])

    def prompt(self, row: Any) -> str:
        return "I think of a number from 1 to 15. Guess!"

    def step(self, episode: Episode, answer: str) -> Step:
        number = int(answer) if re.fullmatch(r"[0-9]{1,3}", answer.strip()) else 0
        if number == episode.row:
            return Step(reward=1.0, done=True)
        return Step("higher" if number < episode.row else "lower")

    def example_answers(self, item: Any) -> Any:
        def halve(prompt: str) -> str:
            low, high = 1, 15
            for guess, said in re.findall(r"<assistant>(\d+)<eos><user>(\w+)", prompt):
                low, high = (int(guess) + 1, high) if said == "higher" else (low, int(guess) - 1)
            return str((low + high) // 2)

        return [halve]


class Maze(Guess):
    """Sound: a game whose right moves are not told."""

    def prompt(self, row: Any) -> str:
        return "You stand in a maze. Say where to go."

    def step(self, episode: Episode, answer: str) -> Step:
        won = answer == "north by north-west"
        return Step("Nothing happens.", reward=float(won), done=won)

    def example_answers(self, item: Any) -> Any:
        return []


def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


class Calculator(ToolEnv, Products):
    """Sound: a tool, then a number."""

    tools = (multiply,)


@breaks("evaluation_held_out", "take the rows of load_rows('eval') out")
class SplitIgnored(Products):
    def load_rows(self, split: Any) -> Any:
        return super().load_rows("train")


@breaks("rows_work", "correct what raises this")
class OneRowWithoutAnswer(Products):
    def load_rows(self, split: Any) -> Any:
        rows = [{"question": f"{n} * 37", "answer": str(n * 37)} for n in range(21, 221)]
        return training(split, [*rows, {"question": "?"}])


@breaks("copy_unrewarded", "show worked examples of other questions")
class RowInThePrompt(Products):
    def load_rows(self, split: Any) -> Any:
        return training(split, [{"q": f"{n} * 37", "a": n * 37} for n in range(21, 33)])

    def prompt(self, row: Any) -> Any:
        return f"Row: {row}. End with: The answer is <number>"

    def gold_answer(self, row: Any) -> str | None:
        return f"The answer is {row['a']}"

    def score(self, row: Any, answer: str) -> Any:
        return super().score({"answer": str(row["a"])}, answer)


@breaks("no_leaked_handles", "open in `with`")
class SessionDropped(Products):
    async def score(self, row: Any, answer: str) -> Any:
        aiohttp.ClientSession()
        return super().score(row, answer)


def lookup(place: str) -> str:
    """Return the number at a place."""
    return {"shelf": "7"}[place]


def first_number(text: str) -> str:
    """Return the first number in a text."""
    return re.search(r"[0-9]+", text).group()  # type: ignore[union-attr]


class FirstNumbers(Calculator):
    """Sound: a tool that raises AttributeError for some texts, which the model gets as a result."""

    tools = (first_number,)


class Places(Calculator):
    """Sound: a tool that knows few arguments."""

    tools = (lookup,)


def misspelt(a: int, b: int = 2) -> int:
    """Multiply."""
    return multiplied(a, b)  # type: ignore[name-defined, no-any-return]  # noqa: F821


async def sleeping(a: int, b: int) -> int:
    """Multiply slowly."""
    time.sleep(0.3)  # noqa: ASYNC251
    return a * b


def setting(a: int) -> object:
    """Return what has no text."""

    class Odd:
        def __repr__(self) -> str:
            raise ValueError("no text")

    return {1: Odd()}


def _with_tool(function: Callable[..., Any], rule: str, hint: str) -> None:
    name = f"Calls{function.__name__.capitalize()}"
    breaks(rule, hint)(type(name, (Calculator,), {"__module__": __name__, "tools": (function,)}))


def renamed(text: str) -> str:
    """Call a method that texts do not have."""
    return text.decode()  # type: ignore[attr-defined, no-any-return]


_with_tool(renamed, "tools_work", "renamed(text='1'): AttributeError: 'str' object has no")
_with_tool(misspelt, "tools_work", "misspelt(a=1): NameError: name 'multiplied' is not")
_with_tool(setting, "tools_work", "the result of setting cannot be written as text")
_with_tool(sleeping, "loop_stays_free", "await, never time.sleep")


class Parrot(Offline, AgentEnv):
    """Sound: an agent that asks the policy over HTTP."""

    def load_rows(self, split: Any) -> Any:
        return training(split, [{"question": f"{n} + 40", "answer": str(n + 40)} for n in range(8)])

    async def run_agent(self, row: Any, base_url: str, api_key: str) -> str:
        peer = HttpPeer(base_url, api_key=api_key)
        asked = {"model": "m", "messages": [{"role": "user", "content": row["question"]}]}
        try:
            reply: Any = await peer.post("/chat/completions", asked, timeout_s=30)
        finally:
            await peer.close()
        return str(reply["choices"][0]["message"]["content"])

    def score(self, row: Any, answer: Any) -> float:
        return float(str(answer).strip() == row["answer"])


class Preferred(Offline, JudgeEnv):
    """Sound: a reward model scores poems."""

    judging = "reward_model"

    def load_rows(self, split: Any) -> Any:
        return training(split, ["a poem about soup", "a joke about pigeons", "a toast"])

    def prompt(self, row: Any) -> str:
        return f"Write {row}."


class Ranked(Preferred):
    """Sound: a reward model with a reply of its own."""

    reward_path = "/rank"

    def read_reward(self, reply: Any) -> float:
        return float(reply["ranking"]["value"])

    def example_reply(self, path: str, body: Any) -> Any:
        return {
            "ranking": {"value": 0.9 if body["messages"][-1]["content"].startswith("O ") else 0.1}
        }

    def example_answers(self, item: Any) -> list[str]:
        return ["O soup, thou hot and wet one"]


class Taught(TeacherDistillationEnv, Products):  # type: ignore[misc]
    """Sound: a teacher adds its logprobs."""

    @classmethod
    def config_init(cls) -> Any:
        class Config(DatasetEnvConfig, TeacherDistillationConfig):
            """Rows and a teacher."""

        config = Config(use_wandb=False, teacher_enabled=True, teacher_top_k=2)
        return config, [APIServerConfig(model_name="m")]


class OriginalStyle(Offline, BaseEnv):
    """Sound: chat completions and `tokenize_for_trainer`, as environments of the original are written."""

    async def setup(self) -> None:
        self.iter = 0

    async def get_next_item(self) -> Any:
        self.iter += 1
        return ({"role": "user", "content": f"Spell {self.iter} backwards"},), f"{self.iter}"[::-1]

    def example_answers(self, item: Any) -> list[str]:
        return [item[1]]

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        messages = [dict(message) for message in item[0]]
        completion = await self.server.chat_completion(messages=messages, n=self.config.group_size)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in completion.choices:
            said = {"role": "assistant", "content": choice.message.content}
            tokenized = tokenize_for_trainer(self.tokenizer, [*messages, said])
            group["tokens"].append(tokenized["tokens"])
            group["masks"].append(tokenized["masks"])
            group["scores"].append(1.0 if said["content"] == item[1] else -1.0)
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.evaluate_log({"eval/accuracy": 0.0})


# Wrong answers that earn.

faults(Products, "wrong_unrewarded")(
    Containment=lambda self, row, answer: row["answer"] in answer,
    StartsLikeIt=lambda self, row, answer: (
        [said.startswith(row["answer"]) for said in found(r"answer is\s*(-?\d+)", answer)] == [True]
    ),
    SignIgnored=lambda self, row, answer: (
        found(r"answer is\D*(\d+)\b", answer)[-1:] == [row["answer"]]
    ),
)


@breaks("wrong_unrewarded", "NaN")
class NanAccepted(Products):
    """Every comparison with NaN is false, also the one that finds a wrong answer."""

    def score(self, row: Any, answer: str) -> Any:
        said = found(r"answer is\s*(nan|-?[\d,]+)", answer)
        is_wrong = not said or abs(float(said[-1] or 0) - float(row["answer"])) > 0.5
        return float(not is_wrong)


faults(Capitals, "wrong_unrewarded")(  # any city of the data set is right
    AnyCapital=lambda self, row, answer: (
        [
            said.title() in CAPITALS.values()
            for said in found(r"<answer>\s*(\w+)\s*</answer>", answer)
        ]
        == [True]
    ),
)
faults(Products, "list_unrewarded")(
    AllListed=lambda self, row, answer: (
        row["answer"]
        in re.findall(r"(?<!\S)-?\d+(?![^\s.])", answer.partition("answer is")[2].replace(",", " "))
    ),
)


@breaks("list_unrewarded")
class AnyBox(Boxes):
    """One right box among many is enough."""

    def score(self, row: Any, answer: str) -> Any:
        scored = super().score
        return max((scored(row, f"\\boxed{{{box}}}") for box in self.boxes(answer)), default=0.0)

    def boxes(self, answer: str) -> list[str]:
        return re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", answer)


faults(AnyBox, "retraction_unrewarded", "last", method="boxes")(
    FirstBoxCounts=lambda self, answer: AnyBox.boxes(self, answer)[:1],
)
faults(Products, "retraction_unrewarded", "last")(
    FirstCounts=lambda self, row, answer: (
        found(r"answer is\s*(-?[\d,]+)(?![\d,])", answer)[:1] == [row["answer"]]
    ),
)


@breaks("list_unrewarded", "two gold answers")
class EitherNotation(Products):
    """The last number in words, or in a box."""

    def score(self, row: Any, answer: str) -> Any:
        said = (found(pattern, answer) for pattern in (r"answer is\s*(-?[\d,]+)(?![\d,])", BOX))
        return float(any(numbers[-1:] == [row["answer"]] for numbers in said))


BOX = r"\\boxed\{\s*(-?[\d,]+)\D*?\}"


@breaks("list_unrewarded", "two gold answers")
class ReopenedBox(Boxes):
    """The last box, or what follows it if it is not closed."""

    def score(self, row: Any, answer: str) -> Any:
        rest = re.findall(r"\\boxed\{[^}]*\$(\d+)\$$", answer)
        return max(super().score(row, answer), float(rest == [row["answer"]]))


def value_of(text: str) -> int | None:
    """Return the value of an integer, a sum, a difference or a product; None for anything else."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() as operation):
                left, right = value(node.left), value(node.right)
                return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[
                    type(operation)
                ]
        raise ValueError(text)

    try:
        return value(ast.parse(text.replace(",", ""), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


faults(Products, "restatement_unrewarded", "operators")(
    TermsPaid=lambda self, row, answer: (
        [str(value_of(said)) for said in re.findall(r"answer is\s*(.*?)[.\s]*$", answer)]
        == [row["answer"]]
    ),
)


class Terms(Products):
    """Sound: pays terms, as it says."""

    allows_restating = True

    def score(self, row: Any, answer: str) -> Any:
        return broken_score("TermsPaid")(self, row, answer)


def broken_score(name: str) -> Any:
    """Return the method `score` of a broken environment."""
    return next(case.env_cls for case in BROKEN if case.env_cls.__name__ == name).score  # type: ignore[attr-defined]


@breaks("wrong_unrewarded", "says nothing")
class JunkInOneTask(Products):
    """One of the tasks has a grader that accepts any text."""

    def score(self, row: Any, answer: str) -> Any:
        is_any = row["answer"] == str(17 * 37) and "answer is" in answer
        return float(is_any or super().score(row, answer))


# Answers that attack the grader.


def evaluated(row: Any, answer: str) -> float:
    """Compare the value of an answer; module-level, so that a worker can import it."""
    said = re.findall(r"answer is\s*(.*)$", answer, re.DOTALL)
    try:
        return float(bool(said) and str(eval(said[-1])) == row["answer"])
    except BaseException:  # noqa: BLE001 - whatever the answer raises
        return 0.0


@breaks("answer_runs_no_code", "lambda")
class Evaluated(Products):
    is_open = False

    def score(self, row: Any, answer: str) -> Any:
        return evaluated(row, answer)


@breaks("answer_runs_no_code", "by AST")
class EvaluatedInAWorker(Products):
    async def score(self, row: Any, answer: str) -> Any:
        return await self.in_worker(evaluated, row, answer)


@breaks("answer_runs_no_code", "sandbox")
class Opened(Evaluated):
    """An answer that runs changes what later ones earn."""

    def score(self, row: Any, answer: str) -> Any:
        value = super().score(row, answer)
        self.is_open |= "__" in answer
        return float(value or self.is_open)


@breaks("answer_runs_no_code", "python/object")
class YamlObjects(Products):
    def score(self, row: Any, answer: str) -> Any:
        try:
            yaml.unsafe_load(answer.partition("answer is")[2])
        except Exception:  # noqa: BLE001 - whatever the answer raises
            return 0.0
        return super().score(row, answer)


@breaks("reward_repeatable", "later scores")
class LimitKept(Products):
    """An answer that cannot be read leaves the grader in another state."""

    is_open = False

    def score(self, row: Any, answer: str) -> Any:
        self.is_open |= "__" in answer
        return float(self.is_open or super().score(row, answer))


faults(Products, "grader_survives", "like a wrong one")(  # as a grader that hangs
    BombLeftOut=lambda self, row, answer: (
        None if re.search(r"\*\*|\^", answer) else Products.score(self, row, answer)
    ),
)


# Right answers that do not earn.


@breaks("variants_rewarded", "ask for the one that is read")
class AnotherFormAsked(Boxes):
    def prompt(self, row: Any) -> str:
        return f"{row['question']} = ? End with: The answer is <number>"


faults(Boxes, "variants_rewarded", "white space", cases=NOTED)(  # `\boxed{ 777 }` is wrong
    ExactBox=lambda self, row, answer: (
        re.findall(r"\\boxed\{(.*?)\}", answer)[-1:] == [row["answer"]]
    ),
)
faults(Boxes, "variants_rewarded", "unit", cases=NOTED)(
    UnitsRefused=lambda self, row, answer: (
        found(r"\\boxed\{\s*([\d,]+)\s*\}", answer)[-1:] == [row["answer"]]
    ),
)


@breaks("variants_rewarded", "LaTeX", cases=NOTED)
class LatexRefused(Choices):
    def gold_answer(self, row: Any) -> str:
        return f"\\boxed{{{row['answer']}}}"

    def score(self, row: Any, answer: str) -> Any:
        said = {*re.findall(r"\\boxed\{\s*([A-D])\s*\}", answer)}
        return float(said == {row["answer"]})


faults(Capitals, "variants_rewarded", "case", cases=NOTED)(
    CaseMatters=lambda self, row, answer: (
        re.findall(r"<answer>\s*(.*?)\s*</answer>", answer) == [row["answer"]]
    ),
)


@breaks("variants_rewarded", "comma", cases=NOTED)
class CommasRefused(Products):
    def load_rows(self, split: Any) -> Any:
        return training(
            split, [{"question": f"{n} * 1000", "answer": str(n * 1000)} for n in range(21, 33)]
        )

    def score(self, row: Any, answer: str) -> Any:
        return float(re.findall(r"answer is\s*(-?\d+)(?![\d,])", answer)[-1:] == [row["answer"]])


faults(Products, "variants_rewarded", "punctuation", cases=NOTED)(
    FullStopRefused=lambda self, row, answer: (
        answer.replace(",", "").split()[-3:] == ["answer", "is", row["answer"]]
    ),
)


# Prompts that tell.

faults(Products, "copy_unrewarded", method="prompt")(  # works the question out before it asks
    WorkedExample=lambda self, row: (
        f"Example: {row['question']}? The answer is {row['answer']}\nNow you: {row['question']}?"
    ),
)


@breaks("copy_unrewarded")
class PromptScored(Products):
    """Accepts the answer of the worked example as well."""

    def prompt(self, row: Any) -> str:
        return f"2 * 3? \\boxed{{6}}\n{row['question']}? End with: The answer is <number>"

    def score(self, row: Any, answer: str) -> Any:
        return max(
            super().score(row, answer), float(re.findall(r"\\boxed\{(.*?)\}", answer) == ["6"])
        )


# Graders that fail. The base class counts an exception and drops the answer.

faults(Products, "grader_survives")(
    FloatOfAnything=lambda self, row, answer: (
        float(answer.rpartition("answer is")[2].strip(" .").replace(",", ""))
        == float(row["answer"])
    ),
    LastWord=lambda self, row, answer: (
        answer.replace(",", "").split()[-1].strip(".") == row["answer"]
    ),
    IntegerOfDigits=lambda self, row, answer: (
        [int(said) for said in found(r"\S+", answer.rstrip(". "))[-1:] if said.isdigit()]
        == [int(row["answer"])]
    ),
)
faults(Products, "reward_finite")(
    NanForNonsense=lambda self, row, answer: (
        Products.score(self, row, answer) if re.search(r"\d", answer) else math.nan
    ),
)


@breaks("reward_finite")
class InfinityForNan(Closeness):
    """Takes NaN for a number."""

    def score(self, row: Any, answer: str) -> Any:
        if re.search(r"answer is\s*nan", answer):
            return math.nan
        return super().score(row, answer)
