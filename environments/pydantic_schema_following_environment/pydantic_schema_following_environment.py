"""Write data that fits a pydantic model, as JSON, YAML, TOML or XML, or correct data that does not fit.

Each item asks for one format, in one container: inside `<json_output>` tags, in a Markdown fence, or bare. The reward
is 1 if the text after the only `<think>` block has this form and the model validates it, else 0. The models' source,
which is code of the data set, runs in the sandbox only (`schema_program.py`).

Data: justus27/pydantic-adherance-test, or JSONL rows with `prompt` and `verification_info` (JSON: `pydantic_config`,
the source, and `model_name`); rows to correct also with `task_type` "editing" and `erroneous_data`, without which they
are left out.
Needs: extras datasets.

    python environments/pydantic_schema_following_environment/pydantic_schema_following_environment.py process \\
        --env.dataset_path sample ...
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pydantic

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once, code_blocks, only_tagged
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Rollout, Split
from atroposlib.envs.rows import HubRows
from atroposlib.envs.sandbox import SandboxResult, run_code
from atroposlib.errors import EnvError

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("schema_program.py")
PACKAGES = Path(pydantic.__file__).parents[1]
"""The sandbox may run another interpreter of the same version, which lacks these packages."""

Format = Literal["json", "yaml", "toml", "xml"]
Container = Literal["tagged", "none", "markdown"]

EXAMPLES: dict[Format, str] = {
    "json": '{"name": "Ada", "scores": [1, 2]}',
    "yaml": "name: Ada\nscores:\n  - 1\n  - 2",
    "toml": 'name = "Ada"\nscores = [1, 2]',
    "xml": "<data><name>Ada</name><scores><item>1</item><item>2</item></scores></data>",
}


class SchemaTask(NamedTuple):
    """One row, with the form that its answer must have."""

    prompt: str
    code: str
    """Python source of the pydantic model."""
    model_name: str
    form: Format = "json"
    container: Container = "tagged"
    gold: Any = None
    """Data that fits, if the row has some."""


class PydanticEnvConfig(DatasetEnvConfig):
    group_size: int = 16
    max_token_length: int = 12288
    min_trained_tokens: int = 10
    temperature: float = 0.9
    eval_temperature: float | None = 0.1
    num_eval_rows: int = 50
    dataset_name: str = "justus27/pydantic-adherance-test"
    dataset_split: str = "train"
    allowed_structured_formats: list[Format] = ["json", "yaml", "toml", "xml"]
    allowed_container_formats: list[Container] = ["tagged", "none", "markdown"]


class PydanticSchemaFollowingEnv(DatasetEnv):
    """Single turn, validated in the sandbox."""

    name = "pydantic_schema_following"
    env_config_cls = PydanticEnvConfig
    config: PydanticEnvConfig
    runs_model_code = True
    truncated_score = 0.0
    aliases = {
        "eval/avg_score": "eval/mean_score",
        "eval/percent_perfect": "eval/percent_correct",
        "train/percent_perfect": "train/percent_correct",
    }

    async def setup(self) -> None:
        """Load the rows; EnvError if the sandbox cannot run a pydantic model."""
        code = "import yaml\nfrom pydantic import BaseModel\nclass Probe(BaseModel):\n    x: int"
        probe = SchemaTask(prompt="", code=code, model_name="Probe")
        result = await asyncio.to_thread(validate, probe, ['{"x": 1}', "{}"])
        if verdicts_of(result) != [True, False]:
            raise EnvError(
                "pydantic does not work in the sandbox, whose interpreter must have this one's version and be able "
                f"to read {PACKAGES}; install bubblewrap, or do not run as root: {result.stderr}"
            )
        await super().setup()

    def hub_rows(self, split: Split) -> HubRows | None:
        """Return the configured data set; evaluation rows are held out from it."""
        hub_rows = HubRows(path=self.config.dataset_name, split=self.config.dataset_split)
        return hub_rows if split == "train" else None

    def parse_row(self, row: dict[str, Any]) -> SchemaTask | None:
        """Return the task in a form that depends on seed and row; None (logged) if it has no data to correct."""
        schema = json.loads(row["verification_info"])
        task = SchemaTask(
            prompt=row["prompt"],
            code=schema["pydantic_config"],
            model_name=schema["model_name"],
            gold=row.get("answer"),
        )
        if row.get("task_type") == "editing":
            if not (wrong := row.get("erroneous_data")):
                logger.warning("row %s has no erroneous_data: left out", row.get("problem_id"))
                return None
            wrong = wrong if isinstance(wrong, str) else json.dumps(wrong, indent=2)
            task = task._replace(
                prompt=f"The data below does not fit the pydantic model {task.model_name}. Correct it.\n\n"
                f"```python\n{task.code}\n```\n\n```json\n{wrong}\n```"
            )
        return self.with_form(task, random.Random(f"{self.config.seed}:{row['prompt']}"))

    def with_form(self, task: SchemaTask, rng: random.Random) -> SchemaTask:
        """Return the task with a random format and container."""
        return task._replace(
            form=rng.choice(self.config.allowed_structured_formats),
            container=rng.choice(self.config.allowed_container_formats),
        )

    async def get_next_item(self) -> SchemaTask:
        """Return the next task, in another form in every epoch."""
        task = await super().get_next_item()
        return self.with_form(task, random.Random(f"{self.config.seed}:{self.num_items}"))

    def item_class(self, item: SchemaTask) -> str:
        return super().item_class(item.prompt)

    def prompt(self, row: SchemaTask) -> list[dict[str, Any]]:
        """Return the required form with an example, and the task."""
        example = contained(EXAMPLES[row.form], row)
        system = (
            f"{THINK_FIRST} Answer with {row.form.upper()} and nothing else"
            f", formatted like this example:\n\n{example}"
        )
        return [{"role": "system", "content": system}, {"role": "user", "content": row.prompt}]

    def example_answers(self, item: SchemaTask) -> list[str]:
        """Return the data that fits, if the row has some; JSON is YAML, too."""
        if item.gold is None or item.form not in ("json", "yaml"):
            return []
        return [f"<think>Which fields?</think>\n{contained(json.dumps(item.gold), item)}"]

    async def score(self, row: SchemaTask, answer: str) -> Outcome:
        [outcome] = await self.scores(row, [answer])
        return outcome

    async def score_group(self, row: SchemaTask, rollouts: Sequence[Rollout]) -> list[Outcome]:
        outcomes = await self.scores(row, [rollout.completion for rollout in rollouts])
        is_cut = [rollout.finish_reason == "length" for rollout in rollouts]
        return [0.0 if cut else each for cut, each in zip(is_cut, outcomes, strict=True)]

    async def scores(self, row: SchemaTask, answers: Sequence[str]) -> list[Outcome]:
        """Return 1 for each answer that fits, 0 for others; None if the schema itself fails."""
        found = [content_of(answer, row) for answer in answers]
        texts = [text for text in found if text is not None]
        fits = iter(await self.verdicts(row, texts))
        return [0.0 if text is None else next(fits) for text in found]

    async def verdicts(self, row: SchemaTask, texts: list[str]) -> Sequence[bool | None]:
        """Return whether each text fits; each has a sandbox of its own if they fail together."""
        if not texts:
            return []
        together = verdicts_of(await asyncio.to_thread(validate, row, texts))
        if together is not None or len(texts) == 1:
            return together or [None]
        return [(await self.verdicts(row, [text]))[0] for text in texts]


def contained(text: str, row: SchemaTask) -> str:
    """Return the text in the container that the task requires."""
    if row.container == "tagged":
        return f"<{row.form}_output>\n{text}\n</{row.form}_output>"
    return f"```{row.form}\n{text}\n```" if row.container == "markdown" else text


def content_of(answer: str, row: SchemaTask) -> str | None:
    """Return the content of the container after the thinking; None if the answer does not have the required form."""
    solution = (after_thinking_once(answer) or "").strip()
    if row.container == "tagged":
        return only_tagged(solution, f"{row.form}_output")
    if row.container == "markdown":
        blocks = [content for _, content in code_blocks(solution)]
        is_alone = solution.count("\n") == 2 + sum(content.count("\n") for content in blocks)
        return blocks[0] if len(blocks) == 1 and is_alone else None
    return solution or None


def validate(row: SchemaTask, texts: list[str]) -> SandboxResult:
    """Validate texts against the row's model in the sandbox."""
    task = {"code": row.code, "model_name": row.model_name, "format": row.form, "texts": texts}
    source = f"import sys\nsys.path.append({str(PACKAGES)!r})\n"
    program = PROGRAM.read_text(encoding="utf-8").replace(
        "from __future__ import annotations\n", ""
    )
    return run_code(source + program, stdin=json.dumps(task))


def verdicts_of(result: SandboxResult) -> list[bool] | None:
    """Return the last line of the program's output; None if it did not finish."""
    if result.reason != "exit" or result.exit_code != 0:
        return None
    verdicts: list[bool] = json.loads(result.stdout.rpartition("\n")[2])
    return verdicts


if __name__ == "__main__":
    PydanticSchemaFollowingEnv.cli()
