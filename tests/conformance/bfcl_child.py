"""Judge answers of BFCL's Java and JavaScript categories by bfcl-eval; runs in `.ci/conformance_env.sh`'s environment.

stdin: one JSON object a line, with `language`, a `row`, and `text`, or `calls` of a model that has a format of its own.
stdout: a list with true or false for each. An empty module stands for the one that imports every provider's client.
"""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

models = ModuleType("bfcl_eval.constants.model_config")
models.MODEL_CONFIG_MAPPING = {"none": SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
sys.modules[models.__name__] = models

from bfcl_eval.constants.enums import Language  # noqa: E402
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker  # noqa: E402
from bfcl_eval.model_handler.parser.java_parser import parse_java_function_call  # noqa: E402
from bfcl_eval.model_handler.parser.js_parser import parse_javascript_function_call  # noqa: E402

PARSERS = {"java": parse_java_function_call, "javascript": parse_javascript_function_call}


def verdict(asked: dict[str, Any]) -> bool:
    """Return whether an answer is valid; what bfcl-eval cannot read is not."""
    row, language, category = asked["row"], asked["language"], f"simple_{asked['language']}"
    try:
        code = asked["text"].strip("`\n ").removeprefix("[").removesuffix("]")
        calls = asked["calls"] or PARSERS[language](code)
        result = ast_checker(
            row["function"], calls, row["ground_truth"], Language(language), category, "none"
        )
    except Exception:  # noqa: BLE001 - its runner counts every exception as a wrong answer
        return False
    return bool(result["valid"])


print(json.dumps([verdict(json.loads(line)) for line in sys.stdin]))
