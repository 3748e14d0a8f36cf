"""Find a word letter by letter, before six mistakes (hangman).

The score is 1 for a word found without a mistake, 0.1 less for each mistake, and 0.2 times the share of letters found
if the word is not. A wrong or repeated letter, a wrong word, and an answer without a guess are mistakes.

Data: common nouns of WordNet, or JSONL rows with `word`.
Needs: extra games.

    python environments/game_environments/hangman.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from atroposlib.envs.dataset_env import Outcome
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnvConfig, Step
from atroposlib.envs.word_games import Word, WordGameEnv, guess_in

MAX_MISTAKES = 6
COST_OF_A_MISTAKE = 0.1
SCORE_OF_LETTERS = 0.2


class HangmanConfig(MultiTurnEnvConfig):
    max_token_length: int = 1024
    max_turns: int = 20


class HangmanEnv(WordGameEnv):
    """One hidden word."""

    name = "hangman"
    env_config_cls = HangmanConfig
    config: HangmanConfig
    success_score = 1.0 - COST_OF_A_MISTAKE * (MAX_MISTAKES - 1)
    min_letters = 4

    def prompt(self, row: Word) -> str:
        return (
            "Find a hidden English noun. In every turn guess one letter, or the whole word, inside <guess> </guess> "
            f"tags. After {MAX_MISTAKES} mistakes you lose.\nWord: {shown(row.word, set())} ({len(row.word)} letters)"
        )

    def step(self, episode: Episode, answer: str) -> Step:
        """Reveal a letter, or count a mistake."""
        word, guess = episode.row.word, guess_in(answer)
        tried = episode.state.setdefault("tried", set())
        is_hit = guess == word or (len(guess) == 1 and guess in word and guess not in tried)
        episode.state["mistakes"] = episode.state.get("mistakes", 0) + (not is_hit)
        tried |= {guess} if len(guess) == 1 else set()
        if guess == word or set(word) <= tried:
            episode.state["found"] = True
            return Step(done=True, reason="found")
        num_left = MAX_MISTAKES - episode.state["mistakes"]
        reply = (
            "Yes."
            if is_hit
            else "A mistake."
            if guess
            else "No guess inside <guess> </guess> tags: a mistake."
        )
        state = f"Tried: {' '.join(sorted(tried)) or 'none'}. Mistakes left: {num_left}."
        return Step(
            f"{reply}\nWord: {shown(word, tried)}\n{state}", done=num_left == 0, reason="not_found"
        )

    def final_score(self, episode: Episode) -> Outcome:
        state = episode.state
        if state.get("found"):
            return 1.0 - COST_OF_A_MISTAKE * int(state["mistakes"])
        word: str = episode.row.word
        return SCORE_OF_LETTERS * sum(c in state.get("tried", ()) for c in word) / len(word)


def shown(word: str, tried: set[str]) -> str:
    """Return the word with its unknown letters hidden.

    >>> shown("apple", {"p", "x"})
    '_ p p _ _'
    """
    return " ".join(letter if letter in tried else "_" for letter in word)


if __name__ == "__main__":
    HangmanEnv.cli()
