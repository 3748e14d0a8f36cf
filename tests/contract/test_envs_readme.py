"""The classes of the guides in envs/guides run as they stand, on a scripted engine, and have at most 25 lines each.

`tests/cli/test_environments_command.py` checks the copies that `atropos-env new` makes of them.
"""

import asyncio
import itertools
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.environments import main as atropos_env
from atroposlib.inference.harness import ByteTokenizer, HarnessRequest, ServerHarness
from atroposlib.runtime.process import process
from atroposlib.scored_data import Strictness, check_group

GUIDES = sorted((Path(__file__).resolve().parents[2] / "atroposlib/envs/guides").glob("*.md"))
README = "".join(path.read_text() for path in GUIDES)
BLOCKS = dict(re.findall(r"<!-- runs: (\w+) -->\n```python\n(.*?)```", README, re.S))
ENVIRONMENTS = [name for name in BLOCKS if name != "testing"]


def namespace_of(name: str, **known: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "readme", **known}
    exec(compile(BLOCKS[name], f"README.md:{name}", "exec"), namespace)
    return namespace


def offline(name: str, *, weight_version: str | None = None, **settings: Any) -> Any:
    """Return the example's environment on a scripted engine."""
    example = namespace_of(name)[name]
    env_cls = type(name, (example,), {"load_tokenizer": lambda self: ByteTokenizer()})
    config, servers = env_cls.config_init()
    env = env_cls(config.model_copy(update=settings), servers)
    env.server.servers = [ServerHarness(respond=RESPOND[name], weight_version=weight_version)]
    return env


EPISODES = itertools.count()


def turn_of(request: HarnessRequest) -> int:
    return request.prompt.count("<assistant>")


def count_vowels(request: HarnessRequest) -> str:
    return ["0", "3", "4", "5"][request.choice]


def guess(request: HarnessRequest) -> str:
    """Halve the range by what was said so far; every other episode begins with nonsense."""
    if turn_of(request) == 1 and next(EPISODES) % 2:
        return "no idea"
    low, high = 1, 80
    for said, told in re.findall(r"<assistant>(\d+)<eos><user>(Higher|Lower)", request.prompt):
        low, high = (int(said) + 1, high) if told == "Higher" else (low, int(said) - 1)
    return str((low + high) // 2)


def shop(request: HarnessRequest) -> str:
    found = re.search(r"What do (\d+) pieces of (\w+)", request.prompt)
    assert found
    if turn_of(request) == 1:
        call = {"name": "price", "arguments": {"fruit": found[2]}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
    told = re.search(r"<tool>(\d+)<eos>", request.prompt)
    assert told
    return str(int(found[1]) * int(told[1]) + request.call % 2)


def joke(request: HarnessRequest) -> str:
    """Joke as the policy, mark as the judge."""
    if "Mark an answer" in request.prompt:
        return f"Score: {len(request.prompt) % 11}"
    return "ha" * (request.choice + 1)


def double(request: HarnessRequest) -> str:
    """Right on every other call."""
    found = re.search(r"Double (\d+)", request.prompt)
    assert found
    return str(2 * int(found[1]) + request.call % 2)


RESPOND = {
    "CountVowels": count_vowels,
    "GuessNumber": guess,
    "Shopping": shop,
    "Jokes": joke,
    "Doubling": double,
}


def test_there_is_an_example_of_every_base() -> None:
    assert sorted(ENVIRONMENTS) == sorted(RESPOND)
    bases = {re.search(r"class \w+\((\w+)\)", BLOCKS[name])[1] for name in ENVIRONMENTS}  # type: ignore[index]
    assert bases == {"DatasetEnv", "MultiTurnEnv", "ToolEnv", "JudgeEnv", "AgentEnv"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_example_is_a_whole_file_of_at_most_25_lines(name: str) -> None:
    lines = [line for line in BLOCKS[name].splitlines() if line.strip()]
    assert len(lines) <= 25
    assert lines[-1] == f"    {name}.cli()"


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_example_makes_groups_that_pass_the_strict_gate(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "groups.jsonl")
    settings = {"total_steps": 3, "max_num_workers": 1, "data_path_to_save_groups": path}
    env = offline(name, weight_version="4", **settings)
    result = await process(env)
    assert result.num_groups == 3
    assert env.group_sink.dropped == {}
    for line in result.path.read_text().splitlines():
        group = json.loads(line)
        checked = check_group(group, strictness=Strictness.MEANING)
        assert checked.num_sequences == 4
        assert checked.inference_logprobs is not None
        assert checked.num_trained > 0
        assert len(set(group["scores"])) > 1
        assert group["policy_version"] == 4


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_example_evaluates(name: str, tmp_path: Path) -> None:
    env = offline(name, data_dir_to_save_evals=str(tmp_path))
    await env.setup()
    metrics = await env.evaluate()
    await env.close()
    assert 0 <= metrics["eval/pass@1"] <= 1
    samples = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(samples) == len(env.eval_rows) > 0


async def test_test_of_the_readme_passes() -> None:
    known = namespace_of("CountVowels")
    await namespace_of("testing", CountVowels=known["CountVowels"])["test_right_answers_score"]()


def test_the_commands_of_replay_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("atroposlib.envs.hooks.load_tokenizer", lambda name: ByteTokenizer())
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    Path("my_env.py").write_text(BLOCKS["CountVowels"])
    path = Path("data/count_vowels.jsonl")
    asyncio.run(process(offline("CountVowels", total_steps=3, data_path_to_save_groups=str(path))))
    group_id = json.loads(path.read_text().splitlines()[0])["group_id"]
    block = README.split("## Replay")[1].split("```")[1].replace("GROUP_ID", group_id)
    rescore, write, pin, run = [shlex.split(line, comments=True) for line in block.splitlines()[1:]]
    assert atropos_env(rescore[1:]) == 0
    assert "3 of 3 groups scored again: 0 with other scores" in capsys.readouterr().out
    assert Path("page.html").stat().st_size > 1000
    assert atropos_env(write[1:]) == 0
    assert len(Path("new.jsonl").read_text().splitlines()) == 3
    capsys.readouterr()
    assert atropos_env(pin[1:]) == 0
    assert "it passes today" in capsys.readouterr().out  # the first word has no vowel
    [test] = Path().glob(run[1])
    runpy.run_path(str(test))[test.stem]()


def test_names_in_the_readme_exist() -> None:
    from atroposlib.envs.base import BaseEnv

    hooks = re.findall(r"^\| `(\w+)\(", README.split("## Hooks")[1], re.M)
    assert len(hooks) >= 10
    assert [hook for hook in hooks if not callable(getattr(BaseEnv, hook, None))] == []
