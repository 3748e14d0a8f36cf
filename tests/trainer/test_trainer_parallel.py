"""Two processes with half of the weights each take the steps that one process takes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.config import TrainerConfig
from example_trainer.data import DataOptions, make_batch
from example_trainer.model import build_model
from example_trainer.optim import BLOCK
from example_trainer.parallel import ALONE, World, processes
from tests.faults.trainer_lives import Life, nursery
from tests.tiny_model import make_tiny_model
from tests.trainer.helpers_models import CHANGES, make_model
from tests.trainer.helpers_trainer import make_group
from tests.trainer.parallel_worker import run

NUM_STEPS, MIDDLE = 10, 4

Numbers = list[float]
InTwo = Callable[..., list[Numbers]]
"""Returns the numbers of each run that it is given the settings of."""


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InTwo]:
    directory = tmp_path_factory.mktemp("nursery")
    with nursery(directory / "lives.log", make_tiny_model(directory / "model")) as live:

        def numbers_of(*runs: dict[str, Any]) -> list[Numbers]:
            ended = live(Life({}, str(directory / "two"), ranks=2, runs=runs))
            assert ended.codes == [0, 0], (directory / "two.log").read_text()[-4000:]
            paths = [Path(settings["save_path"]) / "numbers.json" for settings in runs]
            return [json.loads(path.read_text()) for path in paths]

        yield numbers_of


def settings_for(model_dir: Path, out: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "model_name": str(model_dir),
        "device": "cpu",
        "num_steps": NUM_STEPS,
        "batch_size": 2,
        "lr": 1e-3,
        "save_path": str(out),
        "weights_dir": str(out / "weights"),
        "threads": 1,
    }
    return settings | {name: str(v) if isinstance(v, Path) else v for name, v in changes.items()}


def in_one_process(settings: dict[str, Any], *, save_at: int | None = None) -> list[Any]:
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        return run(TrainerConfig(**settings), ALONE, save_at=save_at)


def weights_of(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(settings["save_path"]) / "final_model/model.safetensors")


def measured(settings: dict[str, Any], rank: int) -> dict[str, Any]:
    path = Path(settings["save_path"]) / f"measured_{rank}.json"
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def assert_half_is_held(two: dict[str, Any], one: dict[str, Any]) -> None:
    """Also between the micro-batches of a step: a gradient is summed over the processes as soon as it is there."""
    alone, *halves = measured(one, 0), measured(two, 0), measured(two, 1)
    for half in halves:
        assert half["weights"] < 0.6 * alone["weights"]
    # The first of two micro-batches of each step; the other process may have a filler as its second.
    held, whole = halves[0]["gradients"][1], alone["gradients"][1]
    assert 0 < held < 0.6 * whole


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_two_processes_train_as_one_and_read_each_others_checkpoints(
    tmp_path: Path, in_two_processes: InTwo
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    one = settings_for(model_dir, tmp_path / "one")
    two = settings_for(model_dir, tmp_path / "two")
    expected = in_one_process(one, save_at=MIDDLE)
    path = f"step_{MIDDLE}"
    to_two = settings_for(model_dir, tmp_path / "to_two", resume_from=tmp_path / "one" / path)
    found, resumed = in_two_processes(two | {"save_at": MIDDLE}, to_two)
    assert found == pytest.approx(expected, abs=1e-5)
    assert_same(weights_of(two), weights_of(one))
    assert_half_is_held(two, one)

    rest = expected[len(expected) // NUM_STEPS * MIDDLE :]
    assert resumed == pytest.approx(rest, abs=1e-5)
    to_one = settings_for(model_dir, tmp_path / "to_one", resume_from=tmp_path / "two" / path)
    assert in_one_process(to_one) == pytest.approx(rest, abs=1e-5)
    assert_same(weights_of(to_two), weights_of(to_one))


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_two_processes_compute_and_publish_in_bfloat16_over_float32_masters(
    tmp_path: Path, in_two_processes: InTwo
) -> None:
    """The published weights travel in half of the bytes that the masters have, an adapter without its base.

    A frozen base has no masters: each of two processes holds a quarter of float32's bytes, and its adapters.
    """
    model_dir = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    one = settings_for(model_dir, tmp_path / "one", num_steps=2)
    expected = in_one_process(one)
    alone = measured(one, 0)
    assert (alone["gathered"], alone["computes_in"]) == (0, ["torch.float32"])
    whole = alone["weights"]
    ways: list[tuple[dict[str, Any], float, float]] = [
        ({}, 0.45, 0.55),
        ({"lora": True, "lora_target_modules": ["q_proj", "v_proj"]}, 0.25, 0.2),
        ({"cpu_offload": True}, 0.45, 0.55),
    ]
    runs = [
        settings_for(model_dir, tmp_path / str(changes), num_steps=2, dtype="bfloat16", **changes)
        for changes, *_ in ways
    ]
    plain, _, offloaded = numbers = in_two_processes(*runs)
    assert plain == offloaded
    for two, found, (changes, held, most) in zip(runs, numbers, ways, strict=True):
        half = measured(two, 1)
        assert half["computes_in"] == ["torch.bfloat16"]
        assert held * whole < half["weights"] < (held + 0.15) * whole
        assert 0 < half["gathered"] < most * whole
        if "lora" not in changes:
            assert found[:2] == pytest.approx(
                expected[:2], rel=0.05, abs=0.01
            )  # loss, gradient norm
            assert half["gathered"] > 0.45 * whole
            assert {value.dtype for value in weights_of(two).values()} == {torch.bfloat16}


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_two_processes_have_the_losses_and_gradients_of_one_on_every_architecture(
    tmp_path: Path, in_two_processes: InTwo
) -> None:
    ones, twos = [], []
    for kind in CHANGES:
        model_dir = make_model(kind, tmp_path / kind.model_type)
        changes: dict[str, Any] = {"num_steps": 2, "attention": "eager"}
        ones.append(settings_for(model_dir, model_dir / "one", **changes))
        twos.append(settings_for(model_dir, model_dir / "two", **changes))
    for one, two, found in zip(ones, twos, in_two_processes(*twos), strict=True):
        assert found == pytest.approx(in_one_process(one), abs=1e-5), one["model_name"]
        expected, gradient = (
            load_file(Path(each["save_path"]) / "gradient.safetensors") for each in (one, two)
        )
        assert 0 < len(expected) == len(gradient)
        for name, value in expected.items():
            torch.testing.assert_close(gradient[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.other_trainers
@pytest.mark.timeout(300)
def test_two_processes_share_8_bit_moments_and_read_each_others(
    tmp_path: Path, in_two_processes: InTwo
) -> None:
    """In a model as wide as a block, every matrix has them."""
    model_dir = make_tiny_model(tmp_path / "model", hidden_size=BLOCK)
    changes: dict[str, Any] = {"optimizer": "adamw_8bit", "num_steps": 4}
    one, two = (settings_for(model_dir, tmp_path / name, **changes) for name in ("one", "two"))
    expected = in_one_process(one, save_at=2)
    path = tmp_path / "one/step_2"
    to_two = settings_for(model_dir, tmp_path / "to_two", resume_from=path, **changes)
    found, resumed = in_two_processes(two | {"save_at": 2}, to_two)
    assert found == pytest.approx(expected, abs=1e-4)
    whole, half = measured(one, 0), measured(two, 1)
    assert whole["optimizer"] < 0.3 * 2 * whole["weights"]
    assert half["optimizer"] < 0.6 * whole["optimizer"]
    path = tmp_path / "two/step_2"
    to_one = settings_for(model_dir, tmp_path / "to_one", resume_from=path, **changes)
    assert in_one_process(to_one) == pytest.approx(found[len(found) // 2 :], abs=1e-4)
    assert resumed == pytest.approx(expected[len(expected) // 2 :], abs=1e-4)


def test_each_process_computes_as_many_micro_batches() -> None:
    options = DataOptions(seq_len=64, max_sequences=1, max_tokens=10_000)
    micro_batches = make_batch([make_group([1.0, 0.0, 0.3])], options).micro_batches
    shares = [
        World(rank=rank, size=2, device=torch.device("cpu")).share(micro_batches)
        for rank in range(2)
    ]
    assert [len(share) for share in shares] == [2, 2]
    assert [m.is_filler for share in shares for m in share] == [False, False, False, True]
    weight = sum(float(m.positions.weights_N.sum()) for share in shares for m in share)
    assert weight == pytest.approx(1.0)


@pytest.mark.parametrize("changes", [{}, {"lora": True}], ids=str)
def test_a_process_that_reads_no_weights_holds_none(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """What it is to hold is split before it has any memory."""
    model_dir = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    config = TrainerConfig(**settings_for(model_dir, tmp_path, **changes))
    read = build_model(config, dtype=torch.float32)
    with torch.device("meta"):
        held = build_model(config, dtype=torch.float32, has_weights=False)
    tensors = [*held.named_parameters(), *held.named_buffers()]
    assert {tensor.device.type for _, tensor in tensors} == {"meta"}
    expected = [*read.named_parameters(), *read.named_buffers()]
    assert [(n, t.shape, t.dtype) for n, t in tensors] == [
        (n, t.shape, t.dtype) for n, t in expected
    ]


def test_one_process_computes_on_the_gpu_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of libraries run on the current device, which is the first one unless it is set."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name in ("cuda:1", "cuda", "cpu"):
        with processes(torch.device(name)) as world:
            assert world.device == torch.device(name)
    assert chosen == [torch.device("cuda:1")]
