"""Reward functions: the framework's promises, and a table of values for every reward."""

import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atroposlib.envs import rewards
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, math_worker, registry
from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward, accuracy_reward
from atroposlib.envs.reward_fns.cascading_r1_math_reward import cascading_r1_math_reward
from atroposlib.envs.reward_fns.chandas_meter_reward import ChandasMeterReward, _chandas
from atroposlib.envs.reward_fns.cosine_scaled_reward import CosineScaledReward, embed
from atroposlib.envs.reward_fns.crossword_format_reward import CrosswordFormatReward
from atroposlib.envs.reward_fns.format_reward import FormatReward, format_reward
from atroposlib.envs.reward_fns.math_worker import BlockingWorkers, math_workers
from atroposlib.envs.reward_fns.r1_reward import FormatReasoningReward, R1Reward, r1_reward
from atroposlib.envs.reward_fns.reasoning_steps_reward import ReasoningStepsReward
from atroposlib.envs.reward_fns.registry import LegacyFunctionWrapper, RewardRegistry
from atroposlib.envs.reward_fns.repetition_penalty_reward import (
    RepetitionPenaltyReward,
    repetition_penalty_reward,
)
from atroposlib.envs.rewards import RewardFailure
from atroposlib.errors import ConfigError, EnvError, MissingDependency
from tests.builders.programs import run_python
from tests.builders.tables import table
from tests.envs import helpers_rewards
from tests.tiny_model import make_tiny_model


class Length(RewardFunction):
    """The number of characters."""

    def compute(self, completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(self.get_content(each))) for each in completions]


class Broken(RewardFunction):
    def compute(self, completions: Any, **kwargs: Any) -> list[float]:
        raise KeyError("no such column")


class Recorder:
    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def log(self, metrics: dict[str, float]) -> None:
        self.logged.update(metrics)


def test_a_call_multiplies_by_the_weight_and_logs() -> None:
    reward, recorder = Length(weight=0.5, name="len"), Recorder()
    reward.set_wandb_logger(recorder)
    assert reward(["a", "abc"]) == [0.5, 1.5]
    assert recorder.logged == {
        "reward/len/mean_raw": 2.0,
        "reward/len/mean_weighted": 1.0,
        "reward/len/min": 1.0,
        "reward/len/max": 3.0,
    }
    assert Length().name == "length"


def test_a_reward_that_raises_is_zero_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    reward = Broken()
    with caplog.at_level(logging.ERROR):
        assert reward(["a", "b"]) == [0.0, 0.0]
    assert reward.failures == {"exception": 2}
    assert "no such column" in caplog.text


def test_mistakes_of_the_setup_are_raised_not_zero() -> None:
    class Lacks(RewardFunction):
        def compute(self, completions: Any, **kwargs: Any) -> list[float]:
            raise MissingDependency("pip install 'atroposlib[math]'")

    with pytest.raises(MissingDependency):
        Lacks()(["a"])
    with pytest.raises(MissingDependency):
        CombinedReward([Lacks()])(["a"])


def test_a_value_too_few_is_an_error() -> None:
    class Short(RewardFunction):
        def compute(self, completions: Any, **kwargs: Any) -> list[float]:
            return [1.0]

    with pytest.raises(EnvError, match="1 values for 2 completions"):
        Short()(["a", "b"])


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("t", "t"),
        ({"role": "assistant", "content": "t"}, "t"),
        ({"message": {"role": "assistant", "content": "t"}}, "t"),
        ([{"role": "user", "content": "q"}, {"role": "assistant", "content": "t"}], "t"),
        ([{"role": "user", "content": "q"}], ""),
        ([], ""),
        (None, ""),
        ({"role": "assistant", "content": None}, ""),
    ],
)
def test_content_of_every_shape_of_completion(completion: Any, text: str) -> None:
    assert RewardFunction.get_content(completion) == text


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("accuracy", "AccuracyReward"),
        ("format", "FormatReward"),
        ("formatreasoning", "FormatReasoningReward"),
        ("accuracyx", "AccuracyXReward"),
        ("r1", "R1Reward"),
        ("r1_reward", "R1Reward"),
        ("cascading_r1_math", "LegacyFunctionWrapper"),
        ("cosine_scaled", "CosineScaledReward"),
        ("crossword_format", "CrosswordFormatReward"),
        ("reasoning_steps", "ReasoningStepsReward"),
        ("repetition_penalty", "RepetitionPenaltyReward"),
        ("chandas_meter", "ChandasMeterReward"),
    ],
)
def test_every_name_makes_its_own_class(name: str, cls: str) -> None:
    # "cascading_r1_math" and "r1_reward" have one spelling.
    for spelling in {name, name if "r1" in name else name.replace("_", "")}:
        made = registry.create(spelling, weight=2.0)
        assert type(made).__name__ == cls
        assert made.weight == 2.0


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("r1", "r1reward"),
        ("formatreasoning", "formatreasoningreward"),
        ("cascading_r1_math", "cascading_r1_math"),
    ],
)
def test_names_are_found_where_nothing_was_imported_before(name: str, made: str) -> None:
    code = f"from atroposlib.envs.reward_fns import registry; print(registry.create({name!r}).name)"
    assert run_python("-c", code) == f"{made}\n"


