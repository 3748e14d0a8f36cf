"""Continuous batching over one transformers causal LM, on one thread that owns the model.

Only that thread accesses the model, the cache and the lists of sequences; other threads post commands to its queue and
hold `concurrent.futures.Future`s. Sequences join and leave at every decode step; identical prompts admitted together
are prefilled once. Weights are replaced between two steps, and every completion records the weight versions that
sampled its tokens. If the thread dies, every pending future and every later call raises the reason, so no caller waits
forever. No HTTP here.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import Cache, DynamicCache

from atroposlib.engine.cache import RunningCache
from atroposlib.engine.sampling import BatchSampler, Sampled
from atroposlib.engine.sequences import (
    Completion,
    EngineRequest,
    FinishReason,
    RunningSequence,
    Tokenizer,
)
from atroposlib.engine.weights import copy_weights
from atroposlib.errors import EngineError, EngineRejected, EngineUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_PREFILL_TOKENS = 16384
"""Limit of prompt tokens, padding included, of one prefill pass; bounds its memory. One prompt may exceed it."""

_DIVERGED = (
    "the model returned NaN or infinite logits; its weights have probably diverged or were "
    "written from a broken checkpoint"
)


class PauseMode(StrEnum):
    """What `pause` does with sequences in flight: freeze them, let them finish, or abort them."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started; `*_s` are seconds on the engine's thread."""

    decode_steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    shared_prompt_tokens: int = 0
    """Prompt tokens that were not computed because an identical prompt was prefilled in the same pass."""
    finished_requests: int = 0
    aborted_requests: int = 0
    weight_reloads: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0


class _Command(NamedTuple):
    """Work for the engine's thread, and the future to fail if it is never run."""

    run: Callable[[], None]
    future: Future[Any] | None = None


