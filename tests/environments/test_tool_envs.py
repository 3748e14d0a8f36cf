"""Environments of tool calls: the edges of their rewards."""

import io
import json
import tarfile
from typing import Any

import pytest

from atroposlib.envs.gold_calls import call_matches
from atroposlib.envs.search import LocalPages
from atroposlib.envs.tool_env import MalformedCall, ToolCall, ToolFailure
from atroposlib.envs.tool_env import hermes_call as call
from atroposlib.errors import ConfigError
from atroposlib.inference.harness import HarnessRequest
from atroposlib.scored_data import Strictness, check_group
from atroposlib.utils.local_server import serve_locally
from tests.environments.helpers_environments import load

fundamentals = load("fundamental_prediction_environment")
mcp_env = load("mcp_env")
tool_calling = load("tool_calling_server")
interleaved = load("tool_use_interleaved_thinking")
multiturn = load("tool_use_multiturn_server")
sql = load("sql_query_env")
research = load("deep_research_env")
turnlevel = load("tool_use_turnlevel_advantage_server")


@pytest.mark.parametrize(
    ("given", "expected", "matches", "matches_read"),
    [
        ({"n": 5}, {"n": 5}, True, True),
        ({"n": "5"}, {"n": 5}, False, True),
        ({"n": 5.0}, {"n": 5}, True, True),
        ({"n": "True"}, {"n": True}, False, True),
        ({"n": 1}, {"n": True}, False, False),
        ({"n": "[1, 2]"}, {"n": [1, 2]}, False, True),
        ({"n": ["1"]}, {"n": [1]}, False, True),
        ({"n": "{'a': 1}"}, {"n": {"a": 1}}, False, True),
        ({"n": [1, 2, 3]}, {"n": [1, 2]}, False, False),
        ({"n": {"a": 1, "b": 2}}, {"n": {"a": 1}}, True, True),
        ({"n": {"a": "1"}}, {"n": {"a": 1}}, False, True),
        ({"n": {"b": 2}}, {"n": {"a": 1}}, False, False),
        ({"n": "it's"}, {"n": "it's"}, True, True),
        ({"n": "NaN"}, {"n": "NaN"}, True, True),
        ({"n": None}, {"n": ""}, False, False),
        ({}, {"n": None}, False, False),
    ],
)
def test_arguments_have_the_expected_json_types_unless_texts_are_read(
    given: dict[str, Any], expected: dict[str, Any], matches: bool, matches_read: bool
) -> None:
    gold = ToolCall(name="f", arguments=expected)
    assert call_matches(ToolCall(name="f", arguments=given), gold) is matches
    read = call_matches(ToolCall(name="f", arguments=given), gold, reads_texts=True)
    assert read is matches_read
    assert not call_matches(ToolCall(name="g", arguments=given), gold)
    assert not call_matches(MalformedCall(reason="no JSON"), gold)


PRICE, STOCK = call("price", fruit="fig", count=3), call("stock", fruit="pear")
REQUEST = tool_calling.Request(
    "",
    "?",
    [
        ToolCall(name="price", arguments={"fruit": "fig", "count": 3}),
        ToolCall(name="stock", arguments={"fruit": "pear"}),
    ],
)


