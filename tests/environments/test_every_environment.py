"""Every environment runs offline on its sample, and rewards right answers but no cheap trick.

An environment is one row of `CASES`. The perfect answer of an item is the first of `example_answers(item)`; an
environment of several turns, or one whose right answer depends on more than the item, gives `perfect` in its row.
`check`, `serve` and `process` take up to several seconds each and are drills; the rewards are always tested.
"""

import contextlib
import contextvars
import random
import re
import string
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import check_env
from atroposlib.checker.guesses import NONSENSE, verdict
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.collecting import close
from atroposlib.envs.dataset_env import DatasetEnv
from atroposlib.envs.sandbox import ProcessSandbox, local_sandbox
from atroposlib.envs.stepwise import Answer, Request, SteppedEnv
from atroposlib.errors import AtroposError
from atroposlib.inference.answerer import ask_of, end_at_stop, sample_text
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, made_up_logprobs
from atroposlib.inference.servers.api_server import read_stops
from atroposlib.runtime.process import process
from atroposlib.runtime.replay import Replayer
from atroposlib.scored_data import Strictness, check_group
from tests.builders.rows import rows_in
from tests.builders.tables import table
from tests.environments.game_players import drive_taxi, play_blackjack, play_table
from tests.environments.helpers_environments import load, logged, make_env
from tests.runtime.helpers_runtime import LoopbackHub, produced, serving, until

Policy = Callable[[Any, Any, HarnessRequest], str]
"""(environment, item, request) -> answer."""

README = (Path(__file__).resolve().parents[2] / "environments/README.md").read_text()
NUM_ITEMS = 8
ITEM: contextvars.ContextVar[Any] = contextvars.ContextVar("item")


def right(env: Any, item: Any, request: HarnessRequest) -> str:
    answer = env.example_answers(item)[0]
    return answer(request.prompt) if callable(answer) else str(answer)


def sensible(env: Any, item: Any, request: HarnessRequest) -> str:
    """Give the scripted judge an answer that it takes for a good one."""
    return "Thank you, it is a pleasure."


def calculate(env: Any, item: Any, request: HarnessRequest) -> str:
    """Answer an agent, whose requests say what the item is."""
    return env.gold_answer(re.search(r"\d+ [*+] \d+", request.prompt)[0])  # type: ignore[index]


@dataclass(frozen=True)
class Case:
    """One environment of the table."""

    module: str
    """The environment is its last class."""
    needs: tuple[str, ...] = ()
    """Modules without which the test is skipped."""
    settings: dict[str, Any] = field(default_factory=lambda: {"dataset_path": "sample"})
    """Configuration that differs from `config_init`."""
    perfect: Policy = right
    best: float = 1.0
    """Score of a perfect answer."""
    starts_processes: bool = False
    """Whether its sandboxed programs start processes, which needs bubblewrap."""
    num_items: int = NUM_ITEMS
    """Items in the test of the rewards. Few: its grader runs tests, for seconds, and `check` is its only drill."""
    has_rule: bool = True
    """Whether it builds on `DatasetEnv`, a fixed rule, not a judge, scores, and a perfect player always wins."""

    @property
    def env_cls(self) -> Any:
        module = load(self.module)
        known = [found for found in vars(module).values() if isinstance(found, type)]
        own = [found for found in known if found.__module__ == module.__name__]
        return [found for found in own if issubclass(found, BaseEnv)][-1]

    def make(self, monkeypatch: pytest.MonkeyPatch, policy: Policy, **settings: Any) -> Any:
        """Return the environment on an engine that answers by `policy`."""
        base = self.env_cls

        async def collect_trajectories(env: Any, item: Any) -> Any:
            ITEM.set(item)
            return await super(type(env), env).collect_trajectories(item)

        namespace = {"collect_trajectories": collect_trajectories, "__module__": base.__module__}
        defaults = {"max_token_length": 3000, "num_reward_workers": 1, **self.settings}
        fields = base.env_config_cls.model_fields

        def respond(request: HarnessRequest) -> str:
            # As in `check`, the judge of a `JudgeEnv` is scripted, and gives useless answers the lowest mark.
            said = getattr(env, "example_verdict", verdict)(request.prompt)
            return said or policy(env, ITEM.get(None), request)

        env = make_env(
            type(base.__name__, (base,), namespace),
            monkeypatch,
            respond=respond,
            weight_version="1",
            **{name: value for name, value in (defaults | settings).items() if name in fields},
        )
        return env


