"""The author's surface: names, defaults and the joining of single sequences."""

from pathlib import Path
from typing import Any

import pytest

import atroposlib.envs
from atroposlib.envs import checkpoint
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.hooks import join_items
from atroposlib.errors import EnvError
from atroposlib.scored_data import Strictness, check_group
from tests.runtime.helpers_runtime import ScriptedEnv, make_group


def make_item(i: int, **fields: Any) -> dict[str, Any]:
    return {"tokens": [1, 2 + i], "masks": [-100, 2 + i], "scores": float(i), **fields}


def test_join_keeps_every_optional_field() -> None:
    fields: dict[str, Any] = {
        "inference_logprobs": [1.0, -0.5],
        "ref_logprobs": [1.0, -0.75],
        "advantages": [0.0, 2.0],
        "messages": [{"role": "user", "content": "hi"}],
        "overrides": {"sft": True},
        "images": "i",
        "distill_token_ids": [[1], [2]],
        "distill_logprobs": [[-1.0], [-2.0]],
    }
    items = [
        make_item(i, **fields, policy_version=9 - i, group_overrides={str(i): i}) for i in (0, 1)
    ]
    group: dict[str, Any] = dict(join_items(items))
    for key, value in fields.items():
        assert group[key] == [value, value], key
    assert group["policy_version"] == 8
    assert group["group_overrides"] == {"0": 0, "1": 1}
    assert check_group(group, strictness=Strictness.MEANING).num_trained == 2


def test_join_leaves_absent_fields_none() -> None:
    group: dict[str, Any] = dict(join_items([make_item(0), make_item(1, overrides={"sft": True})]))
    assert group["inference_logprobs"] is None
    assert group["messages"] is None
    assert group["overrides"] == [{}, {"sft": True}]
    assert group["group_overrides"] == {}


@pytest.mark.parametrize("member", [None, [1], "x"])
def test_join_refuses_what_is_no_dict(member: Any) -> None:
    with pytest.raises(ValueError, match="ScoredDataItem.*call 1 returned"):
        join_items([make_item(0), member])


async def test_default_collect_runs_group_size_times_and_raises_the_authors_error() -> None:
    class PerSequence(ScriptedEnv):
        calls = 0

        async def collect_trajectory(self, item: int) -> Any:
            self.calls += 1
            if item == 13:
                raise LookupError("thirteen")
            return make_item(self.calls), [f"later-{self.calls}"]

    env = PerSequence(group_size=3)
    group, backlog = await BaseEnv.collect_trajectories(env, 1)
    assert group["scores"] == [1.0, 2.0, 3.0]
    assert backlog == ["later-1", "later-2", "later-3"]
    with pytest.raises(LookupError, match="thirteen"):
        await BaseEnv.collect_trajectories(env, 13)


def test_class_without_the_two_required_methods_cannot_be_built() -> None:
    class Incomplete(BaseEnv):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete(BaseEnvConfig(), [])  # type: ignore[abstract]


async def test_sending_without_a_runtime_says_how_to_start_one() -> None:
    with pytest.raises(EnvError, match="serve or process"):
        await ScriptedEnv().handle_send_to_api(make_group())


async def test_rollout_logging_wants_more_than_the_group_has() -> None:
    env = ScriptedEnv(use_wandb=True, num_rollouts_per_group_for_logging=9, num_rollouts_to_keep=2)
    for _ in range(3):
        await env.add_rollouts_for_wandb(make_group())
    assert [len(rows) for rows in env.rollouts_for_wandb] == [2, 2]


async def test_wandb_log_prefixes_the_environments_metrics() -> None:
    class Run:
        logged: dict[str, Any] = {}

        def log(self, metrics: dict[str, Any], step: int) -> None:
            self.logged = {**metrics, "step": step}

    env = ScriptedEnv()
    env.wandb_run, env.wandb_prepend, env.curr_step = Run(), "scripted_0", 5
    env.completion_lengths = [2, 4]
    await env.wandb_log({"eval/x": 1.0})
    logged = env.wandb_run.logged
    assert logged["scripted_0_eval/x"] == 1.0
    assert logged["scripted_0_train/completion_lengths"] == 3.0
    assert logged["step"] == 5
    assert env.completion_lengths == []


def test_checkpoint_is_restored_from_the_newest_step_not_later(tmp_path: Path) -> None:
    folder = checkpoint.checkpoint_folder(str(tmp_path), "scripted_0")
    env = ScriptedEnv()
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "scripted_0"
    for step in (10, 20, 30):
        env.save_checkpoint(step, {"iter": step})
    env.curr_step = 25
    env.load_checkpoint()
    assert env.iter == 20  # type: ignore[attr-defined]
    assert checkpoint.load(folder, 5) == {}
    assert sorted(p.name for p in folder.iterdir()) == [
        "step-10.json",
        "step-20.json",
        "step-30.json",
    ]


def test_package_reexports_lazily() -> None:
    assert atroposlib.envs.BaseEnv is BaseEnv
    assert issubclass(atroposlib.envs.DatasetEnv, BaseEnv)
    with pytest.raises(AttributeError):
        _ = atroposlib.envs.BaseLanguageEnv