def test_a_row_without_a_readable_call_is_skipped(made: Any) -> None:
    env = made(tool_calling.SingleToolCallingEnv)
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<tool_call>{</tool_call>"}]
    assert env.parse_row({"conversations": turns}) is None
    turns[1]["value"] = STOCK
    assert env.parse_row({"conversations": turns}).calls == REQUEST.calls[1:]


TASK = mcp_env.Task("?", ToolCall(name="stock", arguments={"fruit": "pear"}), "18")


@pytest.mark.parametrize(
    ("turns", "answer", "score"),
    [
        ([STOCK, "<answer>18</answer>"], "18", 1.0),
        ([STOCK, "<think><answer>17</answer></think><answer>18</answer>"], "18", 1.0),
        ([STOCK, "<answer>17</answer>"], "18", -1.0),
        ([STOCK, "<answer>17</answer><answer>18</answer>"], "18", -1.0),
        ([STOCK, STOCK], "18", -1.0),
        (["<answer>18</answer>"], "18", -1.0),
        ([PRICE], "18", -1.0),
        ([STOCK + PRICE], "18", -1.0),
        ([STOCK], None, 1.0),
    ],
)
@pytest.mark.e2e
async def test_one_expected_call_reaches_the_mcp_server_over_http(
    started: Any, turns: list[str], answer: str | None, score: float
) -> None:
    mcpserver = pytest.importorskip("mcp.server.mcpserver")
    server = mcpserver.MCPServer("shop")
    asked = []

    @server.tool()  # type: ignore[untyped-decorator]
    def stock(fruit: str) -> int:
        asked.append(fruit)
        return 18

    @server.tool()  # type: ignore[untyped-decorator]
    def price(fruit: str, count: int) -> int:
        raise AssertionError("not expected")

    def respond(request: HarnessRequest) -> str:
        return turns[request.prompt.count("<assistant>") - 1]

    async with serve_locally(server.streamable_http_app()) as url:
        env = await started(mcp_env.McpEnv, respond, servers=[f"{url}/mcp"])
        row = TASK._replace(answer=answer)
        rollout = (await env.roll_out(row, 1, split="train"))[0]
        await env.close()
    assert rollout.outcome == score
    assert asked == (["pear"] if turns[0] == STOCK else [])


async def test_rows_that_expect_a_tool_of_no_server_are_refused(made: Any, tmp_path: Any) -> None:
    path = tmp_path / "rows.jsonl"
    gone = {"tool_name": "gone", "arguments": {}}
    path.write_text(json.dumps({"user_prompt_text": "?", "expected_mcp_call": gone}) + "\n")
    env = made(mcp_env.McpEnv, dataset_path=str(path))
    env.mcp_servers = []
    with pytest.raises(ConfigError, match=r"expect the tools \['gone'\]"):
        await env.setup()


class WithSearch(interleaved.InterleavedInlineEnv):  # type: ignore[misc, name-defined]
    search_engine = LocalPages({"Products": "two times three is 6"})


SIX = "It is six.</think> \\boxed{6}"


@pytest.mark.parametrize(
    ("turns", "score", "said"),
    [
        ([SIX], 1.0, ""),
        ([call("calculator", expr="sqrt(36)"), SIX], 1.2, "\n6.0\n"),
        ([call("python_interpreter", code="print(2 * 3)\nprint('ok')"), SIX], 1.2, "\n6\nok\n"),
        ([call("web_search", query="two times three"), SIX], 1.2, "two times three is 6"),
        ([call("calculator", expr="1 / 0"), SIX], 1.0, "ZeroDivisionError"),
        ([call("calculator"), SIX], 1.0, "Error: calculator: expr"),
        (["<tool_call>six</tool_call>", SIX], 1.0, "not valid JSON"),
        ([call("calculator", expr="6"), "It is seven.</think> \\boxed{7}"], -1.0, "\n6\n"),
        (["</think> \\boxed{5}, no, \\boxed{6}"], 1.0, ""),
        (["</think> \\boxed{6} or \\boxed{6"], -1.0, ""),
        (["</think> \\boxed{2 \\cdot 3}"], -1.0, ""),
        (["</think> \\boxed{6} or \\boxed{\\frac{10}{2}}"], -1.0, ""),
        (["\\boxed{6}"], -1.0, ""),
        (["</think> \\boxed{6} " + call("calculator", expr="6")], -1.0, ""),
        ([call("calculator", expr="6")] * 4, -1.0, "\n6\n"),
    ],
)
async def test_tools_run_inside_the_thinking_and_their_results_are_not_trained(
    made: Any, turns: list[str], score: float, said: str
) -> None:
    env = made(WithSearch, lambda request: turns[request.call])
    row = interleaved.Problem("?", "6")
    rollout = (await env.roll_out(row, 1, split="train"))[0]
    assert rollout.outcome == score
    assert said in rollout.completion
    [node] = rollout.nodes
    trained = env.tokenizer.decode([label for label in node.masked_tokens if label != -100], True)
    assert trained == "".join(turns)


@pytest.mark.parametrize("answer", ["1, 2", "x + 1", "nan"])
def test_problems_without_a_number_as_their_answer_are_skipped(made: Any, answer: str) -> None:
    env = made(interleaved.InterleavedInlineEnv)
    assert env.parse_row({"problem": "?", "answer": answer}) is None
    assert env.parse_row({"problem": "?", "answer": "1,234"}).answer == "1,234"


SAYS = {"from": "gpt", "value": "They cost 90."}
DIALOGUE = [
    {"from": "system", "value": "tools"},
    {"from": "human", "value": "What do two cost?"},
    {"from": "gpt", "value": f"<think>a</think>{PRICE}"},
    {"from": "tool", "value": "<tool_response>90</tool_response><tool_response>91</tool_response>"},
    SAYS,
    {"from": "human", "value": "And the stock?"},
    {"from": "gpt", "value": STOCK},
    {"from": "tool", "value": "<tool_response>18</tool_response>"},
    {"from": "gpt", "value": "18 are left."},
]


async def replayed(env_cls: Any, made: Any, turns: list[str], **settings: Any) -> Any:
    """Run one episode of `DIALOGUE` in which the model says `turns`."""
    settings = {"add_dynamic_few_shot": False, **settings}
    env = made(env_cls, lambda r: turns[r.call], **settings)
    row = env.parse_row({"conversations": DIALOGUE})
    return (await env.roll_out(row, 1, split="train"))[0]


@pytest.mark.parametrize(
    ("turns", "settings", "score"),
    [
        ([PRICE, STOCK], {}, 1.5),
        ([f"<think>a</think>\n{PRICE}", STOCK], {"validate_think_blocks": True}, -1.0),
        ([f"<think>a</think>\n{PRICE}", f"<think>a</think>{STOCK}"], {"validate_think_blocks": True}, 1.5),
        ([PRICE, PRICE], {}, -1.0),
        ([PRICE + STOCK], {}, -1.0),
        ([f"I call {PRICE}"], {}, -1.0),
        ([f"{PRICE}<tool_response>90</tool_response>"], {}, -1.0),
        ([PRICE, "Hm.", STOCK, "Hm."], {"generate_all_gpt_turns": True}, 1.5),
        ([PRICE, PRICE], {"generate_all_gpt_turns": True}, -1.0),
        ([PRICE, "Hm.", STOCK, PRICE], {"generate_all_gpt_turns": True}, 1.3),
        ([PRICE], {"scenario_category": "single"}, 1.5),
        ([STOCK], {"scenario_category": "single"}, -1.0),
        (["90"], {"scenario_category": "single"}, -1.0),
    ],
)  # fmt: skip
async def test_right_turns_earn_their_share(
    made: Any, turns: list[str], settings: dict[str, Any], score: float
) -> None:
    rollout = await replayed(multiturn.MultiTurnToolCallingEnv, made, turns, **settings)
    assert rollout.outcome == pytest.approx(score)


async def test_recorded_results_and_texts_follow_a_right_call(made: Any) -> None:
    rollout = await replayed(multiturn.MultiTurnToolCallingEnv, made, [PRICE, STOCK])
    assert [(m["role"], m["content"]) for m in rollout.messages[2:]] == [
        ("assistant", PRICE),
        ("tool", "90"),
        ("tool", "91"),
        ("assistant", "They cost 90."),
        ("user", "And the stock?"),
        ("assistant", STOCK),
    ]


@pytest.mark.parametrize(
    ("category", "conversations", "num_turns"),
    [
        ("multiturn", DIALOGUE, 4),
        ("multistep", DIALOGUE, None),
        ("relevance", DIALOGUE, None),
        ("relevance", [DIALOGUE[1], SAYS], 1),
        ("all", DIALOGUE, 4),
        ("all", [DIALOGUE[1], SAYS], None),
        ("multistep", [*DIALOGUE[:4], *DIALOGUE[6:]], 3),
        ("single", [DIALOGUE[1], SAYS], None),
        ("single", [*DIALOGUE[:2], {"from": "gpt", "value": "<tool_call>{</tool_call>"}], None),
    ],
)
def test_a_scenario_selects_its_conversations(
    made: Any, category: str, conversations: Any, num_turns: int | None
) -> None:
    settings = {"scenario_category": category}
    env = made(multiturn.MultiTurnToolCallingEnv, **settings)
    row = env.parse_row({"conversations": conversations})
    assert (row and len(row.turns)) == num_turns


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Sorry, I have no tool for that. Please tell me more.", 1.2),
        ("I apologize, this is beyond my tools.", 1.1),
        ("It is 4.", -1.0),
        (f"Sorry! {STOCK}", -1.0),
        ("<think>I am sorry</think> It is 4.", -1.0),
        ("", -1.0),
    ],
)
async def test_a_question_that_no_tool_fits_gets_a_reply_without_a_call(
    made: Any, reply: str, score: float
) -> None:
    settings = {"scenario_category": "relevance"}
    env = made(multiturn.MultiTurnToolCallingEnv, reply, **settings)
    row = env.parse_row({"conversations": [DIALOGUE[1], SAYS]})
    rollout = (await env.roll_out(row, 1, split="train"))[0]
    assert rollout.outcome == pytest.approx(score)


