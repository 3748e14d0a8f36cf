"""One environment through three doors: this project's `process`, an OpenEnv server, a taskset of verifiers.

The same engine answers all of them. Same seed: same prompt ids, tokens, masks, logprobs and rewards.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sysconfig
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atroposlib.cli.environments import load
from atroposlib.inference.harness import HarnessRequest
from atroposlib.inference.scripted_engine import ScriptedEngine, dialects, server
from atroposlib.runtime.process import process as write_groups
from atroposlib.runtime.replay import environment_for
from tests.contract.test_envs_readme import BLOCKS
from tests.processes import ROOT
from tests.tiny_model import IM_END, make_tiny_tokenizer

pytestmark = [pytest.mark.bridges, pytest.mark.timeout(240)]

NUM_EPISODES = 3
TOKENS_PATH = "/inference/v1/generate"

OVER_OUR_PACKAGES = "import sys; sys.path.append(sys.argv.pop(1)); "
"""Finds in this interpreter's packages what a library's virtual environment does not have."""


class Episode(NamedTuple):
    """What a trainer gets to train on."""

    tokens: list[int]
    trained: list[bool]
    logprobs: list[float]
    """Of the trained tokens."""
    reward: float

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each turn: all tokens before its sampled ones."""
        starts = [
            i for i, (a, b) in enumerate(itertools.pairwise(self.trained), start=1) if b and not a
        ]
        return [self.tokens[:start] for start in starts]


