"""`WordGameEnv`: games about an English word, from WordNet (extra: games) or from rows with `word` and `clue`.

It loads and filters the words, and reads guesses. Used by the environments wordle, hangman and crosswords.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

from atroposlib.envs.answers import only_tagged, solution_of
from atroposlib.envs.dataset_env import Split
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.errors import EnvError, require

MIN_USES = 3
"""Occurrences in WordNet's tagged texts below which a word is too rare for a game."""


class Word(NamedTuple):
    word: str
    """In lower case, a to z."""
    clue: str


class WordGameEnv(MultiTurnEnv):
    """Conversations about words; subclasses may reject words in `parse_row`."""

    min_letters: ClassVar[int] = 3
    max_letters: ClassVar[int] = 12

    def load_rows(self, split: Split) -> Any:
        """Return the words of a file, else common nouns; some are held out for evaluation."""
        has_file = self.config.dataset_path if split == "train" else self.config.eval_dataset_path
        if has_file:
            return super().load_rows(split)
        if split == "eval":
            return None
        return [row for each in wordnet_nouns() if (row := self.parse_row(each)) is not None]

    def parse_row(self, row: dict[str, Any]) -> Word | None:
        """Return the word of a row; None if it has other characters than letters or another length."""
        word = str(row["word"]).lower()
        is_word = word.isascii() and word.isalpha()
        is_usable = is_word and self.min_letters <= len(word) <= self.max_letters
        return Word(word, str(row.get("clue", ""))) if is_usable else None

    def example_answers(self, item: Any) -> list[str]:
        """Return the word as a guess."""
        return [f"<guess>{item.word}</guess>"]


def guess_in(answer: str) -> str:
    """Return the guess in the only tag after the thinking, in lower case; "" without one, or if it is no word.

    >>> guess_in("<think>or <guess>pear</guess>?</think> <guess>Apple</guess>"), guess_in("apple")
    ('apple', '')
    >>> guess_in("<think>or <guess>pear</guess>?")
    ''
    """
    guess = (only_tagged(solution_of(answer), "guess") or "").lower()
    return guess if guess.isascii() and guess.isalpha() else ""


@functools.cache
def wordnet_nouns() -> list[dict[str, str]]:
    """Return the common nouns of WordNet with the definition of their most frequent sense, downloaded on first use."""
    nltk = require("nltk", extra="games")
    nltk.download("wordnet", quiet=True)
    wordnet = nltk.corpus.wordnet
    uses: dict[str, tuple[int, str]] = {}
    try:
        with wordnet.open("cntlist.rev") as counts:
            for line in counts:
                key, _, count = line.split()
                word, _, kind = key.partition("%")
                if kind.startswith("1:") and int(count) >= MIN_USES:
                    uses[word] = max(uses.get(word, (0, "")), (int(count), key))
    except LookupError as error:
        raise EnvError(
            "NLTK's corpus `wordnet` is missing and cannot be downloaded; run `python -m nltk.downloader wordnet` "
            "where there is a network, or give --env.dataset_path"
        ) from error
    lemmas = [
        wordnet.lemma_from_key(key) for _, key in sorted(uses.values(), key=lambda use: use[1])
    ]
    return [
        {"word": lemma.name(), "clue": lemma.synset().definition()}
        for lemma in lemmas
        if lemma.name().islower()  # no names
    ]
