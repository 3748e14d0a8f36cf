"""The directory of an evaluation: samples as they come, resuming, earlier results."""

import os
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.eval_run import EvalRun, evaluate_items, hash_of, stored_samples
from atroposlib.errors import ConfigError
from tests.builders.programs import run_python
from tests.builders.rows import rows_in

CONFIG = "env: {seed: 0, max_eval_workers: 2}\nopenai:\n- {model_name: m, base_url: http://a}\n"


def run_in(folder: Path, *, config: str = CONFIG, is_resumed: bool = False) -> EvalRun:
    return EvalRun(folder, config=config, is_resumed=is_resumed)


class Measures:
    """Two samples of every item; fails at the items in `fails`."""

    def __init__(self, *, fails: Any = ()) -> None:
        self.asked: list[Any] = []
        self.fails = fails

    async def __call__(self, item: Any) -> list[dict[str, Any]]:
        self.asked.append(item)
        if item in self.fails:
            raise LookupError(item)
        return [{"answer": f"{item}.{i}"} for i in range(2)]


async def measure(run: EvalRun | None, items: list[Any], **options: Any) -> tuple[list[Any], Any]:
    measures = Measures(**options)
    samples = await evaluate_items(items, measures, run=run, max_workers=1)
    return samples, measures.asked


def lines(folder: Path) -> list[Any]:
    return rows_in(folder / "samples.jsonl")


async def test_samples_survive_a_failure_and_a_resume_measures_what_is_missing(
    tmp_path: Path,
) -> None:
    with pytest.raises(LookupError), run_in(tmp_path) as run:
        await measure(run, ["a", "b", "c"], fails=["c"])
    assert [line["answer"] for line in lines(tmp_path)] == ["a.0", "a.1", "b.0", "b.1"]
    first = {k: v for k, v in lines(tmp_path)[1].items() if k != "item_hash"}
    assert first == {"answer": "a.1", "item_index": 0, "sample_index": 1, "num_samples": 2}
    with run_in(tmp_path, is_resumed=True) as run:
        samples, asked = await measure(run, ["a", "b", "c"])
    assert asked == ["c"]
    assert [s["answer"] for s in samples] == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    assert samples == lines(tmp_path)
    assert samples == (await measure(None, ["a", "b", "c"]))[0]


@pytest.mark.parametrize("cut", [2, 60, "one line", 140])
async def test_item_that_was_written_in_part_is_measured_again(
    tmp_path: Path, cut: int | str
) -> None:
    with run_in(tmp_path) as run:
        whole, _ = await measure(run, ["a", "b"])
    path = tmp_path / "samples.jsonl"
    text = path.read_text()
    num_bytes = cut if isinstance(cut, int) else len(text.splitlines()[-1]) + 1
    path.write_text(text[:-num_bytes])
    with run_in(tmp_path, is_resumed=True) as run:
        samples, asked = await measure(run, ["a", "b"])
    assert asked == ["b"]
    assert samples == whole == lines(tmp_path)


async def test_resume_with_other_data_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        await measure(run, ["a", "b"])
    measures = Measures()
    with (
        run_in(tmp_path, is_resumed=True) as run,
        pytest.raises(ConfigError, match="data has changed: item 1 is not the one"),
    ):
        await evaluate_items(["a", "x"], measures, run=run, max_workers=1)
    assert measures.asked == []


def test_resume_with_another_model_or_setting_is_refused(tmp_path: Path) -> None:
    with run_in(tmp_path):
        pass
    elsewhere = CONFIG.replace("http://a", "http://b").replace("workers: 2", "workers: 9")
    run_in(tmp_path, config=elsewhere, is_resumed=True)
    with pytest.raises(ConfigError, match=r"openai.model_name: \['m'\] -> \['n'\]"):
        run_in(tmp_path, config=CONFIG.replace("name: m", "name: n"), is_resumed=True)
    with pytest.raises(ConfigError, match=r"env.seed: 0 -> 1"):
        run_in(tmp_path, config=CONFIG.replace("seed: 0", "seed: 1"), is_resumed=True)
    with pytest.raises(ConfigError, match="give a directory that evaluate made"):
        run_in(tmp_path / "other", is_resumed=True)
    (tmp_path / "evaluate_config.yaml").write_text("")
    with pytest.raises(ConfigError, match="is not a configuration"):
        run_in(tmp_path, is_resumed=True)