def test_custom_names_are_kept_whole() -> None:
    own = RewardRegistry()
    own.register(name="my_reward")(Length)
    own.register(Length)
    assert own.list_registered() == ["length", "my_reward"]
    assert own.get("my_reward") is own.get("my") is Length
    with pytest.raises(TypeError, match="not a subclass"):
        own.register(dict)


def test_configuration_wins_over_keywords() -> None:
    config = {"type": "format", "weight": 3.0, "params": {"preferred_tags": ["b"]}}
    made = registry.create(config, weight=1.0, require_all_tags=True)
    assert isinstance(made, FormatReward)
    assert (made.weight, made.preferred_tags, made.require_all_tags) == (3.0, ["b"], True)
    assert config["type"] == "format"
    with pytest.raises(ValueError, match="needs a type"):
        registry.create({"weight": 1.0})


def test_functions_are_rewards_and_one_number_is_for_all() -> None:
    own = RewardRegistry()
    own.register_function("half", lambda completions, **_: 0.5)
    own.register_function("scaled", lambda completions, scale, **_: [scale] * len(completions))
    assert own.create("half", weight=2.0)(["a", "b"]) == [1.0, 1.0]
    scaled = own.create({"type": "scaled", "scale": 3})
    assert isinstance(scaled, LegacyFunctionWrapper)
    assert scaled(["a"]) == [3.0]
    assert scaled.name == "scaled"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("acuracy", "; did you mean accuracy"),
        *((name, "") for name in ("registry", "reward_function", "os.path", "")),
    ],
)
def test_unknown_names_are_import_errors_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ImportError, match=f"there is no reward function '{name}'{hint}"):
        registry.create(name)


def test_required_functions_are_found_everywhere_in_a_configuration() -> None:
    config = {
        "datasets": [
            {
                "dataset_reward_funcs": ["accuracy"],
                "reward_funcs": ["format"],
                "types": [{"reward_funcs": ["r1"]}],
            }
        ],
        "reward_functions": [{"type": "repetition_penalty", "weight": 0.1}],
        "reward_funcs": ["reasoning_steps"],
    }
    names = "accuracy format r1 repetition_penalty reasoning_steps"
    assert registry.load_required_functions(config) == {*names.split()}
    with pytest.raises(ImportError):
        registry.load_required_functions({"reward_funcs": ["nothing_like_it"]})


def test_file_dropped_into_the_package_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.envs import reward_fns

    (tmp_path / "shouting_reward.py").write_text(
        "from atroposlib.envs.reward_fns import RewardFunction\n"
        "class Another(RewardFunction):\n    def compute(self, c, **k): return [9.0] * len(c)\n"
        "class ShoutingReward(RewardFunction):\n"
        "    def compute(self, c, **k): return [float(x.isupper()) for x in c]\n"
    )
    (tmp_path / "lonely.py").write_text("def lonely(completions, **kwargs): return 7\n")
    monkeypatch.setattr(reward_fns, "__path__", [*reward_fns.__path__, str(tmp_path)])
    own = RewardRegistry()
    assert own.create("shouting")(["A", "b"]) == [1.0, 0.0]
    assert own.create("lonely")(["A", "b"]) == [7.0, 7.0]


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("none", [7.0, 21.0, 10.5]), ("sum", [3.5, 10.5, 5.25]), ("minmax", [0.0, 1.0, 0.25])],
)
def test_combined_adds_weighted_members_then_normalises(
    normalization: Any, expected: list[float]
) -> None:
    def half_length(completions: Any, **kwargs: Any) -> list[float]:
        return [len(each) / 2 for each in completions]

    members = [Length(weight=1.5), LegacyFunctionWrapper(half_length, weight=0.5)]
    # 1.5 * 4 + 0.5 * 2 = 7; the weights sum to 2.
    combined = CombinedReward(members, normalization=normalization)
    assert combined(["a" * 4, "a" * 12, "a" * 6]) == expected