THINK = "<think>a</think>"


@pytest.mark.parametrize(
    ("turns", "rewards", "score"),
    [
        ([THINK + PRICE, THINK + "90", THINK + STOCK, THINK + "18"], [1.0, 1.0, 1.0, 1.0], 2.0),
        ([THINK + STOCK], [0.3], -1.0),
        ([PRICE], [-0.2], -1.0),
        ([THINK + PRICE, THINK + PRICE], [1.0, 0.0], 0.25),
        ([THINK + PRICE, THINK + "90", THINK + STOCK + PRICE], [1.0, 1.0, 0.3], 0.575),
    ],
)
async def test_every_turn_earns_its_reward(
    made: Any, turns: list[str], rewards: list[float], score: float
) -> None:
    env_cls = turnlevel.MultiTurnToolUseTurnLevelAdvantageEnv
    rollout = await replayed(env_cls, made, turns)
    assert rollout.overrides["turn_rewards"] == pytest.approx(rewards)
    assert rollout.outcome == pytest.approx(score)


async def test_the_tokens_of_a_turn_have_the_advantage_of_this_turn(made: Any) -> None:
    right = [THINK + PRICE, THINK + "90", THINK + STOCK, THINK + "18"]

    def respond(request: HarnessRequest) -> str:
        number = request.prompt.count("<assistant>") - 1
        return THINK + STOCK if request.call == 0 else right[number]

    env_cls = turnlevel.MultiTurnToolUseTurnLevelAdvantageEnv
    settings: dict[str, Any] = {"add_dynamic_few_shot": False, "group_size": 2}
    env = made(env_cls, respond, **settings)
    row = env.parse_row({"conversations": DIALOGUE})
    group, _ = await env.collect_trajectories(row)
    check_group(group, strictness=Strictness.MEANING)
    trained = [
        [a for a, label in zip(advantages, mask, strict=True) if label != -100]
        for advantages, mask in zip(group["advantages"], group["masks"], strict=True)
    ]
    # Two episodes: each turn's normalized reward is +-1, and so is the outcome's.
    assert [set(advantages) for advantages in trained] == [{-2.0}, {2.0}]
    given = [
        a
        for a, label in zip(group["advantages"][1], group["masks"][1], strict=True)
        if label == -100
    ]
    assert set(given) == {0.0}