def answer(request: HarnessRequest) -> str:
    """Answer one of the three environments by its prompt alone."""
    prompt = request.prompt
    turn = prompt.count("<|im_start|>assistant")
    if "hidden English noun" in prompt:
        return f"I try <guess>{['crane', 'moist', 'lunch'][turn % 3]}</guess>"
    asked = re.search(r"What do (\d+) pieces of (\w+)", prompt)
    if asked is None:
        return "abcde"
    if turn == 1:
        call = {"name": "price", "arguments": {"fruit": asked[2]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    return str(2 * int(asked[1]))


def named_tokens(body: Any, results: Any, model: Any) -> Any:
    """Write `token` beside `token_id`, as older vLLM did: verifiers 0.4 does not read the form of vLLM 0.32."""
    written = dialects.write_scale_out(body, results, model)
    for choice in written["choices"]:
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            entry["token"] = f"token_id:{entry['token_id']}"
    return written


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedEngine]:
    usual = server._DIALECTS[TOKENS_PATH]
    monkeypatch.setitem(server._DIALECTS, TOKENS_PATH, usual._replace(write=named_tokens))
    tokenizer = make_tiny_tokenizer()
    tokenizer.eos_token = IM_END
    engine = ScriptedEngine(tokenizer=tokenizer, respond=answer, model_name="scripted")
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def model(engine: ScriptedEngine, tmp_path: Path) -> str:
    """Return a folder with the engine's tokenizer."""
    engine.tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture(params=["wordle", "letter_reversal_server", "shopping.py"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the name of a game of several turns, of a single turn, or the file of an environment with tools."""
    name: str = request.param
    if name.endswith(".py"):
        (tmp_path / name).write_text(BLOCKS["Shopping"])
        return str(tmp_path / name)
    return name


@pytest.fixture
def flags(environment: str, model: str) -> dict[str, Any]:
    given: dict[str, Any] = {"env.tokenizer_name": model, "env.max_token_length": 64}
    if environment == "wordle":
        given["env.dataset_path"] = "sample"
    if environment == "letter_reversal_server":
        given["env.strictly_on_policy"] = False
    return given


def argv_of(flags: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture
async def usual(
    environment: str, flags: dict[str, Any], engine: ScriptedEngine, tmp_path: Path
) -> list[Episode]:
    """The episodes as `process` writes them."""
    path = tmp_path / "groups.jsonl"
    more = {
        "env.group_size": 1,
        "env.total_steps": NUM_EPISODES,
        "env.max_num_workers": 1,
        "env.data_path_to_save_groups": path,
        "openai.base_url": f"{engine.url}/v1",
        "openai.model_name": "scripted",
        "openai.server_type": "vllm",
    }
    env = environment_for(load(environment), flags=argv_of({**flags, **more}), prog="test")
    await write_groups(env)
    return [_of_group(json.loads(line)) for line in path.read_text().splitlines()]


def _of_group(group: dict[str, Any]) -> Episode:
    [tokens], [mask], [logprobs] = group["tokens"], group["masks"], group["inference_logprobs"]
    trained = [label != -100 for label in mask]
    assert [label for label in mask if label != -100] == list(itertools.compress(tokens, trained))
    return Episode(tokens, trained, list(itertools.compress(logprobs, trained)), group["scores"][0])


def command(venv: str, code: str, *argv: str) -> list[str]:
    """Return the command that runs `code` in a library's virtual environment, over this one's packages."""
    path = Path(os.environ.get("ATROPOS_BRIDGES_VENVS", "no"), venv, "bin/python").absolute()
    if not path.is_file():
        pytest.skip(f"{venv} WAS NOT TESTED: set ATROPOS_BRIDGES_VENVS, see .ci/bridges_env.sh")
    return [str(path), "-c", OVER_OUR_PACKAGES + code, sysconfig.get_path("purelib"), *argv]


def variables() -> dict[str, str]:
    kept = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**kept, "NO_PROXY": "127.0.0.1", "PRIME_API_KEY": "none"}


@contextmanager
def openenv_server(environment: str, flags: dict[str, Any], log: Path) -> Iterator[str]:
    """Run `atropos-env openenv` and yield its URL."""
    code = "from atroposlib.cli.environments import main; sys.exit(main())"
    argv = command("openenv", code, "openenv", environment, "--port", "0", *argv_of(flags))
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables()
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert "as an OpenEnv server: " in line, log.read_text()
        yield line.split("server: ")[1].strip()
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(timeout=30) == 0, log.read_text()


async def run(argv: list[str]) -> str:
    """Run a command beside the engine in this loop; return its output."""
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, env=variables()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


async def test_the_openenv_server_gives_the_episodes_of_process(
    environment: str,
    flags: dict[str, Any],
    engine: ScriptedEngine,
    usual: list[Episode],
    tmp_path: Path,
) -> None:
    client = Path(__file__).with_name("openenv_client.py").read_text()
    with openenv_server(environment, flags, tmp_path / "server.log") as url:
        out = await run(command("openenv", client, url, engine.url, str(NUM_EPISODES)))
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == NUM_EPISODES
    for theirs, ours in zip(found, usual, strict=True):
        assert theirs["prompts"] == ours.prompts
        assert _of_group(theirs["group"]) == ours
        assert theirs["reward"] == ours.reward


async def test_the_taskset_of_verifiers_gives_the_episodes_of_process(
    environment: str,
    flags: dict[str, Any],
    engine: ScriptedEngine,
    model: str,
    usual: list[Episode],
    tmp_path: Path,
) -> None:
    given = {
        "env.taskset.environment": environment,
        "env.taskset.flags": json.dumps(flags),
        "model": "scripted",
        "client.type": "train",
        "client.base_url": f"{engine.url}/v1",
        "client.renderer_model_name": model,
        "sampling.max-tokens": "64",  # its training client ignores those of the request
        "run.name": "outward",
        "output_dir": str(tmp_path / "evals"),
    }
    argv = [word for name, value in given.items() for word in (f"--{name}", value)]
    code = "from verifiers.v1.cli.eval.main import main; main()"
    await run(
        command(
            "verifiers",
            code,
            "atropos-taskset",
            *argv,
            "-n",
            str(NUM_EPISODES),
            "--no-rich",
            "--no-push",
        )
    )
    lines = (tmp_path / "evals/outward/traces.jsonl").read_text().splitlines()
    by_seed = {}
    for episode in map(json.loads, lines):
        [trace] = episode["traces"]
        by_seed[episode["task"]["data"]["seed"]] = _of_trace(trace)
    for seed, ours in enumerate(usual):
        theirs = by_seed[seed]
        assert theirs._replace(logprobs=[]) == ours._replace(logprobs=[])
        # verifiers writes four digits.
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=5e-5)


async def test_the_block_for_prime_rl_of_the_readme_is_an_environment_of_verifiers() -> None:
    readme = (ROOT / "example_trainer" / "README.md").read_text()
    block = readme.split("<!-- prime-rl -->\n```toml\n")[1].split("```")[0]
    [source] = tomllib.loads(block)["orchestrator"]["train"]["source"]
    code = """import json
import verifiers.v1 as vf
from pydantic import SerializeAsAny, model_validator

class Source(vf.BaseConfig):
    env: SerializeAsAny[vf.EnvConfig] = vf.SingleAgentEnvConfig()
    narrow = model_validator(mode="before")(
        lambda cls, given: vf.resolve_env_field(given, vf.narrowed_env_annotation(cls))
    )

env = Source.model_validate({"env": json.loads(sys.argv[1])}).env
print(json.dumps([type(env).__name__, env.taskset.model_dump(mode="json")]))
"""
    out = await run(command("verifiers", code, json.dumps(source["env"])))
    name, taskset = json.loads(out.splitlines()[-1])
    assert name == "AtroposEnvConfig"
    assert taskset["environment"] == "wordle"
    assert taskset["flags"] == {"tokenizer_name": "Qwen/Qwen3-8B"}


def _of_trace(trace: dict[str, Any]) -> Episode:
    """Return a trace's one branch: each node continues the one before."""
    nodes = trace["nodes"]
    assert trace["ok"], trace["errors"]
    assert [node.get("parent") for node in nodes] == [None, *range(len(nodes) - 1)]
    return Episode(
        [token for node in nodes for token in node["token_ids"]],
        [is_sampled for node in nodes for is_sampled in node["mask"]],
        [logprob for node in nodes for logprob in node.get("logprobs") or ()],
        trace["rewards"]["score"]["score"],
    )
