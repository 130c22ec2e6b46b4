"""`EngineCore`: the engine's thread, which joins scheduler, backend, sampling and the store.

One thread owns the backend, the scheduler and every sequence. Other threads (callers, the loader,
the publisher) only post functions to its inbox, which it runs between two forwards. A forward
that raises fails the requests it held; anything else that raises is a bug, ends the thread, fails
every request and makes the engine unhealthy, so that serving replaces the replica.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mooncake_serve.engine.detokenizer import Decode, Detokenizer
from mooncake_serve.engine.grammar import GrammarFailed, Grammars, Matcher
from mooncake_serve.engine.job import Job, choose
from mooncake_serve.engine.namespace import namespace
from mooncake_serve.engine.pool import BlockPool
from mooncake_serve.engine.pool_journal import PoolJournal
from mooncake_serve.engine.prefill_curve import PrefillCurve
from mooncake_serve.engine.protocol import (
    Backend,
    EngineStats,
    Event,
    FailEvent,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    LayeredBackend,
    LayerGate,
    ModelInfo,
    OnEvent,
)
from mooncake_serve.engine.sampler import Sampled, Sampler
from mooncake_serve.engine.scheduler import Completed, Limits, Load, Scheduler, Step
from mooncake_serve.engine.sequence import Sequence
from mooncake_serve.engine.transfer import BlockStore, Loader, Publisher
from mooncake_serve.engine.validate import check_request, context_limit, pool_blocks
from mooncake_serve.errors import DeadlineExceeded, EngineFailed, InvalidRequest

log = logging.getLogger(__name__)

PUBLISH_QUEUE_BLOCKS = 64
CLOSE_TIMEOUT_S = 60.0
CLOSE_PUBLISH_S = 10.0
"""How long a closing engine goes on to publish what it has computed."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the core needs beside the backend."""

    name: str
    threads: int
    pool_bytes: int
    max_batch: int = 32
    max_context: int | None = None
    relaxed: bool = False


