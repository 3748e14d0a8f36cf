"""Mathematics for base models: a plain-text prompt, without chat template and examples.

The prompt is a short conversation in words that ends in an opened `<think>`. The model continues it, and is to end with
`<answer> ... \\boxed{...} </answer>`. The last such block earns +1 if math-verify finds its box equal to the gold
answer, else -1. The token limit of an answer rises from `start_tok_length` to `max_token_length` over the run.

Data: that of `math_server`; evaluation also on Minerva and OlympiadBench.
Needs: extras datasets, math.

    python environments/math_server_zero.py process --env.dataset_path sample ...
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from atroposlib.envs.answers import all_tagged
from atroposlib.envs.dataset_env import Outcome, Rollout, Split
from atroposlib.envs.math_env import Problem, VerifiedMathConfig, VerifiedMathEnv
from atroposlib.envs.rows import HubRows

PROMPT = (
    "What follows is a conversation between a user and an assistant. The user asks a question. The assistant first "
    "reasons between <think> and </think>, then gives the result between <answer> and </answer>, with the final "
    "answer in a box: \\boxed{{}}.\nUser: {question}\nAssistant: <think>"
)
STOPS = ["User:", "Human:", "Assistant:", "</answer>"]
"""Texts at which a completion ends; the API cuts them off."""


class MathZeroConfig(VerifiedMathConfig):
    tokenizer_name: str = "Qwen/Qwen3-4B-Instruct-2507"
    group_size: int = 8
    max_token_length: int = 32000
    start_tok_length: int = Field(default=8192, ge=1)
    """Token limit of an answer at the first step; at the last one it is `max_token_length`."""


class MathZeroEnv(VerifiedMathEnv):
    """Text completion, verified answers."""

    name = "math_zero"
    env_config_cls = MathZeroConfig
    config: MathZeroConfig
    train_data = HubRows(path="zwhe99/DeepMath-103K")
    eval_parts = {
        "aime24": HubRows(path="HuggingFaceH4/aime_2024"),
        "math500": HubRows(path="HuggingFaceH4/MATH-500", split="test"),
        "amc23": HubRows(path="math-ai/amc23", split="test"),
        "minerva": HubRows(path="math-ai/minervamath", split="test"),
        "olympiad": HubRows(path="math-ai/olympiadbench", split="test"),
    }

    def prompt(self, row: Problem) -> str:
        return PROMPT.format(question=row.question)

    def example_answers(self, item: Problem) -> list[str]:
        form = "I see.</think> <answer>\\boxed{{{}}}</answer>".format
        return [form(item.answer), form("0.123")]

    async def roll_out(self, row: Problem, n: int, *, split: Split) -> list[Rollout]:
        """Sample continuations of the prompt."""
        prompt = self.prompt(row)
        max_tokens = self.token_limit(prompt, split)
        self.record("train/curr_token_length", max_tokens)
        async with self.chat_session(split) as chat:
            completion = await chat.target.completion(
                prompt=prompt,
                n=n,
                max_tokens=max_tokens,
                temperature=chat.temperature,
                stop=STOPS,
                split=split,
            )
            nodes = chat.nodes()
        return [
            Rollout(
                messages=[
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": with_end(choice.text, choice.finish_reason)},
                ],
                nodes=nodes[i : i + 1],
                finish_reason=choice.finish_reason,
            )
            for i, choice in enumerate(completion.choices)
        ]

    def token_limit(self, prompt: str, split: Split) -> int:
        """Return the token limit of an answer at this step; in evaluation that of the last step. At least 1."""
        longest = self.config.max_token_length
        room = max(1, longest - len(self.tokenizer.encode(prompt)))
        start, num_steps = min(self.config.start_tok_length, longest), self.config.total_steps
        if split == "eval" or num_steps < 1:
            return room
        progress = min(1.0, self.curr_step / num_steps)
        return min(room, start + int((longest - start) * progress))

    async def score_group(self, row: Problem, rollouts: Sequence[Rollout]) -> list[Outcome]:
        outcomes = await super().score_group(row, rollouts)
        self.record_answers(rollouts, outcomes)
        return outcomes

    async def score(self, row: Problem, answer: str) -> Outcome:
        blocks = all_tagged(answer, "answer")
        return await self.verify(row, blocks[-1] if blocks else "")


def with_end(text: str, finish_reason: str | None) -> str:
    """Add the `</answer>` that the API cut off.

    >>> with_end("</think> <answer>\\\\boxed{4}", "stop")
    '</think> <answer>\\\\boxed{4}</answer>'
    """
    is_open = text.count("<answer>") > text.count("</answer>")
    return f"{text}</answer>" if is_open and finish_reason == "stop" else text


if __name__ == "__main__":
    MathZeroEnv.cli()
