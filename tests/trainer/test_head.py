"""Log-probabilities in chunks against torch's own log-softmax over whole logits, in float64."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks._trainer_measure import result_in
from example_trainer import head
from example_trainer.head import (
    HeadOutput,
    _fused,
    _gradient,
    _sums,
    head_logprobs,
    logits_logprobs,
)
from tests.builders.programs import run_python

N, H, V, K = 7, 4, 11, 3


def inputs(*, bias: bool) -> list[torch.Tensor | None]:
    rng = torch.Generator().manual_seed(0)
    shapes = [(N, H), (V, H), *([(V,)] if bias else [])]
    tensors: list[torch.Tensor | None] = [
        torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    return tensors if bias else [*tensors, None]


IDS = torch.randint(0, V, (N, K), generator=torch.Generator().manual_seed(1))
IDS[1, 2] = IDS[1, 0]  # a teacher names the label too
TEMPERATURE = torch.linspace(0.5, 2.0, N, dtype=torch.float64)


def slow(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> HeadOutput:
    logits = torch.nn.functional.linear(hidden, weight, bias) / TEMPERATURE[:, None]
    table = torch.log_softmax(logits, dim=1)
    return HeadOutput(table.gather(1, IDS), -(table.exp() * table).sum(dim=1))


def weighed(out: HeadOutput) -> torch.Tensor:
    ramp = torch.linspace(-1, 1, N * K, dtype=torch.float64).view(N, K)
    return (out.logprobs_NK * ramp).sum() + (out.entropy_N * ramp[:, 0]).sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_give_the_logprobs_entropy_and_gradients_of_whole_logits(
    chunk_size: int, bias: bool
) -> None:
    wanted_in, found_in = inputs(bias=bias), inputs(bias=bias)
    wanted = slow(*wanted_in)  # type: ignore[arg-type]
    found = head_logprobs(
        *found_in,  # type: ignore[arg-type]
        ids_NK=IDS,
        temperature_N=TEMPERATURE,
        chunk_size=chunk_size,
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    weighed(wanted).backward()
    weighed(found).backward()
    for a, b in zip(found_in, wanted_in, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_the_gradient_of_logprobs_alone_needs_no_entropy() -> None:
    wanted_in, found_in = inputs(bias=False), inputs(bias=False)
    slow(*wanted_in).logprobs_NK.sum().backward()  # type: ignore[arg-type]
    out = head_logprobs(*found_in, ids_NK=IDS, temperature_N=TEMPERATURE)  # type: ignore[arg-type]
    out.logprobs_NK.sum().backward()
    torch.testing.assert_close(found_in[0].grad, wanted_in[0].grad, rtol=0, atol=1e-12)  # type: ignore[union-attr]


def test_logits_that_exist_give_the_same() -> None:
    hidden, weight, _ = inputs(bias=False)
    wanted = slow(hidden, weight, None)  # type: ignore[arg-type]
    logits = hidden @ weight.T  # type: ignore[operator, union-attr]
    found = logits_logprobs(logits, ids_NK=IDS, temperature_N=TEMPERATURE)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def blocks() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return what is compiled on CUDA, with arguments."""
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(N, V, generator=rng)
    temperature, gradient = TEMPERATURE.float(), torch.randn(N, K, generator=rng)
    _, log_sum, entropy = _sums(logits, temperature, IDS, None, None)
    backward = (logits, temperature, log_sum, entropy, gradient, gradient[:, 0])
    return [
        (_sums, (logits, temperature, IDS, None, None)),
        (_gradient, (*backward, torch.float32, None)),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_blocks_compile_as_one_graph_that_gives_the_same(which: int) -> None:
    function, arguments = blocks()[which]
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(*arguments), function(*arguments)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def no_compiler(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no C++ compiler")


@pytest.mark.parametrize(
    "backend", [no_compiler, pytest.param("inductor", marks=pytest.mark.drill)]
)
def test_blocks_that_cannot_be_compiled_run_as_they_are_after_one_warning(
    backend: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor":  # takes a second to import
        config = importlib.import_module("torch._inductor.config")
        monkeypatch.setattr(config.cpp, "cxx", ("/no/compiler",))
        monkeypatch.setattr(config, "fx_graph_cache", False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    function, arguments = blocks()[0]
    fused = _fused.__wrapped__(function)
    for _ in range(2):
        torch.testing.assert_close(fused(*arguments), function(*arguments), rtol=0, atol=0)
    warned = [record for record in caplog.records if record.name == head.__name__]
    assert [record.getMessage().split(":")[0] for record in warned] == [
        "_sums could not be compiled and runs slower and in more memory"
    ]


@pytest.mark.e2e
@pytest.mark.drill
@pytest.mark.timeout(180)  # importing torch takes a minute on a busy machine
def test_logprobs_of_a_large_vocabulary_need_a_fraction_of_one_tensor_of_logits() -> None:
    """In a process of its own: memory once used stays with a process."""
    printed = run_python("-m", "benchmarks._trainer_head", 1024, 100_000, 8, "cpu")
    assert 2**26 < result_in(printed).peak_bytes < 0.6 * 4 * 1024 * 100_000
