"""Environments of `environments/` as tasks that a model of a million parameters can learn, and its starting policy.

The starting policy imitates a random player: it knows the form of the answers and which characters they consist of,
nothing about the task. Its tokenizer has one token per character and one for each text that all conversations share,
so that a prompt of 30 words takes a few tokens.
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import json
import random
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.environments.letter_counting_environment.letter_counting_environment import (
    make_question,
)

from atroposlib.cli._demo.commands import PROMPTS_PER_STEP
from atroposlib.cli._demo.tiny_model import MAX_POSITIONS, build_model, build_tokenizer
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.scored_data import IGNORE_INDEX

SHIPPED = "atroposlib.environments"
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
MIN_SHARED = 4
"""Shortest text, in characters, that becomes one token because all conversations have it."""
NUM_HELDOUT = 200
NUM_IMITATION_STEPS = 150
NUM_COMPARED = 50
LEARNING_RATE = 1e-3
BATCH_SIZE = 64

Rows = list[dict[str, Any]]
Answer = Callable[[random.Random, str], str]
"""(random generator, last user message) -> answer."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One environment, made small by its own flags."""

    title: str
    module: str
    cls: str
    random_answer: Answer
    """What the starting policy imitates."""
    flags: dict[str, Any]
    num_steps: int
    rows: Callable[[random.Random], tuple[Rows, Rows]] | None = None
    """The rows of `--env.dataset_path` and `--env.eval_dataset_path`; no held-out word is trained on. None: the
    environment generates its items."""
    prompts_per_step: int = PROMPTS_PER_STEP
    sequences_per_rollout: int = 1
    learning_rate: float = 3e-4
    num_demonstrations: int = 3000
    reference: tuple[str, float] | None = None
    """A score to compare with, and what has it."""


def reversal_rows(rng: random.Random) -> tuple[Rows, Rows]:
    words = ["".join(letters) for letters in itertools.permutations("abcdefgh", 4)]
    return split([{"text": word} for word in shuffled(rng, words)])


def shuffled_letters(rng: random.Random, prompt: str) -> str:
    text = prompt.rpartition("\n")[2]
    return f"<reversed_text>{''.join(shuffled(rng, text))}</reversed_text>"


def counting_rows(rng: random.Random) -> tuple[Rows, Rows]:
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=4)]
    train, heldout = split([{"word": word} for word in shuffled(rng, words)], num_heldout=64)
    held_words = [row["word"] for row in heldout]
    questions = [make_question(rng, held_words, 1) for _ in range(NUM_HELDOUT)]
    return train, [
        {"Prompt": asked.prompt, "Answer": asked.answer, "DifficultyLevel": 1}
        for asked in questions
    ]


def random_count(rng: random.Random, prompt: str) -> str:
    return f"<think>I count.</think> <answer>{rng.randrange(4)}</answer>"


def random_step(rng: random.Random, prompt: str) -> str:
    return f"<action>{rng.randrange(4)}</action>"


CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": "%s"}}\n</tool_call>'


def tool_rows(rng: random.Random) -> tuple[Rows, Rows]:
    """Two calls, whose argument is the last letter of a word: of the user's, then of the one that the tool gives."""
    words = ["".join(letters) for letters in itertools.permutations("abcdefgh", 3)]
    words = shuffled(rng, words)

    def row(known: Sequence[str]) -> dict[str, Any]:
        asked, given = rng.choices(known, k=2)
        turns = [
            ("system", "Tools: find(x), open(x)."),
            ("human", f"Find the last letter, then open the last letter of what it gives: {asked}"),
            ("gpt", CALL % ("find", asked[-1])),
            ("tool", f"It gives: {given}"),
            ("gpt", CALL % ("open", given[-1])),
            ("tool", "It is open."),
            ("gpt", "Done."),
        ]
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    heldout, train = words[:60], words[60:]
    return [row(train) for _ in range(2000)], [row(heldout) for _ in range(NUM_HELDOUT)]


def random_call(rng: random.Random, prompt: str) -> str:
    return CALL % ("open" if "It gives" in prompt else "find", rng.choice(prompt[-3:]))


def shuffled_half(rng: random.Random, prompt: str) -> str:
    return "".join(shuffled(rng, prompt[-2:]))


def shuffled(rng: random.Random, values: Sequence[Any]) -> list[Any]:
    return rng.sample(values, k=len(values))


def split(rows: Rows, num_heldout: int = NUM_HELDOUT) -> tuple[Rows, Rows]:
    return rows[num_heldout:], rows[:num_heldout]


