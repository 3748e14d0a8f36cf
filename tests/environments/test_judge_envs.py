"""Environments with judges: votes in both orders, verdicts by criterion, and a reward model in this process."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.checker import RULES, check_env
from atroposlib.envs.rows import ChatPrompt
from atroposlib.errors import ConfigError
from atroposlib.inference.harness import HarnessRequest
from atroposlib.scored_data import Strictness, check_group
from tests.environments.helpers_environments import load

rlaif = load("rlaif_server")
rubric = load("rubric_judge_server")
reward = load("reward_model_server")

Respond = Callable[[HarnessRequest], str]
ITEM = ChatPrompt(messages=[{"role": "user", "content": "Say hello."}], answer="Good day to you.")


def judged_by(judge: Callable[[str, str], str], *answers: str) -> Respond:
    """Return a policy with these answers, and a judge of two answers."""

    def respond(request: HarnessRequest) -> str:
        _, found, rest = request.prompt.partition("<answer_a>\n")
        if not found:
            return answers[(request.choice + request.call) % len(answers)]
        first, _, rest = rest.partition("\n</answer_a>\n<answer_b>\n")
        return judge(first, rest.partition("\n</answer_b>")[0])

    return respond


def shorter(first: str, second: str) -> str:
    return f"Verdict: {'A' if len(first) < len(second) else 'B'}"


async def test_the_preferred_answer_wins_in_both_orders(started: Any) -> None:
    env = await started(rlaif.RLAIFEnv, judged_by(shorter, "Hi.", "Hello to you all."))
    group, _ = await env.collect_trajectories(ITEM)
    assert group["scores"] == [0.5, -0.5]
    asked = [str(request.get("prompt") or request["messages"]) for request in _requests(env)]
    assert len(asked) == 1 + 2 * env.config.num_votes
    assert sum(env.config.preference in text for text in asked) == 2 * env.config.num_votes


async def test_a_judge_that_prefers_a_position_gives_a_tie(started: Any) -> None:
    respond = judged_by(lambda first, second: "Verdict: A", "Hi.", "Hello to you all.")
    env = await started(rlaif.RLAIFEnv, respond)
    group, _ = await env.collect_trajectories(ITEM)
    assert group["scores"] == [0.0, 0.0]


async def test_unreadable_votes_do_not_count(started: Any) -> None:
    verdicts = iter(["Verdict: A", "hm", "hm", "Verdict: B", "Verdict: B", "hm"])
    respond = judged_by(lambda first, second: next(verdicts), "Hi.", "Hello to you all.")
    env = await started(rlaif.RLAIFEnv, respond)
    group, _ = await env.collect_trajectories(ITEM)
    assert sorted(group["scores"]) == [-0.5, 0.5]
    assert env.counts["judge_unparsable"] == 3


@pytest.mark.parametrize(
    ("answers", "scores"),
    [(("Hi.", "x" * 200), [1.0, -1.0]), (("x" * 200, "y" * 200), [-1.0, -1.0])],
)
async def test_a_cut_answer_is_not_compared(
    started: Any, answers: tuple[str, ...], scores: list[float]
) -> None:
    env = await started(rlaif.RLAIFEnv, judged_by(shorter, *answers), max_token_length=100)
    group, _ = await env.collect_trajectories(ITEM)
    assert group["scores"] == scores
    assert env.counts["judge_calls"] == 0


async def test_the_steering_message_is_not_trained(started: Any) -> None:
    def respond(request: HarnessRequest) -> str:
        if "<answer_a>" in request.prompt:
            return "Verdict: tie"
        return "steered" if "<system>Rhyme." in request.prompt else "plain"

    settings = {"steer_probability": 1.0, "preference": "Rhyme.", "group_size": 3}
    env = await started(rlaif.RLAIFEnv, respond, **settings)
    group, _ = await env.collect_trajectories(ITEM)
    check_group(group, strictness=Strictness.MEANING)
    texts = [env.tokenizer.decode(tokens) for tokens in group["tokens"]]
    prompt = "<user>Say hello.<eos><assistant>"
    assert texts == [prompt + "steered<eos>", prompt + "plain<eos>", prompt + "plain<eos>"]
    assert [messages[0]["role"] for messages in group["messages"]] == ["user"] * 3


@pytest.mark.parametrize("env_cls", [rlaif.RLAIFEnv, rubric.RubricJudgeEnv, reward.RewardModelEnv])
def test_a_prompt_that_is_too_long_is_skipped(env_cls: Any, made: Any) -> None:
    env = made(env_cls, max_token_length=100)
    assert env.parse_row({"prompt": "x" * 300}) is not None
    assert env.parse_row({"prompt": "x" * 500}) is None


async def test_evaluation_counts_the_answers_that_beat_the_data_set(
    started: Any, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    turns = [
        [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": text}]
        for text in ("Hi", "Good morning, dear friend.")
    ]
    rows.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    env = await started(
        rlaif.RLAIFEnv,
        judged_by(shorter, "Hello to you."),
        dataset_path=str(rows),
        eval_dataset_path=str(rows),
        data_dir_to_save_evals=str(tmp_path),
    )
    assert (await env.evaluate())["eval/percent_correct"] == 0.5


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("correct: 10\nhelpful: 5\nbrief: 0", (3 * 10 + 2 * 5) / 60),
        ("Good.\n\n- **correct**: 10\n\n* helpful = 10\n**brief:** 10.0\n", 1.0),
        ("correct: 1\nhelpful: 1\nbrief: 1\nbrief: 0\ncorrect: 0\nhelpful: 0", 0.0),
        ("<think>\ncorrect: 1</think>\ncorrect: 10\nhelpful: 10\nbrief: 10", 1.0),
        ("correct: 10\nhelpful: 10", None),
        ("correct: 10\nhelpful: 10\nbrief: 10\nbrief: 10", None),
        ("correct: 10\nhelpful: 10\nbrief: 10\nkind: 10", None),
        ("correct: 10\nhelpful: 10\nkind: 10", None),
        ("correct: 10\nhelpful: 10\nbrief: 10\nI hope this helps.", None),
        ("correct: 11\nhelpful: 10\nbrief: 10", None),
        ("correct: -1\nhelpful: 10\nbrief: 10", None),
        ("correct: ten\nhelpful: 10\nbrief: 10", None),
        ("<think>\ncorrect: 10\nhelpful: 10\nbrief: 10", None),
        ("", None),
    ],
)
async def test_every_criterion_needs_exactly_one_mark(
    started: Any, verdict: str, score: float | None
) -> None:
    env = await started(rubric.RubricJudgeEnv, lambda request: verdict)
    assert await env.score(ITEM, "Hello.") == (None if score is None else pytest.approx(score))
    assert env.counts["judge_unparsable"] == (score is None)


async def test_an_answer_without_a_readable_verdict_is_dropped(started: Any) -> None:
    answers = ["good", "bad", "odd"]

    def respond(request: HarnessRequest) -> str:
        if "<answer>" not in request.prompt:
            return answers[request.choice]
        mark = {"good": 10, "bad": 0}
        [answer] = [each for each in answers if f"<answer>\n{each}\n" in request.prompt]
        return f"correct: {mark.get(answer, '?')}\nhelpful: 6\nbrief: 6"

    env = await started(rubric.RubricJudgeEnv, respond, group_size=3)
    group, _ = await env.collect_trajectories(ITEM)
    assert group["scores"] == [pytest.approx(0.8), pytest.approx(0.3)]
    assert env.lost_answers()["judge_unparsable"] == 1


@pytest.mark.parametrize("names", [[], ["fit", "fit"], ["Not a name"]])
def test_criteria_need_different_names(names: list[str]) -> None:
    criteria = [{"name": name, "text": "Is it good?"} for name in names]
    with pytest.raises(ValueError, match=r"names|pattern"):
        rubric.RubricJudgeConfig(criteria=criteria)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Save tiny classification models."""

    def save(num_labels: int) -> str:
        torch = pytest.importorskip("torch")
        from transformers import Qwen2Config, Qwen2ForSequenceClassification

        from tests.tiny_model import make_tiny_tokenizer

        folder = tmp_path_factory.mktemp("reward_model")
        tokenizer = make_tiny_tokenizer()
        tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=num_labels,
            initializer_range=0.5,
            **sizes,
        )
        Qwen2ForSequenceClassification(config).save_pretrained(folder)
        return str(folder)

    return save


