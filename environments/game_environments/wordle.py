"""Find a word of five letters in six guesses, told after each which letters are right (Wordle).

The score is 1 for the first guess, 0.1 less for each further one, and 0.2 times the best share of letters in the right
place if the word is not found. An answer without a guess of five letters uses one up.

Data: common nouns of WordNet, or JSONL rows with `word`.
Needs: extra games.

    python environments/game_environments/wordle.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from atroposlib.envs.dataset_env import Outcome
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnvConfig, Step
from atroposlib.envs.word_games import Word, WordGameEnv, guess_in

NUM_GUESSES = 6
LENGTH = 5
COST_OF_A_GUESS = 0.1
SCORE_OF_LETTERS = 0.2


class WordleConfig(MultiTurnEnvConfig):
    max_token_length: int = 2048
    max_turns: int = NUM_GUESSES


class WordleEnv(WordGameEnv):
    """One hidden word."""

    name = "wordle"
    env_config_cls = WordleConfig
    config: WordleConfig
    success_score = 1.0 - COST_OF_A_GUESS * (NUM_GUESSES - 1)
    min_letters = max_letters = LENGTH

    def prompt(self, row: Word) -> str:
        return (
            f"Find a hidden English noun of {LENGTH} letters. You have {NUM_GUESSES} guesses. After each you see a "
            "mark per letter: G, right; Y, in the word but elsewhere; -, not in the word, or not as often. Think about "
            "what the marks exclude, then give one word inside <guess> </guess> tags."
        )

    def step(self, episode: Episode, answer: str) -> Step:
        """Mark a guess."""
        word, guess = episode.row.word, guess_in(answer)
        is_last = episode.num_turns + 1 == NUM_GUESSES
        if len(guess) != LENGTH:
            reply = f"That is no guess of {LENGTH} letters inside <guess> </guess> tags."
        elif guess == word:
            return Step(reward=1.0 - COST_OF_A_GUESS * episode.num_turns, done=True, reason="found")
        else:
            signs = marks(guess, word)
            episode.state["best"] = max(episode.state.get("best", 0), signs.count("G"))
            reply = f"{' '.join(guess.upper())}\n{' '.join(signs)}"
        num_left = NUM_GUESSES - 1 - episode.num_turns
        return Step(f"{reply}\nGuesses left: {num_left}.", done=is_last, reason="not_found")

    def final_score(self, episode: Episode) -> Outcome:
        share = episode.state.get("best", 0) / LENGTH
        return sum(episode.rewards) or SCORE_OF_LETTERS * share


def marks(guess: str, word: str) -> str:
    """Return G, Y or - for each letter of a guess; a letter gets as many marks as the word has of it.

    >>> marks("eerie", "crepe"), marks("crepe", "crepe")
    ('Y-Y-G', 'GGGGG')
    """
    hidden = [a for a, b in zip(word, guess, strict=True) if a != b]
    signs = []
    for letter, right in zip(guess, word, strict=True):
        if letter == right:
            signs.append("G")
        elif letter in hidden:
            hidden.remove(letter)
            signs.append("Y")
        else:
            signs.append("-")
    return "".join(signs)


if __name__ == "__main__":
    WordleEnv.cli()
