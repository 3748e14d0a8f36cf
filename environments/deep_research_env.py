"""Research a question: search pages, read them, and answer with citations.

The model has two tools, `search` and `read`, over local pages (BM25), or with --env.search_api over the web by one of
`SERVICES` in `atroposlib/envs/search.py`; a page's title is then its address. It answers inside `<answer>` tags and
cites the pages it read as [[Title]]. A wrong answer scores 0. A right one scores 0.5, plus up to 0.5 for the citations:
the F1 of the cited pages against those that support the answer. A page that was not read does not count as support.

Data: the distractor setting of hotpotqa/hotpot_qa, or JSONL rows with `question`, `answer`, `supporting_facts` and
`context` in its form; the pages are those of all rows, or of --env.pages_path (JSONL with `title` and `text`).
Needs: extras datasets.

    python environments/deep_research_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.answers import only_tagged, solution_of, words_of
from atroposlib.envs.dataset_env import Split
from atroposlib.envs.multi_turn_env import Episode, Step, in_turns
from atroposlib.envs.rows import HubRows, read_jsonl
from atroposlib.envs.search import LocalPages, SearchEngine, WebPages
from atroposlib.envs.tool_env import ToolEnv, ToolEnvConfig, ToolFailure, hermes_call, tool_from

ANSWER_SCORE = 0.5
"""Score of a right answer without citations; the rest is for these."""
_CITATION = re.compile(r"\[\[((?:(?!\[\[).)+?)\]\]")


class Topic(NamedTuple):
    question: str
    answer: str
    sources: list[str]
    """Titles of the pages that support the answer."""
    pages: dict[str, str]
    """Title -> text of pages that belong to the question."""


class DeepResearchConfig(ToolEnvConfig):
    group_size: int = 8
    max_token_length: int = 2048
    max_turns: int = 10
    temperature: float = 0.7
    seed: int = 42
    num_rows: int = Field(default=2000, ge=1)
    """Rows of each split that are used, so that the index of their pages fits into memory (10 pages a row)."""
    pages_path: str | None = None
    """JSONL file of pages with `title` and `text`; None: the pages of the rows."""
    search_api: Literal["brave", "serper", "tavily"] | None = None
    """Search the web by this service, with its key from the environment (BRAVE_API_KEY, ...); None: local pages."""
    search_url: str | None = None
    """Address of a service with the same interface; None: the service's own."""
    num_hits: int = Field(default=5, ge=1)
    """Pages that one search returns."""


class DeepResearchEnv(ToolEnv):
    """Search, read, answer, cite."""

    name = "deep_research"
    env_config_cls = DeepResearchConfig
    config: DeepResearchConfig
    train_data = HubRows(path="hotpotqa/hotpot_qa", config="distractor")
    eval_data = HubRows(path="hotpotqa/hotpot_qa", config="distractor", split="validation")
    engine: SearchEngine | None = None
    """Set by a subclass to search elsewhere; None: as configured."""
    system_prompt = (
        "Research the question: search, read the pages that matter, then answer. Give the short answer inside "
        "<answer> </answer> tags, and after it cite every page that supports it as [[Title]]."
    )

    def __init__(self, config: DeepResearchConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.tools_by_name |= {"search": tool_from(self.search), "read": tool_from(self.read)}
        self._found: SearchEngine = LocalPages({})

    async def setup(self) -> None:
        """Load the rows and index the pages."""
        await super().setup()
        if self.engine is not None:
            self._found = self.engine
        elif self.config.search_api is not None:
            self._found = WebPages(self.config.search_api, url=self.config.search_url)
        elif self.config.pages_path is not None:
            pages = read_jsonl(self.config.pages_path, flag="pages_path")
            self._found = LocalPages({page["title"]: page["text"] for page in pages})
        else:
            rows = [*self.train_rows, *self.eval_rows]
            self._found = LocalPages({t: text for row in rows for t, text in row.pages.items()})

    def load_rows(self, split: Split) -> list[Topic] | None:
        rows: list[Topic] | None = super().load_rows(split)
        return rows and rows[: self.config.num_rows]

    def parse_row(self, row: dict[str, Any]) -> Topic:
        context = row["context"]
        texts = ["".join(sentences).strip() for sentences in context["sentences"]]
        sources = sorted(set(row["supporting_facts"]["title"]))
        pages = dict(zip(context["title"], texts, strict=True))
        return Topic(row["question"], row["answer"], sources, pages)

    def prompt(self, row: Topic) -> str:
        return row.question

    async def search(self, query: str) -> list[dict[str, str]]:
        """Find pages; returns their titles with the beginning of their texts."""
        hits = await self._found.search(query, limit=self.config.num_hits)
        return [hit._asdict() for hit in hits]

    async def read(self, title: str, episode: Episode) -> str:
        """Return the whole text of the page with exactly this title."""
        try:
            text = await self._found.read(title)
        except KeyError as error:
            raise ToolFailure("exception", f"there is no page {title!r}; search for it") from error
        episode.state.setdefault("read", set()).add(title)
        return text

    def example_answers(self, item: Topic) -> list[Callable[[str], str]]:
        calls = [hermes_call("read", title=title) for title in item.sources]
        citations = " ".join(f"[[{title}]]" for title in item.sources)
        return [in_turns([*calls, f"<answer>{item.answer}</answer> {citations}"])]

    async def step(self, episode: Episode, answer: str) -> Step:
        if self.parse_calls(answer):
            return await super().step(episode, answer)
        read = episode.state.get("read", set())
        return Step(reward=research_score(episode.row, answer, read), done=True, reason="answered")


def research_score(topic: Topic, text: str, read: set[str]) -> float:
    """Return the score of a final answer after the pages of `read` were read.

    >>> topic = Topic("?", "The Seine", ["Paris", "Seine"], {})
    >>> research_score(topic, "<answer>Seine.</answer> [[Paris]] [[Seine]]", {"Paris", "Seine"})
    1.0
    >>> research_score(topic, "<answer>Seine</answer>", {"Paris"})
    0.5
    """
    text = solution_of(text)
    given = only_tagged(text, "answer")
    if given is None or words_of(given) != words_of(topic.answer):
        return 0.0
    cited = set(_CITATION.findall(text))
    if not cited and not topic.sources:
        return 1.0
    num_good = len(cited & set(topic.sources) & read)
    return ANSWER_SCORE + (1 - ANSWER_SCORE) * 2 * num_good / (len(cited) + len(topic.sources))


if __name__ == "__main__":
    DeepResearchEnv.cli()
