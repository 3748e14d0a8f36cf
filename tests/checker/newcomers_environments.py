"""Environments of a newcomer's first day, as text that uses the README alone: sound ones, and ones with a planted bug.

A bug, or another style, is text that takes the place of other text. Used by `test_newcomers_day.py`.
"""

from __future__ import annotations

from typing import NamedTuple

TIMES = """
import asyncio, math, random, time
import aiohttp
from atroposlib.envs.dataset_env import DatasetEnv


class Times(DatasetEnv):
    name = "times"
    system_prompt = "End with: The answer is <number>"
    seen = []

    def load_rows(self, split):
        numbers = range(21, 81) if split == "train" else range(81, 91)
        return [{"question": f"{n} * 37", "product": str(n * 37)} for n in numbers]

    def prompt(self, row):
        return f"What is {row['question']}?"

    def gold_answer(self, row):
        return f"The answer is {row['product']}"

    def score(self, row, answer):
        said = answer.rpartition("The answer is ")[2].strip(" .").replace(",", "")
        return float(said == row["product"])
"""
GUESS = """
from atroposlib.envs.multi_turn_env import MultiTurnEnv, Step


class Guess(MultiTurnEnv):
    name = "guess"
    system_prompt = "Answer with one whole number and nothing else."
    seen = []

    def load_rows(self, split):
        return range(1, 64) if split == "train" else range(64, 80)

    def prompt(self, row):
        return "I think of a number from 1 to 80. Guess it."

    def step(self, episode, answer):
        if not answer.strip().isdecimal():
            return Step("Give a number.", reward=-0.1)
        if int(answer) == episode.row:
            return Step(reward=1.0, done=True, reason="found")
        return Step("Higher." if int(answer) < episode.row else "Lower.", reward=-0.01)

    def example_answers(self, row):
        return [str(row)]
"""
SHOP = '''
import random, time
from atroposlib.envs.tool_env import ToolEnv

PRICES = {"apple": 3, "pear": 5, "fig": 7}


def price(fruit: str) -> int:
    """Price of one piece of fruit, in cents."""
    return PRICES[fruit]


class Shop(ToolEnv):
    name = "shop"
    tools = (price,)

    def load_rows(self, split):
        numbers = range(2, 12) if split == "train" else range(12, 14)
        return [(fruit, n) for fruit in PRICES for n in numbers]

    def prompt(self, row):
        return f"What do {row[1]} pieces of {row[0]} cost, in cents? End with the number alone."

    def gold_answer(self, row):
        return str(PRICES[row[0]] * row[1])

    def score(self, row, answer):
        return float(answer.strip() == self.gold_answer(row))
'''
TOAST = """
import random
from atroposlib.envs.judge_env import JudgeEnv


class Toast(JudgeEnv):
    name = "toast"
    rubric = "Is it short, kind, and about the person?"
    success_score = 0.8

    def load_rows(self, split):
        people = ["a nurse", "a baker", "a pilot", "an aunt", "a judge", "a diver"]
        return people[:4] if split == "train" else people[4:]

    def prompt(self, row):
        return f"Give a toast to {row}."
"""
DOUBLE = """
import asyncio
from openai import AsyncOpenAI, OpenAI
from atroposlib.envs.agent_env import AgentEnv


class Double(AgentEnv):
    name = "double"

    def load_rows(self, split):
        return range(1, 900) if split == "train" else range(900, 916)

    def run_agent(self, row, base_url, api_key):
        question = {"role": "user", "content": f"Double {row}. Answer with the number alone."}
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            completion = client.chat.completions.create(model="any", messages=[question])
        return completion.choices[0].message.content

    def gold_answer(self, row):
        return str(2 * row)

    def score(self, row, answer):
        return float(answer.strip() == self.gold_answer(row))
"""
SOUND = {"times": TIMES, "guess": GUESS, "shop": SHOP, "toast": TOAST, "double": DOUBLE}


class Variant(NamedTuple):
    """A sound environment in another style, or one with a bug."""

    what: str
    source: str
    old: str
    """Text that is replaced."""
    new: str
    verdict: str = ""
    """The rule that fails; "+": a note of it names the bug; "?": it is not checked; "not": the report says nothing."""

    def text(self) -> str:
        assert self.source.count(self.old) == 1, (self.what, self.old)
        return self.source.replace(self.old, self.new)


def shaped(statements: str) -> tuple[str, str]:
    """Return what adds a hook to `TIMES` that changes the group."""
    return (
        "    def prompt",
        f"    def shape_group(self, row, group):\n{statements}\n\n    def prompt",
    )


SCORED = 'return float(said == row["product"])'
ASKED = "with OpenAI(base_url=base_url, api_key=api_key) as client:"
LOOKED_UP = 'def price(fruit: str) -> int:\n    """Price of one piece of fruit, in cents."""\n    return PRICES[fruit]'

