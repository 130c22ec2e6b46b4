"""The engine's thread: requests in, events out; loads and publishing; failures stay small."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mooncake_serve.engine.protocol import SamplingParams
from mooncake_serve.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
)
from tests.engine.chain_backend import ChainBackend, expected_tokens
from tests.engine.support import (
    WAIT_S,
    DictStore,
    chain_engine,
    generate,
    request,
    spell,
    start,
)

BLOCK = 8


def backend(**options: object) -> ChainBackend:
    return ChainBackend(block_tokens=BLOCK, **options)  # type: ignore[arg-type]


def document(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * each) % 250 for each in range(length)]


def wanted(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, block_tokens=BLOCK)


class SlowStore(DictStore):
    """Answers when told."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        assert self.go.wait(WAIT_S)
        return super().match(keys, tenant)

    def put(self, *args, **options) -> list[str]:
        assert self.go.wait(WAIT_S)
        return super().put(*args, **options)


def test_one_request_from_prompt_to_finish() -> None:
    with chain_engine(backend()) as engine:
        result = start(engine, request(document(21), 5))
        end = result.finish()
    assert result.tokens == wanted(document(21), 5)
    assert result.text == spell(result.tokens)
    assert end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (21, 5)
    assert end.usage.cached_tokens == 0


def test_eos_ends_a_request_and_ignore_eos_does_not() -> None:
    tokens = wanted(document(5), 6)
    chain = backend()
    chain.eos_token_ids = (tokens[2],)  # type: ignore[assignment]
    with chain_engine(chain) as engine:
        result = start(engine, request(document(5), 6))
        assert result.finish().reason == "stop"
        assert result.tokens == tokens[:3]
        assert result.text == spell(tokens[:2])
        longer = start(engine, request(document(5), 6, ignore_eos=True))
        assert longer.finish().reason == "length"
        assert longer.tokens == tokens


def test_a_stop_string_across_tokens_is_cut_off() -> None:
    text = spell(wanted(document(9), 8))
    with chain_engine(backend()) as engine:
        result = start(engine, request(document(9), 8, stop=(text[3:5],)))
        assert result.finish().reason == "stop"
    assert result.text == text[: text.index(text[3:5])]


def test_prefix_from_pool_then_from_the_store_of_another_engine() -> None:
    store = DictStore()
    prompt = document(5 * BLOCK + 1)
    with chain_engine(backend(), store) as engine:
        assert generate(engine, [prompt], 3) == [wanted(prompt, 3)]
        again = start(engine, request(prompt, 3))
        assert again.finish().usage.cached_pool_tokens == 5 * BLOCK
        assert engine.flush()
        assert engine.stats().published_blocks == len(store.blocks) == 5
    with chain_engine(backend(), store) as engine:
        other = start(engine, request([*prompt[: 3 * BLOCK], *document(12, first=99)], 3))
        usage = other.finish().usage
        assert (usage.cached_store_tokens, usage.cached_pool_tokens) == (3 * BLOCK, 0)
    assert other.tokens == wanted([*prompt[: 3 * BLOCK], *document(12, first=99)], 3)


def test_tenants_share_nothing() -> None:
    store = DictStore()
    prompt = document(3 * BLOCK + 1)
    with chain_engine(backend(), store) as engine:
        for salt in (b"a" * 32, b"b" * 32):
            result = start(engine, request(prompt, 2, tenant_salt=salt))
            assert result.finish().usage.cached_tokens == 0
        assert engine.flush()
    assert len(store.blocks) == 6


def test_a_slow_store_stalls_no_decode() -> None:
    store = SlowStore()
    with chain_engine(backend(), store) as engine:
        waiting = start(engine, request(document(2 * BLOCK + 1), 2))
        running = start(engine, request(document(3, first=50), 20))
        assert running.finish().reason == "length"
        assert waiting.end is None
        store.go.set()
        waiting.finish()
    assert waiting.tokens == wanted(document(2 * BLOCK + 1), 2)


def test_publishing_more_than_the_pool_holds_drops_and_never_blocks() -> None:
    store = SlowStore()
    store.match = lambda keys, tenant="": 0  # type: ignore[method-assign]
    prompts = [document(4 * BLOCK + 1, first) for first in range(6)]
    with chain_engine(backend(), store, pool_blocks=6) as engine:
        for prompt in prompts:
            assert generate(engine, [prompt], 2) == [wanted(prompt, 2)]
        store.go.set()
        assert engine.flush()
        assert engine._publisher is not None
        assert engine._publisher.dropped > 0
        assert engine._publisher.published + engine._publisher.dropped == 24
    assert engine._pool.available == 6
    engine._pool.check_integrity()


