"""Count letters in words and random strings. The difficulty follows the success.

Each item asks for one letter of a word, or for several as JSON. The reward is 1 if every count is right, else 0. There
are ten levels, from words of three letters to strings of 500; above 80 % success the level rises, below 20 % it falls.
Groups that are nearly all right or all wrong are dropped, but count for the level. With --env.item_choice posterior
each question has the level whose groups will most probably have different scores.

Data: words of NLTK, or JSONL rows with `word`; evaluation on NousResearch/Letter-Counting-Eval.
Needs: extras examples, datasets.

    python environments/letter_counting_environment/letter_counting_environment.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import json
import math
import random
import statistics
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.answers import after_thinking_once, only_tagged
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Rollout, Split
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError, EnvError, require

NUM_TRIES = 100
"""Words tried for one of the right length, before a random string replaces it."""
SHARE_TRAINED = 0.95
"""Fraction of the words that training uses."""
NUM_EVAL_PER_LEVEL = 10


class Level(NamedTuple):
    """What a difficulty level asks for."""

    min_length: int
    max_length: int
    share_multiple: float
    """Probability of a question about several letters."""
    min_letters: int
    max_letters: int


LEVELS = [
    Level(3, 8, 0.0, 1, 1),
    Level(5, 12, 0.5, 1, 2),
    Level(8, 18, 0.6, 2, 3),
    Level(10, 25, 0.8, 3, 5),
    Level(15, 35, 0.9, 5, 8),
    Level(40, 80, 1.0, 8, 12),
    Level(80, 150, 1.0, 12, 20),
    Level(150, 250, 1.0, 18, 26),
    Level(250, 400, 1.0, 25, 26),
    Level(400, 500, 1.0, 26, 26),
]
FIRST_LEVEL_WITHOUT_WORDS = 6


class Question(NamedTuple):
    prompt: str
    answer: int | dict[str, int]
    """The count of the one letter, or of each of several."""
    level: int
    text: str = ""
    letters: str = ""
    """All that are asked for."""


class LetterCountingConfig(DatasetEnvConfig):
    group_size: int = 32
    max_token_length: int = 15360
    min_trained_tokens: int = 10
    seed: int = 42
    item_choice: Literal["order", "posterior"] = "order"
    """order: the curriculum of `difficulty_*`; posterior: the level of each question by the results of its level."""
    eval_temperature: float | None = 0.6
    difficulty_window_size: int = Field(default=150, ge=10)
    """Groups whose mean score decides about the level; half of them are enough."""
    difficulty_increase_threshold: float = 0.8
    difficulty_decrease_threshold: float = 0.2
    min_difficulty_level: int = Field(default=1, ge=1, le=len(LEVELS))
    max_difficulty_level: int = Field(default=len(LEVELS), ge=1, le=len(LEVELS))
    starting_difficulty_level: int = Field(default=3, ge=1, le=len(LEVELS))


class LetterCountingEnv(DatasetEnv):
    """Generated questions about words, exact reward, a curriculum of ten levels."""

    name = "letter_counting"
    env_config_cls = LetterCountingConfig
    config: LetterCountingConfig
    eval_data = HubRows(path="NousResearch/Letter-Counting-Eval")
    truncated_score = 0.0
    checkpointed = ("level", "recent_scores", "letters_asked", "lengths_asked")

    async def setup(self) -> None:
        """Load the words and begin at the configured level."""
        self.level = self.config.starting_difficulty_level
        self.recent_scores: list[float] = []
        """Mean scores of the last groups of this level."""
        self.letters_asked: Counter[str] = Counter()
        self.lengths_asked: Counter[str] = Counter()
        """Training words by their number of letters."""
        await super().setup()

    def load_rows(self, split: Split) -> list[Any]:
        """Return the training words, or the evaluation questions."""
        if split == "eval" and (self.config.eval_dataset_path or not self.config.dataset_path):
            return [eval_question(row) for row in super().load_rows("eval")]
        words = super().load_rows("train") if self.config.dataset_path else nltk_words()
        random.Random(self.config.seed).shuffle(words)
        cut = int(SHARE_TRAINED * len(words))
        if split == "train":
            return words[:cut]
        rng = random.Random(f"{self.config.seed}:eval")
        levels = [n for n in range(1, len(LEVELS) + 1) for _ in range(NUM_EVAL_PER_LEVEL)]
        return [make_question(rng, words[cut:], level) for level in levels]

    def parse_row(self, row: dict[str, Any]) -> Any:
        return row.get("word", row)

    async def get_next_item(self) -> Question:
        """Generate the next question at the current level."""
        if self.config.item_choice == "posterior":
            first, last = self.config.min_difficulty_level, self.config.max_difficulty_level
            self.level = int(self.choose_class([str(level) for level in range(first, last + 1)]))
        self.num_items += 1
        rng = random.Random(f"{self.config.seed}:{self.num_items}")
        question = make_question(rng, self.train_rows, self.level)
        self.letters_asked.update(question.letters)
        self.lengths_asked[str(len(question.text))] += 1
        return question

    def item_class(self, item: Question) -> str:
        return str(item.level)

    def prompt(self, row: Question) -> str:
        return row.prompt

    def gold_answer(self, row: Any) -> str | None:
        """Return the counts in the required form; None for a word, which is no question yet."""
        if not isinstance(row, Question):
            return None
        return f"<think>I count.</think> <answer>{json.dumps(row.answer)}</answer>"

    def score(self, row: Question, answer: str) -> float:
        return float(counts_of(answer) == row.answer)

    async def roll_out(self, row: Question, n: int, *, split: Split) -> list[Rollout]:
        """Sample answers, and count what is wrong with the form of those that ended."""
        rollouts = await super().roll_out(row, n, split=split)
        for rollout in rollouts:
            if rollout.finish_reason != "length":
                fault = fault_of(rollout.completion)
                self.counts["format_errors"] += fault is not None
                for kind in ("think", "answer"):
                    self.record(f"errors/{kind}_format_error_rate", fault == kind)
        return rollouts

    def shape_group(self, row: Question, group: ScoredDataGroup) -> ScoredDataGroup | None:
        """Adapt the level; drop groups that are too easy or too hard."""
        mean = sum(group["scores"]) / len(group["scores"])
        if self.config.item_choice == "order" and row.level == self.level:
            self.adapt_level(mean)
        config = self.config
        is_useful = (
            config.difficulty_decrease_threshold <= mean <= config.difficulty_increase_threshold
        )
        return group if is_useful else None

    def adapt_level(self, mean_score: float) -> None:
        """Move by one level if the recent groups of this level were too easy or too hard."""
        config = self.config
        self.recent_scores = [*self.recent_scores, mean_score][-config.difficulty_window_size :]
        if len(self.recent_scores) < max(10, config.difficulty_window_size // 2):
            return
        mean = sum(self.recent_scores) / len(self.recent_scores)
        if mean > config.difficulty_increase_threshold and self.level < config.max_difficulty_level:
            self.level, self.recent_scores = self.level + 1, []
        if mean < config.difficulty_decrease_threshold and self.level > config.min_difficulty_level:
            self.level, self.recent_scores = self.level - 1, []

    def parts_of(self, row: Question) -> list[str]:
        return [f"eval/percent_correct_L{row.level}"]

    def train_metrics(self) -> dict[str, float]:
        """Return the state of the curriculum, and what was asked since the start."""
        metrics: dict[str, float] = {
            "curriculum/difficulty_level": self.level,
            "curriculum/samples_in_window": len(self.recent_scores),
            "errors/total_format_errors": self.counts["format_errors"],
        }
        if self.recent_scores:
            metrics["curriculum/recent_success_rate"] = statistics.fmean(self.recent_scores)
        return metrics | statistics_of(self.letters_asked, self.lengths_asked)


def statistics_of(letters: Counter[str], lengths: Counter[str]) -> dict[str, float]:
    """Return how evenly letters were asked for (the entropy in bits), and in words of which lengths.

    >>> statistics_of(Counter("aabc"), Counter({"3": 2, "6": 1}))["stats/letter_distribution_entropy"]
    1.5
    """
    if not letters:
        return {}
    num_letters, num_words = letters.total(), lengths.total()
    shares = [num / num_letters for num in letters.values()]
    known = [int(length) for length in lengths]
    metrics = {
        "total_letters_asked": num_letters,
        "most_common_letter_count": max(letters.values()),
        "least_common_letter_count": min(letters.values()),
        "letter_distribution_entropy": -sum(share * math.log2(share) for share in shares),
        "total_words_asked": num_words,
        "avg_word_length": statistics.fmean(known, weights=lengths.values()),
        "min_word_length": min(known),
        "max_word_length": max(known),
    }
    return {f"stats/{name}": value for name, value in metrics.items()}


def make_question(rng: random.Random, words: Sequence[str], number: int) -> Question:
    """Ask about a word or random string of level `number`."""
    level = LEVELS[number - 1]
    text = ""
    if number < FIRST_LEVEL_WITHOUT_WORDS and words:
        tried = (rng.choice(words) for _ in range(NUM_TRIES))
        text = next((w for w in tried if level.min_length <= len(w) <= level.max_length), "")
    if not text:
        length = rng.randint(level.min_length, level.max_length)
        text = "".join(rng.choices(string.ascii_lowercase, k=length))
    num_letters = 1
    if rng.random() < level.share_multiple:
        num_letters = rng.randint(max(2, level.min_letters), level.max_letters)
    letters = pick_letters(rng, text, num_letters)
    counts = {letter: text.count(letter) for letter in letters}
    think = "Think inside <think> </think> tags, then give"
    if num_letters == 1:
        question = f'How many times does the letter "{letters[0]}" occur in "{text}"?'
        form = f"{think} the number inside <answer> </answer> tags."
        return Question(f"{question} {form}", counts[letters[0]], number, text, letters[0])
    question = f'How many times does each of the letters {", ".join(letters)} occur in "{text}"?'
    form = f"{think} a JSON object with a number for every letter inside <answer> </answer> tags."
    return Question(f"{question} {form}", counts, number, text, "".join(letters))


def pick_letters(rng: random.Random, text: str, num: int) -> list[str]:
    """Return `num` different letters, of which a random majority or minority occurs in `text`."""
    present, absent = sorted(set(text)), sorted(set(string.ascii_lowercase) - set(text))
    share_present = rng.uniform(0.3, 0.9)
    picked: list[str] = []
    for _ in range(num):
        pool = present if (rng.random() < share_present and present) or not absent else absent
        picked.append(pool.pop(rng.randrange(len(pool))))
    return picked


def counts_of(answer: str) -> int | dict[str, int] | None:
    """Return the counts in the only answer tags after the thinking; None if the form is another."""
    return parse_counts(only_tagged(after_thinking_once(answer) or "", "answer"))


def fault_of(answer: str) -> str | None:
    """Return which tags of an answer are wrong, "think" or "answer"; None if neither are."""
    if after_thinking_once(answer) is None:
        return "think"
    return "answer" if counts_of(answer) is None else None


def parse_counts(text: str | None) -> int | dict[str, int] | None:
    """Return a whole number or a flat JSON object of them; None for anything else.

    >>> parse_counts("3"), parse_counts('{"a": 2}'), parse_counts("true"), parse_counts('{"a": "2"}')
    (3, {'a': 2}, None, None)
    """
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    numbers = value.values() if isinstance(value, dict) else [value]
    return value if all(type(number) is int for number in numbers) else None


def eval_question(row: dict[str, Any]) -> Question:
    """Convert a row of the evaluation data: Prompt, Answer (a number or JSON) and DifficultyLevel."""
    answer = parse_counts(str(row["Answer"]))
    if answer is None:
        raise ConfigError(f"Answer {row['Answer']!r:.80} is neither a number nor a JSON object")
    return Question(row["Prompt"], answer, int(row["DifficultyLevel"]))


def nltk_words() -> list[str]:
    """Return NLTK's English words of 3 to 30 letters, downloaded on first use."""
    nltk = require("nltk", extra="examples")
    nltk.download("words", quiet=True)
    try:
        listed = nltk.corpus.words.words()
    except LookupError as error:
        raise EnvError(
            "NLTK's corpus `words` is missing and cannot be downloaded; run `python -m nltk.downloader words` where "
            "there is a network, or give --env.dataset_path"
        ) from error
    words = {word.lower() for word in listed if word.isalpha()}
    return sorted(word for word in words if 3 <= len(word) <= 30)


if __name__ == "__main__":
    LetterCountingEnv.cli()
