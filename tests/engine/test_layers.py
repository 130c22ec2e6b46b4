"""A forward may begin when the first layer of its blocks has arrived, and nobody can tell."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from mooncake_serve.engine.native import NativeBackend
from mooncake_serve.engine.pool import BlockPool
from mooncake_serve.engine.protocol import GenerationRequest, LayerGate, WorkItem
from mooncake_serve.engine.scheduler import Limits, Load, Scheduler
from mooncake_serve.engine.sequence import Phase
from mooncake_serve.engine.sequence import Sequence as Request
from tests.engine.support import WAIT_S, DictStore, generate, model_engine, random_prompt
from tests.kernels.tiny import VOCAB, tiny_model

BLOCK = 32


class Watch:
    """Sees every forward that begins behind a gate, and how it went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.outcomes: list[bool] = []
        forward = NativeBackend.forward_behind

        def watched(
            backend: NativeBackend, batch: Sequence[WorkItem], gate: LayerGate
        ) -> torch.Tensor | None:
            self.begun.set()
            logits = forward(backend, batch, gate)
            self.outcomes.append(logits is not None)
            return logits

        monkeypatch.setattr(NativeBackend, "forward_behind", watched)


def warm(store: DictStore, prompt: list[int]) -> tuple[list[int], list[int], int]:
    """Tokens without a store, tokens of a second replica, and what that one found in the store."""
    loaded = tiny_model("llama-tied")
    with model_engine(loaded, backend="native", block_tokens=BLOCK) as engine:
        (cold,) = generate(engine, [prompt])
    with model_engine(loaded, store, backend="native", block_tokens=BLOCK) as engine:
        generate(engine, [prompt])
        assert engine.flush(WAIT_S)
    with model_engine(loaded, store, backend="native", block_tokens=BLOCK, threads=2) as engine:
        (tokens,) = generate(engine, [prompt])
        return cold, tokens, engine.stats().cached_store_tokens


@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 500])
def test_it_begins_with_the_first_layer_and_answers_alike(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, store = Watch(monkeypatch), DictStore()

    def hold_the_last_layers(first: int, blocks: int) -> int:
        assert first == 0 or watch.begun.wait(WAIT_S), "the forward waited for all layers"
        return blocks

    store.before_planes = hold_the_last_layers
    cold, tokens, cached = warm(store, random_prompt(length, 5, VOCAB))
    assert tokens == cold
    assert watch.outcomes == [True]
    assert cached == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("left", [0, 1, 4])
def test_a_block_that_breaks_on_the_way_is_computed(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward that began is thrown away; what was whole stays loaded."""
    watch, store = Watch(monkeypatch), DictStore()

    def lose_blocks(first: int, blocks: int) -> int:
        if first == 0:
            return blocks
        assert watch.begun.wait(WAIT_S)
        for key in list(store.blocks)[left:]:
            del store.blocks[key]
        return left

    store.before_planes = lose_blocks
    cold, tokens, cached = warm(store, random_prompt(6 * BLOCK + 9, 5, VOCAB))
    assert tokens == cold
    assert watch.outcomes == [False]
    assert cached == left * BLOCK


def test_a_store_that_raises_lets_the_forward_through(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, store = Watch(monkeypatch), DictStore()
    loaded = tiny_model("llama-tied")
    backend = NativeBackend(loaded, block_tokens=BLOCK, threads=2)
    backend.allocate_pool(2)
    gate = backend.make_gate()
    results: list[torch.Tensor | None] = []
    item = WorkItem([5, 6], BLOCK, [0, 1], True)
    thread = threading.Thread(target=lambda: results.append(backend.forward_behind([item], gate)))
    thread.start()
    assert watch.begun.wait(WAIT_S)
    gate.open(1)
    gate.fail()
    thread.join(WAIT_S)
    assert results == [None]
    assert store.reads == 0


def scheduler(pool_blocks: int = 16) -> Scheduler:
    limits = Limits(BLOCK, 4, 32, any_cut=True, keep_decoded=True, use_store=True)
    return Scheduler(limits, BlockPool(pool_blocks), lambda salt, tokens: keys_of(tokens))


def keys_of(tokens: list[int]) -> list[bytes]:
    return [bytes([tokens[0], at]) for at in range(len(tokens) // BLOCK)]


def add(wanted: Scheduler, first: int, length: int, order: int) -> Request:
    tokens = tuple([first] * length)
    sequence = Request(GenerationRequest(f"r{order}", tokens), order, keys_of(list(tokens)), BLOCK)
    wanted.add(sequence)
    return sequence


def loading(wanted: Scheduler) -> Load:
    assert wanted.plan() is None
    (load,) = wanted.take_loads()
    return load


def test_the_step_behind_a_load_is_the_one_that_would_follow() -> None:
    planned = scheduler()
    sequence = add(planned, 1, 3 * BLOCK + 5, order=0)
    load = loading(planned)
    step = planned.plan_behind(load)
    assert step is not None
    assert sequence.phase is Phase.LOADING
    assert sequence.computed == 0
    planned.load_done(load, 3)
    after = planned.plan()
    assert after is not None
    assert step.items == after.items
    planned.check_integrity()


def test_nothing_runs_behind_a_load_while_others_could_run() -> None:
    planned = scheduler()
    other = add(planned, 2, 5, order=0)
    step = planned.plan()
    assert step is not None
    planned.complete(step)
    other.tokens.append(1)
    add(planned, 1, 3 * BLOCK + 5, order=1)
    planned.plan()
    (load,) = planned.take_loads()
    assert planned.plan_behind(load) is None
    planned.finish(other)
    assert planned.plan_behind(load) is not None
    planned.finish(load.sequence)
    assert planned.plan_behind(load) is None
    planned.load_done(load, 3)
    planned.check_integrity()