def test_combined_leaves_a_failing_member_out() -> None:
    combined = CombinedReward([Length(weight=2.0), Broken(weight=8.0)], normalization="sum")
    assert combined(["abc"]) == [3.0]
    assert combined.failures == {"broken": 1}


def test_combined_minmax_of_equal_values_is_zero() -> None:
    assert CombinedReward([Length()], normalization="minmax")(["ab", "cd"]) == [0.0, 0.0]


def test_combined_is_made_from_names_and_configurations() -> None:
    combined = registry.create(
        {"type": "combined", "rewards": ["format", {"type": "r1", "weight": 2.0}], "weight": 10.0}
    )
    assert combined(["<think>t</think> four"], solution="four") == [10.0 * (1.0 + 2.0 * 1.25)]
    with pytest.raises(ConfigError, match="normalization"):
        CombinedReward([], normalization="softmax")  # type: ignore[arg-type]


PLAIN = "The cat sat on a mat near our door. Later it went off to sleep in some warm place."
SAME_BEGINNINGS = "We saw a big dog here. We saw an old car there. We saw some men at work now."


@pytest.mark.parametrize(
    ("reward", "text", "settings", "expected", "solution"),
    [
        (reward, text, settings, expected, *(solution or [None]))
        for reward, rows in table("envs/rewards").items()
        for text, settings, expected, *solution in rows
    ],
)
def test_a_text_has_its_value(
    reward: str, text: str, settings: dict[str, Any], expected: float, solution: Any
) -> None:
    made = registry.create(reward, **settings)
    assert made([text], solution=solution) == [pytest.approx(expected)]
    if reward == "format":
        assert format_reward([text], **settings) == [expected]


def test_r1_is_the_weighted_sum_of_form_and_accuracy() -> None:
    texts = ["<think>x</think>four", "four", "<think>x</think>five", "five"]
    assert R1Reward()(texts, solution="four") == [1.25, 1.0, 0.25, 0.0]
    weighted = R1Reward(format_weight=2.0, accuracy_weight=3.0)
    assert weighted(texts, solution=["four"] * 4) == [4.0, 3.0, 1.0, 0.0]
    assert r1_reward(texts, solution="four", format_weight=0.0) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (FormatReward, "<think>" * 50_000),
        (FormatReasoningReward, "<think>" * 50_000),
        (CrosswordFormatReward, "1" * 200_000),
        (ReasoningStepsReward, "\n" * 200_000),
    ],
)
def test_a_text_that_repeats_itself_takes_no_quadratic_time(
    reward: type[RewardFunction], text: str
) -> None:
    assert reward()([text]) == [0.0]


def test_pattern_weights_have_the_originals_names(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"numbered_steps": 0.1, "list_numbers": 0.2, "bullet_points": 0.25}
    reward = ReasoningStepsReward(
        min_steps=1, pattern_weights={**weights, "transition_words": 0.05}
    )
    assert reward(["Step 1:", "1. a", "- a", "then"]) == [0.1, 0.2, 0.25, 0.05]
    assert not caplog.records
    assert ReasoningStepsReward(pattern_weights={"bullets": 9.0})(["- a\n- b\n- c"]) == [0.4]
    assert "'bullets' have no effect; the names are numbered_steps, list_numbers" in caplog.text


def test_repetition_below_the_threshold_costs_nothing() -> None:
    letters = " ".join("bcdefghijklmnopqrstuvwxyz")
    text = f"Seen a {letters}. Now seen 1 2 3 4 5 6 7 8 9 10."  # one long word twice in 39
    assert RepetitionPenaltyReward()([text]) == [0.0]
    assert RepetitionPenaltyReward(threshold=0.0)([text]) == [pytest.approx(-0.3 / 39)]


