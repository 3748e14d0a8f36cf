"""The table of fields is what types, encodings and documents say, and blobs keep their bytes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib import wire
from atroposlib.api.schemas import ScoredData
from atroposlib.errors import GroupError
from atroposlib.scored_data import (
    FIELDS,
    WIRE_KEYS,
    Field,
    Level,
    ScoredDataGroup,
    ScoredDataItem,
    ScoredGroup,
    Strictness,
    check_group,
)

ROOT = Path(__file__).parents[1]
GOLDEN: dict[str, Any] = json.loads((ROOT / "tests/golden_groups.json").read_text())
"""Groups by what is special about them, with their blob, digest and JSON as clients and stores hold them."""


@pytest.mark.parametrize("name", GOLDEN)
def test_blobs_digests_and_json_keep_their_bytes(name: str) -> None:
    kept = GOLDEN[name]
    blob = base64.b64decode(kept["blob"])
    group = check_group(kept["group"], strictness=Strictness.WIRE)
    assert wire.pack_group(group) == blob
    assert wire.content_digest(blob).hex() == kept["digest"]
    assert wire.encode_json(wire.unpack_group(blob, strictness=Strictness.WIRE)) == (
        kept["json"].encode()
    )


def test_golden_groups_hold_every_field() -> None:
    assert set(GOLDEN["versions"]["group"]) == {field.name for field in FIELDS}


def test_types_have_the_fields_of_the_table() -> None:
    names = [field.name for field in FIELDS]
    assert list(ScoredDataGroup.__annotations__) == names
    assert set(names) <= set(ScoredGroup.__dataclass_fields__)
    assert list(ScoredData.model_fields) == list(WIRE_KEYS)
    by_sequence = {field.name for field in FIELDS if field.level is not Level.GROUP}
    assert by_sequence <= set(ScoredDataItem.__annotations__) <= set(names)


def span(start: Any, num_tokens: Any, version: Any = "3") -> dict[str, Any]:
    return {"start": start, "num_tokens": num_tokens, "weight_version": version}


def row(field: Field) -> str:
    """Return the field's row in the README."""
    lists = {"messages": "list of messages", "weight_versions": "list of spans"}
    kinds = {int: "int", float: "float", str: "string", object: "any JSON", dict: "object"}
    kind = lists.get(field.name) or kinds[field.kind]
    per = f"{field.level.value}, or sequence" if field.may_be_per_sequence else field.level.value
    said = ["*Required.* "] if field.is_required else [] if field.is_original else ["*Native.* "]
    return f"| `{field.name}` | {kind} | {per} | {''.join(said)}{field.meaning} |"


def test_the_readme_has_the_table() -> None:
    rows = [row(field) for field in FIELDS]
    table = "\n".join(["| key | value | one per | meaning |", "|---|---|---|---|", *rows])
    assert f"<!-- fields -->\n{table}\n\n" in (ROOT / "atroposlib/api/README.md").read_text()


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([[{"start": 0}], []], r"\[0\]\.weight_versions\[0\]: expected num_tokens, start"),
        ([[7], []], r"\[0\]\.weight_versions\[0\]: expected num_tokens, start"),
        ([[], 7], r"\[1\]\.weight_versions: expected one list"),
        ([[]], "1 entries for 2 sequences"),
        ([[], [span(1, 2)]], r"\[1\]\.weight_versions\[0\]: 2 tokens from 1 are not within 0\.\.2"),
        (
            [[span(1, 1), span(1, 1)], []],
            r"\[0\]\.weight_versions\[1\]: 1 tokens from 1 are not wi",
        ),
        ([[span(-1, 1)], []], "1 tokens from -1"),
        ([[span(0, -1)], []], "-1 tokens from 0"),
        ([[span(0, 1.5)], []], "num_tokens: expected a 64-bit integer"),
        ([[span(0, 1, None)], []], "weight_version: expected a 64-bit integer"),
        ([[span(0, 1, "9" * 30)], []], "weight_version: expected a 64-bit integer"),
        ([[span(0, 1, "9" * 5000)], []], "weight_version: expected a 64-bit integer"),
    ],
)
def test_spans_of_versions_lie_in_their_sequence(spans: Any, fault: str) -> None:
    group = {**GOLDEN["rollouts"]["group"], "weight_versions": spans}
    with pytest.raises(GroupError, match=fault):
        check_group(group, strictness=Strictness.WIRE)


@pytest.mark.parametrize(
    ("versions", "masks", "newest"),
    [
        (None, [-100, 6, 7], 3),
        (["3", "5", "4"], [-100, 6, 7], 5),
        (["9", "5", "4"], [-100, -100, 7], 4),
        (["3", "5", "default"], [-100, 6, 7], 3),
        (["3", "5", "4"], [-100, -100, -100], 3),
    ],
)
def test_the_hub_judges_a_group_by_the_newest_version_of_its_trained_tokens(
    versions: list[str] | None, masks: list[int], newest: int
) -> None:
    group: dict[str, Any] = {"tokens": [[5, 6, 7]], "masks": [masks], "scores": [1.0]}
    if versions is not None:
        spans = [{**span(i, 1), "weight_version": each} for i, each in enumerate(versions)]
        group["weight_versions"] = [spans]
    checked = check_group({**group, "policy_version": 3}, strictness=Strictness.WIRE)
    headers = [wire.header_of(checked), wire.check_blob(wire.pack_group(checked))]
    assert [header.policy_version for header in headers] == [newest, newest]