@pytest.mark.parametrize("use_store", [False, True])
def test_cancel_frees_everything(use_store: bool) -> None:
    with chain_engine(backend(), DictStore() if use_store else None) as engine:
        doomed = request(document(20), 400)
        result = start(engine, doomed)
        engine.cancel(doomed.request_id)
        engine.cancel("unknown")
        assert result.finish().reason in {"cancelled", "length"}
        assert generate(engine, [document(20)], 3) == [wanted(document(20), 3)]
        assert engine.flush()
        assert engine.stats().running == 0


def test_deadline_fails_a_request_with_504() -> None:
    store = SlowStore()
    with chain_engine(backend(), store) as engine:
        late = request(document(3 * BLOCK), 4, deadline_s=time.monotonic() + 0.05)
        error = start(engine, late).fail()
        assert isinstance(error, DeadlineExceeded)
        assert error.status == 504
        store.go.set()
        assert generate(engine, [document(30)], 3) == [wanted(document(30), 3)]


def test_a_failed_forward_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    chain = backend()
    with chain_engine(chain) as engine:
        chain.fail_next = RuntimeError("out of memory")
        asked = replace(request(document(5), 4), log_id="req-7")
        error = start(engine, asked).fail()
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        named = [getattr(record, "request_id", None) for record in errors]
        assert named == [None, "req-7"], "what failed, and whose request"
        assert isinstance(error, EngineFailed)
        assert "out of memory" in str(error)
        assert engine.healthy
        assert generate(engine, [document(5)], 4) == [wanted(document(5), 4)]


def test_a_bug_ends_the_engine_and_every_request() -> None:
    chain = backend()
    with chain_engine(chain) as engine:
        chain.fail_next = KeyError("bug")
        assert isinstance(start(engine, request(document(5), 4)).fail(), EngineFailed)
        engine._thread.join(WAIT_S)
        assert not engine.healthy
        with pytest.raises(EngineFailed):
            engine.submit(request(document(5), 4), lambda event: None)


def test_a_receiver_that_raises_loses_only_its_own_request() -> None:
    with chain_engine(backend()) as engine:
        engine.submit(request(document(5), 400), lambda event: 1 / 0)
        assert generate(engine, [document(6)], 4) == [wanted(document(6), 4)]
        assert engine.healthy


def test_close_fails_what_is_queued() -> None:
    store = SlowStore()
    with chain_engine(backend(), store) as engine:
        result = start(engine, request(document(3 * BLOCK), 4))
        store.go.set()
    assert result.ended.wait(WAIT_S)
    with pytest.raises(EngineFailed):
        engine.submit(request(document(5), 4), lambda event: None)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "param"),
    [
        ([], SamplingParams(), InvalidRequest, "prompt"),
        ([1], SamplingParams(max_tokens=0), InvalidRequest, "max_tokens"),
        ([251], SamplingParams(max_tokens=1), InvalidRequest, "prompt"),
        ([1] * 60, SamplingParams(max_tokens=5), ContextTooLong, "max_tokens"),
        ([1] * 64, SamplingParams(max_tokens=1), ContextTooLong, "prompt"),
    ],
)
def test_what_cannot_run_is_refused_at_submit(prompt, sampling, error, param) -> None:
    with chain_engine(backend(), pool_blocks=8) as engine:
        assert engine.info.max_context == 64
        wrong = request(prompt, sampling.max_tokens)
        with pytest.raises(error) as caught:
            engine.submit(wrong, lambda event: None)
        assert caught.value.param == param
        assert caught.value.status == 400
        (tokens,) = generate(engine, [[1] * 59], 5)
        assert tokens == wanted([1] * 59, 5)


def test_a_pool_too_small_names_the_setting() -> None:
    with (
        pytest.raises(ConfigError, match=r"engine\.pool.*at least"),
        chain_engine(backend(), pool_blocks=1),
    ):
        pass


def test_any_cut_publishes_what_decode_wrote() -> None:
    store = DictStore()
    with chain_engine(backend(any_cut=True), store) as engine:
        (answer,) = generate(engine, [document(BLOCK)], 2 * BLOCK + 1)
        second = [*document(BLOCK), *answer]
        result = start(engine, request(second, 3))
        assert result.finish().usage.cached_pool_tokens == 3 * BLOCK
        assert engine.flush()
    assert len(store.blocks) == 3
    assert result.tokens == expected_tokens(second, 3, block_tokens=BLOCK, any_cut=True)