TASKS = {
    "reversal": Task(
        title="Text reversal: four letters",
        module=f"{SHIPPED}.text_reversal_environment",
        cls="TextReversalEnv",
        rows=reversal_rows,
        random_answer=shuffled_letters,
        flags={"max_token_length": 16},
        num_steps=60,
    ),
    "counting": Task(
        title="Letter counting: words of four letters",
        module=f"{SHIPPED}.letter_counting_environment.letter_counting_environment",
        cls="LetterCountingEnv",
        rows=counting_rows,
        random_answer=random_count,
        flags={
            "max_token_length": 16,
            "min_trained_tokens": 1,
            "starting_difficulty_level": 1,
            "max_difficulty_level": 1,
            "difficulty_increase_threshold": 1.0,
            "difficulty_decrease_threshold": 0.0,
        },
        num_steps=100,
        # 88 of the 200 held-out questions have the answer 0.
        reference=("always the answer 0", 0.44),
    ),
    "lake": Task(
        title="FrozenLake of 2 x 2, several turns",
        module=f"{SHIPPED}.game_environments.gymnasium.gymnasium_env",
        cls="GymnasiumEnv",
        random_answer=random_step,
        flags={
            "env_kwargs": {"desc": ["SF", "HG"], "is_slippery": False},
            "rules": "Walk to G, not into H.",
            "invalid_reward": 0.0,
            "max_turns": 5,
            "max_token_length": 8,
            "max_episode_tokens": MAX_POSITIONS,
        },
        num_steps=40,
        prompts_per_step=16,
    ),
    "tools": Task(
        title="Two tool calls in a row",
        module=f"{SHIPPED}.tool_use_multiturn_server",
        cls="MultiTurnToolCallingEnv",
        rows=tool_rows,
        random_answer=random_call,
        flags={
            "scenario_category": "multistep",
            "add_dynamic_few_shot": False,
            "min_trained_tokens": 1,
            "temperature": 1.0,
            "max_token_length": 64,
            "max_episode_tokens": MAX_POSITIONS,
        },
        num_steps=60,
        learning_rate=6e-4,
        num_demonstrations=1000,
    ),
    "agent": Task(
        title="An agent with two conversations",
        module="benchmarks._agent_in_parts",
        cls="AgentInParts",
        random_answer=shuffled_half,
        flags={"max_token_length": 8, "min_trained_tokens": 1},
        num_steps=40,
        learning_rate=6e-4,
        prompts_per_step=16,
        sequences_per_rollout=2,
        num_demonstrations=400,
    ),
}


def write_rows(task: Task, folder: Path) -> dict[str, Any]:
    """Write the rows of a task, the same for every seed, and return the flags of its environment."""
    flags = {**task.flags, "num_eval_rows": NUM_HELDOUT, "eval_temperature": 1.0}
    if task.rows is None:
        return flags
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "train.jsonl", folder / "heldout.jsonl"]
    for path, rows in zip(paths, task.rows(random.Random(0)), strict=True):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return {**flags, "dataset_path": str(paths[0]), "eval_dataset_path": str(paths[1])}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation of the random player with the environment."""

    messages: list[dict[str, Any]]
    score: float


async def demonstrate(
    task: Task, flags: dict[str, Any], *, seed: int, num: int
) -> list[Demonstration]:
    """Let the random player play `num` items of the task's environment."""
    module = importlib.import_module(task.module)
    base: Any = getattr(module, task.cls)
    env_cls = type(task.cls, (base,), {"load_tokenizer": lambda env: ByteTokenizer()})
    config, servers = base.config_init()
    unlimited = {"max_token_length": 4000, "max_episode_tokens": 20_000, "use_wandb": False}
    env: Any = env_cls(config.model_copy(update={**flags, **unlimited, "seed": seed}), servers)
    rng = random.Random(seed)

    def answer(request: HarnessRequest) -> str:
        question = request.prompt.rpartition("<user>")[2].removesuffix("<eos><assistant>")
        return task.random_answer(rng, question)

    env.server.servers = [ServerHarness(respond=answer)]
    await env.setup()
    played = []
    for _ in range(num):
        row = await env.get_next_item()
        [rollout] = rollouts = await env.roll_out(row, 1, split="train")
        [score] = await env.score_group(row, rollouts)
        played.append(Demonstration(messages=rollout.messages, score=float(score)))
    await env.close()
    return played


def shared_texts(texts: Sequence[str]) -> list[str]:
    """Return the parts, in order, that all texts have.

    >>> shared_texts(["count a in abca, please", "count d in bead, please"])
    ['count ', ' in ', ', please']
    """
    parts = [texts[0]]
    for text in texts[1:]:
        parts = [part for known in parts for part in _common(known, text)]
    return list(dict.fromkeys(parts))


def _common(known: str, text: str) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, known, text, autojunk=False)
    for at, _, size in matcher.get_matching_blocks():
        if size >= MIN_SHARED:
            yield known[at : at + size]


def make_tokenizer(played: Sequence[Demonstration]) -> Any:
    """Return a tokenizer of characters, and of texts shared by all first messages, or by all later ones of a role."""
    texts: dict[Any, list[str]] = defaultdict(list)
    for each in played[:NUM_COMPARED]:
        for place, message in enumerate(each.messages):
            texts[place if place < 2 else message["role"]].append(message["content"])
    whole = {text for alike in texts.values() for text in shared_texts(alike)}
    return build_tokenizer(CHARACTERS, whole_texts=sorted(whole))


def make_starting_policy(played: Sequence[Demonstration], folder: Path, *, seed: int) -> None:
    """Train the model to imitate the random player, and save it with its tokenizer."""
    import torch

    tokenizer = make_tokenizer(played)
    model = build_model(tokenizer, seed=seed, architecture="Llama")
    rows = [encode(tokenizer, each.messages) for each in played]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    rng = random.Random(seed)
    for step in range(1, NUM_IMITATION_STEPS + 1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = LEARNING_RATE * min(1.0, step / 20)
        batch = rng.sample(rows, k=BATCH_SIZE)
        longest = max(len(tokens) for tokens, _ in batch)
        fill = tokenizer.pad_token_id
        tokens_BT = torch.tensor([t + [fill] * (longest - len(t)) for t, _ in batch])
        labels_BT = torch.tensor([x + [IGNORE_INDEX] * (longest - len(x)) for _, x in batch])
        loss = model(tokens_BT, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def encode(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation and its labels: the model's answers with their end."""
    tokens: list[int] = []
    labels: list[int] = []
    for message in messages:
        ids = tokenizer.encode(message["content"])
        is_answer = message["role"] == "assistant"
        ids += [tokenizer.eos_token_id] if is_answer else []
        tokens += ids
        labels += ids if is_answer else [IGNORE_INDEX] * len(ids)
    return tokens, labels