CASES = [
    Case("answer_format_environment.answer_format_environment"),
    Case("gsm8k_server", needs=("math_verify",)),
    Case("letter_counting_environment.letter_counting_environment"),
    Case("text_reversal_environment"),
    Case("mcqa_thinking_env"),
    Case("mmlu_server"),
    Case("fundamental_prediction_environment", best=2.0),
    Case("mcp_env", needs=("mcp",)),
    Case("tool_calling_server"),
    Case("tool_use_interleaved_thinking", best=1.2),
    Case("tool_use_multiturn_server", best=1.5),
    Case("tool_use_turnlevel_advantage_server", best=2.0),
    Case("sql_query_env"),
    Case("deep_research_env"),
    Case("simulated_user_env"),
    Case("math_server", needs=("math_verify",)),
    Case("math_server_zero", needs=("math_verify",)),
    Case(
        "code_execution_server.coding_server",
        settings={"dataset_path": "sample", "num_eval_rows": 4},
    ),
    Case("swe_rl_env"),
    Case("terminal_env", settings={"max_turns": 1, "num_eval_rows": 30}, starts_processes=True),
    Case(
        "swe_env",
        settings={"dataset_path": "sample", "mode": "patch"},
        starts_processes=True,
        num_items=1,
    ),
    Case(
        "harbor_env",
        settings={"dataset_path": "sample", "runs_in": "sandbox", "max_turns": 2},
        starts_processes=True,
        num_items=1,
    ),
    Case("instruction_following_algorithm_environment"),
    Case(
        "pydantic_schema_following_environment.pydantic_schema_following_environment",
        settings={"dataset_path": "sample", "allowed_structured_formats": ["json", "yaml"]},
    ),
    Case(
        "dataset_environment.dataset_env",
        needs=("math_verify",),
        settings={
            "dataset_path": "sample",
            "prompt_field": "question",
            "answer_field": "answer",
            "reward_functions": ["accuracy"],
        },
    ),
    Case(
        "reasoning_gym_environment.reasoning_gym_environment",
        needs=("reasoning_gym",),
        settings={"tasks": ["gcd", "basic_arithmetic"], "num_eval_samples_per_task": 4},
    ),
    Case("sft_loader_server", has_rule=False),
    Case(
        "image_question_server",
        needs=("PIL",),
        settings={"num_train_images": 40, "num_eval_rows": 20},
    ),
    Case("rlaif_server", perfect=sensible, has_rule=False),
    Case("rubric_judge_server", perfect=sensible, has_rule=False),
    Case("eval_environments.mmlu_eval"),
    Case("eval_environments.mmlu_pro_eval"),
    Case("eval_environments.gpqa_eval"),
    Case("eval_environments.arc_eval"),
    Case("eval_environments.hellaswag_eval"),
    Case("eval_environments.gsm8k_eval", needs=("math_verify",)),
    Case("eval_environments.math500_eval", needs=("math_verify",)),
    Case("eval_environments.aime_eval", needs=("math_verify",)),
    Case("eval_environments.bbh_eval"),
    Case("eval_environments.drop_eval"),
    Case("eval_environments.simpleqa_eval"),
    Case("eval_environments.ifeval_eval"),
    Case("eval_environments.code_eval"),
    Case("eval_environments.bfcl_eval"),
    Case("eval_environments.hle_eval"),
    Case("eval_environments.arena_hard_eval", perfect=sensible, has_rule=False),
    Case("eval_environments.mt_bench_eval", perfect=sensible, has_rule=False),
    Case("game_environments.wordle"),
    Case("game_environments.hangman"),
    Case("game_environments.crosswords", settings={"dataset_path": "sample", "num_puzzles": 40}),
    Case(
        "game_environments.gymnasium.gymnasium_env",
        needs=("gymnasium",),
        settings={"env_kwargs": {"is_slippery": False}},
        perfect=play_table,
    ),
    Case(
        "game_environments.gymnasium.gym_taxi",
        needs=("gymnasium",),
        settings={},
        perfect=drive_taxi,
    ),
    Case(
        "game_environments.gymnasium.blackjack.blackjack_env_no_thinking",
        needs=("gymnasium",),
        settings={},
        perfect=play_blackjack,
        has_rule=False,
    ),
    Case(
        "game_environments.gymnasium.blackjack.blackjack_env_thinking",
        needs=("gymnasium",),
        settings={},
        perfect=play_blackjack,
        has_rule=False,
    ),
    Case(
        "game_environments.textworld_env.textworld_env",
        needs=("textworld",),
        settings={
            "challenge_names": ["tw-coin_collector"],
            "randomize_challenge_settings": False,
            "num_train_seeds": 10,
            "num_eval_rows": 1,
            "max_turns": 4,
        },
        perfect=lambda env, item, request: "take coin",
        has_rule=False,
    ),
    Case("agents.arithmetic_agents", settings={"agent": "http"}, perfect=calculate, has_rule=False),
    Case(
        "letter_reversal_server",
        settings={"strictly_on_policy": False, "max_token_length": 32},
        has_rule=False,
    ),
]


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.module, indirect=True)
every_fast_case = pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.num_items == NUM_ITEMS],
    ids=lambda case: case.module,
    indirect=True,
)
every_rule = pytest.mark.parametrize(
    "case", [case for case in CASES if case.has_rule], ids=lambda case: case.module, indirect=True
)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    for module in chosen.needs:
        pytest.importorskip(module)
    if chosen.starts_processes and isinstance(local_sandbox(), ProcessSandbox):
        pytest.skip("bubblewrap is missing or may not create namespaces")
    return chosen


