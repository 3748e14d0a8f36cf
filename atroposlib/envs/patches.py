"""Patches of text files: apply a unified diff or SEARCH/REPLACE edits, and compare two patches.

Pure functions. An edit is a line `### path/of/the/file.py`, then the marks `<<<<<<< SEARCH`, `=======` and
`>>>>>>> REPLACE`, each on its own line, with the lines to replace and the new lines between them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

Files: TypeAlias = Mapping[str, Sequence[str]]
"""Path -> lines."""

EDIT_FORM = """\
Give only edits, in this form; SEARCH has whole lines of the file, with their indentation, and an empty SEARCH makes a
new file:
### path/of/the/file.py
<<<<<<< SEARCH
lines to replace
=======
new lines
>>>>>>> REPLACE
"""
"""How to write edits, for a prompt."""

_FILE_DIFF = re.compile(r"^--- (?:a/)?(\S+).*\n\+\+\+ (?:b/)?(\S+).*\n(?=@@)", re.MULTILINE)
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def apply_diff(files: Files, diff: str) -> dict[str, list[str]]:
    """Return the files after a unified diff; ValueError if it does not apply.

    >>> apply_diff({"a": ["x", "y"]}, "--- a/a\\n+++ b/a\\n@@ -1,2 +1,2 @@\\n x\\n-y\\n+z\\n")
    {'a': ['x', 'z']}
    """
    after = {path: list(lines) for path, lines in files.items()}
    parts = _FILE_DIFF.split(diff)[1:]
    if not parts:
        raise ValueError("the patch changes no file")
    for old, new, hunks in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if old != "/dev/null" and old not in after:
            raise ValueError(f"{old} is not among the files")
        before = [] if old == "/dev/null" else after.pop(old)
        result = _apply_hunks(before, hunks.split("\n"))
        after[old if new == "/dev/null" else new] = result
    return after


def patched(texts: Mapping[str, str], diff: str) -> dict[str, str]:
    """Return texts after a unified diff; ValueError if it does not apply."""
    after = apply_diff(lines_of(texts), diff)
    return {path: "\n".join(lines) for path, lines in after.items()}


def lines_of(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of texts; joined by newlines they are the texts."""
    return {path: text.split("\n") for path, text in texts.items()}


def _apply_hunks(before: Sequence[str], lines: Sequence[str]) -> list[str]:
    result: list[str] = []
    position = num_old = num_new = 0
    for line in lines:
        if match := _HUNK.match(line):
            start, num_old, num_new = (int(number or 1) for number in match.groups())
            start -= num_old > 0
            result += before[position:start]
            position = start
        elif num_old > 0 or num_new > 0:
            kind, text = line[:1] or " ", line[1:]
            if kind == "\\":  # "No newline at end of file"
                continue
            if kind in " -" and before[position : position + 1] != [text]:
                raise ValueError(f"line {position + 1} is not {text!r}")
            result += [] if kind == "-" else [text]
            position += kind != "+"
            num_old -= kind != "+"
            num_new -= kind != "-"
    return [*result, *before[position:]]


class Edit(NamedTuple):
    """One SEARCH/REPLACE edit."""

    path: str
    search: list[str]
    replacement: list[str]


def edits_of(text: str) -> list[Edit] | None:
    """Return the edits of a text, which may fence them as code blocks; None without one, or if one is malformed."""
    edits: list[Edit] = []
    edit: Edit | None = None
    part: list[str] | None = None
    path = ""
    for line in text.split("\n"):
        mark = line.rstrip()
        if edit is None or part is None:
            if mark.startswith("### "):
                path = mark[4:].strip(" `")
            elif mark == "<<<<<<< SEARCH":
                edit = Edit(path, [], [])
                part = edit.search
        elif mark == "=======" and part is edit.search:
            part = edit.replacement
        elif mark == ">>>>>>> REPLACE" and part is edit.replacement:
            edits.append(edit)
            edit = None
        else:
            part.append(line)
    is_whole = edit is None and all(each.path for each in edits)
    return edits if edits and is_whole else None


def apply_edits(files: Files, text: str) -> dict[str, list[str]] | None:
    """Return the files after the edits of a text; None if one is malformed or does not apply, or nothing changes.

    >>> edit = "### a\\n```\\n<<<<<<< SEARCH\\n y\\n=======\\n z\\n>>>>>>> REPLACE\\n```"
    >>> apply_edits({"a": ["x", " y"]}, edit), apply_edits({"a": ["x", "y"]}, edit)
    ({'a': ['x', ' z']}, None)
    """
    after = {path: list(lines) for path, lines in files.items()}
    for path, search, replacement in edits_of(text) or []:
        lines = after.setdefault(path, [])
        place = _place_of(search, lines)
        if place is None:
            return None
        lines[place : place + len(search)] = replacement
    return after if changed(files, after) else None


def edits_for(before: Files, after: Files) -> str:
    """Return the edits of whole files that make `after` of `before`."""
    return "\n".join(
        "\n".join(
            [
                f"### {path}",
                "<<<<<<< SEARCH",
                *before.get(path, []),
                "=======",
                *after.get(path, []),
                ">>>>>>> REPLACE",
            ]
        )
        for path in changed(before, after)
    )


def paths_of(diff: str) -> list[str]:
    """Return the paths that a unified diff changes.

    >>> paths_of("--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-a\\n+b\\n--- /dev/null\\n+++ b/y\\n@@ -0,0 +1 @@\\n+c\\n")
    ['x', 'y']
    """
    return sorted({path for pair in _FILE_DIFF.findall(diff) for path in pair} - {"/dev/null"})


def _place_of(search: Sequence[str], lines: Sequence[str]) -> int | None:
    """Return where the lines of `search` occur first; a blank search occurs only in an empty file."""
    if not "".join(search).strip():
        return None if lines else 0
    starts = (i for i, line in enumerate(lines) if line == search[0])
    return next((i for i in starts if lines[i : i + len(search)] == search), None)


def changed(before: Files, after: Files) -> list[str]:
    """Return the paths whose lines differ; a missing file has no lines."""
    paths = sorted({*before, *after})
    return [path for path in paths if list(before.get(path, [])) != list(after.get(path, []))]


def similarity_of_edits(before: Files, wanted: Files, text: str) -> float | None:
    """Return the similarity of the patch that the edits of a text make; None if `apply_edits` refuses them."""
    given = apply_edits(before, text)
    return None if given is None else similarity_of_patches(before, wanted, given)


def similarity_of_patches(before: Files, wanted: Files, given: Files) -> float:
    """Return the similarity of two patches, averaged over the files that either changes.

    >>> similarity_of_patches({"a": ["x"]}, {"a": ["y"]}, {"a": ["y"]})
    1.0
    >>> similarity_of_patches({"a": ["x"], "b": ["x"]}, {"a": ["y"], "b": ["x"]}, {"a": ["y"], "b": ["z"]})
    0.5
    """
    paths = sorted({*changed(before, wanted), *changed(before, given)})
    diffs = [
        [_words(before.get(path, []), after.get(path, [])) for after in (wanted, given)]
        for path in paths
    ]
    ratios = [
        difflib.SequenceMatcher(None, first, second, autojunk=False).ratio() if second else 0.0
        for first, second in diffs
    ]
    return sum(ratios) / len(ratios)


def _words(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the words, spaces and signs of a diff without its file names."""
    diff = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    return re.findall(r"\w+|\s+|.", "\n".join(diff))
