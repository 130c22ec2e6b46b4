"""`bench serve --echo`: what HTTP, ingress and router cost, with an engine that only echoes.

The application is the product's: proxy, ingress, tokenising, plan, request router, replica, stream.
Only the engine is another: each step gives every running request its next token, as a batch does,
without computing anything. Beside it runs a bare Serve hop, an ingress that passes the body to a
replica, behind the same proxy, in turns with ours; the difference of the medians is what we add.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle

from mooncake_serve.app import assemble
from mooncake_serve.bench.http import Connection
from mooncake_serve.bench.report import progress
from mooncake_serve.bench.serving import Serving
from mooncake_serve.config import load_app_config
from mooncake_serve.engine.protocol import (
    EngineStats,
    FinishEvent,
    GenerationRequest,
    KVLayout,
    ModelInfo,
    OnEvent,
    TokenEvent,
    Usage,
)
from mooncake_serve.replica import ModelReplica

MODEL = "echo"
PROMPT_TOKENS = 512
CLIENTS = 16
STEP_S = 1e-3
"""Of a step that gives every request a token: 16 clients are offered 16,000 tokens a second."""
CONTEXT = 8192
WORD = " the"
"""One token of the embedded model's tokenizer."""


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    on_event: OnEvent
    sent: int = 0


class EchoEngine:
    """Implements `Engine`: a token a step for every request."""

    def __init__(self) -> None:
        layout = KVLayout(1, 1, 64, 256, "bfloat16")
        self.info = ModelInfo(MODEL, "echo", layout, CONTEXT, 1 << 16, (), True, "none", "echo")
        self._running: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="echo", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Start echoing; the first token comes at once."""
        with self._changed:
            self._running[request.request_id] = running = _Running(request, on_event)
            self._step(running)
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        with self._changed:
            self._running.pop(request_id, None)

    def stats(self) -> EngineStats:
        """How many run."""
        return EngineStats(len(self._running), *([0] * 10))

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        while not self._closed:
            began = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._running or self._closed)
                for running in list(self._running.values()):
                    self._step(running)
            time.sleep(max(0.0, STEP_S - (time.monotonic() - began)))

    def _step(self, running: _Running) -> None:
        request = running.request
        running.on_event(TokenEvent(running.sent % 256, WORD))
        running.sent += 1
        if running.sent == request.sampling.max_tokens:
            del self._running[request.request_id]
            usage = Usage(len(request.token_ids), running.sent, 0)
            running.on_event(FinishEvent("length", usage))


class EchoReplica(ModelReplica):
    """The product's replica with the echo in the engine's place, and no store."""

    def __init__(self, config: dict[str, Any]) -> None:
        del config
        self._store = None
        self._engine = EchoEngine()
        self._id = serve.get_replica_context().replica_id.unique_id


_bare = FastAPI()


@serve.deployment(name="bare-replica", max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class BareReplica:
    """Answers at once."""

    async def answer(self, body: bytes) -> AsyncGenerator[bytes]:
        """The same few bytes for everybody."""
        del body
        yield json.dumps({"choices": [{"index": 0, "text": WORD}]}).encode()


@serve.deployment(name="bare", max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
@serve.ingress(_bare)
class BareIngress:
    """Passes the body on: what any two-tier Serve application does at least."""

    def __init__(self, replica: DeploymentHandle) -> None:
        self._answer: Any = replica.options(stream=True).answer

    @_bare.post("/v1/completions")
    async def complete(self, request: Request) -> Any:
        """One hop there and back."""
        chunks = [chunk async for chunk in self._answer.remote(await request.body())]
        return json.loads(b"".join(chunks))


def measure(*, quick: bool) -> dict[str, Any]:
    """Streamed tokens a second, and the latency we add. Needs no model but its tokenizer."""
    args = {
        "model": {"name": MODEL},
        "replicas": {"count": 1, "num_cpus": 0.1, "max_ongoing_requests": 256},
        "store": {"dram": "128MiB", "ingest": "8MiB"},
    }
    with Serving() as serving:
        progress("starting the echo application and a bare hop")
        config = load_app_config({**args, "api": {"state_dir": None}})
        echo = serving.run("echo", assemble(config, EchoReplica))
        bare = serving.run("bare", BareIngress.bind(BareReplica.bind()))
        return asyncio.run(_measure(echo, bare, quick))


async def _measure(echo: str, bare: str, quick: bool) -> dict[str, Any]:
    prompt = WORD * PROMPT_TOKENS
    one = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    rounds, calls, tokens = (3, 50, 200) if quick else (7, 150, 1000)
    await _latencies(echo, one, 30)
    await _latencies(bare, one, 30)
    ours, bares = [], []
    for _ in range(rounds):  # In turns, so that a slow moment of the machine hits both.
        bares += await _latencies(bare, one, calls)
        ours += await _latencies(echo, one, calls)
    added = statistics.median(ours) - statistics.median(bares)
    progress(f"bare hop {statistics.median(bares) * 1e3:.2f} ms, ours adds {added * 1e3:.2f} ms")
    many = {**one, "max_tokens": tokens, "stream": True}
    rates = [await _rate(echo, many) for _ in range(rounds)]
    progress(f"{statistics.median(rates):,.0f} tokens/s over {CLIENTS} streams")
    return {
        "workload": "echo",
        "prompt_tokens": PROMPT_TOKENS,
        "clients": CLIENTS,
        "offered_tok_s": CLIENTS / STEP_S,
        "stream_tok_s": round(statistics.median(rates)),
        "stream_tok_s_runs": [round(rate) for rate in rates],
        "bare_hop_ms_p50": round(statistics.median(bares) * 1e3, 3),
        "ours_ms_p50": round(statistics.median(ours) * 1e3, 3),
        "added_ms_p50": round(added * 1e3, 3),
    }


async def _latencies(url: str, body: dict[str, Any], calls: int) -> list[float]:
    """Seconds of one call after another on one connection."""
    async with Connection(url) as connection:
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            await connection.post("/v1/completions", body)
            seconds.append(time.perf_counter() - began)
        return seconds


async def _rate(url: str, body: dict[str, Any]) -> float:
    """Tokens a second of all streams together, counted where they arrive."""

    async def stream() -> int:
        async with Connection(url) as connection:
            return await connection.count_events("/v1/completions", body)

    began = time.perf_counter()
    counts = await asyncio.gather(*(stream() for _ in range(CLIENTS)))
    expected = body["max_tokens"]
    # Beside the tokens: the chunk with the finish reason, and [DONE].
    if any(count != expected + 2 for count in counts):
        raise RuntimeError(f"streams of {expected} tokens had {set(counts)} events")
    return CLIENTS * expected / (time.perf_counter() - began)
