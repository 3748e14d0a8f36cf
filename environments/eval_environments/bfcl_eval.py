"""BFCL: call the right functions, in one answer; accuracy of every category and their mean.

Categories: one call of one function (simple, also in Java and JavaScript), of several (multiple), several calls
(parallel, parallel_multiple), and questions that no function fits (irrelevance) or some function does (relevance), also
those of users (live_*). The score is 1 if the calls are possible by the rules of BFCL's AST checker
(`atroposlib/envs/possible_calls.py`; `typed_calls.py` reads the other languages), else 0; no call is run.
`--env.call_form python` asks for `[f(x=1), g(y="a")]`, as BFCL does of models without a format of their own; `native`
gives the functions to the chat template and reads the calls in `--env.call_style`.

Data: gorilla-llm/Berkeley-Function-Calling-Leaderboard, or `--env.dataset_name` with the folder `bfcl_eval/data` of the
package bfcl-eval, or JSONL rows with `question`, `function`, `ground_truth` and `category`.
Needs: extras datasets.

    python environments/eval_environments/bfcl_eval.py evaluate --env.call_form native ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from atroposlib.envs.benchmark_env import BenchmarkConfig, BenchmarkEnv, Question, Reading
from atroposlib.envs.dataset_env import Row
from atroposlib.envs.eval_run import Sample
from atroposlib.envs.possible_calls import calls_are_possible, python_calls
from atroposlib.envs.rows import HubRows, read_jsonl
from atroposlib.envs.tool_env import ToolCall
from atroposlib.envs.typed_calls import Language, converted, described, in_language, typed_calls
from atroposlib.errors import ConfigError, require
from atroposlib.inference.tools.parsers import Call, style_named
from atroposlib.inference.tools.parsers.style import call_from

LANGUAGES: dict[str, Language] = {"simple_java": "java", "simple_javascript": "javascript"}
OF_FUNCTIONS = [
    "simple_python",
    *LANGUAGES,
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
]
OF_USERS = ["simple", "multiple", "parallel", "parallel_multiple", "irrelevance", "relevance"]
CATEGORIES = [*OF_FUNCTIONS, *(f"live_{name}" for name in OF_USERS)]
OPENAPI_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}

PROMPT = """\
You can call functions. Answer the question with the calls of one or more of them, and nothing else:
[function_1(name=value, ...), function_2(...)]
If no function fits the question, or a required value is missing, say so and call none. These are the functions:
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BfclRows(HubRows):
    """A category with its expected calls, from a folder or a data set on the hub."""

    category: str = ""

    def load(self) -> list[dict[str, Any]]:
        """Read the questions and join the expected calls, of which irrelevance and relevance have none."""
        rows = read_jsonl(self._file(""), flag="dataset_name")
        golds = []
        if "relevance" not in self.category:
            golds = read_jsonl(self._file("possible_answer/"), flag="dataset_name")
        found = {row["id"]: row["ground_truth"] for row in golds}
        return [row | {"ground_truth": found.get(row["id"], [])} for row in rows]

    def _file(self, folder: str) -> str:
        if Path(self.path).is_dir():
            return f"{self.path}/{folder}BFCL_v4_{self.category}.json"
        hub = require("huggingface_hub", extra="datasets")
        category = self.category.removesuffix("_python")  # as version 3 names it
        name = f"{folder}BFCL_v3_{category.removeprefix('simple_')}.json"
        try:
            return str(hub.hf_hub_download(self.path, name, repo_type="dataset"))
        except Exception as error:
            raise ConfigError(f"cannot load {name} of {self.path!r}: {str(error)[:300]}") from error


class Request(Question, total=False):
    """A question with its functions; the answer is the expected calls as JSON."""

    messages: list[dict[str, str]]
    functions: str
    """As JSON: the order of the keys of an object is lost where a row is stored, and the prompt has it."""


class BfclConfig(BenchmarkConfig):
    eval_temperature: float | None = 0.001
    categories: list[str] = Field(default=CATEGORIES, min_length=1)
    """Categories to evaluate."""
    call_form: Literal["python", "native"] = "python"
    """Whether the model writes Python in its answer, or the calls of its chat template."""
    call_style: str = "hermes"
    """Parser of native calls, by its name in vLLM."""