TABLE = ["Name", "No. of pieces"], ["text", "real"], [["Ada", 3], ["Bo", "1,200"], ["O'Neil", 3]]


@pytest.mark.parametrize(
    ("query", "score"),
    [
        ('SELECT "Name" FROM data WHERE "No. of pieces" = 3', 1.0),
        ("select name from data where `No. of pieces` < 4 order by name desc;", 1.0),
        ('SELECT upper("Name") FROM data WHERE "No. of pieces" = 3', 1.0),
        ('SELECT "Name" FROM data', -1.0),
        ("SELECT 'ada' UNION SELECT 'o''neil'", -1.0),
        ("SELECT 'ada' FROM data UNION SELECT 'o''neil' FROM data", -1.0),
        ('SELECT "Name" FROM data; DROP TABLE data', -1.0),
        ("DELETE FROM data RETURNING name", -1.0),
        ("ATTACH '/tmp/x.db' AS other", -1.0),
        ("PRAGMA table_info(data)", -1.0),
        ("SELECT zeroblob(1000000000) FROM data", -1.0),
        ("no SQL", -1.0),
        ("", -1.0),
    ],
)
async def test_a_query_is_judged_by_its_result(made: Any, query: str, score: float) -> None:
    env = made(sql.SQLQueryEnv)
    row = sql.Question("Who?", *TABLE, 'SELECT "Name" FROM data WHERE "No. of pieces" = 3')
    assert await env.score(row, f"<think>a</think> \\boxed{{{query}}}") == score
    assert await env.score(row, f"\\boxed{{{query}}}") == -1.0
    assert await env.score(row, f"<think>a</think> \\boxed{{{query}}} \\boxed{{{query}}}") == -1.0
    for found in ('"Name"', 'max("No. of pieces")'):  # no row, and NULL
        nothing = row._replace(query=f'SELECT {found} FROM data WHERE "No. of pieces" = 7')
        assert await env.score(nothing, f"<think>a</think> \\boxed{{{query}}}") is None


