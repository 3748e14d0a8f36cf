"""Translate a question about a table into SQL; the query is run in SQLite.

The model sees the table's columns and three rows, thinks, and boxes one query. The reward is 1 if its result equals
that of the recorded query, in any order of the rows and without regard to case, on the table and on each half of its
rows, so that a result written into the query earns nothing; another result, an error, or a query that does not read the
table is -1. Queries run in a worker process, on a connection that permits nothing but reading, with a time limit. If a
whole group is right, shorter is better.

Data: WikiSQL (downloaded once), or JSONL rows with `question`, `header`, `types` (text or real), `rows`, and `sql` in
WikiSQL's form (`sel`, `agg`, `conds`) or as a text `query`.
Needs: nothing.

    python environments/sql_query_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tarfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.envs.answers import THINK_FIRST, after_thinking_once, boxes_in
from atroposlib.envs.base import ScoredDataGroup
from atroposlib.envs.dataset_env import DatasetEnv, DatasetEnvConfig, Outcome, Split
from atroposlib.envs.lengths import prefer_shorter
from atroposlib.envs.rewards import RewardFailure
from atroposlib.utils.files import replace_file

WIKISQL_URL = "https://github.com/salesforce/WikiSQL/raw/master/data.tar.bz2"
AGGREGATES = ["", "MAX", "MIN", "COUNT", "SUM", "AVG"]
COMPARISONS = ["=", ">", "<"]
QUERY_TIMEOUT_S = 2.0
MAX_RESULT_ROWS = 10_000
MAX_VALUE_BYTES = 1_000_000
_READING = (
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WikiSqlRows:
    """A split of WikiSQL: train, dev or test."""

    split: str

    def load(self) -> list[dict[str, Any]]:
        """Download the data set, or read it from the cache, and return the rows with their tables."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atroposlib"
        path = cache / "wikisql.tar.bz2"
        if not path.is_file():
            with urllib.request.urlopen(WIKISQL_URL, timeout=60) as response:
                content = response.read()
            replace_file(path, content)
        with tarfile.open(path) as archive:
            tables = {table["id"]: table for table in _lines(archive, f"{self.split}.tables")}
            return [tables[row["table_id"]] | row for row in _lines(archive, self.split)]


def _lines(archive: tarfile.TarFile, name: str) -> list[dict[str, Any]]:
    file = archive.extractfile(f"data/{name}.jsonl")
    assert file is not None
    return [json.loads(line) for line in io.TextIOWrapper(file, encoding="utf-8")]


class Question(NamedTuple):
    text: str
    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    query: str


class SQLQueryConfig(DatasetEnvConfig):
    group_size: int = 8
    max_token_length: int = 2048
    min_trained_tokens: int = 10
    seed: int = 42
    num_eval_rows: int = 500


class SQLQueryEnv(DatasetEnv):
    """Single turn, reward by execution."""

    name = "sql_query"
    env_config_cls = SQLQueryConfig
    config: SQLQueryConfig
    train_data = WikiSqlRows(split="train")
    eval_data = WikiSqlRows(split="dev")
    truncated_score = -1.0
    system_prompt = THINK_FIRST

    def load_rows(self, split: Split) -> list[Question] | None:
        """Return the rows of a split; of WikiSQL's evaluation split the first `num_eval_rows`."""
        rows: list[Question] | None = super().load_rows(split)
        return rows[: self.config.num_eval_rows] if split == "eval" and rows else rows

    def parse_row(self, row: dict[str, Any]) -> Question | None:
        """Return the question; one whose query compares in an unknown way, or whose table has gaps, is skipped."""
        columns = unique(row["header"])
        query = row.get("query") or query_of(
            columns, **{k: row["sql"][k] for k in ("sel", "agg", "conds")}
        )
        lengths = {len(columns), len(row["types"]), *map(len, row["rows"])}
        if query is None or len(lengths) > 1:
            return None
        return Question(row["question"], columns, row["types"], row["rows"], query)

    def prompt(self, row: Question) -> str:
        rows = "\n".join(json.dumps(values) for values in row.rows[:3])
        return (
            f"{schema_of(row.columns, row.types)}\n\nSome of its rows:\n{rows}\n\n"
            f"Write one SQLite query that answers this question, inside \\boxed{{}}: {row.text}"
        )

    def example_answers(self, item: Question) -> list[str]:
        """Return the recorded query. Not a `gold_answer`: some queries of WikiSQL have no result."""
        return [f"<think>I read the table.</think> \\boxed{{{item.query}}}"]

    async def score(self, row: Question, answer: str) -> Outcome:
        """Return 1 for the right result, else -1; None if the recorded query has no result, only NULL, or fails."""
        boxes = boxes_in(after_thinking_once(answer) or "")
        query = boxes[0].rstrip(";") if len(boxes) == 1 else ""
        queries = [row.query, query]
        for rows in (row.rows, row.rows[::2], row.rows[1::2]):
            results = await self.in_worker(results_of, row.columns, row.types, rows, queries)
            if isinstance(results, RewardFailure):
                return results
            gold, found = results
            if gold is None:  # an error, or it took too long
                return None
            if rows is row.rows:
                if set(gold) <= {"[null]"}:  # any query that finds nothing would be right
                    return None
                self.record("train/execution_success", found is not None)
            # Of no rows, an aggregate is NULL, and `ORDER BY ... LIMIT 1` finds nothing.
            if found is None or (found != gold and {*found, *gold} - {"[null]"}):
                return -1.0
        return 1.0

    def shape_group(self, row: Question, group: ScoredDataGroup) -> ScoredDataGroup:
        """Prefer shorter answers if all are right."""
        return prefer_shorter(group, self.config.max_token_length)


