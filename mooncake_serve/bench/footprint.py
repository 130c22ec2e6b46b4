"""`mooncake-serve bench footprint`: one workload's memory and latency, shared and coded or not.

The same conversations (see `sessions`) in five arms, which differ in who shares what and how blocks
are stored: A) KV per session, raw; B) KV per replica, raw; C) one store, raw; D) one store, fast;
E) one store, dense. A session's turns reach a random one of two replicas; in A its KV follows it.
Arms differ in the roots of their block keys and in the store's codec, nothing else: one engine in
this process computes, one request after the other, and publishes in the background.

Two passes. Without eviction: how many bytes the whole workload takes. At the cap, half of A's
logical bytes for each arm's arena: hit rate and latency at equal bytes. Then prompts that hit
nothing, with a store and without one, in turns. At the cap arm E codes with its usual share of a
core; without eviction it is given time to finish.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from mooncake_serve.bench.engine import Answer
from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.bench.sessions import Session, Size, Workload
from mooncake_serve.bench.store import running_store
from mooncake_serve.bench.store_coded import wait_until_recoded
from mooncake_serve.config import AppConfig, ModelConfig
from mooncake_serve.engine.build import build_engine
from mooncake_serve.engine.core import EngineCore
from mooncake_serve.engine.protocol import GenerationRequest, SamplingParams
from mooncake_serve.engine.transfer import Reading
from mooncake_serve.errors import MooncakeError, StoreUnavailable
from mooncake_serve.models import load_tokenizer
from mooncake_serve.store import NodeStore, StoreClient, tenant_salt

MIB, GIB = 1 << 20, 1 << 30
INGEST, INDEX = 128 * MIB, 2 * MIB
WAIT_S, ATTACH_S = 600.0, 60.0
QUICK = Size(documents=2, sessions=3, turns=2)
WARM_UP = Size(documents=1, sessions=1, turns=2)
ZERO_HIT_TOKENS, ZERO_HIT_PAIRS = 512, 12


@dataclass(frozen=True)
class Arm:
    """Who shares, and how blocks are stored."""

    what: str
    shared_by: str
    codec: str = "none"

    def root(self, session: Session, turn: int) -> str:
        """Whose cache a turn uses."""
        if self.shared_by == "session":
            return f"session {session.number}"
        return f"replica {session.replicas[turn]}" if self.shared_by == "replica" else "node"


ARMS = {
    "A": Arm("KV per session, unshared, raw", "session"),
    "B": Arm("prefixes shared within each of two replicas, raw", "replica"),
    "C": Arm("one store, raw", "node"),
    "D": Arm("one store, fast codec", "node", "fast"),
    "E": Arm("one store, dense codec", "node", "dense"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mooncake-serve bench footprint`, and of this module run by itself."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench footprint", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="a small workload")
    parser.add_argument("--backend", choices=["auto", "torch", "native"], default="auto")
    parser.add_argument("--model", default=ModelConfig().id)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--document-tokens", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    try:
        emit(Measurement(options).run())
    except (MooncakeError, OSError, RuntimeError) as err:
        sys.stderr.write(f"bench footprint: {err}\n")
        return 1
    return 0


class ChosenStore:
    """The engine's store, replaced between arms; None misses."""

    def __init__(self) -> None:
        self.current: NodeStore | None = None

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """See `NodeStore`."""
        return self.current.match(keys, tenant) if self.current else 0

    def read_into(
        self, keys: Any, buffers: Any, tenant: str = "", hint: Any = None, threads: int = 1
    ) -> int:
        """See `NodeStore`."""
        store = self.current
        return store.read_into(keys, buffers, tenant, hint, threads) if store else 0

    def open(
        self, keys: Any, buffers: Any, tenant: str = "", hint: Any = None, threads: int = 1
    ) -> AbstractContextManager[Reading | None]:
        """See `NodeStore`."""
        store = self.current
        return store.open(keys, buffers, tenant, hint, threads) if store else nullcontext()

    def put(
        self,
        keys: Any,
        parents: Any,
        buffers: Any,
        shape: Any,
        tenant: str = "",
        hint: Any = None,
    ) -> list[str]:
        """See `NodeStore`."""
        if self.current is None:
            return ["refused: no store"] * len(keys)
        return self.current.put(keys, parents, buffers, shape, tenant, hint)


