"""An environment as verl's agent loop: verl's own classes and configuration, a server that answers by the prompt.

The configuration is that of `example_trainer/README.md`.
"""

import itertools
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from atroposlib.cli.environments import build
from atroposlib.envs.stepwise import Answer, Request, SteppedEnv
from atroposlib.errors import EnvError
from tests.processes import ROOT
from tests.tiny_model import IM_END, make_tiny_tokenizer

pytestmark = [
    pytest.mark.other_trainers,
    pytest.mark.filterwarnings("ignore"),  # hydra's and ray's own
    pytest.mark.timeout(90),
]
with warnings.catch_warnings(action="ignore"):
    pytest.importorskip(
        "verl.experimental.agent_loop",
        reason="VERL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
    )

import hydra  # noqa: E402
import verl  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from verl.experimental.agent_loop.agent_loop import (  # noqa: E402
    AgentLoopOutput,
    DictConfigWrap,
    ToolListWrap,
)
from verl.utils.config import omega_conf_to_dataclass, validate_config  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

README = (ROOT / "example_trainer" / "README.md").read_text()
CONFIG_DIR = Path(verl.__file__).parent / "experimental" / "fully_async_policy" / "config"
GUESSES = ["crane", "moist", "lunch"]


def block(name: str) -> str:
    """Return the code of the README below the comment `name`."""
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def config(tmp_path: Path) -> DictConfig:
    """Read the README's command by verl's schema, which refuses unknown keys."""
    words = shlex.split(block("verl-command").replace("\\\n", " ").replace("$PWD", str(tmp_path)))
    start = words.index("verl.experimental.fully_async_policy.fully_async_main")
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return hydra.compose("fully_async_ppo_trainer", overrides=words[start + 1 :])


class Server:
    """verl's `LLMServerClient`: a guess in each turn, of a newer policy version each time."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, stop_reason: str) -> None:
        self.tokenizer = tokenizer
        self.stop_reason = stop_reason
        self.asked: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        version = len(self.asked)
        self.asked.append(sampling_params)
        token_ids = answer(self.tokenizer, prompt_ids)
        versions = {"min_global_steps": version, "max_global_steps": version}
        return TokenOutput(
            token_ids=token_ids,
            log_probs=logprobs_of(token_ids),
            stop_reason=self.stop_reason,
            extra_fields=versions,
        )


def answer(tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int]) -> list[int]:
    turn = tokenizer.decode(prompt_ids).count("<|im_start|>assistant")
    text = f"I try <guess>{GUESSES[turn % 3]}</guess>"
    return [*tokenizer.encode(text), tokenizer.eos_token_id]


def logprobs_of(token_ids: list[int]) -> list[float]:
    return [-token_id / 1000 for token_id in token_ids]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    made = make_tiny_tokenizer()
    made.eos_token = IM_END
    made.save_pretrained(tmp_path / "model")
    return made


def flags(tmp_path: Path) -> dict[str, Any]:
    return {
        "env.tokenizer_name": str(tmp_path / "model"),
        "env.dataset_path": "sample",
    }


async def play(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, *, stop_reason: str = "completed"
) -> tuple[AgentLoopOutput, Server]:
    """Run the README's loop on its item 1, as verl's worker does."""
    [entry] = yaml.safe_load(block("verl-loop"))
    assert entry.pop("name") == "atropos"
    entry["flags"] = flags(tmp_path)
    server = Server(tokenizer, stop_reason=stop_reason)
    given = config(tmp_path)
    loop = hydra.utils.instantiate(
        OmegaConf.create(entry),
        trainer_config=DictConfigWrap(given),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        hf_model_type=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(given.data),
        tools=ToolListWrap([]),
    )
    files = tmp_path / "items.parquet"
    exec(block("verl-items").replace("items.parquet", str(files)), {})
    row = collate_fn([RLHFDataset(str(files), tokenizer, given.data)[1]])
    kwargs = {name: values[0] for name, values in row.items() if name != "dummy_tensor"}
    return await loop.run({"temperature": 1.0}, **kwargs), server


def test_the_command_of_the_readme_fits_verls_configuration(tmp_path: Path) -> None:
    given = config(tmp_path)
    rollout = omega_conf_to_dataclass(given.actor_rollout_ref.rollout)
    assert rollout.agent.default_agent_loop == "atropos"
    assert rollout.n == 8, "the key `rollout.n` is not read"
    assert rollout.multi_turn.enable, "else verl replaces the loop by its own"
    assert omega_conf_to_dataclass(given.actor_rollout_ref.actor).strategy == "fsdp2"
    assert given.async_training.partial_rollout
    validate_config(given, use_reference_policy=False, use_critic=False)


async def test_an_episode_is_that_of_the_stepped_environment(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    output, server = await play(tokenizer, tmp_path)
    env = build("wordle", flags(tmp_path), prog="test")
    async with SteppedEnv(env) as stepped:
        episode = stepped.episode()
        turn = await episode.reset(1)
        num_turns = 0
        while isinstance(turn, Request):
            token_ids = answer(tokenizer, turn.prompt_ids)
            turn = await episode.step(Answer(token_ids=token_ids, logprobs=logprobs_of(token_ids)))
            num_turns += 1
    assert turn.group is not None
    assert num_turns > 1
    assert output.prompt_ids + output.response_ids == turn.group["tokens"][0]
    trained = [token != -100 for token in turn.group["masks"][0]]
    assert [0] * len(output.prompt_ids) + output.response_mask == trained
    assert output.response_mask[0] == 1
    assert output.reward_score == turn.reward
    assert output.response_logprobs is not None
    for token, mask, logprob in zip(
        output.response_ids, output.response_mask, output.response_logprobs, strict=True
    ):
        assert logprob == pytest.approx(-token / 1000 if mask else 0.0)
    assert output.num_turns == 2 * num_turns
    assert output.extra_fields["min_global_steps"] == 0
    assert output.extra_fields["max_global_steps"] == num_turns - 1
    assert all(a["temperature"] == 1.0 for a in server.asked)
    assert all(a["max_tokens"] <= b["max_tokens"] for b, a in itertools.pairwise(server.asked))


async def test_episodes_without_a_score_end_the_run_after_three(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(EnvError, match="wordle: 3 episodes without a score: "):
        await play(tokenizer, tmp_path, stop_reason="aborted")