def test_repetition_never_costs_more_than_one() -> None:
    reward = RepetitionPenaltyReward(component_weights={"word_repetition": 90.0})
    assert reward(["Word word word up. And word word word it, word word."]) == [-1.0]


def test_repetition_takes_the_originals_keywords(caplog: pytest.LogCaptureFixture) -> None:
    twice = f"{PLAIN} It rains now. it rains, NOW!"
    reward = RepetitionPenaltyReward(paragraph_repetition_base_penalty=-0.2, weight=2.0)
    assert reward([twice]) == [pytest.approx(2 * (-0.2 - 0.4 / 4))]
    weights = {"beginning_repetition": 0.25, "phrase_repetition": 0, "consecutive_repetition": 0}
    reward = RepetitionPenaltyReward(component_weights=weights)
    assert reward([SAME_BEGINNINGS]) == [pytest.approx(-(0.25 * 2 / 3))]
    often = "Word of mine. Your word is word enough for them all, word."
    assert RepetitionPenaltyReward()([often]) == [pytest.approx(-0.3 * 3 / 12)]
    assert RepetitionPenaltyReward(stopwords={"word"})([often]) == [0.0]
    assert repetition_penalty_reward([often], threshold=0.3) == [0.0]
    assert not caplog.records
    RepetitionPenaltyReward(component_weights={"words": 1.0})
    assert "'words' have no effect" in caplog.text


def test_metre_without_chandas_is_zero_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "chandas.identify", None)
    _chandas.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert ChandasMeterReward()(["a"]) == [0.0]
        assert ChandasMeterReward()(["a", "b"]) == [0.0, 0.0]
    assert caplog.text.count("pip install chandas") == 1
    _chandas.cache_clear()


def test_metre_is_valued_by_the_kind_of_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def identify(lines: list[str]) -> dict[str, Any]:
        metre = "Tri\u1e63\u1e6dubh"
        return {
            "exact": metre if lines == ["exact"] else None,
            "partial": {metre: [1]} if lines == ["partial"] else {"Other": [1]},
            "accidental": [metre] if lines == ["accidental"] else [],
        }

    fake = SimpleNamespace(
        to_pattern_lines=list, identifier=SimpleNamespace(IdentifyFromPatternLines=identify)
    )
    monkeypatch.setitem(sys.modules, "chandas", SimpleNamespace(identify=fake))
    monkeypatch.setitem(sys.modules, "chandas.identify", fake)
    _chandas.cache_clear()
    texts = ["exact", "partial", "accidental", "none", " "]
    assert ChandasMeterReward()(texts) == [1.0, 0.5, 0.25, 0.0, 0.0]
    _chandas.cache_clear()