async def test_a_reward_model_scores_in_batches_as_it_does_one_by_one(
    started: Any, reward_model: Callable[..., str]
) -> None:
    answers = ["Hi.", "Hello to you all, and welcome.", "No.", "Good morning."]
    env = await started(
        reward.RewardModelEnv,
        lambda request: answers[request.choice],
        reward_model=reward_model(1),
        reward_batch_size=3,
        group_size=4,
    )
    group, _ = await env.collect_trajectories(ITEM)
    check_group(group, strictness=Strictness.MEANING)
    single = [env._model.scores_of([messages])[0] for messages in group["messages"]]
    assert group["scores"] == pytest.approx(single, abs=1e-5)
    assert len({round(score, 3) for score in single}) == 4


async def test_the_event_loop_runs_while_the_reward_model_scores(
    started: Any, reward_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = await started(reward.RewardModelEnv, lambda request: "Hi", reward_model=reward_model(1))
    released = threading.Event()
    loop = asyncio.get_running_loop()

    def wait(conversations: Any) -> list[float]:
        loop.call_soon_threadsafe(released.set)
        assert released.wait(timeout=20)
        return [0.5 + i for i in range(len(conversations))]

    monkeypatch.setattr(env._model, "scores_of", wait)
    group, _ = await env.collect_trajectories(ITEM)
    assert group["scores"][0] == 0.5


async def test_the_event_loop_runs_while_close_waits_for_a_batch(
    started: Any, reward_model: Callable[..., str]
) -> None:
    env = await started(reward.RewardModelEnv, lambda request: "Hi", reward_model=reward_model(1))
    released = threading.Event()
    batch = asyncio.create_task(env._in_thread(released.wait, 20))
    await asyncio.sleep(0)
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0)
    released.set()
    assert await batch
    await closing


@pytest.mark.drill
def test_check_finds_no_fault_with_a_reward_model(reward_model: Callable[..., str]) -> None:
    path = reward_model(1)

    def make(cls: Any) -> Any:
        config, servers = cls.config_init()
        settings = {"dataset_path": "sample", "reward_model": path}
        return cls(config.model_copy(update=settings), servers, False, True)

    # Random weights give every answer a random reward.
    skip = [rule.name for rule in RULES if rule.name.endswith("rewarded")]
    report = check_env(reward.RewardModelEnv, make=make, num_items=2, skip=skip)
    assert report.failed == [], report.to_text()


async def test_a_classifier_with_several_labels_is_refused(
    started: Any, reward_model: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match="2 labels"):
        await started(reward.RewardModelEnv, lambda request: "Hi", reward_model=reward_model(2))


def _requests(env: Any) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = env.server.servers[0].requests
    return requests
