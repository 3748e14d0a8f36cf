"""`ReplayedToolsEnv`: recorded tool conversations; the model writes the assistant's turns, tools answer as recorded.

Each answer is compared with the recorded turn: the expected calls in their order, or text without a call. The recorded
results follow a right answer; a wrong one ends the episode, because nothing was recorded for it. `episode.state` has
the list of `verdicts`, one per answer. Subclasses define the reward: `turn_reward` and `final_score`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once
from atroposlib.envs.base import BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.gold_calls import call_matches
from atroposlib.envs.lengths import length_penalties
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, MultiTurnEnvConfig, Step, in_turns
from atroposlib.envs.tool_env import ToolCall, hermes_call, parse_hermes_calls

Scenario: TypeAlias = Literal["all", "single", "multistep", "multiturn", "relevance"]
Verdict: TypeAlias = Literal["valid", "unparsable", "mismatch"]

PERFECT = 0.99
"""A group whose scores are all above this loses score by length."""
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_TOOL_TAG = re.compile(r"</?tool_(?:call|response)>")
_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_HINTS = {
    "multistep": "Call the tools one after another, and wait for the result of each.",
    "multiturn": "When you have the results, tell the user what they are.",
}


class ReplayedToolsConfig(MultiTurnEnvConfig):
    max_token_length: int = 65536
    max_turns: int = 32
    max_gen_per_turn: int = 1024
    temperature: float = 0.8
    eval_temperature: float | None = 0.0
    seed: int = 42
    max_tool_call_turns_cap: int | None = Field(default=2, ge=1)
    """Turns with calls that are kept of a conversation, and the text that follows the last; None: all."""
    min_tool_call_turns: int = Field(default=0, ge=0)
    """Conversations with fewer turns with calls are skipped."""
    validate_think_blocks: bool = False
    """Require one `<think>` block at the start of every answer."""
    generate_all_gpt_turns: bool = False
    """Whether the model also writes the turns without calls; otherwise they are taken from the recording."""
    wrong_call_penalty: float = -0.2
    scenario_category: Scenario = "multiturn"
    """Conversations that are used. single: their first turn with calls. multistep: several such turns in a row.
    multiturn: several, with the user in between. relevance: no tool fits. all: any with a call."""
    add_dynamic_few_shot: bool = True
    """Show a call of another conversation in the system message."""


class GoldTurn(NamedTuple):
    """A recorded turn of the assistant."""

    text: str
    calls: list[ToolCall]
    """Empty: text for the user."""
    reply: list[dict[str, str]]
    """The messages that follow it."""


class Dialogue(NamedTuple):
    """A recorded conversation."""

    system: str
    question: str
    turns: list[GoldTurn]

    @property
    def num_tool_turns(self) -> int:
        """Turns with calls."""
        return sum(bool(turn.calls) for turn in self.turns)


class ReplayedToolsEnv(MultiTurnEnv):
    """Recorded conversations, turn by turn."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = ReplayedToolsConfig
    config: ReplayedToolsConfig
    aliases = {"train/avg_reward": "train/mean_score", "eval/avg_reward": "eval/mean_score"}

    def turn_reward(self, turn: GoldTurn, verdict: Verdict) -> float:
        """Return the reward of one answer."""
        return 0.0

    def parse_row(self, row: dict[str, Any]) -> Dialogue | None:
        """Return the part of the conversation that is used; None if it does not fit the configuration."""
        config = self.config
        dialogue = read_dialogue(row["conversations"])
        if dialogue is None or dialogue.num_tool_turns < config.min_tool_call_turns:
            return None
        scenario, wanted = scenario_of(dialogue.turns), config.scenario_category
        if wanted == "single" and dialogue.num_tool_turns:
            first = next(i for i, turn in enumerate(dialogue.turns) if turn.calls)
            return dialogue._replace(turns=dialogue.turns[: first + 1])
        if scenario != wanted and (wanted != "all" or scenario == "relevance"):
            return None
        if scenario == "relevance":
            return dialogue._replace(turns=dialogue.turns[:1])
        return dialogue._replace(turns=cut(dialogue.turns, config.max_tool_call_turns_cap))

    def prompt(self, row: Dialogue) -> list[dict[str, Any]]:
        """Return the system message with tools and hints, the question, and recorded turns before the first call."""
        parts = [THINK_FIRST, row.system, _HINTS.get(scenario_of(row.turns), "")]
        if self.config.add_dynamic_few_shot and row.num_tool_turns:
            parts.append(f"This is a call in another conversation:\n{self._example_call(row)}")
        start = self._given(row, 0)
        return [
            {"role": "system", "content": "\n\n".join(filter(None, parts))},
            {"role": "user", "content": row.question},
            *start.messages,
        ]

    def reset(self, row: Dialogue) -> Episode:
        state: dict[str, Any] = {"index": self._given(row, 0).turn, "verdicts": []}
        return Episode(row=row, messages=self.conversation(row), state=state)

    def step(self, episode: Episode, answer: str) -> Step:
        """Compare the answer with the recorded turn, and continue if it is right."""
        index: int = episode.state["index"]
        turn: GoldTurn = episode.row.turns[index]
        verdict = self.judge_turn(turn, answer)
        episode.state["verdicts"].append(verdict)
        reward = self.turn_reward(turn, verdict)
        if verdict != "valid":
            return Step(reward=reward, done=True, reason=verdict)
        given = self._given(episode.row, index + 1)
        if given.turn is None:
            return Step(reward=reward, done=True, reason="completed")
        episode.state["index"] = given.turn
        return Step([*turn.reply, *given.messages], reward)

    def judge_turn(self, turn: GoldTurn, answer: str) -> Verdict:
        """Compare one answer: text for the user has no tags of tools, calls have nothing beside them."""
        solution = self.solution_of(answer)
        if solution is None:
            return "unparsable"
        if not turn.calls:
            is_text = bool(solution) and _TOOL_TAG.search(solution) is None
            return "valid" if is_text else "unparsable"
        calls = parse_hermes_calls(solution)
        if not calls or not all(isinstance(call, ToolCall) for call in calls):
            return "unparsable"
        if _CALL.sub("", solution).strip():
            return "unparsable"
        is_same = len(calls) == len(turn.calls) and all(
            call_matches(call, gold, reads_texts=True)
            for call, gold in zip(calls, turn.calls, strict=True)
        )
        return "valid" if is_same else "mismatch"

    def solution_of(self, answer: str) -> str | None:
        """Return the text after the thinking; None if the thinking has not the required form."""
        if "<think>" not in answer and not self.config.validate_think_blocks:
            return answer.strip()
        solution = after_thinking_once(answer)
        is_first = answer.lstrip().startswith("<think>")
        return solution.strip() if solution is not None and is_first else None

    def example_answers(self, item: Dialogue) -> list[Callable[[str], str]]:
        """Return the recorded turns of the assistant that the model writes."""
        turns = enumerate(self.written_turns(item))
        texts = [f"<think>Turn {i}.</think>\n{text_of(turn)}" for i, turn in turns]
        return [in_turns(texts)]

    def shape_group(self, row: Dialogue, group: ScoredDataGroup) -> ScoredDataGroup | None:
        if min(group["scores"]) > PERFECT:
            penalties = length_penalties(group["masks"], self.config.max_token_length)
            scored = zip(group["scores"], penalties, strict=True)
            group["scores"] = [max(0.0, score - penalty) for score, penalty in scored]
        return group

    def written_turns(self, row: Dialogue) -> list[GoldTurn]:
        """Return the turns that the model writes."""
        if self.config.generate_all_gpt_turns or not row.num_tool_turns:
            return row.turns
        return [turn for turn in row.turns if turn.calls]

    def _given(self, row: Dialogue, index: int) -> _Given:
        """Return the recorded messages from a turn on until the next one that the model writes."""
        messages: list[dict[str, str]] = []
        written = self.written_turns(row)
        for number in range(index, len(row.turns)):
            turn = row.turns[number]
            if turn in written:
                return _Given(messages, number)
            messages += [{"role": "assistant", "content": turn.text}, *turn.reply]
        return _Given([], None)

    def _example_call(self, row: Dialogue) -> str:
        others = [other for other in self.train_rows if other.question != row.question]
        other = random.Random(row.question).choice(others or [row])
        return text_of(next(turn for turn in other.turns if turn.calls))


