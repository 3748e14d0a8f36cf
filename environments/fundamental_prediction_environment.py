"""Predict how a figure of a company's next report changes: its direction and its size.

The model reads a report, thinks in one `<think>` block, and ends with one line such as "The revenue will be: raised,
+3.5%". A wrong direction, a sign against it, another form or two predictions earn 0; a right direction earns 1, plus up
to 1 for the size (`size_score`). In training, an answer of nearly the token limit loses up to half a point.

Data: NousResearch/company-fundamentals-prediction-lite, or JSONL rows with `context`, `fundamental_metric`, `answer`
(maintained, raised or reduced) and `magnitude` (percent).
Needs: extras datasets.

    python environments/fundamental_prediction_environment.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from atroposlib.envs.answers import after_thinking_once
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig
from atroposlib.envs.lengths import num_trained
from atroposlib.envs.rows import HubRows

PREDICTION = re.compile(
    r"^[ \t*]*The (.+?) will be:?[\s*]*(maintained|raised|reduced)[\s*]*,?[\s*]*"
    r"([+-]?\d+(?:\.\d+)?)[\s*]*%",
    re.IGNORECASE | re.MULTILINE,
)
SIZE_SCORES = [(0.0, 1.0), (1.0, 0.9), (5.0, 0.7), (10.0, 0.5), (20.0, 0.3)]
"""(largest error in percentage points, score)."""
WRONG_SIGNS = {"raised": "-", "reduced": "+"}
LONG = 0.95
"""Fraction of the token limit above which an answer loses score."""


class Report(NamedTuple):
    context: str
    metric: str
    direction: str
    size: float
    """Percent, without its sign, which the direction gives."""


class FundamentalPredictionConfig(DatasetEnvConfig):
    group_size: int = 16
    max_token_length: int = 16384
    min_trained_tokens: int = 10
    seed: int = 42
    temperature: float = 0.8
    eval_temperature: float | None = 0.2


class FundamentalPredictionEnv(DatasetEnv):
    """Single turn, graded reward."""

    name = "fundamental_metric_prediction"
    env_config_cls = FundamentalPredictionConfig
    config: FundamentalPredictionConfig
    train_data = HubRows(path="NousResearch/company-fundamentals-prediction-lite", config="default")
    system_prompt = (
        "You are a financial analyst. Weigh the evidence at length inside <think> </think> tags, "
        "then give your prediction."
    )

    def parse_row(self, row: dict[str, Any]) -> Report:
        """Return the report; its magnitude may be a number or a text such as "-3.5%"."""
        size = abs(float(str(row["magnitude"]).strip().rstrip("%")))
        direction = row["answer"].strip().lower()
        return Report(row["context"], row["fundamental_metric"], direction, size)

    def prompt(self, row: Report) -> str:
        return (
            f"Predict whether the company's {row.metric} will be maintained, raised or reduced, and by how many "
            f"percent.\n\n{row.context}\n\n"
            f"End with one line: The {row.metric} will be: DIRECTION, SIGN AND NUMBER%"
        )

    def gold_answer(self, row: Report) -> str:
        sign = "-" if row.direction == "reduced" else "+"
        line = f"The {row.metric} will be: {row.direction}, {sign}{row.size:g}%"
        return f"<think>The report says so.</think>\n{line}"

    def score(self, row: Report, answer: str) -> float:
        """Return 1 to 2 for the right direction, else 0."""
        found = PREDICTION.findall(after_thinking_once(answer) or "")
        if len(found) != 1:
            return 0.0
        metric, direction, size = found[0]
        if metric.strip().lower() != row.metric.lower() or direction.lower() != row.direction:
            return 0.0
        if size[0] == WRONG_SIGNS.get(row.direction):
            return 0.0
        return 1.0 + size_score(abs(float(size)) - row.size)

    def shape_group(self, row: Report, group: ScoredDataGroup) -> ScoredDataGroup:
        """Lower the score of answers of nearly the token limit."""
        limit = self.config.max_token_length
        for i, mask in enumerate(group["masks"]):
            used = num_trained(mask) / limit
            group["scores"][i] -= 0.5 * used if used > LONG else 0.0
        return group

    def summarize(self, scores: Sequence[Sequence[float | None]]) -> dict[str, float]:
        judged = [score for row in scores for score in row if score is not None]
        return {**super().summarize(scores), **accuracies(judged, prefix="eval")}

    def train_metrics(self) -> dict[str, float]:
        return accuracies(self.train_scores, prefix="train")


def size_score(error: float) -> float:
    """Return the score of a prediction that is off by `error` percentage points.

    >>> size_score(0.0), size_score(-0.5), size_score(21.0)
    (1.0, 0.9, 0.0)
    """
    return next((score for limit, score in SIZE_SCORES if abs(error) <= limit + 1e-9), 0.0)


def accuracies(scores: Sequence[float], *, prefix: str) -> dict[str, float]:
    """Return the share of right directions, the mean size score of these, and the mean score.

    >>> accuracies([0.0, 1.5], prefix="eval")["eval/magnitude_accuracy"]
    0.5
    """
    if not scores:
        return {}
    sizes = [score - 1.0 for score in scores if score >= 1.0]
    metrics = {
        f"{prefix}/direction_accuracy": len(sizes) / len(scores),
        f"{prefix}/combined_score": sum(scores) / len(scores),
    }
    if sizes:
        metrics[f"{prefix}/magnitude_accuracy"] = sum(sizes) / len(sizes)
    return metrics


if __name__ == "__main__":
    FundamentalPredictionEnv.cli()
