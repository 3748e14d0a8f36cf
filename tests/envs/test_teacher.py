"""Teacher distillation: the requests to the teacher, the fields of a group, and the effect of a failure."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, ServerBaseline
from atroposlib.envs.collecting import close
from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from atroposlib.errors import ConfigError, EngineUnavailable
from atroposlib.inference.harness import ByteTokenizer, ServerHarness
from atroposlib.inference.scripted_engine import ScriptedEngine, made_up_logprobs
from atroposlib.runtime.env_command import build_environment
from atroposlib.runtime.group_log import GroupLog
from atroposlib.runtime.outbox import Outbox
from tests.builders.rows import rows_in

POLICY = [APIServerConfig(model_name="policy", base_url="http://policy/v1")]
TEACHER = APIServerConfig(model_name="big", base_url="http://teacher/v1")


class Vocabulary(ByteTokenizer):
    def __init__(self, size: int = 259) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.size)}


class Env(TeacherDistillationEnv):
    vocabularies = {"policy": 259, "big": 259, "other": 300}

    def load_tokenizer(self) -> Any:
        return Vocabulary()

    def load_teacher_tokenizer(self, source: str) -> Any:
        return Vocabulary(self.vocabularies[source])

    async def get_next_item(self) -> None:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def config(**values: Any) -> TeacherDistillationConfig:
    defaults = {"group_size": 2, "use_wandb": False, "teacher_enabled": True, "teacher_top_k": 2}
    return TeacherDistillationConfig(**{**defaults, "tokenizer_name": "policy", **values})


class Teacher(ServerHarness):
    """Answers with each token and its successor; `answer` may spoil that."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        self.asked.append(kwargs)
        await self._begin(kwargs)
        tokens = kwargs["input_ids"]
        return self.answer(
            {
                "prompt_tokens": tokens,
                "prompt_topk_token_ids": [[], *([t, t + 1] for t in tokens[1:])],
                "prompt_topk_logprobs": [[], *([-0.5, -float(t)] for t in tokens[1:])],
            }
        )


def group(**extra: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 5, 6], [1, 7]],
        "masks": [[-100, 5, 6], [-100, 7]],
        "scores": [1.0, 0.0],
        **extra,
    }


IDS = [[[], [5, 6], [6, 7]], [[], [7, 8]]]
LOGPROBS = [[[], [-0.5, -5.0], [-0.5, -6.0]], [[], [-0.5, -7.0]]]


class Attached:
    """An environment with its outbox and its teacher, without a hub."""

    def __init__(self, path: Path, **values: Any) -> None:
        self.env = Env(config(**values), POLICY, [TEACHER])
        self.teacher = Teacher()
        assert self.env.teacher_server is not None
        self.env.teacher_server.servers = [self.teacher]
        self.log = GroupLog.open(path / "groups.jsonl")
        self.outbox = Outbox(self.env, log=self.log)
        self.env.group_sink = self.outbox

    async def send(self, scored_data: Any, **options: Any) -> list[tuple[Any, Any]]:
        """Send and return the teacher's fields of every accepted group so far."""
        await self.env.handle_send_to_api(scored_data, None, **options)
        groups = rows_in(self.log.path)
        return [(each["distill_token_ids"], each["distill_logprobs"]) for each in groups]


@pytest.fixture
def attached(tmp_path: Path) -> Any:
    made = Attached(tmp_path)
    yield made
    made.log.close()


async def test_every_position_of_a_kept_group_gets_the_teachers_logprobs(
    attached: Attached,
) -> None:
    given = group()
    assert await attached.send(given) == [(IDS, LOGPROBS)]
    assert attached.outbox.num_held == 1
    assert "distill_token_ids" not in given  # the author's dict is not touched
    assert [
        (each["input_ids"], each["top_k"], each["max_tokens"]) for each in attached.teacher.asked
    ] == [([1, 5, 6], 2, 1), ([1, 7], 2, 1)]


async def test_lists_of_groups_keep_their_order_and_their_nones(attached: Attached) -> None:
    other = group(tokens=[[1, 9], [1, 9]], masks=[[-100, 9], [-100, 9]])
    found = await attached.send([group(), None, other])
    assert found == [(IDS, LOGPROBS), ([[[], [9, 10]]] * 2, [[[], [-0.5, -9.0]]] * 2)]
    assert attached.outbox.dropped == {"none": 1}


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (group(scores=[1.0, 1.0]), "equal_scores"),
        (group(group_overrides={"group_size": 3}), "group_size"),
        (group(tokens=[[1] * 9, [1, 7]], masks=[[-100] * 8 + [1], [-100, 7]]), "too_long"),
        ([group(), group(masks=[[-100, 5], [-100, 7]])], "malformed"),
    ],
)
async def test_groups_that_will_be_dropped_cost_the_teacher_nothing(
    attached: Attached, spoiled: Any, reason: str
) -> None:
    attached.env.max_token_len = 8
    await attached.send(spoiled)
    assert attached.outbox.dropped == {reason: 1}
    assert len(attached.teacher.asked) == (2 if isinstance(spoiled, list) else 0)


