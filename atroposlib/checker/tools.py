"""Call the tools of a `ToolEnv`: with arguments made from their schemas and an item, and as scripted answers do."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from atroposlib.checker.calls import copy_of, describe
from atroposlib.checker.execution import Execution
from atroposlib.checker.guesses import short_texts

NUM_VARIANTS = 3
"""Calls of each tool with made-up arguments: the required ones, then twice all of them."""
MAX_TEXTS = 6
"""Texts of an item that a tool gets one after another, until it returns a result."""
CODE_FAULTS = (ImportError, NameError, NotImplementedError)
"""Errors that no argument causes."""
DOUBTFUL_FAULTS = (AttributeError, TypeError)
"""Errors that an argument of the declared type may cause, as in `re.search(...).group()`; faults if all calls raise."""
_WITHOUT_ERROR = ("tool_error_timeout", "tool_error_result", "tool_error_hung")
"""Counts of calls that failed although the tool raised nothing."""
_MAX_DEPTH = 6
_TEXTS = ("1", "1 + 1", "two words")


class _Raised(NamedTuple):
    arguments: dict[str, Any]
    error: Exception


class ToolCalls:
    """How calls of an environment's tools ended."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._returned: Counter[str] = Counter()
        self._raised: dict[str, _Raised] = {}
        """The first error of each tool that was called."""
        self._failed: set[str] = set()
        self._env: Any = execution.env
        self._tools = self._env.known_tools()
        for name, tool in self._tools.items():
            self._tools[name] = self._noting(tool)

    def _noting(self, tool: Any) -> Any:
        async def run(arguments: dict[str, Any], episode: Any) -> Any:
            try:
                result = await tool.run(arguments, episode)
            except Exception as error:
                if getattr(error, "kind", None) == "arguments":  # refused as they should be
                    raise
                self._raised.setdefault(tool.name, _Raised(arguments, error))
                if isinstance(error, CODE_FAULTS):
                    self._fail(tool.name, arguments, describe(error))
                raise
            self._returned[tool.name] += 1
            return result

        return dataclasses.replace(tool, run=run)  # a `Tool`

    async def try_all(self) -> None:
        """Call each tool with arguments made from its schema."""
        texts = short_texts(self._execution.items[0])[:MAX_TEXTS]
        for tool in list(self._tools.values()):
            with self._execution.judging("collects", what="an episode without turns: "):
                await self._try(tool, texts)

    async def _try(self, tool: Any, texts: Sequence[str]) -> None:
        within, item = self._execution.within, copy_of(self._execution.items[0])
        episode = await within(_called(self._env.reset, item), "reset()")
        try:
            for variant in range(NUM_VARIANTS + len(texts)):
                has_returned = variant >= NUM_VARIANTS and self._returned[tool.name]
                if tool.name in self._failed or has_returned:
                    break
                await self._call(tool, arguments_of(tool.parameters, variant, texts), episode)
        finally:
            await within(_called(self._env.end, episode), "end()")

    async def _call(self, tool: Any, arguments: dict[str, Any], episode: Any) -> None:
        env, call = self._env, SimpleNamespace(name=tool.name, arguments=arguments)
        before = Counter(env.counts)
        try:
            text = await self._execution.within(env.result_of(call, episode), tool.name)
        except Exception as error:  # noqa: BLE001 - boundary: the author's code
            self._fail(tool.name, arguments, describe(error))
        else:
            if any(env.counts[kind] > before[kind] for kind in _WITHOUT_ERROR):
                self._fail(tool.name, arguments, text.removeprefix("Error: "))

    def _fail(self, name: str, arguments: Mapping[str, Any], why: str) -> None:
        """Add evidence, once for each tool."""
        if name not in self._failed:
            self._failed.add(name)
            self._execution.report.fail("tools_work", f"{_call(name, arguments)}: {why}")

    def judge(self) -> None:
        """Count the tools that worked; the rule is not checked if one raised each time it was called."""
        report = self._execution.report
        report.look("tools_work", self._returned.total())
        if self._tools and not self._returned and not self._raised:
            report.skip("no tool accepted the arguments made for it", "tools_work")
        for name, (arguments, error) in self._raised.items():
            is_doubtful = isinstance(error, DOUBTFUL_FAULTS)
            if is_doubtful and self._returned[name]:
                report.note("tools_work", f"{_call(name, arguments)}: {describe(error)}")
            elif is_doubtful:
                self._fail(name, arguments, describe(error))
            elif not self._returned[name]:
                reason = (
                    f"{name} raised each time it was called, first {describe(error)};"
                    " define example_answers that call it with arguments that exist"
                )
                report.skip(reason, "tools_work")


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r:.40}' for key, value in arguments.items())})"


async def _called(hook: Callable[..., Any], *args: Any) -> Any:
    value = hook(*args)
    return await value if inspect.isawaitable(value) else value


def arguments_of(
    schema: Mapping[str, Any], variant: int, texts: Sequence[str] = ()
) -> dict[str, Any]:
    """Return arguments that fit a JSON schema of objects; variant 0 has the required ones only.

    From variant `NUM_VARIANTS` on, strings are those of `texts`.

    >>> schema = {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
    >>> arguments_of(schema, 0), arguments_of(schema, 1)
    ({'a': 1}, {'a': 2, 'b': 'y'})
    """
    made = _Making(variant, schema.get("$defs", {}), (*_TEXTS, *texts))
    value = made.value({**schema, "type": "object"}, 0)
    return value if isinstance(value, dict) else {}


class _Making(NamedTuple):
    """How values of a schema are made."""

    variant: int
    definitions: Mapping[str, Any]
    texts: Sequence[str]

    def value(self, schema: Any, depth: int) -> Any:
        """Return a value of a schema; None beyond `_MAX_DEPTH`."""
        variant = self.variant
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if "$ref" in schema:
            name = str(schema["$ref"]).rpartition("/")[2]
            return self.value(self.definitions.get(name), depth + 1)
        for key in ("examples", "enum"):
            if schema.get(key):
                return schema[key][variant % len(schema[key])]
        for key in ("const", "default"):
            if key in schema and (key == "const" or variant == 0):
                return schema[key]
        for key in ("anyOf", "oneOf", "allOf"):
            if schema.get(key):
                return self.value(schema[key][0], depth + 1)
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        match kind:
            case "object":
                required = schema.get("required", ())
                properties = schema.get("properties", {}).items()
                given = [(name, each) for name, each in properties if variant or name in required]
                return {name: self.value(each, depth + 1) for name, each in given}
            case "array":
                num = max(min(variant, 2), schema.get("minItems", 0))
                return [self.value(schema.get("items", {}), depth + 1)] * num
            case "integer" | "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
                high = schema.get("maximum", schema.get("exclusiveMaximum", low + 1 + variant) - 1)
                value = min(low + variant, high)
                return value if kind == "integer" else float(value)
            case "boolean":
                return variant % 2 == 1
            case "null":
                return None
        text = self.texts[variant % len(self.texts)]
        return text.ljust(schema.get("minLength", 0), "a")[
            : schema.get("maxLength", len(text) + 99)
        ]
