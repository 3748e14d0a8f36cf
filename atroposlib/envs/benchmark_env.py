"""`BenchmarkEnv`: a published benchmark. Subclass it, name its data, and define `parse_row` and `prompt`.

An answer is read from what follows the thinking: the only `<answer>...</answer>`, or in `ChoiceBenchmarkEnv` and
`MathBenchmarkEnv` a stated letter or the last box. A text that states two answers states none. The evaluation
reports the accuracy in all and by group (subject, year, ...), pass@k and avg@k if rows have several answers, and how
many answers could be read. `serve` and `process` sample the benchmark's own rows, to make data or to try a trainer.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

from pydantic import Field

from atroposlib.envs.answers import (
    BOX,
    THINK_FIRST,
    after_thinking_once,
    last_answer,
    lettered,
    read_choice,
    read_tag,
    solution_of,
)
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Split, awaited
from atroposlib.envs.eval_run import Sample, hash_of
from atroposlib.envs.math_answers import boxed_answer
from atroposlib.envs.math_env import is_correct
from atroposlib.envs.reward_fns.math_worker import CANARY, PRELOAD
from atroposlib.envs.rows import HubRows
from atroposlib.errors import ConfigError
from atroposlib.utils.estimates import Estimate, estimate_mean


class Question(TypedDict, total=False):
    """One row, as JSON: it is stored with every answer."""

    question: str
    answer: str
    """The gold answer; the letter of a choice."""
    choices: list[str]
    groups: dict[str, str]
    """What the row belongs to, by kind, such as `{"subject": "astronomy"}`; each has its own accuracy."""
    reasoning: str
    """How to find the answer; shown if the row is an example."""


class Reading(NamedTuple):
    """What was read out of an answer."""

    answer: str | None
    """None: the text states no answer, or several."""
    method: str
    """Where it was found."""


class BenchmarkConfig(DatasetEnvConfig):
    protocol: Literal["ours", "lm_eval"] = "ours"
    """Prompt: `ours` names the form of the answer, so that any chat model can keep it; `lm_eval` is that of lm-eval's
    task for generated answers, to compare with figures made by it."""
    max_token_length: int = 8192
    eval_temperature: float | None = 0.6
    num_eval_rows: int = Field(default=0, ge=0)
    """Rows to evaluate, chosen by `seed`; 0: all."""
    custom_thinking_prompt: str | None = None
    """System prompt with `thinking_mode`; None: a request to think inside of `<think> </think>` first."""
    custom_system_prompt: str | None = None
    """System prompt; with `thinking_mode` it follows the thinking prompt."""
    dataset_name: str | None = None
    """Data set on the Hugging Face hub, such as a mirror with the same fields; None: the one of the benchmark."""
    subset: str | None = None
    """Its configuration; None: the one of the benchmark."""
    eval_split: str | None = None
    """Its split; None: the one of the benchmark."""


class BenchmarkEnv(DatasetEnv):
    """Questions with one gold answer each; the answer is inside of `<answer> </answer>`."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = BenchmarkConfig
    config: BenchmarkConfig

    benchmark_data: ClassVar[HubRows]
    """The benchmark's rows without `--env.dataset_path`."""
    all_parts: ClassVar[Mapping[str, HubRows]] = {}
    """The data sets by the names of their parts; {}: `benchmark_data` alone."""
    part_key: ClassVar[str] = "subset"
    """Field in which a raw row has the name of its part, if there are several."""
    part_setting: ClassVar[str] = ""
    """Setting that lists the parts to evaluate (None: all); "": all are evaluated."""
    trains_on_evaluation: ClassVar[bool] = True
    grader_packages: ClassVar[tuple[str, ...]] = ()
    """Packages that decide which answers are right; their versions are in `metrics.json`."""
    accuracy_name: ClassVar[str] = "accuracy"
    """Name of the share of right answers."""

    def parts(self) -> dict[str, HubRows]:
        """Return the data sets that are asked for, by the names of their parts; ConfigError for an unknown part."""
        if not self.all_parts:
            return {"": self.benchmark_data}
        asked = self.asked_parts
        chosen = self.all_parts.keys() if asked is None else asked
        if unknown := set(chosen) - self.all_parts.keys():
            what = f"there is no {min(unknown)}, only {', '.join(self.all_parts)}"
            raise ConfigError(f"--env.{self.part_setting}: {what}")
        return {name: self.all_parts[name] for name in chosen}

    @property
    def asked_parts(self) -> list[str] | None:
        """The parts to evaluate; None: all."""
        return getattr(self.config, self.part_setting) if self.part_setting else None

    def parsed(self, raw: Iterable[dict[str, Any]]) -> list[Question]:
        """Return the questions of raw rows, without those whose part is not asked for."""
        asked, key = self.asked_parts, self.part_key
        chosen = [each for each in raw if asked is None or str(each.get(key, "")) in (*asked, "")]
        return [row for each in chosen if (row := self.parse_row(each)) is not None]

    def load_rows(self, split: Split) -> list[Question]:
        """Return the benchmark's rows, the same for both splits."""
        config = self.config
        if config.dataset_path:
            raw = self.read_file(config.dataset_path)
        else:
            changes = {
                "path": config.dataset_name,
                "config": config.subset,
                "split": config.eval_split,
            }
            given: dict[str, Any] = {name: value for name, value in changes.items() if value}
            raw = [
                {self.part_key: part, **row}
                for part, rows in self.parts().items()
                for row in replace(rows, **given).load()
            ]
        parsed = self.parsed(raw)
        if not parsed:
            raise ConfigError(
                f"{self.registered_name}: the settings of --env select none of {len(raw)} rows"
            )
        self.conversation(parsed[0])  # refuses a protocol that the benchmark lacks
        if not 0 < config.num_eval_rows < len(parsed):
            return parsed
        chosen = random.Random(config.seed).sample(range(len(parsed)), k=config.num_eval_rows)
        return [parsed[i] for i in sorted(chosen)]

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the question of a raw row; None skips it."""
        raise NotImplementedError(f"{type(self).__name__} must define parse_row(self, row)")

    def conversation(self, row: Question) -> list[dict[str, Any]]:
        """Return the prompt after the configured system prompts."""
        config = self.config
        think = config.custom_thinking_prompt
        thinking = (THINK_FIRST if think is None else think) if config.thinking_mode else ""
        system = "\n\n".join(part for part in (thinking, config.custom_system_prompt) if part)
        if config.protocol == "lm_eval":
            messages = [{"role": "user", "content": self.lm_eval_prompt(row)}]
        else:
            messages = super().conversation(row)
        return [{"role": "system", "content": system}, *messages] if system else messages

    def lm_eval_prompt(self, row: Question) -> str:
        """Return the prompt of lm-eval's task; default: ConfigError."""
        raise ConfigError(
            f"--env.protocol lm_eval: {self.registered_name} has no prompt of lm-eval for generated answers"
        )

    def eval_parameters(self) -> dict[str, Any]:
        """Add the protocol, a hash of all prompts, and the versions of what grades."""
        return {
            **super().eval_parameters(),
            "protocol": self.config.protocol,
            "prompts_hash": hash_of([self.conversation(row) for row in self.eval_rows]),
            "versions": {
                name: metadata.version(name) for name in ("atroposlib", *self.grader_packages)
            },
        }

    def prompt(self, row: Question) -> str:
        """Return the question and the required form of the answer."""
        return f"{row['question']}\n\nEnd with the answer alone inside of <answer> </answer>."

    def gold_answer(self, row: Question) -> str | None:
        """Return the gold answer in the required form."""
        return f"<answer>{row['answer']}</answer>"

    def read(self, row: Question, text: str) -> Reading:
        """Read the answer out of the text that follows the thinking."""
        found = read_tag(text, "answer")
        return Reading(found, "none" if found is None else "answer_tag")

    def grade(self, row: Question, answer: str) -> Outcome | Awaitable[Outcome]:
        """Score an answer that was read, plain or async; default: 1 if it is the gold answer."""
        return float(answer == row["answer"])

    async def score(self, row: Question, answer: str) -> Outcome:
        """Return 0 if no answer can be read, else its grade."""
        found = self.read(row, solution_of(answer)).answer
        if found is None:
            return 0.0
        outcome: Outcome = await awaited(self.grade(row, found))
        return outcome

    def sample_fields(self, row: Question, answer: str) -> dict[str, Any]:
        """Return what was read out of an answer, and the row's groups."""
        found = self.read(row, solution_of(answer))
        is_valid = after_thinking_once(answer) is not None or not self.config.thinking_mode
        return {
            "gold_answer": row.get("answer"),
            "extracted_answer": found.answer,
            "extraction_method": found.method,
            "has_thinking": "<think>" in answer,
            "format_valid": is_valid,
            "response_length": len(answer),
            **row.get("groups", {}),
        }

    def summarize_samples(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the accuracy, in all and of every group, and how the answers looked."""
        sound = [sample for sample in samples if sample["correct"] is not None]
        judged = [sample for sample in sound if sample["score"] is not None]
        k = self.config.num_eval_samples
        names = [self.accuracy_name, *([f"avg@{k}"] if k > 1 else [])]
        metrics: dict[str, float] = {**means_of(samples, dict.fromkeys(names, "correct"))}
        if len(judged) < len(sound):
            metrics |= means_of(judged, {f"{self.accuracy_name}_judged": "correct"})
        metrics |= super().summarize_samples(samples)
        for name in ("percent_correct", "percent_correct_judged"):
            metrics.pop(f"eval/{name}", None)  # the accuracy under another name
        metrics["eval/total_questions"] = float(len({s["item_index"] for s in samples}))
        metrics["eval/total_correct"] = float(sum(bool(s["correct"]) for s in samples))
        metrics |= means_of(
            samples,
            {
                "format_compliance_rate": "format_valid",
                "thinking_utilization_rate": "has_thinking",
                "avg_response_length": "response_length",
            },
        )
        methods = Counter(sample["extraction_method"] for sample in samples)
        metrics["eval/answer_extraction_rate"] = 1 - methods["none"] / max(1, len(samples))
        metrics |= {f"eval/extraction_{name}_count": float(n) for name, n in methods.items()}
        return metrics

    def parts_of(self, row: Question) -> list[str]:
        """Return the names of the accuracies of the row's groups."""
        return [f"eval/{kind}_{name}_accuracy" for kind, name in row.get("groups", {}).items()]


class ChoiceBenchmarkConfig(BenchmarkConfig):
    num_few_shot: int = Field(default=0, ge=0)
    """Examples in the prompt, of the same subject or category if there are enough."""
    few_shot_path: str | None = None
    """JSONL file of examples; None: those of the benchmark."""


class ChoiceBenchmarkEnv(BenchmarkEnv):
    """Questions with choices; the answer is a letter."""

    env_config_cls = ChoiceBenchmarkConfig
    config: ChoiceBenchmarkConfig
    few_shot_data: ClassVar[HubRows | None] = None
    """Rows for examples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples: list[Question] = []

    async def setup(self) -> None:
        if self.config.num_few_shot:
            path = self.config.few_shot_path
            if path is not None:
                raw = self.read_file(path, flag="few_shot_path")
            elif self.few_shot_data is not None:
                raw = self.few_shot_data.load()
            else:
                raise ConfigError(
                    f"--env.num_few_shot: {self.registered_name} has no examples; give --env.few_shot_path"
                )
            self.examples = self.parsed(raw)
        await super().setup()

    def prompt(self, row: Question) -> str:
        """Return the examples, the question with its choices, and the required form of the answer."""
        last = string.ascii_uppercase[len(row["choices"]) - 1]
        form = (
            f"End with the letter of the right choice, A to {last}, inside of <answer> </answer>."
        )
        shown = [*map(solved, self.examples_for(row)), question_with_choices(row)]
        return "\n\n".join([*shown, form])

    def lm_eval_examples(self, row: Question, asked: Callable[[Question], str]) -> str:
        """Return the examples, each as `asked`, and its reasoning or letter; then the question as `asked`."""
        shown = self.examples_for(row)
        answers = [each.get("reasoning") or f"({each['answer']})" for each in shown]
        solved = [f"{asked(each)} {answer}" for each, answer in zip(shown, answers, strict=True)]
        return "\n\n".join([*solved, asked(row)])

    def examples_for(self, row: Question) -> list[Question]:
        """Return the examples in the prompt of a row."""
        others = [each for each in self.examples if each["question"] != row["question"]]
        same = [each for each in others if each.get("groups") == row.get("groups")]
        k = self.config.num_few_shot
        return (same if len(same) >= k else others)[:k]

    def read(self, row: Question, text: str) -> Reading:
        """Read the letter of the only choice that the text states."""
        return Reading(*read_choice(text, row["choices"]))


class MathBenchmarkEnv(BenchmarkEnv):
    """Mathematical problems; the last box is compared with the gold answer, by math-verify unless both are numbers."""

    preload = PRELOAD
    canary = CANARY
    isolates_graders = True
    grader_packages = ("math-verify", "latex2sympy2_extended", "sympy")
    allows_restating = True
    """Whether `24*16-9` is right for 375: it is in accuracies published with math-verify. In training it is wrong."""

    def prompt(self, row: Question) -> str:
        """Return the problem and the required form of the answer."""
        return f"{row['question']}\n\nEnd with the final answer, and nothing else, inside of \\boxed{{}}."

    def gold_answer(self, row: Question) -> str:
        """Return the gold answer in a box."""
        return f"\\boxed{{{row['answer']}}}"

    def read(self, row: Question, text: str) -> Reading:
        """Read the last box; without one, with lm-eval's prompt, what "the answer is" states, else the last number."""
        if (found := boxed_answer(text)) or BOX.search(text) or self.config.protocol == "ours":
            return Reading(found or None, "boxed" if found else "none")
        if stated := last_answer(text):
            found = re.split(r"[.!?](?:\s|$)", stated)[0]
            number = re.match(r"-?\d[\d.,]*\b(?=,?\s++[A-Za-z]{2})", found)
            return Reading(number[0] if number else found, "stated")
        numbers = re.findall(r"-?\d[\d.,]*+", text)
        return (
            Reading(numbers[-1].rstrip(".,"), "last_number") if numbers else Reading(None, "none")
        )

    def grade(self, row: Question, answer: str) -> Awaitable[Outcome]:
        """Return 1 for the right answer, else 0; None if the gold answer cannot be read."""
        return is_correct(self, row["answer"], answer, allows_restating=self.allows_restating)


def solved(row: Question) -> str:
    """Return an example: the question, its choices, the reasoning if there is one, and the answer."""
    parts = (question_with_choices(row), row.get("reasoning"), f"<answer>{row['answer']}</answer>")
    return "\n\n".join(filter(None, parts))


def question_with_choices(row: Question) -> str:
    """Return the question, and a line for each choice."""
    return f"{row['question']}\n\n{lettered(row['choices'])}"


def means_of(samples: Sequence[Sample], keys: Mapping[str, str]) -> dict[str, Estimate]:
    """Return the metrics `eval/<name>`: the mean of a field, by name, over the samples that have it.

    The answers of a row are one cluster. A field that no sample has gives no metric.
    """
    found = {}
    for name, key in keys.items():
        if having := [sample for sample in samples if sample.get(key) is not None]:
            rows = [sample["item_index"] for sample in having]
            values = [float(sample[key]) for sample in having]
            found[f"eval/{name}"] = estimate_mean(values, clusters=rows)
    return found