def test_cosine_scaled_follows_the_embeddings(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    source = str(make_tiny_model(tmp_path / "model"))
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModel.from_pretrained(source)

    def slow(text: str) -> Any:
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        return hidden.mean(dim=0).double().numpy()

    texts, gold = ["the same", "quite another thing"], "the same"
    expected = [
        float(slow(t) @ slow(gold) / np.linalg.norm(slow(t)) / np.linalg.norm(slow(gold)))
        for t in texts
    ]
    values = CosineScaledReward(model_name=source)(texts, solution=gold)
    assert values == pytest.approx(expected, abs=1e-5)
    assert values[0] == pytest.approx(1.0)
    assert embed(texts, model_name=source).shape == (2, 32)
    far = CosineScaledReward(model_name=source, scale_factor=1e6)
    assert far([texts[1], "", "x"], solution=[gold, gold, None]) == [-1.0, 0.0, 0.0]


@pytest.fixture(scope="module", autouse=True)
def _end_workers() -> Iterator[None]:
    yield
    if math_workers.cache_info().currsize:
        math_workers().close()
        math_workers.cache_clear()


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        (r"\boxed{4}", 4, 1.0),
        (r"\boxed{4.0000001}", "4", 1.0),
        (r"\boxed{1,200}", "5 * 240 = 1,200 #### 1,200", 1.0),
        ("#### 1200", r"it is \boxed{1200}", 1.0),
        (r"\boxed{\$4.00}", "4", 1.0),
        (r"\boxed{9^{9^{9}}}", "9^{9^{9}}", 1.0),
        (r"\boxed{x +  1}", r"\boxed{x + 1}", 1.0),
        (r"\boxed{}", r"\boxed{}", 0.0),
        (r"<think>\boxed{4}</think> no idea", "4", 0.0),
        (r"<think>\boxed{4}", "4", 0.0),
        (r"<think>\boxed{5}</think>\boxed{4}", "4", 1.0),
        (r"\boxed{4}" * 7, "4", 0.0),
        (r"\boxed{4}" * 6, "4", 1.0),
        ("", "4", 0.0),
        (r"\boxed{4}", None, 0.0),
    ],
)
def test_accuracy_of_numbers(
    text: str, solution: Any, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverEqual:
        def run(self, function: Any, calls: Any, *, timeout_s: float) -> list[bool]:
            return [False] * len(calls)

    assert AccuracyReward(workers=NeverEqual())([text], solution=solution) == [expected]  # type: ignore[arg-type]


def test_accuracy_asks_math_verify_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)  # of another test
    texts = [
        r"\boxed{\frac{1}{2}}",
        r"\boxed{x + 1}",
        r"#### $\frac{2}{4}$",
        r"$\frac{1}{2}$",
        r"\boxed{3}",
    ]
    golds = ["0.5", "1 + x", r"\frac{1}{2}", "0.5", r"\frac{6}{2}"]
    assert accuracy_reward(texts, solution=golds) == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert accuracy_reward(texts[:1], ground_truth=0.5) == [1.0]
    texts = [
        "#### 17\n$16$",
        "\\boxed{17}\n\\boxed{17=\n$16$",
        r"\boxed{4^2}",
        "answer: $16$",
        r"<think>\boxed{16}",
    ]
    assert accuracy_reward(texts, solution="16") == [0.0] * 5
    assert "math_verify" not in sys.modules


def test_cascade_adds_the_format_only_to_right_answers() -> None:
    texts = [
        r"<think>t</think> \boxed{4}",
        r"\boxed{4}",
        r"<think>t</think> \boxed{5}",
        r"<think>t</think> \boxed{4} <b>",
        r"<think>t</think> <think>u</think>\boxed{4}",
    ]
    assert cascading_r1_math_reward(texts, solution="4") == [1.5, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("on_failure", "expected"), [("zero", 0.0), ("nan", math.nan)])
def test_an_answer_that_hangs_is_killed_counted_and_not_simply_wrong(
    on_failure: Any, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.envs.reward_fns import accuracy_reward as module

    monkeypatch.setattr(module, "is_equal", helpers_rewards.hang_on_loop)
    workers = BlockingWorkers(num_workers=1, preload=(helpers_rewards.__name__,))
    reward = AccuracyReward(timeout_s=0.2, on_failure=on_failure, workers=workers)
    values = reward(["#### a", "#### loop", "#### b"], solution="x")
    workers.close()
    np.testing.assert_equal(values, [1.0, expected, 1.0])
    assert reward.failures == {"timeout": 1}


def test_failures_can_be_raised() -> None:
    class Fails:
        def run(self, function: Any, calls: Any, *, timeout_s: float) -> list[RewardFailure]:
            return [RewardFailure(reason="memory", detail="too much")] * len(calls)

    with pytest.raises(EnvError, match=r"could not be judged \(memory\): too much"):
        AccuracyReward(on_failure="raise", workers=Fails())([r"\boxed{x}"], solution="y")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_failure"):
        AccuracyReward(on_failure="drop")  # type: ignore[arg-type]


def test_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_worker.importlib.util, "find_spec", lambda name: None)
    math_workers.cache_clear()
    with pytest.raises(MissingDependency, match=r"\[math\]"):
        AccuracyReward()([r"\boxed{x}"], solution="y")


def test_solutions_of_another_length_are_refused() -> None:
    with pytest.raises(EnvError, match="2 values of solution for 3 completions"):
        AccuracyReward()(["a", "b", "c"], solution=["1", "2"])


def test_workers_are_gone_after_close() -> None:
    workers = BlockingWorkers(num_workers=1)
    [pid] = workers.run(rewards.os.getpid, [()], timeout_s=20.0)
    workers.close()
    with pytest.raises(ProcessLookupError):
        rewards.os.kill(pid, 0)
    workers.close()