def results_of(
    columns: list[str], types: list[str], rows: list[list[Any]], queries: list[str]
) -> list[list[str] | None]:
    """Run queries on a table; return the sorted rows of each as text, None for an error. Runs in a worker."""
    database = sqlite3.connect(":memory:")
    database.execute(schema_of(columns, types))
    holes = ", ".join("?" * len(columns))
    database.executemany(
        f"INSERT INTO data VALUES ({holes})",
        [
            [number_or_text(value, kind) for value, kind in zip(row, types, strict=True)]
            for row in rows
        ],
    )
    database.commit()
    database.execute("PRAGMA query_only = ON")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    return [_run(database, query) for query in queries]


def _run(database: sqlite3.Connection, query: str) -> list[str] | None:
    tables_read: set[str | None] = set()

    def permit(action: int, table: str | None, *rest: object) -> int:
        if action == sqlite3.SQLITE_READ:
            tables_read.add(table)
        return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY

    deadline = time.monotonic() + QUERY_TIMEOUT_S
    database.set_authorizer(permit)
    database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    try:
        rows = database.execute(query).fetchmany(MAX_RESULT_ROWS)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    return (
        sorted(json.dumps([_plain(value) for value in row]) for row in rows)
        if "data" in tables_read
        else None
    )


def _plain(value: Any) -> Any:
    """Return a value so that equal results are equal: text in lower case, numbers as float."""
    if isinstance(value, int | float):
        return round(float(value), 6)
    return None if value is None else str(value).strip().lower()


def number_or_text(value: Any, kind: str) -> Any:
    """Return the number in a value of a real column, without thousands separators; other values unchanged.

    >>> number_or_text("1,234", "real"), number_or_text("7", "text")
    (1234.0, '7')
    """
    if kind == "real" and isinstance(value, str):
        try:
            return float(value.replace(",", ""))
        except ValueError:
            return value
    return value


def unique(header: Sequence[str]) -> list[str]:
    """Return names of columns that differ in more than case.

    >>> unique(["Year", "year", ""])
    ['Year', 'year_2', 'column_3']
    """
    names: list[str] = []
    for number, given in enumerate(header, start=1):
        name = given.replace('"', "'") or f"column_{number}"
        is_known = name.lower() in (known.lower() for known in names)
        names.append(f"{name}_{number}" if is_known else name)
    return names


def schema_of(columns: Sequence[str], types: Sequence[str]) -> str:
    """Return the statement that creates the table; texts are compared without regard to case."""
    kinds = ["REAL" if kind == "real" else "TEXT COLLATE NOCASE" for kind in types]
    described = [f'"{name}" {kind}' for name, kind in zip(columns, kinds, strict=True)]
    return f"CREATE TABLE data ({', '.join(described)})"


def query_of(
    columns: Sequence[str], sel: int, agg: int, conds: Sequence[Sequence[Any]]
) -> str | None:
    """Return a query in WikiSQL's form as text; None for a comparison that SQL does not have.

    >>> query_of(["name", "No. of"], 1, 1, [[0, 0, "O'Neil"], [1, 1, 3]])
    'SELECT MAX("No. of") FROM data WHERE "name" = \\'O\\'\\'Neil\\' AND "No. of" > 3'
    """
    selected = f'"{columns[sel]}"'
    tests = []
    for column, comparison, value in conds:
        if comparison >= len(COMPARISONS):
            return None
        text = str(value).replace("'", "''")
        literal = str(value) if isinstance(value, int | float) else f"'{text}'"
        tests.append(f'"{columns[column]}" {COMPARISONS[comparison]} {literal}')
    where = f" WHERE {' AND '.join(tests)}" if tests else ""
    return (
        f"SELECT {AGGREGATES[agg]}({selected}) FROM data{where}"
        if agg
        else f"SELECT {selected} FROM data{where}"
    )


if __name__ == "__main__":
    SQLQueryEnv.cli()
