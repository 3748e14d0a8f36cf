"""Repair a repository, given an issue; its tests are run.

With --env.mode agent (the default) the model works with the commands of a shell in the repository; with `patch` it sees
the files concerned and answers with SEARCH/REPLACE edits. The reward is 1 if all FAIL_TO_PASS and PASS_TO_PASS tests
pass with its change, else 0. The tests of the task are not visible; a change of tests, of their settings and of
Python's start files is ignored, and one that makes broken tests pass is `forged` and earns 0, as do tests that cannot
be broken (`change_unchecked`): `atroposlib/envs/repository_tests.py` says how, and what remains possible. An image may
hold the repair in its .git.

Data: SWE-Gym/SWE-Gym, evaluation on princeton-nlp/SWE-bench_Verified: in their images, by Docker, which pulls them.
Rows whose tests are not pytest's (`path::name`) are skipped. Or JSONL rows with `problem_statement`, `patch`,
`test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS` and `files` (path -> text): a repository in a sandbox.
Needs: extras datasets; bubblewrap or Docker; pytest.

    python environments/swe_env.py process --env.dataset_path sample ...
"""

from __future__ import annotations

import asyncio
import json
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from atroposlib.envs import patches, repository_tests
from atroposlib.envs.answers import solution_of
from atroposlib.envs.dataset_env import Outcome
from atroposlib.envs.multi_turn_env import Episode, MultiTurnEnv, in_turns
from atroposlib.envs.rewards import RewardFailure
from atroposlib.envs.rows import HubRows
from atroposlib.envs.shell import Files, Machine
from atroposlib.envs.shell_env import ShellEnv, ShellEnvConfig
from atroposlib.envs.tool_env import MalformedCall, ToolCall, hermes_call
from atroposlib.errors import EnvError

MAX_KNOWN_VERDICTS = 256
"""Changes whose verdict is kept."""


@dataclass(frozen=True, kw_only=True)
class Issue:
    text: str
    ids: list[str]
    """Tests that must pass."""
    patch: str = field(repr=False)
    test_patch: str = field(repr=False)
    files: dict[str, str] = field(repr=False)
    """The repository, or with an image the files that a model without a shell is shown."""
    image: str | None = None


class SWEConfig(ShellEnvConfig):
    tokenizer_name: str = "Qwen/Qwen2.5-Coder-7B-Instruct"
    mode: Literal["agent", "patch"] = "agent"
    """agent: with a shell. patch: one answer, with edits."""
    group_size: int = 8
    max_token_length: int = 8192
    max_turns: int = Field(default=30, ge=1)
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of a command, in seconds."""
    tests_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one run of a task's tests, in seconds; a right change has two runs."""
    reward_timeout_s: float = Field(default=1500.0, gt=0)
    """Time limit of judging one change, in seconds."""
    memory_mb: int = Field(default=2048, ge=256)
    """Memory limit of a process in a sandbox, or of a container, MiB; tests in a sandbox judge a change with at most
    2048, the limit of a reward worker."""
    image: str = "xingyaoww/sweb.eval.x86_64.{id}:latest"
    """Image of a row that has none in `docker_image` or `image_name`; {id}: the instance with `id_separator` for __."""
    id_separator: str = "_s_"
    """For swebench/sweb.eval.x86_64.{id}: _1776_."""
    repository_folder: str = "/testbed"
    """Where the repository is in an image."""
    activate: str = "export PATH=/opt/miniconda3/envs/testbed/bin:$PATH"
    """Command in a container before each other one."""