STYLES = (
    Variant("rewards of -1 and 1", TIMES, SCORED, f"{SCORED} * 2 - 1"),
    Variant(
        "a strict pattern",
        TIMES,
        SCORED,
        "return float(answer == f\"The answer is {row['product']}\")",
    ),
    Variant(
        "a worked example",
        TIMES,
        'return f"What',
        'return f"What is 2 * 3? The answer is 6\\nWhat',
    ),
    Variant("a slow grader", TIMES, "    def score", "    async def score"),
    Variant(
        "its own order of the rows",
        TIMES,
        "    def prompt",
        "    async def get_next_item(self):\n        return random.choice(self.train_rows[:20])\n\n    def prompt",
    ),
    Variant("a price per turn", GUESS, "reward=-0.01)", "reward=-0.05)"),
    Variant(
        "a random tool",
        SHOP.replace("tools = (price,)", "tools = (price, dice)"),
        "class Shop(ToolEnv):",
        'def dice() -> int:\n    "Throw a dice."\n    return random.randint(1, 6)\n\n\n'
        "class Shop(ToolEnv):",
    ),
    Variant(
        "a tool that refuses arguments",
        SHOP,
        "    return PRICES[fruit]\n",
        '    if fruit not in PRICES:\n        raise ValueError("no such fruit")\n    return PRICES[fruit]\n',
    ),
    Variant(
        "a judge that compares",
        TOAST,
        "    success_score = 0.8\n",
        '    success_score = 0.8\n    judging = "pairwise"\n\n'
        '    def reference(self, row):\n        return "To you!"\n',
    ),
    Variant(
        "a slow agent that builds a client per run",
        DOUBLE,
        DOUBLE[DOUBLE.index("    def run_agent") : DOUBLE.index("    def gold_answer")],
        """    async def run_agent(self, row, base_url, api_key):
        question = {"role": "user", "content": f"Double {row}. Answer with the number alone."}
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await asyncio.sleep(0.5)
            completion = await client.chat.completions.create(model="any", messages=[question])
        return completion.choices[0].message.content

""",
    ),
    Variant(
        "an agent that asks twice",
        DOUBLE,
        "messages=[question])\n",
        "messages=[question])\n            content = completion.choices[0].message.content\n"
        '            said = {"role": "assistant", "content": content}\n'
        '            sure = {"role": "user", "content": "Are you sure? Answer with the number alone."}\n'
        '            completion = client.chat.completions.create(model="any", messages=[question, said, sure])\n',
    ),
)