@dataclass
class Pass:
    """What one arm did in one pass."""

    ttft: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: list[list[list[int]]] = field(default_factory=list)
    store: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Its row of the result; bytes as the store counts them at the end."""
        stats = self.store
        overhead = sum(stats[f"{kind}_bytes"] for kind in ("metadata", "rounding"))
        return {
            "logical_bytes": stats["logical_bytes"],
            "physical_bytes": stats["physical_bytes"],
            "codec_saved_bytes": stats["codec_saved_bytes"],
            "overhead_bytes": overhead,
            "fragmented_bytes": stats["fragmented_bytes"],
            "os_arena_bytes": stats["os_arena_bytes"],
            "blocks": stats["blocks"],
            "evicted": stats["evicted_for_room"],
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "ttft_mean_s": statistics.fmean(self.ttft),
            "e2e_mean_s": statistics.fmean(self.e2e),
        }


class Measurement:
    """All passes of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        size = QUICK if options.quick else Size()
        if options.document_tokens:
            size = Size(**{**vars(size), "document_tokens": options.document_tokens})
        self._size = size
        engine = {"device": "cpu", "backend": options.backend, "threads": options.threads}
        self._config = AppConfig.model_validate(
            {
                "model": {"id": options.model},
                "engine": {**engine, "pool": 96 * MIB, "max_context": 4096, "block_tokens": 256},
            }
        )
        self._tokenizer = load_tokenizer(self._config.model)
        self._store = ChosenStore()
        self._requests = 0

    def run(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        with ExitStack() as stack:
            progress("loading the model")
            engine = stack.enter_context(self._engine(self._store))
            largest = self._most_bytes(engine)
            self._pass(engine, "warm-up", "C", GIB // 2, Workload(WARM_UP, self._tokenizer, 0))
            free = {name: self._arm(engine, "no eviction", name, largest) for name in ARMS}
            cap = free["A"].store["logical_bytes"] // 2
            capped = {name: self._arm(engine, "at the cap", name, cap) for name in ARMS}
            zero_hit = self._zero_hit(engine, stack.enter_context(self._engine(None)))
            info = engine.info
        outputs = len({str(each.answers) for each in [*free.values(), *capped.values()]})
        return {
            "machine": machine(),
            "version": version(),
            "runs": 1,
            "backend": info.backend,
            "workload": {**vars(self._size), "seed": self._options.seed},
            "block_bytes": info.layout.block_bytes,
            "cap_bytes": cap,
            "arms": _rows(capped, free),
            "no_eviction": _rows(free, free),
            "zero_hit": zero_hit,
            "outputs_identical": outputs == 1,
            "compared": _compared(free, capped, zero_hit),
        }

    @contextmanager
    def _engine(self, store: Any) -> Iterator[EngineCore]:
        engine = build_engine(self._config, store)
        try:
            yield engine
        finally:
            engine.close()

    def _most_bytes(self, engine: EngineCore) -> int:
        """Enough for every block of arm A, and some more."""
        size, layout = self._size, engine.info.layout
        tokens = size.document_tokens + size.turns * (size.question_tokens + size.answer_tokens)
        sessions = size.documents * size.sessions
        return (tokens // layout.block_tokens + 1) * sessions * (layout.block_bytes + 2 * MIB)

    def _arm(self, engine: EngineCore, name: str, arm: str, arena_bytes: int) -> Pass:
        progress(f"{name}: arm {arm}, {ARMS[arm].what}")
        workload = Workload(self._size, self._tokenizer, self._options.seed)
        return self._pass(engine, name, arm, arena_bytes, workload)

    def _pass(
        self, engine: EngineCore, name: str, arm: str, arena_bytes: int, workload: Workload
    ) -> Pass:
        result = Pass()
        uncapped = name == "no eviction"
        settings: dict[str, Any] = {"codec": ARMS[arm].codec}
        if uncapped:
            settings |= {"transcode_share": 1.0, "transcode_idle_s": 0.0}
        with self._attached(arena_bytes, settings) as client:
            for session, turn in workload:
                root = tenant_salt(name.encode(), f"{arm} {ARMS[arm].root(session, turn)}")
                answer, tokens = self._ask(engine, session.ask(), self._size.answer_tokens, root)
                session.hear(tokens)
                result.ttft.append(answer.times[0])
                result.e2e.append(answer.times[-1])
                result.prompt_tokens += answer.prompt_tokens
                result.cached_tokens += answer.cached_tokens
            engine.flush(WAIT_S)
            if uncapped and ARMS[arm].codec == "dense":
                wait_until_recoded(client, client.stats()["puts_stored"])
            result.store = client.stats()
        result.answers = [session.answers for session in workload.sessions]
        return result

    @contextmanager
    def _attached(self, arena_bytes: int, settings: dict[str, Any]) -> Iterator[StoreClient]:
        """A store whose arena has that size, attached to the engine."""
        with attached_store(arena_bytes, settings) as (client, store):
            self._store.current = store
            try:
                yield client
            finally:
                self._store.current = None

    def _ask(
        self, engine: EngineCore, prompt: list[int], max_tokens: int, root: bytes = b""
    ) -> tuple[Answer, list[int]]:
        self._requests += 1
        answer = Answer()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(
            f"footprint-{self._requests}", tuple(prompt), sampling, tenant_salt=root
        )
        engine.submit(request, answer.receive)
        return answer.wait(), answer.tokens

    def _zero_hit(self, on: EngineCore, off: EngineCore) -> dict[str, float]:
        progress("prompts that hit nothing, with a store and without")
        generator = random.Random(self._options.seed)
        seconds: dict[str, list[float]] = {"on": [], "off": []}

        def measure(name: str, engine: EngineCore) -> None:
            prompt = [generator.randrange(on.info.vocab_size) for _ in range(ZERO_HIT_TOKENS)]
            answer, _ = self._ask(engine, prompt, self._size.answer_tokens)
            seconds[name].append(answer.times[-1])
            engine.flush(WAIT_S)

        with self._attached(GIB, {"codec": "fast"}):
            for turn in range(3 if self._options.quick else ZERO_HIT_PAIRS + 1):
                pair = [("on", on), ("off", off)]
                for name, engine in pair if turn % 2 else reversed(pair):
                    measure(name, engine)
        medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
        return {"store_on_e2e_s": medians["on"], "store_off_e2e_s": medians["off"]}


@contextmanager
def attached_store(
    arena_bytes: int, settings: dict[str, Any]
) -> Iterator[tuple[StoreClient, NodeStore]]:
    """A fresh store whose arena has that size, as a caller and as an engine see it.

    An engine serves without a store that is away, so at the end StoreUnavailable is raised if it
    was: what was measured meanwhile was no store.
    """
    settings = {**settings, "ingest_bytes_total": INGEST, "index_bytes": INDEX}
    with running_store(arena_bytes + INGEST + INDEX, **settings) as (client, socket):
        store = NodeStore(socket)
        try:
            if not store.wait_until_healthy(ATTACH_S):
                raise StoreUnavailable(
                    f"the store never came up: nothing attached within {ATTACH_S:.0f} s; its own "
                    "error is above"
                )
            yield client, store
            stats = store.stats()
            if not stats.healthy or stats.connects != 1 or stats.skipped:
                raise StoreUnavailable(
                    f"the store was away during the measurement ({stats.timeouts} timeouts, "
                    f"{stats.errors} errors, {stats.skipped} calls without it); its warnings are "
                    "above; run again on an idle machine"
                )
        finally:
            store.close()


def _rows(passes: dict[str, Pass], free: dict[str, Pass]) -> dict[str, Any]:
    """Sharing is what arm A holds beyond an arm when nothing is evicted: dedup, not compression."""
    unshared = free["A"].store["logical_bytes"]
    rows = {}
    for name, each in passes.items():
        saved = unshared - free[name].store["logical_bytes"]
        rows[name] = {"what": ARMS[name].what, "shared_saved_bytes": saved, **each.figures()}
    return rows


def _compared(
    free: dict[str, Pass], capped: dict[str, Pass], zero_hit: dict[str, float]
) -> list[dict[str, Any]]:
    def saving(name: str, than: str) -> float:
        return 1 - free[name].store["physical_bytes"] / free[than].store["physical_bytes"]

    def faster(name: str, than: str) -> float:
        return 1 - statistics.fmean(capped[name].e2e) / statistics.fmean(capped[than].e2e)

    overhead = zero_hit["store_on_e2e_s"] / zero_hit["store_off_e2e_s"] - 1
    rows = [
        ("E below A, physical bytes, no eviction: sharing and codec", saving("E", "A"), 0.40),
        ("C below A, physical bytes, no eviction: sharing alone", saving("C", "A"), None),
        ("E below C, physical bytes, no eviction: codec alone", saving("E", "C"), 0.33),
        ("D below C, physical bytes, no eviction: codec alone", saving("D", "C"), None),
        ("D below A, mean end-to-end latency, at the cap", faster("D", "A"), 0.25),
        ("E below A, mean end-to-end latency, at the cap", faster("E", "A"), None),
        ("D below C, mean end-to-end latency, at the cap", faster("D", "C"), None),
        ("0 % hit: store on above store off, median end-to-end latency", overhead, 0.05),
    ]
    return [{"what": what, "share": share, "bar": bar} for what, share, bar in rows]


if __name__ == "__main__":
    raise SystemExit(main())