def wrong(env: Any, item: Any, request: HarnessRequest) -> str:
    return NONSENSE[1]


def sometimes_right(case: Case) -> Policy:
    """Return a policy with right and wrong answers in every group; the first turn of an episode decides."""

    def answer(env: Any, item: Any, request: HarnessRequest) -> str:
        is_first_turn = request.prompt.count("<assistant>") <= 1  # 0 in a text completion
        parity = random.Random(request.call).randrange(2)
        was_wrong = NONSENSE[1] in request.prompt
        is_wrong = (request.choice + parity) % 2 if is_first_turn else was_wrong
        is_wrong = is_wrong or (item is None and case.perfect is right)
        return (wrong if is_wrong else case.perfect)(env, item, request)

    return answer


def empty(env: Any, item: Any, request: HarnessRequest) -> str:
    return ""


def echo(env: Any, item: Any, request: HarnessRequest) -> str:
    return request.prompt.removesuffix("<assistant>")


def noise(env: Any, item: Any, request: HarnessRequest) -> str:
    rng = random.Random(f"{request.prompt}{request.choice}")
    return "".join(rng.choices(string.printable, k=80))


def list_all(env: Any, item: Any, request: HarnessRequest) -> str:
    """Give the perfect answers of all items, in an order that has nothing to do with the item."""
    rows = env.eval_rows[:30]
    answers = {right(env, row, request) for row in rows if env.example_answers(row)}
    return "\n".join(sorted(answers, key=len))


async def scores_of(env: Any, num_items: int) -> list[float]:
    """Return the scores of one group for each of a few items; answers that were too short to train on are missing."""
    found: list[float] = []
    for _ in range(num_items):
        await env.collect_trajectories(await env.get_next_item())
        found += env.train_scores
        env.train_scores = []
    return found


