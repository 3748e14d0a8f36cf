"""The benchmark's step is TRL's step: losses and gradient norms of both agree, on the CPU and on a tiny model."""

import sys
from pathlib import Path

import pytest

from benchmarks.trainer import Session, measure_trainer, parse

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(600)]
pytest.importorskip(
    "trl",
    reason="TRL WAS NOT TESTED: run in the environment that .ci/other_trainers_env.sh makes",
)


def test_a_step_has_the_losses_and_gradient_norms_of_trls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_TRL_PYTHON", sys.executable)
    ours, theirs = measure_trainer(Session(parse(["--shapes", "tiny"]), tmp_path))
    assert (ours.error, theirs.error) == ("", "")
    assert "times the memory of atropos" in theirs.note
    [own], [other] = ours.results, theirs.results
    assert own.losses == pytest.approx(other.losses, abs=1e-4)
    assert own.grad_norms == pytest.approx(other.grad_norms, rel=1e-3)
    assert own.num_tokens == other.num_tokens
    assert own.num_parameters == other.num_parameters
