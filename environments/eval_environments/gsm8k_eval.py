"""GSM8K: grade-school mathematics, the test split. `gsm8k_server.py` trains on the training split.

Data: openai/gsm8k, or JSONL rows with `question` and `answer` (`... #### 12`). Source: arXiv:2110.14168.
Needs: extras datasets, math.

    python environments/eval_environments/gsm8k_eval.py evaluate --openai.model_name M --tokenizer_name M
"""

from __future__ import annotations

from typing import Any

from atroposlib.envs.benchmark_env import MathBenchmarkEnv, Question
from atroposlib.envs.rows import HubRows


class GSM8KEvalEnv(MathBenchmarkEnv):
    """A number in a box."""

    name = "gsm8k_eval"
    benchmark_data = HubRows(path="openai/gsm8k", config="main", split="test")

    def parse_row(self, row: dict[str, Any]) -> Question:
        """Return the question with the number after `####`, without thousands separators."""
        gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
        return Question(question=row["question"], answer=gold)

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of `gsm8k_cot_zeroshot`."""
        return f"Q: {row['question']}\nA: Let's think step by step."


if __name__ == "__main__":
    GSM8KEvalEnv.cli()