def test_a_file_is_refused_as_a_directory(tmp_path: Path) -> None:
    (path := tmp_path / "results").touch()
    with pytest.raises(ConfigError, match="results is not a directory"), run_in(path):
        pass
    assert [*tmp_path.iterdir()] == [path]


def test_samples_without_items_cannot_be_resumed(tmp_path: Path) -> None:
    with run_in(tmp_path):
        pass
    (tmp_path / "samples.jsonl").write_text('{"question": "1+1"}\n')
    with (
        pytest.raises(ConfigError, match="do not name their items"),
        run_in(tmp_path, is_resumed=True),
    ):
        pass
    assert lines(tmp_path) == [{"question": "1+1"}]


def test_two_processes_do_not_write_one_evaluation(tmp_path: Path) -> None:
    with (
        run_in(tmp_path),
        pytest.raises(ConfigError, match="another process is evaluating there"),
        run_in(tmp_path, is_resumed=True),
    ):
        pass


def test_two_evaluations_of_one_name_that_begin_together_have_their_own_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [EvalRun(None, name="sums", config=CONFIG) for _ in range(3)]
    with runs[0], runs[1], runs[2]:
        assert len({run.folder for run in runs}) == 3
    assert sorted(Path("evals").iterdir()) == sorted(run.folder for run in runs)


def test_line_that_is_no_sample_is_refused_before_the_last_one(tmp_path: Path) -> None:
    samples = '{"item_index": 0}\n{"item_in\n{"item_index": 1}\n'
    (tmp_path / "samples.jsonl").write_text(samples)
    with pytest.raises(ConfigError, match=r"samples\.jsonl, line 2: not JSON"):
        stored_samples(tmp_path)


async def test_two_data_sets_of_one_evaluation_are_told_apart(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        await measure(run, ["a", "b"])
        with pytest.raises(LookupError):
            await measure(run, ["a", "c"], fails=["c"])
    with run_in(tmp_path, is_resumed=True) as run:
        assert (await measure(run, ["a", "b"]))[1] == []
        samples, asked = await measure(run, ["a", "c"])
    assert asked == ["c"]
    assert [sample["item_index"] for sample in samples] == [2, 2, 3, 3]


async def test_an_unfinished_evaluation_is_kept_when_another_starts(tmp_path: Path) -> None:
    with pytest.raises(LookupError), run_in(tmp_path) as run:
        await measure(run, ["a", "b"], fails=["b"])
    with run_in(tmp_path, config=CONFIG.replace("m,", "n,")) as run:
        await measure(run, ["z"])
    names = ["evaluate_config.yaml", "samples.jsonl", "versions.json"]
    numbered = ["evaluate_config_1.yaml", "samples_1.jsonl", "versions_1.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*names, *numbered])
    assert (tmp_path / "evaluate_config_1.yaml").read_text() == CONFIG
    assert lines(tmp_path)[0]["answer"] == "z.0"


def test_hash_of_an_item_is_the_same_in_every_process() -> None:
    items = [{"q": "1+1", "tags": {"a", "b", "c", "d"}}, ("x", 1.5, None), b"bytes"]

    class Row:
        pass

    assert hash_of(Row()) == hash_of(Row())  # its text has an address
    assert len({*map(hash_of, items)}) == 3
    program = f"from atroposlib.envs.eval_run import hash_of; print(*map(hash_of, {items!r}))"
    for seed in ("1", "2"):
        printed = run_python("-c", program, PYTHONHASHSEED=seed)
        assert printed.split() == [*map(hash_of, items)]