class _Given(NamedTuple):
    """Recorded messages that lead to a turn of the model."""

    messages: list[dict[str, str]]
    turn: int | None
    """Index of the model's turn; None if there is none."""


def read_dialogue(conversations: Sequence[dict[str, str]]) -> Dialogue | None:
    """Read turns of `from` (system, human, gpt, tool) and `value`; None if a part is missing or cannot be read."""
    system, question = "", ""
    turns: list[GoldTurn] = []
    for said in conversations:
        value = said["value"].strip()
        if said["from"] == "gpt":
            if turns and not turns[-1].reply:
                return None
            calls = parse_hermes_calls(value)
            readable = [call for call in calls if isinstance(call, ToolCall)]
            if len(readable) < len(calls):
                return None
            turns.append(GoldTurn(value.rpartition("</think>")[2].strip(), readable, []))
        elif said["from"] == "system":
            system = value
        elif not turns:
            question = value
        elif said["from"] == "tool":
            results = _RESPONSE.findall(value) or [value]
            turns[-1].reply.extend({"role": "tool", "content": text.strip()} for text in results)
        else:
            turns[-1].reply.append({"role": "user", "content": value})
    return Dialogue(system, question, turns) if question and turns else None


def scenario_of(turns: Sequence[GoldTurn]) -> Scenario:
    """Return what kind of conversation the turns are."""
    where = [i for i, turn in enumerate(turns) if turn.calls]
    if len(where) < 2:
        return "single" if where else "relevance"
    between = [message["role"] for turn in turns[where[0] : where[-1]] for message in turn.reply]
    return "multiturn" if "user" in between else "multistep"


def cut(turns: Sequence[GoldTurn], num_tool_turns: int | None) -> list[GoldTurn]:
    """Return the turns up to the text that follows the last of so many turns with calls."""
    kept: list[GoldTurn] = []
    num_kept = 0
    for turn in turns:
        is_full = num_tool_turns is not None and num_kept >= num_tool_turns
        if is_full and (turn.calls or not kept[-1].calls):
            break
        kept.append(turn)
        num_kept += bool(turn.calls)
    return kept


def text_of(turn: GoldTurn) -> str:
    """Return a turn as a model writes it, without thinking."""
    calls = [hermes_call(call.name, **call.arguments) for call in turn.calls]
    return "\n".join(calls) or turn.text