class BfclEnv(BenchmarkEnv):
    """One answer with calls."""

    name = "bfcl_eval"
    env_config_cls = BfclConfig
    config: BfclConfig
    all_parts = {
        name: BfclRows(path="gorilla-llm/Berkeley-Function-Calling-Leaderboard", category=name)
        for name in CATEGORIES
    }
    part_key, part_setting = "category", "categories"

    def parse_row(self, row: dict[str, Any]) -> Request:
        [messages] = row["question"]
        return Request(
            question=messages[-1]["content"],
            messages=messages,
            functions=json.dumps(row["function"], indent=1),
            answer=json.dumps(row.get("ground_truth") or []),
            groups={"category": row["category"]},
        )

    def prompt(self, row: Row) -> list[dict[str, str]]:
        """Return the messages; in the form of Python after a description of the functions."""
        if self.config.call_form == "native":
            return list(row["messages"])
        system = PROMPT + json.dumps(self.functions_of(row), indent=1)
        messages = list(row["messages"])
        if messages[0]["role"] == "system":
            system += f"\n\n{messages.pop(0)['content']}"
        return [{"role": "system", "content": system}, *messages]

    def offered_tools(self, row: Row) -> list[dict[str, Any]]:
        """Return the functions for the chat template, in OpenAI's format."""
        if self.config.call_form == "python":
            return []
        return [{"type": "function", "function": openapi(each)} for each in self.functions_of(row)]

    def functions_of(self, row: Row) -> list[dict[str, Any]]:
        """Return the functions as the model sees them."""
        functions: list[dict[str, Any]] = json.loads(row["functions"])
        language = LANGUAGES.get(row["groups"]["category"])
        return [described(each, language) for each in functions] if language else functions

    def text_of(self, message: Any) -> str:
        """Return the text with the calls, which an API without token ids has beside it."""
        calls = [call_from(call) for call in message.tool_calls or ()]
        written = style_named(self.config.call_style).render(calls) if calls else ""
        return super().text_of(message) + written

    def gold_answer(self, row: Row) -> str:
        """Return calls with the first possible values; where no calls are expected, what is."""
        calls = [first_possible(each) for each in json.loads(row["answer"])]
        category = row["groups"]["category"]
        if category.endswith("irrelevance"):
            return "None of the functions fits."
        if category.endswith("relevance"):
            calls = [ToolCall(name=json.loads(row["functions"])[0]["name"], arguments={})]
        native, language = self.config.call_form == "native", LANGUAGES.get(category)
        if language:
            [function] = json.loads(row["functions"])
            calls = [in_language(call, function, language, quoted=not native) for call in calls]
        if native:
            texts = [Call(call.name, json.dumps(call.arguments)) for call in calls]
            return style_named(self.config.call_style).render(texts)
        form = "{}={}" if language else "{}={!r}"
        arguments = [", ".join(form.format(*each) for each in c.arguments.items()) for c in calls]
        return f"[{', '.join(f'{c.name}({a})' for c, a in zip(calls, arguments, strict=True))}]"

    def calls_in(self, row: Row, text: str) -> list[ToolCall]:
        """Return the calls of an answer."""
        if self.config.call_form == "python":
            is_python = row["groups"]["category"] not in LANGUAGES
            return python_calls(text) if is_python else typed_calls(text)
        parts = style_named(self.config.call_style).split(text, self.offered_tools(row))
        calls = [part for part in parts if isinstance(part, Call)]
        return [ToolCall(name=each.name, arguments=json.loads(each.arguments)) for each in calls]

    def read(self, row: Row, text: str) -> Reading:
        """Return the whole text; the method says whether it has calls."""
        return Reading(text, "calls" if self.calls_in(row, text) else "none")

    def grade(self, row: Row, answer: str) -> float:
        """Return 1 if the calls are possible; for irrelevance if there are none, for relevance if there are some."""
        calls, category = self.calls_in(row, answer), row["groups"]["category"]
        functions = json.loads(row["functions"])
        if category.endswith("relevance"):
            return float(bool(calls) != category.endswith("irrelevance"))
        if language := LANGUAGES.get(category):
            calls = [converted(call, functions[0], language) for call in calls]
        return float(calls_are_possible(calls, json.loads(row["answer"]), functions))

    def rates_of_parts(self, rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, float]:
        """Add the mean over the categories, and that of the three languages, which BFCL publishes as simple."""
        rates = super().rates_of_parts(rows, samples)
        simple = [rate for part, rate in rates.items() if "/category_simple_" in part]
        means = {"eval/macro_accuracy": [*rates.values()], "eval/simple_accuracy": simple}
        return rates | {name: fmean(each) for name, each in means.items() if each}


def openapi(value: Any) -> Any:
    """Return a description of a function with the type names of JSON schema.

    >>> openapi({"type": "dict", "properties": {"type": {"type": "tuple", "items": {"type": "float"}}}})
    {'type': 'object', 'properties': {'type': {'type': 'array', 'items': {'type': 'number'}}}}
    """
    if isinstance(value, list):
        return [openapi(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: OPENAPI_TYPES.get(each, each)
        if key == "type" and isinstance(each, str)
        else openapi(each)
        for key, each in value.items()
    }


def first_possible(expected: Mapping[str, Mapping[str, Sequence[Any]]]) -> ToolCall:
    """Return the call with the first of the possible values of each parameter that may not be left out.

    >>> first_possible({"f": {"x": [{"a": [1, 2], "b": [""]}], "y": ["", 2]}})
    ToolCall(name='f', arguments={'x': {'a': 1}})
    """

    def chosen(possible: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        return {name: inside(values[0]) for name, values in possible.items() if "" not in values}

    def inside(value: Any) -> Any:
        if isinstance(value, list):
            return [inside(each) for each in value]
        return chosen(value) if isinstance(value, dict) else value

    [(name, possible)] = expected.items()
    return ToolCall(name=name, arguments=chosen(possible))


if __name__ == "__main__":
    BfclEnv.cli()
