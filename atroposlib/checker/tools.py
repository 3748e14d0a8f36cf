"""Call the tools of a `ToolEnv`: with arguments made from their schemas, and as the scripted answers call them."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from atroposlib.checker.calls import copy_of, describe
from atroposlib.checker.execution import Execution

NUM_VARIANTS = 3
"""Calls of each tool with made-up arguments: the required ones, then twice all of them."""
CODE_FAULTS = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)
"""Errors that no argument should cause: the arguments have the declared types."""
_WITHOUT_ERROR = ("tool_error_timeout", "tool_error_result", "tool_error_hung")
"""Counts of calls that failed although the tool raised nothing."""
_MAX_DEPTH = 6


class ToolCalls:
    """How calls of an environment's tools ended."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._returned: Counter[str] = Counter()
        self._raised: dict[str, Exception] = {}
        """The first error of each tool that was called."""
        self._failed: set[str] = set()
        self._env: Any = execution.env
        self._tools: dict[str, Any] = getattr(self._env, "tools_by_name", {})
        for name, tool in self._tools.items():
            self._tools[name] = self._noting(tool)

    def _noting(self, tool: Any) -> Any:
        async def run(arguments: dict[str, Any], episode: Any) -> Any:
            try:
                result = await tool.run(arguments, episode)
            except Exception as error:
                if getattr(error, "kind", None) == "arguments":  # refused as they should be
                    raise
                self._raised.setdefault(tool.name, error)
                if isinstance(error, CODE_FAULTS):
                    self._fail(tool.name, arguments, describe(error))
                raise
            self._returned[tool.name] += 1
            return result

        return dataclasses.replace(tool, run=run)  # a `Tool`

    async def try_all(self) -> None:
        """Call each tool with arguments made from its schema."""
        for tool in list(self._tools.values()):
            episode = await _awaited(self._env.reset(copy_of(self._execution.items[0])))
            try:
                for variant in range(NUM_VARIANTS):
                    await self._try(tool, arguments_of(tool.parameters, variant), episode)
            finally:
                await _awaited(self._env.end(episode))

    async def _try(self, tool: Any, arguments: dict[str, Any], episode: Any) -> None:
        env, call = self._env, SimpleNamespace(name=tool.name, arguments=arguments)
        with self._execution.judging("tools_work", what=f"{tool.name}: "):
            before = Counter(env.counts)
            text = await self._execution.within(env.result_of(call, episode), tool.name)
            if any(env.counts[kind] > before[kind] for kind in _WITHOUT_ERROR):
                self._fail(tool.name, arguments, text.removeprefix("Error: "))

    def _fail(self, name: str, arguments: Mapping[str, Any], why: str) -> None:
        """Add evidence, once for each tool."""
        if name not in self._failed:
            self._failed.add(name)
            given = ", ".join(f"{key}={value!r:.40}" for key, value in arguments.items())
            self._execution.report.fail("tools_work", f"{name}({given}): {why}")

    def judge(self) -> None:
        """Count the tools that worked; the rule is not checked if one raised each time it was called."""
        report = self._execution.report
        report.look("tools_work", self._returned.total())
        if self._tools and not self._returned and not self._raised:
            report.skip("no tool accepted the arguments made for it", "tools_work")
        for name, error in self._raised.items():
            if not self._returned[name]:
                reason = (
                    f"{name} raised each time it was called, first {describe(error)};"
                    " define example_answers that call it with arguments that exist"
                )
                report.skip(reason, "tools_work")


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def arguments_of(schema: Mapping[str, Any], variant: int) -> dict[str, Any]:
    """Return arguments that fit a JSON schema of objects; variant 0 has the required ones only.

    >>> schema = {"properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
    >>> arguments_of(schema, 0), arguments_of(schema, 1)
    ({'a': 1}, {'a': 2, 'b': 'y'})
    """
    value = _value({**schema, "type": "object"}, variant, schema.get("$defs", {}), 0)
    return value if isinstance(value, dict) else {}


def _value(schema: Any, variant: int, definitions: Mapping[str, Any], depth: int) -> Any:
    """Return a value of a schema; None beyond `_MAX_DEPTH`."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _value(definitions.get(name), variant, definitions, depth + 1)
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][variant % len(schema[key])]
    for key in ("const", "default"):
        if key in schema and (key == "const" or variant == 0):
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value(schema[key][0], variant, definitions, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object":
            required = schema.get("required", ())
            properties = schema.get("properties", {}).items()
            given = [(name, each) for name, each in properties if variant or name in required]
            return {name: _value(each, variant, definitions, depth + 1) for name, each in given}
        case "array":
            num = max(variant, schema.get("minItems", 0))
            return [_value(schema.get("items", {}), variant, definitions, depth + 1)] * num
        case "integer" | "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
            high = schema.get("maximum", schema.get("exclusiveMaximum", low + 1 + variant) - 1)
            value = min(low + variant, high)
            return value if kind == "integer" else float(value)
        case "boolean":
            return variant % 2 == 1
        case "null":
            return None
    text = ("1", "1 + 1", "two words")[variant % 3]
    return text.ljust(schema.get("minLength", 0), "a")[: schema.get("maxLength", len(text) + 99)]