@pytest.fixture
async def made(case: Case, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Make environments that are closed after the test."""
    envs = []

    def make(policy: Policy, **settings: Any) -> Any:
        envs.append(case.make(monkeypatch, policy, **{"group_size": 4, **settings}))
        return envs[-1]

    yield make
    for env in envs:
        await close(env)


AUDITED = {"swap_gold": "gold", "second_grader": "second", "new_form": "form"}


@every_case
def test_the_readme_says_which_audit_applies(case: Case) -> None:
    name = case.module.rpartition(".")[2]
    [column] = re.findall(rf"^\| `{name}` \|.*\| ([^|]+) \|$", README, re.M)
    found = case.env_cls.detectors() if issubclass(case.env_cls, DatasetEnv) else []
    assert column == (", ".join(AUDITED[each] for each in found if each in AUDITED) or "none")


@pytest.mark.drill
@every_case
def test_check_finds_no_fault(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many rows as half a second allows: the reward of every kind of answer is tested below."""
    monkeypatch.setattr("atroposlib.checker.rows.WALK_S", 0.5)

    def make(cls: Any) -> Any:
        config, servers = cls.config_init()
        settings = {"use_wandb": False, "num_reward_workers": 1, **case.settings}
        known = {name: value for name, value in settings.items() if hasattr(config, name)}
        return cls(config.model_copy(update=known), servers, False, True)

    report = check_env(case.env_cls, make=make, num_items=2)
    assert report.failed == [], report.to_text()


@pytest.mark.drill
@every_fast_case
async def test_process_writes_groups_that_pass_the_strict_gate_and_replay(
    case: Case, made: Callable[..., Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "groups.jsonl")
    env = made(sometimes_right(case), total_steps=4, data_path_to_save_groups=path)
    result = await process(env)
    groups = rows_in(result.path)
    assert len(groups) == 4
    assert env.group_sink.num_tokens_not_sampled == 0
    for group in groups:
        checked = check_group(group, strictness=Strictness.MEANING)
        assert checked.num_trained > 0
        is_supervised = (group["group_overrides"] or {}).get("sft", False)
        assert is_supervised or len(set(group["scores"])) > 1
    async with Replayer(made(sometimes_right(case))) as replayer:
        replays = [replay async for replay in replayer.replays(groups)]
    assert [replay.fault for replay in replays] == [None] * 4
    # The agents of a group ask the same at the same time: any of them may get any recorded answer.
    in_order = sorted if case.perfect is calculate else list
    found = [in_order(replay.scores) for replay in replays]
    assert found == [in_order(group["scores"]) for group in groups]


@pytest.mark.drill
@every_fast_case
async def test_serve_feeds_a_hub_and_evaluates(
    case: Case, made: Callable[..., Any], tmp_path: Path
) -> None:
    async with LoopbackHub(batch_size=16, max_token_len=100_000) as hub:
        env = made(
            sometimes_right(case),
            rollout_server_url=hub.url,
            data_dir_to_save_evals=str(tmp_path),
            num_eval_rows=4,
            steps_per_eval=0,
        )
        async with serving(env):
            await until(lambda: produced(hub) >= 4)
            await env.evaluate()
    assert (tmp_path / "metrics.json").is_file()


@every_rule
async def test_a_right_answer_gets_the_best_score_and_a_cheap_trick_next_to_nothing(
    case: Case, made: Callable[..., Any]
) -> None:
    policy = case.perfect
    env = made(lambda env, item, request: policy(env, item, request), group_size=2)
    await env.setup()
    assert await scores_of(env, case.num_items) == [case.best] * (2 * case.num_items)
    for policy in (empty, echo, noise, list_all):
        scores = await scores_of(env, case.num_items)
        num_successes = sum(score >= env.success_score for score in scores)
        assert num_successes <= len(scores) // 4, policy.__name__


METRICS = table("environments/dashboards")


@pytest.mark.parametrize(
    "case",
    [
        # TextWorld's six games take 2 to 20 s of CPU each.
        pytest.param(case, marks=pytest.mark.drill if "textworld" in case.module else ())
        for case in CASES
        if case.module in METRICS
    ],
    ids=lambda case: case.module,
    indirect=True,
)
async def test_existing_dashboards_find_their_metrics(case: Case, made: Callable[..., Any]) -> None:
    env = made(sometimes_right(case), num_eval_rows=min(4, case.settings.get("num_eval_rows", 4)))
    await env.setup()
    await env.evaluate()
    wanted = METRICS[case.module].items()
    missing = {f"{part}/{name}" for part, names in wanted for name in names.split()}
    for i in range(NUM_ITEMS):
        missing -= (await logged(env)).keys()
        if i and not missing:
            break
        await env.collect_trajectories(await env.get_next_item())
    assert missing - (await logged(env)).keys() == set()


REFUSED = {
    "image_question_server": "cannot have images",
    "rlaif_server": "the judge must not be the policy",
    "rubric_judge_server": "the judge must not be the policy",
    "eval_environments.arena_hard_eval": "the judge must not be the policy",
    "eval_environments.mt_bench_eval": "the judge must not be the policy",
    "game_environments.gymnasium.blackjack.blackjack_env_thinking": "groups for one item",
}
"""Environments that cannot be stepped, and the error."""

STEPPED_IN_EVERY_RUN = (
    *("text_reversal_environment", "tool_use_multiturn_server", "game_environments.wordle"),
    *("game_environments.gymnasium.blackjack.blackjack_env_no_thinking", "letter_reversal_server"),
    "rubric_judge_server",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.module in STEPPED_IN_EVERY_RUN else pytest.mark.drill)
        for case in CASES
        if case.num_items == NUM_ITEMS
    ],
    ids=lambda case: case.module,
    indirect=True,
)
async def test_a_stepped_episode_is_the_group_of_the_same_answers(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 0

    def policy(env: Any, item: Any, request: HarnessRequest) -> str:
        return (noise if seed % 2 else case.perfect)(env, item, request)

    usual = case.make(monkeypatch, policy, group_size=1)
    if isinstance(usual, DatasetEnv):
        usual.shape_group = lambda row, group: group
    async with contextlib.AsyncExitStack() as stack:
        if case.module in REFUSED:
            stack.enter_context(pytest.raises(AtroposError, match=REFUSED[case.module]))
        stepped = await stack.enter_async_context(SteppedEnv(case.make(monkeypatch, policy)))
        stack.push_async_callback(close, usual)
        await usual.setup()
        [engine] = usual.server.servers
        for seed in range(4):
            engine.requests.clear()
            groups, _ = await usual.collect_trajectories(await usual.get_next_item())
            item = await stepped.item(seed)
            episode = stepped.episode()
            turn, asked = await episode.reset(seed), []
            while isinstance(turn, Request):
                request = HarnessRequest(
                    prompt=turn.prompt, choice=0, call=len(asked), kwargs=turn.sampling
                )
                asked.append(turn.prompt_ids)
                turn = await episode.step(as_sampled(turn, policy(stepped.env, item, request)))
            assert asked == [request["input_ids"] for request in engine.requests]
            group = groups[0] if isinstance(groups, list) else groups
            assert group is not None
            assert turn.group is not None, turn.reason
            for key in ("tokens", "masks", "scores", "inference_logprobs"):
                assert turn.group.get(key) == group.get(key), key
            assert turn.reward == sum(group["scores"]) / len(group["scores"])


def as_sampled(request: Request, text: str) -> Answer:
    """Return a text as the scripted engine samples it after this request."""
    limit = request.sampling.get("max_tokens", 2**31)
    asked = ask_of(request.sampling, stops=read_stops(request.sampling))
    ended = end_at_stop(ByteTokenizer(), asked, sample_text(ByteTokenizer(), text, limit))
    logprobs = made_up_logprobs(request.prompt_ids, ended.tokens, spans=[("1", len(ended.tokens))])
    return Answer(token_ids=ended.tokens, logprobs=logprobs, finish_reason=str(ended.finish_reason))
