"""DatasetEnv on a scripted engine: the order of rows, answers that cannot be judged, and evaluation."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.dataset_env import DatasetEnv, Outcome, epoch_order
from atroposlib.envs.rows import _warn_once
from atroposlib.errors import ConfigError, EngineRejected, EnvError
from atroposlib.inference.harness import HarnessRequest
from atroposlib.runtime.evaluate import evaluate
from atroposlib.runtime.serve import serve
from atroposlib.scored_data import IGNORE_INDEX, Strictness, check_group
from tests.builders.environments import Offline
from tests.builders.rows import rows_in, write_rows
from tests.envs.helpers_envs import group_of, make_env
from tests.runtime.helpers_runtime import FAST, LoopbackHub


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `evaluate` writes to evals/
    _warn_once.cache_clear()


class Sums(Offline, DatasetEnv):
    """Rows are pairs of numbers; an answer is right when it is their sum."""

    name = "sums"
    num_rows = 10

    def load_rows(self, split: str) -> Any:
        return [[i, i + 1] for i in range(self.num_rows)] if split == "train" else None

    def prompt(self, row: Any) -> Any:
        return f"{row[0]} + {row[1]} ="

    def score(self, row: Any, answer: str) -> Any:
        return answer == str(sum(row))


def make(
    env_cls: type[Any] = Sums,
    *,
    respond: Callable[[HarnessRequest], str] = lambda request: str(2 * request.choice + 1),
    **settings: Any,
) -> Any:
    return make_env(env_cls, respond=respond, **{"group_size": 4, "num_eval_rows": 2, **settings})


async def handed_out(env: Any, num: int) -> list[Any]:
    return [await env.get_next_item() for _ in range(num)]


async def test_every_epoch_has_each_training_row_once_in_an_order_of_its_own() -> None:
    env = make()
    await env.setup()
    rows = await handed_out(env, 24)
    for epoch in (rows[:8], rows[8:16], rows[16:]):
        assert sorted(epoch) == sorted(env.train_rows)
    assert len({repr(rows[i : i + 8]) for i in (0, 8, 16)}) == 3


async def test_order_depends_on_seed_alone() -> None:
    orders = []
    for seed in (0, 0, 1):
        env = make(seed=seed, num_eval_rows=0)
        await env.setup()
        orders.append(await handed_out(env, 20))
    assert orders[0] == orders[1] != orders[2]
    assert epoch_order(100, seed=3, epoch=0) != epoch_order(100, seed=3, epoch=1)


async def test_position_comes_back_from_the_checkpoint(tmp_path: Path) -> None:
    env = make()
    env.checkpoint_dir = str(tmp_path)
    await env.setup()
    await handed_out(env, 11)
    env.save_checkpoint(3)
    expected = await handed_out(env, 20)

    again = make()
    again.checkpoint_dir, again.curr_step = str(tmp_path), 4
    await again.setup()
    again.load_checkpoint()
    assert await handed_out(again, 20) == expected


class Served(Sums):
    """Its results decide about items, as in `serve`; row i is solved with the probability i / 9."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.runtime = SimpleNamespace()

    def note_group(self, row: Any, rng: random.Random) -> None:
        self.note_scores(row, [float(rng.random() < row[0] / 9) for _ in range(8)])


async def play(env: Any, num: int, rng: random.Random) -> list[int]:
    """Return the numbers of the rows that were asked."""
    played = []
    for _ in range(num):
        row = await env.get_next_item()
        played.append(row[0])
        env.note_group(row, rng)
    return played


async def test_rows_whose_scores_differ_are_asked_more_often_after_the_first_epoch() -> None:
    asked: dict[int, list[int]] = {}
    for seed, choice in enumerate(("order", "posterior", "posterior")):
        env = make(Served, num_eval_rows=0, group_size=8)
        env.config.item_choice = choice
        await env.setup()
        asked[seed] = await play(env, 2010, random.Random(seed))
    in_order, late, other = (rows[10:] for rows in asked.values())
    assert len({tuple(rows[:10]) for rows in asked.values()}) == 1
    assert len(set(in_order[:10])) == 10
    easy_or_hard = sum(row in (0, 9) for row in late) / len(late)
    assert easy_or_hard < 0.08  # in order 0.2
    assert all(set(late[i : i + 100]) == set(range(10)) for i in range(len(late) - 100))
    # Two processes of a run share nothing.
    assert late != other
    assert all(abs(late.count(row) - other.count(row)) < 0.03 * 2000 for row in range(10))