class Engine:
    """Generates on its own thread. Call `start()`, `submit` requests, then `close()`."""

    def __init__(
        self,
        model: Any,
        decoder: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 256,
        seed: int = 0,
        weight_version: str = "0",
    ) -> None:
        """`model` is a causal LM in eval mode. `eos_token_ids[0]`, if any, is the tokenizer's."""
        self.model = model
        self.weight_version = weight_version
        self.stats = EngineStats()
        self.is_paused = False
        self._decoder = decoder
        self._device = model.device
        self._eos = tuple(eos_token_ids)
        self._max_num_seqs = max_num_seqs
        self._generator = torch.Generator().manual_seed(seed)
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        # transformers 5.24 renamed it.
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._waiting: deque[RunningSequence] = deque()
        self._held: deque[RunningSequence] = deque()
        """Submitted while `pause(WAIT)` lets earlier sequences finish."""
        self._drains: list[Future[None]] = []
        """Callers of `pause(WAIT)`; while there are any, `_waiting` does not grow."""
        self._joining: list[RunningSequence] = []
        """Admitted in the current step; added to `_rows` after the prefill."""
        self._rows: list[RunningSequence] = []
        self._cache = RunningCache()
        self._sampler: BatchSampler | None = None
        self._closing = False
        self._failure: BaseException | None = None
        # Protects `_failure` and `_commands`: no command is posted after a crash has emptied the queue.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called by other threads.

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; requests in flight fail with EngineUnavailable."""

        def end() -> None:
            self._closing = True

        if self._thread.is_alive():
            try:
                self.control(end)
            except EngineUnavailable:
                pass
            self._thread.join()

    @property
    def failure(self) -> str | None:
        """Why the engine's thread died; None while it runs."""
        return None if self._failure is None else _explain(self._failure)

    def submit(self, request: EngineRequest) -> Future[list[Completion]]:
        """Queue a request. Its future fails with EngineUnavailable if the engine dies or closes."""
        self._post(_Command(lambda: self._enqueue(request), request.future))
        return request.future

    def abort(self, request: EngineRequest) -> None:
        """End a request's unfinished sequences with FinishReason.ABORT."""
        self._post(_Command(lambda: self._abort(lambda other: other is request)))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding; the future resolves when nothing runs, or fails with EngineRejected."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._post(_Command(lambda: self._pause(mode, future), future))
        return future

    def resume(self) -> Future[None]:
        return self.control(self._resume)

    def reload(
        self, tensors: Mapping[str, torch.Tensor], *, weight_version: str | None
    ) -> Future[None]:
        """Copy tensors from `weights.read_checkpoint` between two steps, and set the version if one is given."""
        return self.control(lambda: self._reload(tensors, weight_version))

    def set_weight_version(self, version: str) -> Future[None]:
        return self.control(lambda: self._set_version(version))

    def snapshot(self) -> Future[dict[str, Any]]:
        """Counters, the numbers of running and waiting sequences and the weight version, at one instant."""
        return self.control(self._snapshot)

    def control(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps; the future gets its result or exception."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = function()
            except Exception as e:  # noqa: BLE001 - a boundary: the caller gets it with its traceback
                future.set_exception(e)
            else:
                future.set_result(result)

        self._post(_Command(run, future))
        return future

    def _post(self, command: _Command) -> None:
        with self._gate:
            if self._failure is not None:
                raise EngineUnavailable(_explain(self._failure))
            self._commands.put(command)

    # The engine's thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_commands()
                    if self._rows or self._waiting:
                        if not self.is_paused:
                            self._step()
                    elif self._drains:
                        self.is_paused = True
                        self._end_drains(None)
            self._fail(EngineUnavailable("the engine is closed"))
        except BaseException as e:
            logger.exception("the engine's thread died")
            self._fail(e)

    def _take_commands(self) -> None:
        """Run the posted commands; wait for one if there is nothing to decode."""
        has_work = self._drains or (not self.is_paused and (self._rows or self._waiting))
        try:
            command = self._commands.get(block=not has_work)
            while True:
                command.run()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _step(self) -> None:
        """Admit sequences that fit, then decode one token of every running sequence."""
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        self._joining = self._admit()
        if self._joining:
            self._prefill(self._joining)
            self._joining = []
        if self._rows:
            self._decode()
        self.stats.busy_s += time.perf_counter() - began_s
        self.stats.cpu_s += time.thread_time() - began_cpu_s

    def _admit(self) -> list[RunningSequence]:
        """Take sequences from the queue, oldest first, within the free rows and the prefill limit."""
        admitted: list[RunningSequence] = []
        prompts: set[tuple[int, ...]] = set()
        width, num_free = 0, self._max_num_seqs - len(self._rows)
        while self._waiting and len(admitted) < num_free:
            prompt_ids = self._waiting[0].request.prompt_ids
            if prompt_ids not in prompts:
                width = max(width, len(prompt_ids))
                if prompts and width * (len(prompts) + 1) > _MAX_PREFILL_TOKENS:
                    break
                prompts.add(prompt_ids)
            admitted.append(self._waiting.popleft())
        return admitted

    def _prefill(self, admitted: list[RunningSequence]) -> None:
        """Compute each distinct prompt once, sample the first tokens and add unfinished sequences to the rows."""
        row_of: dict[tuple[int, ...], int] = {}
        sources = [row_of.setdefault(s.request.prompt_ids, len(row_of)) for s in admitted]
        width = max(map(len, row_of))
        pads = [width - len(prompt_ids) for prompt_ids in row_of]
        ids = [[0] * pad + list(p) for pad, p in zip(pads, row_of, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        mask_BT = torch.tensor(mask, device=self._device)
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        # No config: every layer keeps all its keys, including sliding-window layers; the mask limits attention.
        prefilled = DynamicCache()
        logits_BV = self._forward(
            torch.tensor(ids, device=self._device), mask_BT, positions_BT, prefilled
        )
        for sequence in admitted:
            sequence.versions.append((self.weight_version, 0))
        sampler = BatchSampler([s.request.params for s in admitted], self._device)
        finished = set(self._sample(admitted, sampler, logits_BV[sources]))
        joining = [j for j in range(len(admitted)) if j not in finished]
        if joining:
            self._cache.insert(
                prefilled,
                [sources[j] for j in joining],
                [len(admitted[j].request.prompt_ids) for j in joining],
            )
            self._rows += [admitted[j] for j in joining]
            self._sampler = None
        num_computed = sum(map(len, row_of))
        self.stats.prefilled_tokens += num_computed
        self.stats.shared_prompt_tokens += (
            sum(len(s.request.prompt_ids) for s in admitted) - num_computed
        )

    def _decode(self) -> None:
        """Feed every row its last token and sample the next."""
        self._cache.prepare_step()
        last_B1 = torch.tensor([s.token_ids[-1:] for s in self._rows], device=self._device)
        mask_BT = self._cache.attention_mask(self._device)
        positions_B1 = self._cache.positions(self._device)
        logits_BV = self._forward(last_B1, mask_BT, positions_B1, self._cache)
        self._cache.finish_step()
        if self._sampler is None:
            self._sampler = BatchSampler([s.request.params for s in self._rows], self._device)
        self._leave(self._sample(self._rows, self._sampler, logits_BV))
        self.stats.decode_steps += 1

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Return the logits after the last column, `[B, V]`."""
        positions = {"position_ids": positions_BT} if self._takes_positions else {}
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            use_cache=True,
            **{self._cache_argument: cache},
            **positions,
            **self._last_logits_only,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV

    def _sample(
        self, sequences: list[RunningSequence], sampler: BatchSampler, logits_BV: torch.Tensor
    ) -> list[int]:
        """Append one token to each sequence; return the indices of those that ended, ascending."""
        uniforms_B = torch.rand(len(sequences), generator=self._generator, dtype=torch.float64)
        banned: list[tuple[int, int]] = []
        if sampler.has_generators or sampler.has_min_tokens:
            for row, sequence in enumerate(sequences):
                if sequence.generator is not None:
                    uniforms_B[row] = sequence.generator.random()
                if len(sequence.token_ids) < sequence.request.params.min_tokens:
                    banned += [(row, token) for token in sequence.stops]
        sampled = sampler.sample(logits_BV, uniforms_B.to(self._device), banned)
        self.stats.generated_tokens += len(sequences)
        return self._record(sequences, sampled)

    def _record(self, sequences: list[RunningSequence], sampled: Sampled) -> list[int]:
        ended: list[int] = []
        diverged: set[EngineRequest] = set()
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, sampled.tokens, sampled.logprobs, strict=True)
        ):
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            if sampled.top is not None:
                sequence.top.append(sampled.top[row])
            if logprob != logprob:
                diverged.add(sequence.request)
            elif token in sequence.stops:
                reason = None if self._eos and token == self._eos[0] else token
                sequence.finish(FinishReason.STOP, stop_reason=reason, ended_by_token=True)
            elif sequence.hits_stop_string(token, self._decoder):
                pass
            elif len(sequence.token_ids) >= sequence.request.params.max_tokens:
                sequence.finish(FinishReason.LENGTH)
            else:
                continue
            ended.append(row)
            self.stats.finished_requests += sequence.request.num_open == 0
        for request in diverged:
            request.fail(EngineError(_DIVERGED))
        if diverged:
            # Also drop these requests' other sequences: their results would not be read.
            self._waiting = deque(s for s in self._waiting if s.request not in diverged)
            ended = [row for row, s in enumerate(sequences) if s.finished or s.request in diverged]
        return ended

    def _leave(self, rows: list[int]) -> None:
        """Remove finished rows from the batch."""
        if not rows:
            return
        moves = self._cache.remove(rows)
        for target, source in moves:
            self._rows[target] = self._rows[source]
        del self._rows[self._cache.num_rows :]
        self._sampler = None

    def _enqueue(self, request: EngineRequest) -> None:
        params = request.params
        stops = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self._eos)
        queue = self._held if self._drains else self._waiting
        queue.extend(RunningSequence(request, index, stops) for index in range(params.n))

    def _abort(self, chosen: Callable[[EngineRequest], bool]) -> None:
        everywhere = [*self._rows, *self._waiting, *self._held]
        requests = {s.request for s in everywhere if chosen(s.request)}
        for sequence in everywhere:
            if sequence.request in requests:
                sequence.finish(FinishReason.ABORT)
        self._leave([row for row, s in enumerate(self._rows) if s.finished])
        self._waiting = deque(s for s in self._waiting if not s.finished)
        self._held = deque(s for s in self._held if not s.finished)
        self.stats.aborted_requests += len(requests)

    def _pause(self, mode: PauseMode, future: Future[None]) -> None:
        if mode is PauseMode.WAIT:
            if self.is_paused and (self._rows or self._waiting):
                future.set_exception(
                    EngineRejected(
                        "pause mode 'wait' would never end: the engine is paused with "
                        f"{len(self._rows)} running and {len(self._waiting)} waiting sequences; "
                        "resume first, or pause with mode 'abort'"
                    )
                )
                return
            self._drains.append(future)
            return
        if mode is PauseMode.ABORT:
            self._abort(lambda request: True)
        self._end_drains(EngineRejected(f"overtaken by a pause with mode '{mode.value}'"))
        self.is_paused = True
        future.set_result(None)

    def _end_drains(self, error: Exception | None) -> None:
        """Resolve the futures of `pause(WAIT)`, and queue the sequences that were held meanwhile."""
        for future in self._drains:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        self._drains.clear()
        self._waiting += self._held
        self._held.clear()

    def _resume(self) -> None:
        self._end_drains(EngineRejected("resumed before the sequences in flight had finished"))
        self.is_paused = False

    def _reload(self, tensors: Mapping[str, torch.Tensor], weight_version: str | None) -> None:
        copy_weights(self.model, tensors)
        self.stats.weight_reloads += 1
        if weight_version is not None:
            self._set_version(weight_version)

    def _set_version(self, version: str) -> None:
        if version == self.weight_version:
            return
        self.weight_version = version
        for sequence in self._rows:
            sequence.versions.append((version, len(sequence.token_ids)))

    def _snapshot(self) -> dict[str, Any]:
        return {
            **asdict(self.stats),
            "running": len(self._rows),
            "waiting": len(self._waiting) + len(self._held),
            "is_paused": self.is_paused,
            "weight_version": self.weight_version,
        }

    def _fail(self, error: BaseException) -> None:
        """Fail all pending futures, and refuse later commands."""
        with self._gate:
            self._failure = error
            posted: list[_Command] = []
            while not self._commands.empty():
                posted.append(self._commands.get_nowait())
        answer = EngineUnavailable(_explain(error))
        for future in [*(c.future for c in posted if c.future is not None), *self._drains]:
            if not future.done():
                future.set_exception(answer)
        everyone = (*self._rows, *self._joining, *self._waiting, *self._held)
        for request in {s.request for s in everyone}:
            request.fail(answer)


def _explain(error: BaseException) -> str:
    if isinstance(error, EngineUnavailable):
        return str(error)
    hint = "; lower --max_num_seqs" if isinstance(error, torch.OutOfMemoryError) else ""
    return f"the engine died: {type(error).__name__}: {error}{hint}"
