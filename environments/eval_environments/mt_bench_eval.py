"""MT-Bench: 80 conversations of two turns; a judge marks each answer from 0 to 10.

The score is the mean of the marks divided by 10; the evaluation reports the mean mark in all and of each turn, and the
share of conversations with at least 8 by category. The judge sees the conversation so far, and the reference answer of
questions that have one. It is `--judge.base_url` with `--judge.model_name`, else the policy itself.

Data: HuggingFaceH4/mt_bench_prompts, or JSONL rows with `prompt` (a list), `reference` and `category`.
Source: arXiv:2306.05685.
Needs: extras datasets; --judge.base_url for a judge other than the policy.

    python environments/eval_environments/mt_bench_eval.py evaluate --judge.base_url URL --judge.model_name J ...
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from atroposlib.envs.answers import solution_of
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.judge_env import JudgeEnv, JudgeEnvConfig
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, MultiTurnEnvConfig, Step
from atroposlib.envs.rollouts import number_of
from atroposlib.envs.rows import HubRows


class MTBenchConfig(MultiTurnEnvConfig, JudgeEnvConfig):
    max_token_length: int = 4096
    eval_temperature: float | None = 0.7


class MTBenchEnv(MultiTurnEnv, JudgeEnv):
    """Two questions, the second about the answer to the first."""

    name = "mt_bench_eval"
    env_config_cls = MTBenchConfig
    config: MTBenchConfig
    train_data = eval_data = HubRows(path="HuggingFaceH4/mt_bench_prompts")
    trains_on_evaluation = True
    success_score = 0.8
    rubric = (
        "Is the last answer helpful, relevant, correct, deep enough, creative where that is asked for, and as detailed "
        "as needed? If a reference answer is given, compare it with that, and look for mistakes."
    )

    def prompt(self, row: Row) -> str:
        return str(row["prompt"][0])

    def request_of(self, row: Row) -> str:
        """Return what the judge sees besides the last answer."""
        return str(row["request"] if "request" in row else self.prompt(row))

    async def step(self, episode: Episode, answer: str) -> Step:
        """Mark an answer, and ask the next question."""
        questions, turn = episode.row["prompt"], episode.num_turns
        shown = [
            f"{message['role']}: {solution_of(message['content']).strip()}"
            for message in episode.messages[:-1]
        ]
        references = episode.row.get("reference") or []
        if turn < len(references) and references[turn]:
            shown.append(f"Reference answer: {references[turn]}")
        messages = self.judge_messages({"request": "\n\n".join(shown)}, solution_of(answer).strip())
        mark = number_of(await self.ask_judge(messages, self.parse_mark))
        if mark is None:
            return Step(reward=None)
        is_last = turn + 1 == len(questions)
        return Step("" if is_last else questions[turn + 1], mark / len(questions), is_last)

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Add the mean mark in all and of each turn, 0 to 10."""
        metrics = super().summarize_samples(samples)
        per_turn = [
            [10 * reward * len(s["turn_rewards"]) for reward in s["turn_rewards"]]
            for s in samples
            if s["score"] is not None and len(s["turn_rewards"]) == len(s["row"]["prompt"])
        ]
        for number, marks in enumerate(zip(*per_turn, strict=False), start=1):
            metrics[f"eval/mark_turn_{number}"] = fmean(marks)
        if per_turn:
            metrics["eval/mark"] = fmean(mark for marks in per_turn for mark in marks)
        return metrics

    def parts_of(self, row: Row) -> list[str]:
        return [f"eval/category_{row.get('category', 'none')}_success"]


if __name__ == "__main__":
    MTBenchEnv.cli()