async def test_beliefs_come_back_from_the_checkpoint_and_continue_the_choice(
    tmp_path: Path,
) -> None:
    env, again = (make(Served, num_eval_rows=0, group_size=8) for _ in range(2))
    await env.setup()
    await again.setup()
    await play(env, 40, random.Random(0))
    env.checkpoint_dir = again.checkpoint_dir = str(tmp_path)
    env.save_checkpoint(3)
    again.curr_step = 4
    again.load_checkpoint()
    assert await play(again, 50, random.Random(1)) == await play(env, 50, random.Random(1))


class Retold(Served):
    """Changes its rows, so that results cannot be attributed to them."""

    async def get_next_item(self) -> Any:
        return [*(await super().get_next_item()), "please"]


async def test_rows_without_results_stay_in_order() -> None:
    env = make(Retold, num_eval_rows=0)
    await env.setup()
    rows = await play(env, 40, random.Random(0))
    assert all(len(set(rows[i : i + 10])) == 10 for i in (0, 10, 20, 30))


async def test_classes_of_generated_items_are_chosen_and_none_is_forgotten() -> None:
    names = ["always", "never", "half"]
    env = make(Served, group_size=8)
    env.item_class = lambda item: item
    chosen = []
    for env.num_items in range(300):
        chosen.append(env.choose_class(names))
        env.note_scores(
            chosen[-1], {"always": [1.0] * 8, "never": [0.0] * 8}.get(chosen[-1], [0.0, 1.0])
        )
    assert Counter(chosen).most_common(1)[0][0] == "half"
    assert all(set(chosen[i : i + 30]) == set(names) for i in range(270))
    env.num_items = 4
    for env.runtime, env.config.group_size in ((None, 8), (SimpleNamespace(), 1)):
        assert env.choose_class(names) == "never"


async def test_a_row_that_never_gives_a_group_is_not_preferred() -> None:
    env = make(Served, num_eval_rows=0, group_size=8)
    env.note_group = lambda row, rng: row[0] == 0 or Served.note_group(env, row, rng)
    await env.setup()
    assert (await play(env, 510, random.Random(0)))[10:].count(0) == 5  # of the fixed order


async def test_held_out_rows_are_never_trained_on() -> None:
    env = make(num_eval_rows=4)
    await env.setup()
    assert len(env.eval_rows) == 4
    trained = await handed_out(env, 30)
    assert not [row for row in trained if row in env.eval_rows]
    assert sorted(env.train_rows + env.eval_rows) == [[i, i + 1] for i in range(10)]