class SWEEnv(ShellEnv):
    """Several turns or one, reward by the tests of a repository."""

    name = "swe"
    env_config_cls = SWEConfig
    config: SWEConfig
    train_data = HubRows(path="SWE-Gym/SWE-Gym")
    eval_data = HubRows(path="princeton-nlp/SWE-bench_Verified", split="test")
    preload = ("atroposlib.envs.repository_tests",)
    system_prompt = "You repair software."

    def __init__(self, config: SWEConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.judged: dict[str, tuple[asyncio.Lock, list[str]]] = {}

    async def setup(self) -> None:
        """Load the rows, and check that sandboxes run tests if a repository has no image."""
        await super().setup()
        if any(row.image is None for row in self.train_rows):
            await asyncio.to_thread(repository_tests.check_sandbox, self.config.memory_mb)

    def is_isolated(self) -> bool:
        """Whether all rows have images, or sandboxes may start processes."""
        return self.config.dataset_path is None or super().is_isolated()

    def parse_row(self, row: dict[str, Any]) -> Issue | None:
        """Return the issue; one whose tests are not pytest's, or whose patch does not apply, is skipped."""
        ids = [*_list(row["FAIL_TO_PASS"]), *_list(row["PASS_TO_PASS"])]
        if not all("::" in each for each in ids):
            self.counts["rows_without_pytest"] += 1
            return None
        image = None
        if "files" not in row:
            name = row["instance_id"].lower().replace("__", self.config.id_separator)
            image = row.get("docker_image") or row.get("image_name")
            image = image or self.config.image.format(id=name)
        texts = {name: row[name] for name in ("patch", "test_patch")}
        files = row.get("files", {})
        try:
            if image is None:
                for diff in texts.values():
                    patches.patched(files, diff)
        except ValueError:
            return None
        return Issue(text=row["problem_statement"], ids=ids, files=files, image=image, **texts)

    def prompt(self, row: Issue) -> str:
        """Return the issue, and for a model without a shell the files of the patch."""
        if self.config.mode == "agent":
            return f"Resolve this issue of the repository in the current folder:\n{row.text}"
        shown = [path for path in patches.paths_of(row.patch) if path in row.files]
        files = "\n\n".join(
            f"[start of {path}]\n{row.files[path].rstrip()}\n[end of {path}]" for path in shown
        )
        return f"Resolve this issue:\n{row.text}\n\nFiles:\n{files}\n\n{patches.EDIT_FORM}"

    def conversation(self, row: Issue) -> list[dict[str, Any]]:
        """Return the first messages, which describe the shell only to an agent."""
        is_agent = self.config.mode == "agent"
        return super().conversation(row) if is_agent else MultiTurnEnv.conversation(self, row)

    def parse_calls(self, answer: str) -> list[ToolCall | MalformedCall]:
        """Return the call of an agent's answer."""
        return super().parse_calls(answer) if self.config.mode == "agent" else []

    def task(self, row: Issue) -> dict[str, Any]:
        """Return what `judge_change` needs."""
        return {
            "ids": row.ids,
            "image": row.image,
            "folder": self.config.repository_folder,
            "activate": self.config.activate,
            "test_patch": row.test_patch,
            "files": {} if row.image else patches.patched(row.files, row.test_patch),
        }

    def machine(self, row: Issue) -> Machine:
        """Return the repository, without the tests of the task."""
        if row.image is not None:
            return repository_tests.container_of(self.task(row), self.config.memory_mb)
        return repository_tests.folder_of(row.files, self.config.memory_mb)

    async def reset(self, row: Issue) -> Episode:
        """Return an episode; its row has the files of the patch, and its state the commit of a container."""
        episode = await super().reset(row)
        if row.image is None:
            return episode
        machine = episode.state["machine"]

        def look() -> dict[str, str]:
            commit = machine.run("git rev-parse HEAD", timeout_s=60.0)
            if commit.status != 0:
                raise EnvError(f"{row.image}: git rev-parse: {commit.printed}")
            episode.state["commit"] = commit.printed.strip()
            found = {path: machine.read(path) for path in patches.paths_of(row.patch)}
            return {path: text for path, text in found.items() if text is not None}

        try:
            episode.row = replace(row, files=await asyncio.to_thread(look))
            episode.messages = self.conversation(episode.row)
        except BaseException:
            await self.end(episode)
            raise
        return episode

    def example_answers(self, item: Issue) -> list[str | Callable[[str], str]]:
        """Return the real patch: as edits, or as the command that writes the files."""
        if item.image is not None:
            return []
        before = patches.lines_of(item.files)
        after = patches.apply_diff(before, item.patch)
        if self.config.mode == "patch":
            return [patches.edits_for(before, after)]
        texts = {path: "\n".join(after.get(path, [])) for path in patches.changed(before, after)}
        write = f"python - <<'END'\nfor path, text in {texts!r}.items():\n"
        command = f"{write}    open(path, 'w').write(text)\nEND"
        return [in_turns([hermes_call("shell", command=command), "I repaired it."])]

    async def final_score(self, episode: Episode) -> Outcome:
        """Return 1 if the tests pass with the change, else 0."""
        issue: Issue = episode.row
        if self.config.mode == "agent":
            found = await asyncio.to_thread(
                repository_tests.changes_of,
                episode.state["machine"],
                issue.files,
                episode.state.get("commit", ""),
            )
            if found is None:
                self.counts["no_list_of_changes"] += 1
                return 0.0
            changes = found.files
            self.counts["files_left_out"] += found.num_left_out
        else:
            before = patches.lines_of(issue.files)
            answer = solution_of(episode.messages[-1]["content"])
            after = patches.apply_edits(before, answer) or before
            changes = {path: "\n".join(after[path]) for path in patches.changed(before, after)}
        tests, own = patches.paths_of(issue.test_patch), patches.paths_of(issue.patch)
        changes = {
            path: text
            for path, text in ((posixpath.normpath(each), changes[each]) for each in changes)
            if path not in tests and (path in own or not repository_tests.is_protected(path))
        }
        if not changes:
            self.counts["no_change"] += 1
            return 0.0
        verdict = await self.verdict_of(issue, changes)
        if isinstance(verdict, RewardFailure):
            return verdict
        self.counts[f"change_{verdict}"] += 1
        return float(verdict == "passed")

    async def verdict_of(self, issue: Issue, changes: Files) -> Any:
        """Judge a change; equal ones once, because their tests may take minutes."""
        key = json.dumps([issue.text, issue.ids, changes], sort_keys=True)
        lock, known = self.judged.setdefault(key, (asyncio.Lock(), []))
        if len(self.judged) > MAX_KNOWN_VERDICTS:
            del self.judged[next(iter(self.judged))]
        async with lock:  # of several equal changes the first is judged, the others wait
            if not known:
                limits = self.config.memory_mb, self.config.tests_timeout_s
                verdict = await self.in_worker(
                    repository_tests.judge_change, changes, self.task(issue), *limits
                )
                if isinstance(verdict, RewardFailure):
                    return verdict
                known.append(verdict)
        return known[0]


def _list(value: str | list[str]) -> list[str]:
    return json.loads(value) if isinstance(value, str) else list(value)


if __name__ == "__main__":
    SWEEnv.cli()
