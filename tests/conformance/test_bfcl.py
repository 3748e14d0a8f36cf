"""BFCL's Java and JavaScript categories against bfcl-eval: its rows, its parsers and its AST checker.

Answers are made of the expected calls of each row: as they are, in other forms, and with an argument changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments.helpers_environments import load

pytestmark = pytest.mark.conformance

VENV = Path(os.environ.get("ATROPOS_CONFORMANCE_VENV", "no")).absolute()
DIFFERENCES = {
    "content of a map": "bfcl-eval's parser drops the body of `new HashMap<>() {{ put(...); }}`; here it counts. Ours",
    "elements of a collection": "bfcl-eval keeps the quotes of elements of a `String` array and takes those of an"
    " `ArrayList` of any type for texts, so that no quoted one is right; here they are values. Ours",
    "text around a collection": "bfcl-eval finds a collection inside a native argument, as in `[1]x`; here it is all of"
    " the argument. Ours",
}
"""What differs, with the reason; ours judges a right answer as right, where bfcl-eval's figures are lower."""
AROUND = re.compile(r"[\]})][Lfnx.0]+$|^[\"(]new [AHO]")
FORMS: dict[str, Callable[[str], str]] = {
    "usual": str,
    "bare": lambda text: text[1:-1],
    "fence": lambda text: f"```{text}```",
    "semicolon": lambda text: f"{text[:-1]};]",
    "spaces": lambda text: text.replace("=", " = ").replace(", ", " , ").replace("(", "(\n", 1),
    "capitals": str.upper,
    "another name": lambda text: f"[x{text[1:]}",
    "twice": lambda text: f"[{text[1:-1]}, {text[1:]}",
    "open": lambda text: f"{text[:-2]}]",
    "unnamed": lambda text: text.replace("(", "(1, ", 1),
    "unknown": lambda text: text.replace("(", "(unknown=1, ", 1),
}
CHANGES: dict[str, Callable[[str], str]] = {
    "other quotes": lambda text: text.replace('"', "'"),
    "no quotes": lambda text: text.strip('"'),
    "quotes": lambda text: f'"{text}"',
    "parentheses": lambda text: f"({text})",
    "no suffix": lambda text: text.rstrip("Lfn"),
    "fraction": lambda text: f"{text}.0",
    **{suffix: lambda text, suffix=suffix: text + suffix for suffix in "Lfnx"},  # type: ignore[misc]
    **{
        other: lambda _, other=other: other  # type: ignore[misc]
        for other in ("null", "true", "-3", "[]", "{}", "new ArrayList<>()", "new HashMap<>()", "(x) -> x", "f(1, 'b')")
    },
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["java", "javascript"])
async def test_verdicts_agree_with_bfcl_eval(made: Any, language: str) -> None:
    data = VENV.glob("lib/python*/site-packages/bfcl_eval/data")
    if not (folder := next(data, None)):
        pytest.skip("set ATROPOS_CONFORMANCE_VENV, see .ci/conformance_env.sh")
    module, category = load("eval_environments.bfcl_eval"), f"simple_{language}"
    envs = {form: made(module.BfclEnv, call_form=form) for form in ("python", "native")}
    asked, scores = [], []
    for read in module.BfclRows(path=str(folder), category=category).load():
        row = envs["python"].parse_row(read | {"category": category})
        gold = envs["python"].gold_answer(row)
        texts = [form(gold) for form in FORMS.values()]
        native = json.loads(envs["native"].gold_answer(row).split("\n")[1])
        calls = [native]
        for number, change in enumerate(CHANGES.values()):
            name, value = [*native["arguments"].items()][number % len(native["arguments"])]
            calls.append({**native, "arguments": native["arguments"] | {name: change(value)}})
            code = f'"{value}"' if f'{name}="' in gold else value
            texts.append(gold.replace(f"{name}={code}", f"{name}={change(code)}"))
        for text in texts:
            asked.append({"row": read, "text": text, "calls": None})
            scores.append(await envs["python"].score(row, text))
        for call in calls:
            asked.append({"row": read, "text": "", "calls": [{call["name"]: call["arguments"]}]})
            written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            scores.append(await envs["native"].score(row, written))
    verdicts = theirs([each | {"language": language} for each in asked])
    counts: Counter[tuple[str, bool]] = Counter()
    for each, score, verdict in zip(asked, scores, verdicts, strict=True):
        counts[named(each), score == verdict] += 1
    print(language, dict(counts))
    assert counts["", True] >= 500
    assert counts["", True] >= 0.99 * (counts["", True] + counts["", False])
    found = {name for name, is_equal in counts if name and not is_equal}
    assert found == (set(DIFFERENCES) if language == "java" else {"text around a collection"})


def theirs(asked: list[dict[str, Any]]) -> list[bool]:
    """Return bfcl-eval's verdicts."""
    done = subprocess.run(
        [VENV / "bin/python", Path(__file__).with_name("bfcl_child.py")],
        input="\n".join(map(json.dumps, asked)),
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def named(asked: dict[str, Any]) -> str:
    """Return the name of the difference that an answer may meet, or ""."""
    calls = [arguments for call in asked["calls"] or () for arguments in call.values()]
    if any(AROUND.search(text) for arguments in calls for text in arguments.values()):
        return "text around a collection"
    types = asked["row"]["function"][0]["parameters"]["properties"].values()
    kinds = {(each["type"], each.get("items", {}).get("type")) for each in types}
    if kinds & {("Array", "String"), ("ArrayList", "any")}:
        return "elements of a collection"
    return "content of a map" if "{{" in asked["text"] else ""