@pytest.mark.parametrize(
    ("train", "evaluated", "trained", "said"),
    [
        ([[1, 2], [3, 4], [1, 2]], [[1, 2], [5, 6]], [[3, 4]], "2 training rows are left out"),
        ([[1, 2], [3, 4]], [[5, 6]], [[1, 2], [3, 4]], ""),
        ([[1, 2]], [[1, 2]], [[1, 2]], "all 1 training rows are evaluation rows"),
    ],
)
async def test_training_rows_are_no_evaluation_rows(
    train: Any, evaluated: Any, trained: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    env = make()
    env.load_rows = lambda split: train if split == "train" else evaluated
    await env.setup()
    assert (env.train_rows, env.eval_rows) == (trained, evaluated)
    assert said in caplog.text
    assert bool(said) is bool(caplog.records)


@pytest.mark.parametrize(
    ("hook", "fault"),
    [
        (lambda row: row["gold"], r"raised TypeError: .* for the row \[\d, \d\]"),
        (lambda row: row, r"returned \[\d, \d\], which is no text, for the row \[\d, \d\]"),
    ],
)
async def test_a_row_whose_gold_answer_cannot_be_read_is_named(hook: Any, fault: str) -> None:
    env = make()
    env.gold_answer = hook
    with pytest.raises(EnvError, match=f"gold_answer {fault}"):
        await env.setup()


async def test_at_most_half_of_the_rows_are_held_out_and_then_it_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = make(num_eval_rows=100)
    await env.setup()
    assert (len(env.train_rows), len(env.eval_rows)) == (5, 5)
    assert "5 of the 10 training rows are held out for evaluation" in caplog.text
    caplog.clear()
    await make(num_eval_rows=100).setup()  # a warning is logged once per process
    await make(num_eval_rows=5).setup()
    assert caplog.text == ""


async def test_group_passes_the_strict_gate_with_logprobs_and_policy_version() -> None:
    env = make(weight_version="7")
    group = await group_of(env, [1, 2])
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.scores.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert checked.inference_logprobs is not None
    assert checked.policy_version == 7
    assert group["group_overrides"] == {"group_size": 4}
    assert group["messages"][1] == [
        {"role": "user", "content": "1 + 2 ="},
        {"role": "assistant", "content": "3"},
    ]


async def test_published_version_stands_in_where_the_engine_does_not_tell() -> None:
    env = make()
    await env.setup()
    env.status_dict = {"policy_version": 5}
    group, _ = await env.collect_trajectories([1, 2])
    assert group["policy_version"] == 5


async def test_prompt_and_answer_together_stay_below_the_trainers_limit() -> None:
    env = make(respond=lambda request: "1" * 500, max_token_length=100)
    env.max_token_len = 40
    group = await group_of(env, [1, 2])
    assert [len(tokens) for tokens in group["tokens"]] == [39] * 4
    env.eval_rows = [[1, 2]]
    await env.evaluate()
    assert env.server.servers[0].requests[-1]["max_tokens"] == 100


class Noted(Sums):
    def score(self, row: Any, answer: str) -> Any:
        self.note(explanation=2000 * "." + answer)
        self.record("train/is_odd", int(answer) % 2 == 1)
        return super().score(row, answer)

    def sample_fields(self, row: Any, answer: str) -> dict[str, Any]:
        return {"read": answer, "sft": True}


async def test_rows_have_what_was_noted_of_a_score() -> None:
    group = await group_of(make(Noted), [1, 2])
    noted = group["overrides"]
    assert [each["read"] for each in noted] == ["1", "3", "5", "7"]
    assert [each["is_odd"] for each in noted] == [1.0] * 4
    assert not any("sft" in each for each in noted), "an instruction to the trainer"
    assert [each["explanation"] for each in noted] == [1999 * "." + read for read in "1357"]


class HalfJudged(Sums):
    """The answer 1 cannot be judged; where it `heals`, not at first."""

    num_failed = 0
    heals = False

    def score(self, row: Any, answer: str) -> Outcome:
        if answer == "1" and not (self.heals and self.num_failed):
            self.num_failed += 1
            return None
        return float(answer == "3")


async def test_masked_answer_keeps_the_size_and_trains_nothing() -> None:
    env = make(HalfJudged, on_reward_failure="mask")
    group = await group_of(env, [1, 2])
    checked = check_group(group, strictness=Strictness.MEANING)
    assert checked.num_sequences == 4
    assert group["scores"][0] == pytest.approx(1 / 3)
    assert set(group["masks"][0]) == {IGNORE_INDEX}
    assert set(group["inference_logprobs"][0]) == {1.0}
    assert env.num_reward_failures == 1


async def test_retried_answer_that_can_be_judged_then_is_not_a_failure() -> None:
    env = make(HalfJudged, on_reward_failure="retry")
    env.heals = True
    group = await group_of(env, [1, 2])
    assert group["scores"] == [0.0, 1.0, 0.0, 0.0]
    assert env.num_reward_failures == 0
    env.heals, env.num_failed = False, 0
    group, _ = await env.collect_trajectories([1, 2])
    assert (len(group["scores"]), env.num_reward_failures, env.num_failed) == (3, 1, 2)


async def test_shaping_changes_or_drops_a_group() -> None:
    class Shaped(Sums):
        def shape_group(self, row: Any, group: Any) -> Any:
            group["scores"] = [score * 2 for score in group["scores"]]
            return group if row[0] else None

    env = make(Shaped)
    await env.setup()
    assert (await env.collect_trajectories([1, 2]))[0]["scores"] == [0.0, 2.0, 0.0, 0.0]
    assert (await env.collect_trajectories([0, 1]))[0] is None


async def test_an_answer_cut_at_the_limit_may_have_its_own_score() -> None:
    class Strict(Sums):
        truncated_score = -1.0

    env = make(Strict, respond=lambda request: "3" if request.choice else "33", max_token_length=2)
    await env.setup()
    group, _ = await env.collect_trajectories([1, 2])
    assert group["scores"] == [-1.0, 1.0, 1.0, 1.0]


async def test_score_may_be_async_and_run_in_a_worker_that_is_killed() -> None:
    class InWorker(Sums):
        async def score(self, row: Any, answer: str) -> Any:
            name = "hang" if answer == "5" else "add"
            arguments = [] if answer == "5" else [int(answer), 0.5]
            return await self.in_worker(f"tests.envs.helpers_rewards:{name}", *arguments)

    env = make(InWorker, reward_timeout_s=0.3, num_reward_workers=1)
    group = await group_of(env, [1, 2])
    assert group["scores"] == [1.5, 3.5, 7.5]
    assert env.num_reward_failures == 1


class Breakable(Sums):
    """Answers that name a way to break the grader; the row names whether its gold answer breaks it, too."""

    async def score(self, row: Any, answer: str) -> Any:
        kind = answer if row[0] >= 0 else "raise"
        if kind == "raise":
            raise KeyError("a bad completion")
        if kind == "offline":
            raise ConnectionError("the judge cannot be reached")
        if kind == "nan":
            return float("nan")
        if kind in ("hang", "die", "leave"):
            return await self.in_worker(f"tests.envs.helpers_rewards:{kind}")
        return float(answer == str(sum(row))) * 2 - 1


class WithGold(Breakable):
    def gold_answer(self, row: Any) -> str | None:
        return str(sum(row))


class WithExamples(Breakable):
    def example_answers(self, item: Any) -> list[str]:
        return [str(sum(item)), "hm"]


BREAKING = ["3", "raise", "nan", "hang", "die", "leave", "offline", "4"]


@pytest.mark.parametrize("env_cls", [WithGold, WithExamples, Breakable])
async def test_answer_that_breaks_its_grader_is_wrong(env_cls: Any) -> None:
    env = make(
        env_cls,
        respond=lambda request: BREAKING[request.choice],
        group_size=len(BREAKING),
        reward_timeout_s=0.3,
        num_reward_workers=1,
    )
    group = await group_of(env, [1, 2])
    assert group["scores"] == [1.0, *[-1.0] * 5, -1.0]  # all but the answer that met an outage
    assert env.num_reward_failures == 1
    assert {name: n for name, n in env.counts.items() if n} == {
        "wrong_by_exception": 3,
        "wrong_by_timeout": 1,
        "wrong_by_crash": 1,
    }
    assert env.score_errors == {"KeyError": 1, "EnvError": 1, "ConnectionError": 1}


async def test_row_whose_gold_answer_breaks_the_grader_is_faulty_and_counts_nowhere(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    env = make(
        WithGold,
        respond=lambda request: "hang" if request.choice else "3",
        group_size=2,
        num_eval_samples=2,
        reward_timeout_s=0.3,
        data_dir_to_save_evals=str(tmp_path),
    )
    with pytest.raises(KeyError, match="a bad completion"):  # the row's own fault
        await env.collect_trajectories([-3, 3])
    assert (
        "faulty row: its gold answer does not pass its reward; its answers have no score: [-3, 3]"
        in caplog.text
    )
    env.eval_rows = [[1, 2], [-3, 3]]
    metrics = await env.evaluate()
    assert metrics["eval/percent_correct"] == 0.5  # "hang" is wrong
    assert metrics["eval/unscored_faulty"] == 2.0
    assert "eval/percent_correct_judged" not in metrics
    samples = rows_in(tmp_path / "samples.jsonl")
    assert [sample["correct"] for sample in samples] == [True, False, None, None]
    assert samples[2]["unscored"] == "faulty"


async def test_answers_of_one_row_share_a_process_and_a_canary_guards_their_grader() -> None:
    class Poisoned(Sums):
        def gold_answer(self, row: Any) -> str:
            return str(sum(row))

        async def score(self, row: Any, answer: str) -> Any:
            return await self.in_worker("tests.envs.helpers_rewards:grade", str(sum(row)), answer)

    answers = ["pay me", "fail for good", "3", "4"]
    env = make(Poisoned, respond=lambda request: answers[request.choice], num_reward_workers=1)
    await env.setup()
    assert env.reward_workers.canary.args[1] == "zzz"
    for _ in range(2):
        group, _ = await env.collect_trajectories([1, 2])
        assert group["scores"] == [0.0, 0.0, 1.0, 0.0]
    assert env.counts == {"wrong_by_canary": 2, "wrong_by_exception": 2}


async def test_gold_answer_that_fails_its_reward_stops_the_start() -> None:
    class Golden(Sums):
        def gold_answer(self, row: Any) -> str:
            return str(sum(row)) if row != [4, 5] else "10"

    with pytest.raises(EnvError, match=r"gold answer of \[4, 5\] does not pass"):
        await make(Golden, num_eval_rows=0).setup()


async def test_evaluation_writes_pass_at_1_mean_and_samples(tmp_path: Path) -> None:
    env = make(
        respond=lambda request: str(eval(request.prompt.split(">")[1].split("=")[0])),
        data_dir_to_save_evals=str(tmp_path),
        num_eval_rows=3,
    )
    await env.setup()
    metrics = await env.evaluate()
    assert metrics == {
        "eval/reward_failures": 0.0,
        "eval/mean_score": 1.0,
        "eval/pass@1": 1.0,
        "eval/percent_correct": 1.0,
    }
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"] == metrics
    samples = rows_in(tmp_path / "samples.jsonl")
    assert [sample["row"] for sample in samples] == env.eval_rows
    assert samples[0]["messages"][-1]["role"] == "assistant"
    assert samples[0]["num_tokens"] > 0
    assert {request["temperature"] for request in env.server.servers[0].requests} == {0.0}


async def test_evaluation_with_several_samples_reports_pass_at_k_at_training_temperature() -> None:
    env = make(num_eval_samples=4)
    env.eval_rows = [[1, 2], [10, 20]]
    metrics = await env.evaluate()
    assert metrics["eval/pass@1"] == pytest.approx(1 / 8)
    assert metrics["eval/pass@4"] == 0.5
    assert {request["temperature"] for request in env.server.servers[0].requests} == {1.0}


def test_unjudged_answers_are_not_correct_and_belong_to_no_mean_of_scores() -> None:
    metrics = make().summarize([[1.0], [None], [0.0]])
    assert metrics == {
        "eval/reward_failures": 1.0,
        "eval/mean_score": 0.5,
        "eval/pass@1": pytest.approx(1 / 3),
        "eval/percent_correct": pytest.approx(1 / 3),
        "eval/percent_correct_judged": 0.5,
    }
    nothing = {"eval/reward_failures": 1.0, "eval/pass@1": 0.0, "eval/percent_correct": 0.0}
    assert make().summarize([[None]]) == nothing


async def test_scores_and_failures_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []

    env = make(HalfJudged)
    await env.setup()
    env.wandb_run = SimpleNamespace(log=lambda metrics, step: logged.append(metrics))
    await env.collect_trajectories([1, 2])
    await env.wandb_log()
    await env.wandb_log()
    assert logged[0]["train/mean_score"] == pytest.approx(1 / 3)
    assert logged[0]["train/percent_correct"] == pytest.approx(1 / 3)
    assert logged[0]["train/reward_failures"] == 1
    assert "train/mean_score" not in logged[1]


async def test_events_of_an_evaluation_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []

    class Counting(Sums):
        def score(self, row: Any, answer: str) -> Any:
            self.counts["judged"] += 1
            return super().score(row, answer)

    env = make(Counting)
    env.eval_rows = [[1, 2], [10, 20], [3, 4]]
    env.wandb_run = SimpleNamespace(log=lambda metrics, step: logged.append(metrics))
    await asyncio.gather(env.evaluate(), env.collect_trajectories([1, 2]))
    await env.wandb_log()
    judged = {name: value for name, value in logged[0].items() if name.endswith("/judged")}
    assert judged == {"eval/judged": 3, "train/judged": env.config.group_size}
    assert env.total("judged") == env.config.group_size


def test_system_prompt_precedes_a_string_and_leaves_messages_alone() -> None:
    class Told(Sums):
        system_prompt = "Answer with a number."

    env = make(Told)
    assert [m["role"] for m in env.conversation([1, 2])] == ["system", "user"]
    env.prompt = lambda row: [{"role": "user", "content": "hi"}]
    assert env.conversation([1, 2]) == [{"role": "user", "content": "hi"}]


async def test_rows_come_from_the_configured_files(tmp_path: Path) -> None:
    for name, rows in (("train", [[1, 2], [3, 4]]), ("eval", [[5, 6], [7, 8]])):
        write_rows(tmp_path / name, *rows)

    class FromFiles(Sums):
        def load_rows(self, split: Any) -> Any:
            return DatasetEnv.load_rows(self, split)

        def parse_row(self, row: Any) -> Any:
            return row if row[0] < 7 else None

    env = make(
        FromFiles, dataset_path=str(tmp_path / "train"), eval_dataset_path=str(tmp_path / "eval")
    )
    await env.setup()
    assert (env.train_rows, env.eval_rows) == ([[1, 2], [3, 4]], [[5, 6]])
    with pytest.raises(ConfigError, match="define load_rows or give --env.dataset_path"):
        await make(FromFiles).setup()


async def test_close_may_be_plain() -> None:
    closed: list[str] = []

    class Plain(Sums):
        def close(self) -> Any:
            closed.append("plain")

    await evaluate(make(Plain))
    assert closed == ["plain"]


async def test_failed_request_of_an_evaluation_is_raised_as_itself() -> None:
    env = make()
    await env.setup()
    env.server.servers[0].fail(EngineRejected("no such model"))
    with pytest.raises(EngineRejected, match="no such model"):
        await env.evaluate()


async def test_evaluation_is_plain_chat_where_the_api_has_no_token_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = make(respond=lambda request: "3")
    await env.setup()
    harness = env.server.servers[0]
    monkeypatch.setattr(env.server, "managed_server", lambda **kwargs: _NoTokens())
    await env.evaluate()
    assert [request["messages"][0]["role"] for request in harness.requests] == ["user", "user"]
    with pytest.raises(NotImplementedError, match="no token ids"):
        await env.collect_trajectories([1, 2])


class _NoTokens:
    async def __aenter__(self) -> Any:
        raise NotImplementedError("no token ids")

    async def __aexit__(self, *_: object) -> None: ...


async def test_group_of_one_is_kept() -> None:
    env = make(group_size=1)
    group = await group_of(env, [0, 1])
    assert (group["scores"], group["group_overrides"]) == ([1.0], {"group_size": 1})


async def test_rows_reach_the_hub_and_the_run_ends_with_the_trainer() -> None:
    async with LoopbackHub(batch_size=8, max_token_len=1000) as hub:
        env = make(
            respond=lambda request: str(request.choice),
            rollout_server_url=hub.url,
            total_steps=2,
            ensure_scores_are_not_same=False,
        )
        run = asyncio.create_task(serve(env, timings=FAST))
        while hub.coordinator.status().current_step < 2:
            await hub.take_batch()
            await asyncio.sleep(0.01)
        outbox = await run
    assert outbox.num_stored >= 4
    assert outbox.dropped == {}
    assert any(map(any, env.item_beliefs.values()))