class EngineCore:
    """Implements `Engine` over one backend, with or without a store."""

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        decode: Decode,
        settings: EngineSettings,
        store: BlockStore | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Builds the backend on the engine's own thread and waits for it; raises what it raises."""
        self._decode = decode
        self._settings = settings
        self._store = store
        self._grammars = grammars
        self._journal = PoolJournal()
        self._jobs: dict[str, Job] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Held while a request enters, so that none enters after the last look at the inbox."""
        self._arrivals = 0
        self._closing = False
        self._failure: Exception | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=self._main, args=(make_backend,), name="engine", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs."""
        return self._failure is None and self._thread.is_alive()

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queue a request. Raises ContextTooLong or InvalidRequest before anything is queued."""
        check_request(request, self.info)
        keys = self._keys_of(request.tenant_salt, list(request.token_ids))
        sampler = Sampler(request.sampling, request.token_ids, self._matcher(request))
        detokenizer = Detokenizer(self._decode, request.sampling.stop)
        with self._gate:
            if self._closing or not self.healthy:
                raise EngineFailed("the engine is closed; another replica can take the request")
            self._arrivals += 1
            order = (request.priority, self._arrivals)
            sequence = Sequence(request, order, keys, self.info.layout.block_tokens)
            job = Job(sequence, on_event, sampler, detokenizer)
            self._inbox.put(lambda: self._add(job))

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step; unknown ids are ignored."""
        self._inbox.put(lambda: self._cancel(request_id))

    def stats(self) -> EngineStats:
        """Figures of this moment; read without a lock, so they may be a step apart."""
        return self._snapshot()

    def pool_changes(self, *, everything: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Keys that came into the pool and that left it since the last call, or all that are in."""
        return self._journal.take(everything=everything)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until every completed block reached the store; False when it took longer."""
        return self._publisher is None or self._publisher.flush(timeout_s)

    def close(self) -> None:
        """Stop the thread, fail what is queued, return the pool's memory."""
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _main(self, make_backend: Callable[[], Backend]) -> None:
        try:
            self._start(make_backend)
        except Exception as err:  # noqa: BLE001 - the constructor raises it in the caller's thread
            self._failure = err
            return
        finally:
            self._ready.set()
        try:
            while not self._closing:
                self._turn()
        except Exception as err:
            log.exception("the engine stopped")
            self._failure = err
        finally:
            self._stop()

    def _start(self, make_backend: Callable[[], Backend]) -> None:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        self._backend = backend = make_backend()
        layout = backend.layout
        blocks = pool_blocks(layout, settings.pool_bytes)
        self.info = ModelInfo(
            name=settings.name,
            namespace=namespace(backend, relaxed=settings.relaxed),
            layout=layout,
            max_context=context_limit(backend, settings.max_context, blocks),
            vocab_size=backend.vocab_size,
            eos_token_ids=backend.eos_token_ids,
            exact=backend.exact and not settings.relaxed,
            device=backend.device,
            backend=backend.name,
        )
        backend.allocate_pool(blocks)
        self._pool = BlockPool(blocks, self._journal.note)
        self._curve = PrefillCurve()
        limits = Limits(
            block_tokens=layout.block_tokens,
            max_batch=settings.max_batch,
            max_decode_rows=backend.max_decode_rows,
            any_cut=backend.any_cut,
            keep_decoded=backend.any_cut or settings.relaxed,
            use_store=self._store is not None,
        )
        self._scheduler = Scheduler(limits, self._pool, self._keys_of, self._drop_pin)
        self._loader: Loader | None = None
        self._publisher: Publisher | None = None
        if self._store is not None:
            from mooncake_serve._store import BlockShape

            shape = BlockShape(layout.dtype, layout.planes, layout.block_tokens, layout.channels)
            self._loader = Loader(
                self._store,
                backend,
                settings.threads,
                self._post_load_begun,
                self._post_load_done,
            )
            self._publisher = Publisher(
                self._store, backend, shape, self._post_release, PUBLISH_QUEUE_BLOCKS
            )

    def _stop(self) -> None:
        with self._gate:
            self._closing = True
        if not self.flush(CLOSE_PUBLISH_S):
            log.warning("closing before every computed block reached the store")
        for helper in (self._loader, self._publisher):
            if helper is not None:
                helper.close()
        while not self._inbox.empty():
            self._inbox.get()()
        for job in list(self._jobs.values()):
            self._end(job, FailEvent(EngineFailed("the engine closed before the request ended")))
        self._backend.close()

    def _turn(self) -> None:
        """Run what was posted, then one step; sleep when there is none."""
        while not self._inbox.empty():
            self._inbox.get()()
        next_deadline = self._expire()
        step = self._scheduler.plan()
        for hit in self._scheduler.take_hits():
            assert self._publisher is not None
            if not self._publisher.offer(hit):
                self._pool.release(hit.block)
        for load in self._scheduler.take_loads():
            assert self._loader is not None
            self._loader.start(load)
        if step is not None:
            self._run(step)
        if step is None:
            self._sleep(next_deadline)

    def _sleep(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            self._inbox.get(timeout=timeout)()
        except queue.Empty:
            return

    def _run(self, step: Step) -> None:
        begun = time.monotonic()
        logits = self._forward(step, lambda: self._backend.forward(step.items))
        if logits is None:
            return
        if len(step.items) == 1:
            item = step.items[0]
            self._curve.observe(len(item.tokens), item.start, time.monotonic() - begun)
        self._account(step, logits)

    def _run_behind(self, load: Load, gate: LayerGate) -> None:
        """Run the forward after a load while its last layers arrive, if nobody else could run."""
        step, backend = self._scheduler.plan_behind(load), self._backend
        if step is None or not isinstance(backend, LayeredBackend):
            return
        logits = self._forward(step, lambda: backend.forward_behind(step.items, gate))
        if logits is not None:
            load.settled = True
            self._scheduler.load_done(load, len(load.blocks))
            self._account(step, logits)

    def _forward(
        self, step: Step, forward: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        try:
            return forward()
        except (RuntimeError, MemoryError) as err:
            log.exception("a forward failed")
            for sequence in step.sequences:
                log.error("failed with its forward", extra=sequence.request.logged)
                job = self._jobs[sequence.request.request_id]
                self._end(job, FailEvent(EngineFailed(f"a forward failed: {err}")))
            return None

    def _account(self, step: Step, logits: torch.Tensor) -> None:
        sequences, completed = self._scheduler.complete(step)
        self._publish(completed)
        jobs = [self._jobs[sequence.request.request_id] for sequence in sequences]
        for job, sampled in zip(jobs, choose(jobs, logits), strict=True):
            if isinstance(sampled, GrammarFailed):
                self._end(job, FailEvent(sampled))
            else:
                self._advance(job, sampled)

    def _publish(self, completed: list[Completed]) -> None:
        if self._publisher is None:
            return
        for block in completed:
            if self._publisher.offer(block):
                self._pool.retain(block.block)

    def _advance(self, job: Job, sampled: Sampled) -> None:
        """Give a request its next token, and end it if that was the last one."""
        token, reason = job.push(sampled, self.info.eos_token_ids)
        self._emit(job, token)
        if reason is not None:
            self._finish(job, reason)

    def _finish(self, job: Job, reason: FinishReason) -> None:
        text = job.detokenizer.finish()
        self._end(job, FinishEvent(reason, job.sequence.usage(), text))

    def _end(self, job: Job, event: Event) -> None:
        if self._jobs.pop(job.sequence.request.request_id, None) is None:
            return
        self._scheduler.finish(job.sequence)
        self._emit(job, event)

    def _emit(self, job: Job, event: Event) -> None:
        try:
            job.on_event(event)
        except Exception:
            log.exception("the receiver of events failed", extra=job.sequence.request.logged)
            self.cancel(job.sequence.request.request_id)

    def _add(self, job: Job) -> None:
        request_id = job.sequence.request.request_id
        if request_id in self._jobs:
            error = EngineFailed(f"a request with id {request_id!r} is already running")
            self._emit(job, FailEvent(error))
            return
        self._jobs[request_id] = job
        self._scheduler.add(job.sequence)

    def _cancel(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._finish(job, "cancelled")

    def _expire(self) -> float | None:
        """Fail what is past its deadline; the earliest deadline that is left."""
        deadlines = [
            (deadline, job)
            for job in self._jobs.values()
            if (deadline := job.sequence.request.deadline_s) is not None
        ]
        now = time.monotonic()
        for deadline, job in deadlines:
            if deadline <= now:
                done = f"{job.sequence.generated} tokens generated"
                self._end(job, FailEvent(DeadlineExceeded(f"deadline passed; {done}")))
        return min((deadline for deadline, _ in deadlines if deadline > now), default=None)

    def _matcher(self, request: GenerationRequest) -> Matcher | None:
        if request.sampling.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidRequest(
                "this engine has no tokenizer for structured output", param="response_format"
            )
        info = self.info
        return self._grammars.matcher(request.sampling.grammar, info.vocab_size, info.eos_token_ids)

    def _keys_of(self, tenant_salt: bytes, tokens: list[int]) -> list[bytes]:
        from mooncake_serve._store import block_keys

        layout = self.info.layout
        return block_keys(self.info.namespace, tenant_salt, array("I", tokens), layout.block_tokens)

    def _post_load_begun(self, load: Load, gate: LayerGate) -> None:
        self._inbox.put(lambda: self._run_behind(load, gate))

    def _post_load_done(self, load: Load, loaded: int) -> None:
        self._inbox.put(lambda: None if load.settled else self._scheduler.load_done(load, loaded))

    def _post_release(self, block: Completed) -> None:
        self._inbox.put(lambda: self._pool.release(block.block))

    def _drop_pin(self) -> bool:
        block = self._publisher.take_back() if self._publisher is not None else None
        if block is None:
            return False
        self._pool.release(block.block)
        return True

    def _snapshot(self) -> EngineStats:
        scheduler = self._scheduler
        counters = scheduler.counters
        return EngineStats(
            running=len(scheduler.active),
            waiting=len(scheduler.waiting),
            outstanding_prefill_tokens=scheduler.outstanding_prefill_tokens(),
            pool_blocks=self._pool.blocks,
            pool_free_blocks=self._pool.available,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            cached_pool_tokens=counters.cached_pool_tokens,
            cached_store_tokens=counters.cached_store_tokens,
            published_blocks=self._publisher.published if self._publisher else 0,
            prefill_token_s=self._curve.token_s,
            prefill_attention_s=self._curve.attention_s,
        )