async def test_too_long_groups_are_annotated_where_length_does_not_matter(
    attached: Attached,
) -> None:
    attached.env.max_token_len = 2
    found = await attached.send(
        group(), do_send_to_api=False, abort_on_any_max_length_exceeded=False
    )
    assert found == [(IDS, LOGPROBS)]
    assert attached.outbox.num_held == 0


@pytest.mark.parametrize(
    ("top_k", "overrides", "asked"),
    [
        (2, {"skip_teacher_top_k": True}, []),
        (2, {"skip_teacher_top_k": False}, [2, 2]),
        (2, {"teacher_top_k": -1}, []),
        (2, {"teacher_top_k": 7}, [7, 7]),
        (2, {"teacher_top_k": 0}, [0, 0]),
        (2, {"teacher_top_k": None}, [2, 2]),
        (0, {}, [0, 0]),
        (-1, {}, []),
    ],
)
async def test_top_k_is_the_groups_else_the_configured_one(
    attached: Attached, top_k: int, overrides: dict[str, Any], asked: list[int]
) -> None:
    attached.env.config.teacher_top_k = top_k
    found = await attached.send(group(group_overrides=overrides))
    assert [each["top_k"] for each in attached.teacher.asked] == asked
    assert found == [(IDS, LOGPROBS) if asked else (None, None)]


async def test_an_override_that_is_no_number_is_a_failure_of_the_teacher(
    attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    found = await attached.send(group(group_overrides={"teacher_top_k": "7"}))
    assert found == [(None, None)]
    assert attached.env.num_teacher_failures == 1
    assert "group_overrides.teacher_top_k: '7', expected an integer" in caplog.text


async def test_groups_of_tensors_are_annotated_too(attached: Attached) -> None:
    torch = pytest.importorskip("torch")
    tensors = group(
        tokens=[torch.tensor([1, 5, 6]), torch.tensor([1, 7])],
        masks=[torch.tensor([-100, 5, 6]), torch.tensor([-100, 7])],
        scores=torch.tensor([1.0, 0.0]),
    )
    assert await attached.send(tensors) == [(IDS, LOGPROBS)]
    assert attached.teacher.asked[0]["input_ids"] == [1, 5, 6]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {**answer, "prompt_topk_logprobs": answer["prompt_topk_logprobs"][:-1]},
        lambda answer: {**answer, "prompt_topk_token_ids": [[1]] * len(answer["prompt_tokens"])},
        lambda answer: {
            **answer,
            "prompt_topk_logprobs": [
                [-math.inf] * len(row) for row in answer["prompt_topk_token_ids"]
            ],
        },
        lambda answer: {"prompt_tokens": answer["prompt_tokens"]},
    ],
)
async def test_an_answer_that_does_not_fit_drops_the_fields_not_the_group(
    attached: Attached, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attached.teacher.answer = spoil
    assert await attached.send(group()) == [(None, None)]
    assert attached.outbox.num_accepted == 1
    assert attached.env.num_teacher_failures == 1
    assert "sent without them" in caplog.text


async def test_a_teacher_that_is_away_drops_the_fields_of_the_whole_group(
    attached: Attached,
) -> None:
    attached.teacher.fail(EngineUnavailable("away"), times=2 * attached.teacher.max_attempts)
    assert await attached.send(group()) == [(None, None)]


async def test_the_first_failure_is_logged_with_its_traceback_later_ones_in_a_line(
    attached: Attached, caplog: pytest.LogCaptureFixture
) -> None:
    attached.teacher.answer = lambda answer: {}
    for _ in range(2):
        await attached.send(group())
    first, second = [r for r in caplog.records if "no teacher logprobs" in r.message]
    assert "KeyError: 'prompt_topk_token_ids'" in second.message
    assert first.exc_info
    assert not second.exc_info


async def test_without_a_teacher_groups_pass_as_they_are(tmp_path: Path) -> None:
    env = Env(config(teacher_enabled=False), POLICY)
    log = GroupLog.open(tmp_path / "g.jsonl")
    env.group_sink = Outbox(env, log=log)
    assert env.teacher_server is None
    assert await env.handle_send_to_api([group(), None]) == 1
    log.close()


async def test_the_teachers_connections_are_closed_with_the_environment() -> None:
    closed: list[str] = []

    class Closing(Teacher):
        async def close(self) -> None:
            closed.append("teacher")

    env = Env(config(), POLICY, TEACHER)
    assert env.teacher_server is not None
    env.teacher_server.servers = [Closing()]
    await close(env)
    assert closed == ["teacher"]


def test_teacher_with_another_vocabulary_is_refused() -> None:
    other = TEACHER.model_copy(update={"tokenizer_name": "other"})
    with pytest.raises(ValueError, match="differs from"):
        Env(config(), POLICY, other)


def test_teacher_tokenizer_of_the_same_name_is_not_loaded() -> None:
    class Strict(Env):
        def load_teacher_tokenizer(self, source: str) -> Any:
            raise AssertionError(source)

    Strict(config(), POLICY, TEACHER.model_copy(update={"tokenizer_name": "policy"}))


def test_top_k_below_minus_one_is_refused() -> None:
    with pytest.raises(ValueError, match="teacher_top_k"):
        config(teacher_top_k=-2)


class Configured(Env):
    name = "configured"

    @classmethod
    def config_init(cls) -> tuple[TeacherDistillationConfig, list[APIServerConfig]]:
        return config(teacher_enabled=False), POLICY


class WithDefault(Configured):
    @classmethod
    def teacher_config_init(cls) -> list[APIServerConfig]:
        return [TEACHER]


def build(cls: type[Env], *argv: str, mode: str = "serve") -> Any:
    return build_environment(cls, mode, argv, prog="t")


def test_teacher_flags_describe_the_teacher_and_only_it() -> None:
    flags = ["--teacher.base_url=http://t/v1", "--teacher.model_name=big"]
    env = build(Configured, "--env.teacher_enabled=true", *flags)
    [server] = env.teacher_server.servers
    assert (server.config.base_url, server.config.model_name) == ("http://t/v1", "big")
    assert env.server.servers[0].config.base_url == "http://policy/v1"


def test_teacher_section_of_the_yaml_may_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "env: {teacher_enabled: true}\n"
        "teacher:\n"
        "  - {base_url: 'http://a/v1', model_name: big}\n"
        "  - {base_url: 'http://b/v1', model_name: big}\n"
    )
    env = build(Configured, "--config", str(path))
    urls = [server.config.base_url for server in env.teacher_server.servers]
    assert urls == ["http://a/v1", "http://b/v1"]