BUGS = (
    Variant(
        "masks are off by one",
        TIMES,
        *shaped(
            '        group["masks"] = [[*masks[1:], -100] for masks in group["masks"]]\n        return group'
        ),
        "aligned",
    ),
    Variant(
        "logprobs are shifted",
        TIMES,
        *shaped(
            '        group["inference_logprobs"] = [[*each[1:], each[-1]] for each in group["inference_logprobs"]]\n'
            "        return group"
        ),
        "aligned",
    ),
    Variant(
        "the system prompt is trained",
        TIMES,
        *shaped(
            '        group["masks"] = [list(tokens) for tokens in group["tokens"]]\n        return group'
        ),
        "aligned",
    ),
    Variant(
        "NaN in the advantages",
        TIMES,
        *shaped(
            '        group["advantages"] = [[math.nan] * len(each) for each in group["tokens"]]\n        return group'
        ),
        "aligned",
    ),
    Variant(
        "the answer is tokenised again",
        TIMES,
        *shaped(
            """        group["inference_logprobs"] = None
        for i, tokens in enumerate(group["tokens"]):
            start = group["masks"][i].count(-100)
            text = self.tokenizer.decode(tokens[start:])
            answer = self.tokenizer.encode(text, add_special_tokens=False)
            group["tokens"][i] = tokens[:start] + answer
            group["masks"][i] = [-100] * start + answer
        return group"""
        ),
        "token_exact",
    ),
    Variant(
        "groups have another size",
        TIMES,
        "    def prompt",
        """    async def collect_trajectories(self, item):
        group, later = await super().collect_trajectories(item)
        cut = {key: value[:-1] if isinstance(value, list) else value for key, value in group.items()}
        return {**cut, "group_overrides": {}}, later

    def prompt""",
        "group_size",
    ),
    Variant("the reward is always 1", TIMES, SCORED, "return 1.0", "reward_varies"),
    Variant(
        "the reward is random", TIMES, SCORED, f"{SCORED} + random.random()", "reward_repeatable"
    ),
    Variant(
        "answers seen before earn less",
        TIMES,
        SCORED,
        f"self.seen.append(answer)\n        {SCORED} + 1 / self.seen.count(answer)",
        "reward_repeatable",
    ),
    Variant(
        "the reward is the length",
        TIMES,
        SCORED,
        "return min(1.0, len(answer) / 17)",
        "copy_unrewarded",
    ),
    Variant(
        "the right number anywhere earns",
        TIMES,
        SCORED,
        'return float(row["product"] in answer)',
        "wrong_unrewarded",
    ),
    Variant(
        "NaN for an answer without a number",
        TIMES,
        SCORED,
        f"{SCORED} if said.isdecimal() else math.nan",
        "reward_finite",
    ),
    Variant(
        "the grader takes any text for a number",
        TIMES,
        SCORED,
        'return float(float(said) == float(row["product"]))',
        "grader_survives",
    ),
    Variant(
        "the answer is evaluated",
        TIMES,
        SCORED,
        "try:\n            return float(str(eval(said)) == row['product'])\n"
        "        except Exception:\n            return 0.0",
        "answer_runs_no_code",
    ),
    Variant(
        "the first result counts",
        TIMES,
        'answer.rpartition("The answer is ")[2].strip(" .")',
        '(answer + "The answer is ?").split("The answer is ")[1].partition(".")[0].strip()',
        "retraction_unrewarded",
    ),
    Variant(
        "the score blocks", TIMES, SCORED, f"time.sleep(0.05)\n        {SCORED}", "loop_stays_free"
    ),
    Variant(
        "the score drops a session unclosed",
        TIMES,
        "    def score(self, row, answer):\n",
        "    async def score(self, row, answer):\n        aiohttp.ClientSession()\n",
        "no_leaked_handles",
    ),
    Variant(
        "one row of 60 raises",
        TIMES,
        "    def prompt(self, row):\n",
        '    def prompt(self, row):\n        row["question"].index("0 *" if row["product"] == "2590" else "*")\n'
        '        1 / (row["product"] != "2590")\n',
        "rows_work",
    ),
    Variant(
        "a row lacks its gold field",
        TIMES,
        "        return [{",
        '        return [{"question": "?"}, *self.rows(numbers)]\n\n    def rows(self, numbers):\n        return [{',
        "rows_work",
    ),
    Variant(
        "the items run out with StopIteration",
        TIMES,
        "    def prompt",
        "    async def get_next_item(self):\n        return next(iter(()))\n\n    def prompt",
        "gives_items",
    ),
    Variant(
        "evaluation rows are training rows",
        TIMES,
        '        numbers = range(21, 81) if split == "train" else range(81, 91)\n        return [{',
        '        numbers = range(21, 81) if split == "train" else range(21, 31)\n        return [{"split": split, ',
        "evaluation_held_out",
    ),
    Variant(
        "the gold answer stands in the prompt",
        TIMES,
        "return f\"What is {row['question']}?\"",
        'return f"Row: {row}"',
        "copy_unrewarded",
    ),
    Variant(
        "another form is asked for than is read",
        TIMES,
        "End with: The answer is <number>",
        "Put the number into \\\\boxed{}.",
        "variants_rewarded",
    ),
    Variant(
        "words are compared with their case",
        TIMES,
        '"product": str(n * 37)}',
        '"product": ("Paris", "Rome", "Oslo")[n % 3]}',
        "variants_rewarded+",
    ),
    Variant(
        "the evaluation writes nothing",
        TIMES,
        "    def prompt",
        "    async def evaluate(self, *args):\n        pass\n\n    def prompt",
        "evaluates",
    ),
    Variant(
        "the checkpoint has an object",
        TIMES,
        "    seen = []",
        '    seen = random.Random()\n    checkpointed = ("seen",)',
        "checkpoint_is_json",
    ),
    Variant(
        "the game remembers earlier episodes",
        GUESS,
        "reward=1.0",
        "reward=1.0 + len(self.seen.append(answer) or self.seen) / 10",
        "reward_repeatable",
    ),
    Variant(
        "nonsense is paid in every turn",
        GUESS,
        "reward=-0.1",
        "reward=1.0",
        "empty_unrewarded",
    ),
    Variant("a tool raises", SHOP, "return PRICES[fruit]", "return PRICE[fruit]", "tools_work"),
    Variant(
        "a tool blocks",
        SHOP,
        LOOKED_UP,
        f"async {LOOKED_UP}".replace("return", "time.sleep(0.3)\n    return"),
        "loop_stays_free",
    ),
    Variant(
        "a tool computes wrongly, and no example calls it",
        SHOP,
        "return PRICES[fruit]",
        "return PRICES[fruit] - 1",
        "not",
    ),
    Variant(
        "the judge's mark is random",
        TOAST,
        "    def prompt",
        "    async def score_group(self, row, rollouts):\n"
        "        return [random.random() for _ in rollouts]\n\n    def prompt",
        "reward_repeatable",
    ),
    Variant(
        "the judge's mark is dropped",
        TOAST,
        "    def prompt",
        "    async def score_group(self, row, rollouts):\n        return [1.0 for _ in rollouts]\n\n    def prompt",
        "reward_varies?",
    ),
    Variant(
        "the agent reads a field that answers lack",
        DOUBLE,
        "choices[0].message.content",
        "choices[0].text.strip()",
        "collects",
    ),
    Variant(
        "the agent answers itself",
        DOUBLE,
        "        return completion.choices[0].message.content",
        "        return str(2 * row)",
        "reward_varies",
    ),
)
