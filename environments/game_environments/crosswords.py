"""Solve a small crossword in a few attempts; right entries stay in the grid and help with the others.

The score is the share of entries that were right in the end. In one attempt only the first answer to an entry counts.

Data: common nouns of WordNet with their definitions, or JSONL rows with `word` and `clue`; grids are made by seed.
Needs: extra games.

    python environments/game_environments/crosswords.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from pydantic import Field

from atroposlib.envs.answers import only_tagged, solution_of
from atroposlib.envs.dataset_env import Split
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnvConfig, Step
from atroposlib.envs.word_games import Word, WordGameEnv
from atroposlib.errors import ConfigError

SHARE_TRAINED = 0.8
"""Fraction of the words in puzzles of training."""
NUM_WORDS_TRIED = 60
"""Words that are tried for one puzzle."""
Cells: TypeAlias = tuple[tuple[int, int], ...]
"""Row and column of each letter of a word."""
STEPS = {"across": (0, 1), "down": (1, 0)}
LINE = re.compile(
    r"^[^\w\n]*(\d+)[^\w\n]*(across|down)[^\w\n]+([a-z]+)[^\w\n]*$", re.IGNORECASE | re.MULTILINE
)


class Entry(NamedTuple):
    """A word in the grid."""

    label: str
    """Such as "1 across"."""
    cells: Cells
    word: str
    clue: str


class CrosswordsConfig(MultiTurnEnvConfig):
    max_token_length: int = 4096
    max_turns: int = 4
    num_puzzles: int = Field(default=1000, ge=1)
    """Different puzzles of training; evaluation has `num_eval_rows` more, of other words."""
    num_words: int = Field(default=5, ge=2)
    """Entries of a puzzle, or fewer if no more words fit."""


class CrosswordsEnv(WordGameEnv):
    """One puzzle per episode."""

    name = "crosswords"
    env_config_cls = CrosswordsConfig
    config: CrosswordsConfig
    max_letters = 8

    def load_rows(self, split: Split) -> list[tuple[Entry, ...]]:
        """Make the puzzles of a split."""
        words = sorted(set(super().load_rows("train")))
        random.Random(self.config.seed).shuffle(words)
        cut = int(SHARE_TRAINED * len(words))
        part, num = (words[:cut], self.config.num_puzzles)
        if split == "eval":
            part, num = words[cut:], self.config.num_eval_rows
        if len(part) < 2:
            raise ConfigError(f"{len(words)} words of 3 to {self.max_letters} letters are too few")
        rng = random.Random(f"{self.config.seed}:{split}")
        return [make_puzzle(rng, part, self.config.num_words) for _ in range(num)]

    def prompt(self, row: Sequence[Entry]) -> str:
        """Return the clues and the empty grid."""
        clues = "\n".join(f"{e.label} ({len(e.word)} letters): {e.clue}" for e in row)
        starts = ", ".join(f"{e.label}: row {e.cells[0][0]}, column {e.cells[0][1]}" for e in row)
        return (
            f"Solve this crossword in {self.config.max_turns} attempts. Right entries stay.\n{clues}\n"
            f"First cells: {starts}.\n{drawn(row, set())}\n"
            "Give one line per entry inside <answers> </answers> tags, each with its number, direction and word, "
            f"such as:\n{row[0].label}: WORD"
        )

    def example_answers(self, item: Sequence[Entry]) -> list[str]:
        lines = "\n".join(f"{entry.label}: {entry.word}" for entry in item)
        return [f"<answers>\n{lines}\n</answers>"]

    def step(self, episode: Episode, answer: str) -> Step:
        """Keep what is right, and say what is wrong."""
        entries, solved = episode.row, episode.state.setdefault("solved", set())
        given = answers_in(answer)
        new = {e.label for e in entries if given.get(e.label) == e.word} - solved
        solved |= new
        reward = len(new) / len(entries)
        if len(solved) == len(entries):
            return Step(reward=reward, done=True, reason="solved")
        wrong = [e.label for e in entries if e.label in given and e.label not in solved]
        reply = f"Wrong: {', '.join(wrong) or 'none'}." if given else "No answers inside the tags."
        open_labels = ", ".join(e.label for e in entries if e.label not in solved)
        return Step(f"{reply} To find: {open_labels}.\n{drawn(entries, solved)}", reward=reward)

    def final_score(self, episode: Episode) -> float:
        """Return the share of right entries; exactly 1 for all."""
        return len(episode.state.get("solved", ())) / len(episode.row)


def answers_in(answer: str) -> dict[str, str]:
    """Return the first answer to each entry, by label, from the only tag after the thinking.

    >>> answers_in("<answers>\\n1 across: TIGER\\n1 Across: LIONS\\n2. down - ant</answers>")
    {'1 across': 'tiger', '2 down': 'ant'}
    """
    text = only_tagged(solution_of(answer), "answers") or ""
    found: dict[str, str] = {}
    for number, direction, word in LINE.findall(text):
        found.setdefault(f"{number} {direction.lower()}", word.lower())
    return found


def drawn(entries: Sequence[Entry], solved: set[str]) -> str:
    """Return the grid: letters of solved entries, "." for unknown cells, "#" for no cell."""
    grid = {cell: "." for entry in entries for cell in entry.cells}
    for entry in entries:
        if entry.label in solved:
            grid.update(zip(entry.cells, entry.word.upper(), strict=True))
    rows, columns = (range(1 + max(cell[axis] for cell in grid)) for axis in (0, 1))
    return "\n".join("".join(grid.get((row, column), "#") for column in columns) for row in rows)


def make_puzzle(rng: random.Random, words: Sequence[Word], num_words: int) -> tuple[Entry, ...]:
    """Place words that cross, at random; cells start at (0, 0)."""
    letters: dict[tuple[int, int], str] = {}
    placed: list[tuple[Cells, str, Word]] = []
    for each in rng.sample(words, min(NUM_WORDS_TRIED, len(words))):
        spots = (
            crossings(letters, each.word)
            if letters
            else [(along((0, 0), "across", each.word), "across")]
        )
        if not spots:
            continue
        cells, direction = rng.choice(spots)
        letters.update(zip(cells, each.word, strict=True))
        placed.append((cells, direction, each))
        if len(placed) == num_words:
            break
    top, left = (min(cell[axis] for cell in letters) for axis in (0, 1))
    moved = [(tuple((r - top, c - left) for r, c in cells), way, w) for cells, way, w in placed]
    starts = sorted({cells[0] for cells, _, _ in moved})
    return tuple(
        Entry(f"{1 + starts.index(cells[0])} {direction}", cells, each.word, each.clue)
        for cells, direction, each in sorted(moved)
    )


def along(start: tuple[int, int], direction: str, word: str) -> Cells:
    """Return the cells of a word.

    >>> along((2, 0), "down", "ant")
    ((2, 0), (3, 0), (4, 0))
    """
    down, right = STEPS[direction]
    return tuple((start[0] + i * down, start[1] + i * right) for i in range(len(word)))


def crossings(letters: dict[tuple[int, int], str], word: str) -> list[tuple[Cells, str]]:
    """Return where a word fits so that it crosses another and touches none.

    >>> crossings({(0, 0): "a", (0, 1): "n", (0, 2): "t"}, "tea")
    [(((-2, 0), (-1, 0), (0, 0)), 'down'), (((0, 2), (1, 2), (2, 2)), 'down')]
    """
    found = []
    for (row, column), letter in letters.items():
        for i in (i for i, own in enumerate(word) if own == letter):
            for direction, (down, right) in STEPS.items():
                cells = along((row - i * down, column - i * right), direction, word)
                if fits(letters, cells, word, down, right):
                    found.append((cells, direction))
    return found


def fits(
    letters: dict[tuple[int, int], str], cells: Cells, word: str, down: int, right: int
) -> bool:
    """Whether the cells are free or have the word's letters, and only crossed words are next to them."""
    first, last = cells[0], cells[-1]
    if (first[0] - down, first[1] - right) in letters or (
        last[0] + down,
        last[1] + right,
    ) in letters:
        return False
    was_crossed = False
    for (row, column), own in zip(cells, word, strict=True):
        is_crossed = (row, column) in letters
        beside = [(row + right, column + down), (row - right, column - down)]
        if is_crossed and (was_crossed or letters[row, column] != own):
            return False
        if not is_crossed and any(cell in letters for cell in beside):
            return False
        was_crossed = is_crossed
    return True


if __name__ == "__main__":
    CrosswordsEnv.cli()