class Producing(WithDefault):
    """Makes the same group for ever."""

    async def setup(self) -> None:
        return None

    async def get_next_item(self) -> Any:
        return 1

    async def collect_trajectories(self, item: Any) -> Any:
        return group(), []


async def test_process_writes_the_teachers_fields_too(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    flags = [
        "--env.teacher_enabled=true",
        "--env.total_steps=2",
        f"--env.data_path_to_save_groups={path}",
    ]
    env = build(Producing, *flags, mode="process")
    env.teacher_server.servers = [Teacher()]
    await env.process_manager()
    lines = rows_in(path)
    assert [(each["distill_token_ids"], each["distill_logprobs"]) for each in lines] == [
        (IDS, LOGPROBS)
    ] * 2


@pytest.mark.parametrize("mode", ["serve", "process"])
def test_default_teacher_takes_flags_field_by_field(mode: str) -> None:
    env = build(WithDefault, "--env.teacher_enabled=true", "--teacher.timeout=7", mode=mode)
    found = env.teacher_server.servers[0].config
    assert (found.base_url, found.model_name, found.timeout) == ("http://teacher/v1", "big", 7)


def test_teacher_of_a_disabled_environment_is_not_built() -> None:
    assert build(WithDefault).teacher_server is None
    with pytest.raises(ConfigError, match="no teacher servers"):
        build(Configured, "--env.teacher_enabled=true")


async def test_a_real_route_gives_the_teachers_logprobs(tmp_path: Path) -> None:
    """The whole way: HTTP, prompt_logprobs as vLLM writes them, the group's fields."""
    async with ScriptedEngine(model_name="big", weight_version="7") as engine:
        teacher = APIServerConfig(model_name="big", base_url=engine.url, server_type="vllm")
        env: Any = Env(config(teacher_top_k=1), ServerBaseline(), teacher)
        log = GroupLog.open(tmp_path / "g.jsonl")
        env.group_sink = Outbox(env, log=log)
        assert await env.handle_send_to_api(group()) == 1
        log.close()
        await env.teacher_server.close()
    line = json.loads(log.path.read_text())
    # The scripted engine's likeliest token is the successor, at half the logprob of the prompt's own.
    assert line["distill_token_ids"] == [[[], [6], [7]], [[], [8]]]
    assert line["distill_logprobs"] == [
        [[], *([own / 2] for own in made_up_logprobs([1], tokens, spans=[("7", len(tokens))]))]
        for tokens in ([5, 6], [7])
    ]