async def test_a_recorded_query_that_fails_on_a_half_of_the_table_gives_no_score(made: Any) -> None:
    env = made(sql.SQLQueryEnv)
    query = "SELECT CASE count(*) WHEN 1 THEN abs(-9223372036854775807 - 1) ELSE 1 END FROM data"
    row = sql.Question("?", ["Name"], ["text"], [["Ada"], ["Bo"]], query)
    assert await env.score(row, "<think>a</think> \\boxed{SELECT 1 FROM data LIMIT 1}") is None


def test_a_call_that_is_not_closed_earns_nothing(made: Any) -> None:
    env = made(tool_calling.SingleToolCallingEnv)
    row = tool_calling.Request("", "?", [ToolCall(name="f", arguments={"n": 1})])
    answer = f"<think>a</think>{call('f', n=1)}"
    assert env.score(row, answer) == 1.0
    assert env.score(row, answer.removesuffix("</tool_call>")) == -1.0


def test_a_query_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "QUERY_TIMEOUT_S", 0.05)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n, data WHERE i < 0"
    assert sql.results_of(*TABLE, [endless, 'SELECT sum("No. of pieces") FROM data']) == [
        None,
        ["[1206.0]"],
    ]


def test_a_table_with_a_row_of_another_length_is_skipped(made: Any) -> None:
    env = made(sql.SQLQueryEnv)
    columns, types, rows = TABLE
    row = {"question": "?", "header": columns, "types": types, "rows": rows, "query": "SELECT 1"}
    assert env.parse_row(row) is not None
    assert env.parse_row({**row, "rows": [*rows, ["Cy"]]}) is None
    assert env.parse_row({**row, "types": ["text"]}) is None


