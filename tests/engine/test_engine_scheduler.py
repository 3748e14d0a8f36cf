"""The scheduler against plain forward passes of the same model: right numbers whatever shares the batch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from atroposlib.engine import scheduler
from atroposlib.engine.config import EngineConfig
from atroposlib.engine.loading import LoadedModel, load
from atroposlib.engine.sampling import SamplingParams
from atroposlib.engine.scheduler import Engine, PauseMode
from atroposlib.engine.sequences import Completion, EngineRequest, FinishReason
from atroposlib.engine.weights import read_checkpoint
from atroposlib.errors import EngineError, EngineRejected, EngineUnavailable
from tests.tiny_model import make_tiny_model

TIMEOUT_S = 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def loaded(model_dir: Path) -> Iterator[LoadedModel]:
    loaded = load(EngineConfig(model=str(model_dir), device="cpu", max_num_seqs=16))
    loaded.engine.start()
    yield loaded
    loaded.engine.close()


@pytest.fixture
def engine(loaded: LoadedModel) -> Engine:
    return loaded.engine


def generate(engine: Engine, prompt: list[int], **params: object) -> list[Completion]:
    settings = {"max_tokens": 8, "ignore_eos": True, **params}
    request = EngineRequest(prompt, SamplingParams(**settings))  # type: ignore[arg-type]
    return engine.submit(request).result(timeout=TIMEOUT_S)


@functools.cache
def oracle(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def oracle_logprobs(directory: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """Logprobs of `tokens` after `prompt`: one sequence, no padding, no cache, float64."""
    with torch.no_grad():
        logits = oracle(directory)(torch.tensor([prompt + tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


def max_gap(directory: Path, prompt: list[int], completion: Completion) -> float:
    expected = oracle_logprobs(directory, prompt, completion.token_ids)
    pairs = zip(expected, completion.logprobs, strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_logprobs_are_those_of_a_plain_forward_when_lengths_are_mixed(
    engine: Engine, model_dir: Path
) -> None:
    # More sequences than rows, lengths 1..40, ends at every step: joins, leaves, shifts and growth all happen.
    prompts = [[(7 * i + j) % 250 for j in range(1 + (i * 11) % 40)] for i in range(40)]
    requests = [
        EngineRequest(
            prompt,
            SamplingParams(max_tokens=1 + (i * 5) % 23, ignore_eos=True, temperature=1 + i % 3),
        )
        for i, prompt in enumerate(prompts)
    ]
    futures = [engine.submit(request) for request in requests]
    for prompt, request, future in zip(prompts, requests, futures, strict=True):
        (completion,) = future.result(timeout=TIMEOUT_S)
        assert len(completion.token_ids) == request.params.max_tokens
        assert max_gap(model_dir, prompt, completion) <= 1e-4


def test_long_generation_survives_buffer_growth(engine: Engine, model_dir: Path) -> None:
    prompt = [1, 2, 3]
    (completion,) = generate(engine, prompt, max_tokens=300)
    assert max_gap(model_dir, prompt, completion) <= 1e-4


def test_greedy_follows_the_mode_of_a_plain_forward(engine: Engine, model_dir: Path) -> None:
    prompt = [10, 20, 30]
    (completion,) = generate(engine, prompt, temperature=0.0, max_tokens=12)
    ids = list(prompt)
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(oracle(model_dir)(torch.tensor([ids])).logits[0, -1].argmax()))
    assert completion.token_ids == ids[3:]


def test_completions_of_one_prompt_share_its_prefill(engine: Engine) -> None:
    assert len(generate(engine, list(range(20)), n=8)) == 8
    assert engine.stats.prefilled_tokens == 20
    assert engine.stats.shared_prompt_tokens == 7 * 20


def test_first_token_frequencies_match_the_distribution(engine: Engine, model_dir: Path) -> None:
    draws = 4000
    completions = generate(engine, [5, 6], n=draws, max_tokens=1, temperature=0.5)
    with torch.no_grad():
        expected = torch.softmax(oracle(model_dir)(torch.tensor([[5, 6]])).logits[0, -1] / 0.5, -1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=260)
    error = (counts / draws - expected).abs()
    assert bool((error <= 5 * (expected / draws).sqrt() + 1e-3).all())


def test_seed_repeats_and_distinguishes_completions(engine: Engine) -> None:
    first = [c.token_ids for c in generate(engine, [1, 2], n=3, seed=11)]
    generate(engine, [9], n=4)
    assert [c.token_ids for c in generate(engine, [1, 2], n=3, seed=11)] == first
    assert first[0] != first[1]
    assert [c.token_ids for c in generate(engine, [1, 2], n=1, seed=12)] == [first[1]]


def test_min_tokens_holds_back_stop_tokens(engine: Engine) -> None:
    stops = tuple(range(0, 256, 2))
    for completion in generate(engine, [3], n=8, max_tokens=20, min_tokens=5, stop_token_ids=stops):
        assert not set(completion.token_ids[:5]) & set(stops)
        if completion.finish_reason is FinishReason.STOP:
            assert completion.stop_reason == completion.token_ids[-1]
            assert completion.ended_by_token


def test_a_stop_string_ends_the_sequence_and_is_cut(loaded: LoadedModel) -> None:
    prompt = [1, 2, 3]
    (free,) = generate(loaded.engine, prompt, temperature=0.0, max_tokens=40)
    text = loaded.tokenizer.decode(free.token_ids, skip_special_tokens=True)
    stop = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    (cut,) = generate(loaded.engine, prompt, temperature=0.0, max_tokens=40, stop=(stop,))
    assert cut.finish_reason is FinishReason.STOP
    assert cut.stop_reason == stop
    assert cut.text == text[: text.index(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


def test_weights_swap_in_flight_and_versions_tell_which_sampled_what(
    engine: Engine, model_dir: Path, other_dir: Path
) -> None:
    prompt = [4, 5, 6]
    tensors = read_checkpoint(engine.model, other_dir)
    request = EngineRequest(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    future = engine.submit(request)
    while engine.stats.decode_steps < 20:
        engine.snapshot().result(timeout=TIMEOUT_S)
    engine.pause(PauseMode.KEEP).result(timeout=TIMEOUT_S)
    assert not future.done()
    engine.reload(tensors, weight_version="7").result(timeout=TIMEOUT_S)
    engine.resume().result(timeout=TIMEOUT_S)
    (completion,) = future.result(timeout=TIMEOUT_S)
    (old, num_old), (new, num_new) = completion.weight_versions
    assert (old, new) == ("0", "7")
    assert num_old >= 20
    assert num_old + num_new == len(completion.token_ids) == 400
    before = oracle_logprobs(model_dir, prompt, completion.token_ids[:num_old])
    assert before == pytest.approx(completion.logprobs[:num_old], abs=1e-4)
    after = oracle_logprobs(other_dir, prompt, completion.token_ids)[num_old:]
    assert after != pytest.approx(
        completion.logprobs[num_old:], abs=1e-2
    )  # old keys, kept as in vLLM
    (fresh,) = generate(engine, prompt)
    assert max_gap(other_dir, prompt, fresh) <= 1e-4
    assert fresh.weight_versions == [("7", 8)]


def test_pause_wait_lets_running_finish_and_holds_back_arrivals(engine: Engine) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    running = engine.submit(EngineRequest([1], params))
    drain = engine.pause(PauseMode.WAIT)
    held = engine.submit(EngineRequest([2], params))
    drain.result(timeout=TIMEOUT_S)
    assert running.done()
    assert engine.snapshot().result(timeout=TIMEOUT_S)["waiting"] == 1
    assert not held.done()
    engine.resume().result(timeout=TIMEOUT_S)
    assert len(held.result(timeout=TIMEOUT_S)[0].token_ids) == 60


def test_pause_wait_refuses_to_wait_for_frozen_sequences(engine: Engine) -> None:
    engine.pause(PauseMode.KEEP).result(timeout=TIMEOUT_S)
    engine.submit(EngineRequest([1], SamplingParams(max_tokens=5)))
    with pytest.raises(EngineRejected, match="would never end"):
        engine.pause(PauseMode.WAIT).result(timeout=TIMEOUT_S)


def test_pause_abort_returns_what_was_sampled(engine: Engine) -> None:
    future = engine.submit(EngineRequest([1], SamplingParams(max_tokens=500, ignore_eos=True)))
    while engine.stats.decode_steps < 3:
        engine.snapshot().result(timeout=TIMEOUT_S)
    engine.pause(PauseMode.ABORT).result(timeout=TIMEOUT_S)
    (completion,) = future.result(timeout=TIMEOUT_S)
    assert completion.finish_reason is FinishReason.ABORT
    assert 3 <= len(completion.token_ids) < 500


def test_a_dead_thread_fails_every_waiter_and_every_later_call(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.pause(PauseMode.KEEP).result(timeout=TIMEOUT_S)
    waiting = engine.submit(EngineRequest([1], SamplingParams(max_tokens=5)))

    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("lightning")

    monkeypatch.setattr(engine, "_forward", explode)
    engine.resume().result(timeout=TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="lightning"):
        waiting.result(timeout=TIMEOUT_S)
    with pytest.raises(EngineUnavailable, match="lightning"):
        engine.submit(EngineRequest([1], SamplingParams(max_tokens=5)))
    assert engine.failure is not None


def test_diverged_weights_fail_the_request_and_not_the_engine(
    engine: Engine, model_dir: Path
) -> None:
    good = read_checkpoint(engine.model, model_dir)
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    engine.reload(bad, weight_version=None).result(timeout=TIMEOUT_S)
    with pytest.raises(EngineError, match="NaN"):
        generate(engine, [1], n=20)
    engine.reload(good, weight_version=None).result(timeout=TIMEOUT_S)
    (completion,) = generate(engine, [1, 2])
    assert max_gap(model_dir, [1, 2], completion) <= 1e-4


def test_close_answers_those_who_wait(engine: Engine) -> None:
    future = engine.submit(EngineRequest([1], SamplingParams(max_tokens=500, ignore_eos=True)))
    engine.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        future.result(timeout=TIMEOUT_S)
    assert not any(thread.name == "engine" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), "lacks 1 tensors: lm_head.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "that the model lacks: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight is float32\[3\], the model's is float32\[32\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    engine: Engine, model_dir: Path, tmp_path: Path, change: object, words: str
) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EngineRejected, match=words):
        read_checkpoint(engine.model, tmp_path)


def test_tied_embeddings_reload_both_ends(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "a", tie_word_embeddings=True, seed=0)
    second = make_tiny_model(tmp_path / "b", tie_word_embeddings=True, seed=1)
    engine = load(EngineConfig(model=str(first), device="cpu")).engine
    engine.start()
    try:
        tensors = read_checkpoint(engine.model, second)
        engine.reload(tensors, weight_version="1").result(timeout=TIMEOUT_S)
        (completion,) = generate(engine, [1, 2])
    finally:
        engine.close()
    assert max_gap(second, [1, 2], completion) <= 1e-4


def test_prefill_passes_are_bounded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_PREFILL_TOKENS", 30)
    futures = [
        engine.submit(EngineRequest([i] * 12, SamplingParams(max_tokens=3, ignore_eos=True)))
        for i in range(7)
    ]
    assert all(len(f.result(timeout=TIMEOUT_S)[0].token_ids) == 3 for f in futures)