def test_wikisql_rows_have_their_tables(
    made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    table = {"id": "t", "header": ["Name"], "types": ["text"], "rows": [["Ada"]]}
    query = {"sel": 0, "agg": 3, "conds": []}
    row = {"phase": 1, "table_id": "t", "question": "How many?", "sql": query}
    folder = tmp_path / "atroposlib"
    folder.mkdir()
    with tarfile.open(folder / "wikisql.tar.bz2", "w:bz2") as archive:
        for name, content in (("dev.tables", table), ("dev", row)):
            text = json.dumps(content).encode() + b"\n"
            entry = tarfile.TarInfo(f"data/{name}.jsonl")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    env = made(sql.SQLQueryEnv, dataset_path=None)
    [question] = env.load_rows("eval")
    assert question.query == 'SELECT COUNT("Name") FROM data'
    assert sql.results_of(*question[1:4], [question.query]) == [["[1.0]"]]


TOPIC = research.Topic("?", "Oslo", ["Firm", "Founder"], {})
GOOD = "<answer>Oslo</answer>"


@pytest.mark.parametrize(
    ("text", "read", "score"),
    [
        (f"{GOOD} [[Firm]] [[Founder]]", {"Firm", "Founder"}, 1.0),
        ("<think>Rome?</think><answer>the oslo.</answer> [[Firm]] [[Founder]]", {"Firm", "Founder"}, 1.0),
        (f"{GOOD} [[Firm]] [[Founder]]", {"Firm"}, 0.75),
        (f"{GOOD} [[Firm]] [[Founder]]", set(), 0.5),
        (f"{GOOD} [[Firm]] [[Founder]] [[Other]] [[More]]", {"Firm", "Founder", "Other"}, 5 / 6),
        (GOOD, {"Firm", "Founder"}, 0.5),
        ("<answer>Rome</answer> [[Firm]] [[Founder]]", {"Firm", "Founder"}, 0.0),
        ("<answer>Rome</answer><answer>Oslo</answer> [[Firm]]", {"Firm"}, 0.0),
        ("Oslo [[Firm]] [[Founder]]", {"Firm", "Founder"}, 0.0),
    ],
)  # fmt: skip
def test_a_right_answer_earns_more_with_pages_that_were_read_and_support_it(
    text: str, read: set[str], score: float
) -> None:
    assert research.research_score(TOPIC, text, read) == pytest.approx(score)


@pytest.mark.parametrize(("text", "score"), [(GOOD, 1.0), (f"{GOOD} [[Firm]]", 0.5)])
def test_a_topic_without_sources_needs_no_citation(text: str, score: float) -> None:
    assert research.research_score(TOPIC._replace(sources=[]), text, {"Firm"}) == score


async def test_research_searches_reads_and_answers(started: Any) -> None:
    turns: list[str] = []
    env = await started(research.DeepResearchEnv, lambda r: turns[r.call])
    row = env.train_rows[0]
    title = next(title for title in row.sources if title in row.question)
    turns += [
        call("search", query=row.question),
        call("read", title=title),
        call("read", title="?"),
    ]
    turns += [f"<answer>{row.answer}</answer> [[{title}]]"]
    rollout = (await env.roll_out(row, 1, split="train"))[0]
    found, page, missing = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert json.loads(found)[0] == {"title": title, "excerpt": page[:200]}
    assert page == row.pages[title]
    assert missing == "Error: there is no page '?'; search for it"
    assert rollout.outcome == pytest.approx(0.5 + 0.5 * 2 / 3)


async def test_a_search_service_replaces_the_local_pages(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BRAVE_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="BRAVE_API_KEY"):
        await started(research.DeepResearchEnv, search_api="brave")
    monkeypatch.setenv("BRAVE_API_KEY", "k")
    env = await started(research.DeepResearchEnv, search_api="brave")
    with pytest.raises(ToolFailure, match="no page"):
        await env.read("Seine", None)


def test_space_around_an_expected_answer_does_not_count(made: Any) -> None:
    env = made(mcp_env.McpEnv)
    call = {"tool_name": "stock", "arguments": {"fruit": "pear"}}
    row = {"user_prompt_text": "?", "expected_mcp_call": call, "answer": " 18\n"}
    assert env.parse_row(row) == TASK


def test_a_text_that_repeats_itself_takes_no_quadratic_time(made: Any) -> None:
    env = made(multiturn.MultiTurnToolCallingEnv)
    turn = env.parse_row({"conversations": DIALOGUE}).turns[0]
    assert env.judge_turn(turn, "<tool_call>" * 50_000) == "unparsable"
    assert multiturn.relevance_score("please " * 50_000) == -1.0
    assert research.research_score(TOPIC, GOOD + "[[" * 100_000, set()) == 0.5
    assert fundamentals.PREDICTION.findall("\n" * 200_000) == []
