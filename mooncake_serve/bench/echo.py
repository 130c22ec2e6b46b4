"""`bench serve --echo`: what HTTP, ingress and router cost, with an engine that only echoes.

The application is the product's: proxy, ingress, tokenising, plan, request router, replica, stream.
Only the engine is another: each step gives every running request its next token, as a batch does,
without computing anything. Beside it runs a bare Serve hop, an ingress that passes the body to a
replica, behind the same proxy, in turns with ours; the difference of the medians is what we add.
The same prompts as token ids, and the tokenizer alone, say how much of it is tokenising.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.serve.handle import DeploymentHandle

from mooncake_serve.app import assemble
from mooncake_serve.bench.http import Connection
from mooncake_serve.bench.report import progress
from mooncake_serve.bench.serving import Serving
from mooncake_serve.bench.workloads import prose
from mooncake_serve.client import Client
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
from mooncake_serve.models import load_tokenizer
from mooncake_serve.replica import ModelReplica

MODEL = "echo"
PROMPT_TOKENS = 512
PROMPTS = 64
CLIENTS = 16
WARM_UP_CALLS = 50
STEP_S = 1e-3
"""Of a step that gives every request a token: 16 clients are offered 16,000 tokens a second."""
CONTEXT = 8192
WORD = " the"
"""One token of the embedded model's tokenizer."""

ARGS: dict[str, Any] = {
    "model": {"name": MODEL},
    "replicas": {"count": 1, "num_cpus": 0.1, "max_ongoing_requests": 256},
    "store": {"dram": "128MiB", "ingest": "8MiB"},
    "api": {"state_dir": None},
}


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
            if self._running:
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
        due = time.monotonic()
        while not self._closed:
            with self._changed:
                if not self._running:
                    self._changed.wait_for(lambda: self._running or self._closed)
                    due = time.monotonic()
                for running in list(self._running.values()):
                    self._step(running)
            due += STEP_S  # A step that began late is followed by the next at once.
            time.sleep(max(0.0, due - time.monotonic()))

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


class BareReplica:
    """Answers at once."""

    async def answer(self, body: bytes) -> AsyncGenerator[bytes]:
        """The same few bytes for everybody."""
        del body
        yield json.dumps({"choices": [{"index": 0, "text": WORD}]}).encode()


class _BareFront:
    def __init__(self, replica: DeploymentHandle) -> None:
        self._answer: Any = replica.options(stream=True).answer

    async def complete(self, request: Request) -> Response:
        chunks = [chunk async for chunk in self._answer.remote(await request.body())]
        return Response(b"".join(chunks), media_type="application/json")


@serve.ingress()
class BareIngress:
    """Passes the body on: what any two-tier Serve application does at least."""

    def __init__(self, replica: DeploymentHandle) -> None:
        self._front = _BareFront(replica)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """As the product's ingress does."""
        app = FastAPI()
        app.add_api_route("/v1/completions", self._front.complete, methods=["POST"])
        return app


def build(args: dict[str, Any]) -> serve.Application:
    """The product's application with the echo in its replicas."""
    return assemble(load_app_config(args), EchoReplica)


def build_bare(args: dict[str, Any]) -> serve.Application:
    """The bare hop."""
    del args
    options: Any = {"max_ongoing_requests": 256, "ray_actor_options": {"num_cpus": 0}}
    replica = serve.deployment(name="bare-replica", **options)(BareReplica)
    return serve.deployment(name="bare", **options)(BareIngress).bind(replica.bind())


def measure(*, quick: bool) -> dict[str, Any]:
    """Streamed tokens a second, and the latency we add. Needs no model but its tokenizer."""
    with Serving() as serving:
        progress("starting the echo application and a bare hop")
        echo = serving.run("echo", ARGS, f"{__name__}:build")
        bare = serving.run("bare", {}, f"{__name__}:build_bare")
        prompts = _prompts(echo)
        measured = asyncio.run(_measure(echo, bare, prompts, quick))
    return {**measured, "tokenize_ms_p50": _ms(_tokenizing(list(prompts)))}


def _prompts(url: str) -> dict[str, list[int]]:
    """Different texts of exactly PROMPT_TOKENS tokens, with their ids; every word is one."""
    texts = [prose(PROMPT_TOKENS, seed) for seed in range(PROMPTS)]
    with Client(url) as client:
        prompts = {text: list(client.tokenize(text).ids) for text in texts}
    if {len(ids) for ids in prompts.values()} != {PROMPT_TOKENS}:
        raise RuntimeError(f"a prompt does not have {PROMPT_TOKENS} tokens")
    return prompts


def _tokenizing(texts: list[str]) -> list[float]:
    """Seconds that the ingress's tokenizer takes for each text, in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encode = load_tokenizer(load_app_config(ARGS).model).encode
    for text in texts:
        encode(text)
    seconds = []
    for text in texts:
        began = time.perf_counter()
        encode(text)
        seconds.append(time.perf_counter() - began)
    return seconds


async def _measure(
    echo: str, bare: str, prompts: dict[str, list[int]], quick: bool
) -> dict[str, Any]:
    rounds, calls, tokens = (3, 60, 500) if quick else (7, 200, 2000)
    one = [_body(prompt, max_tokens=1) for prompt in prompts]
    ids = [_body(prompt, max_tokens=1) for prompt in prompts.values()]
    many = [_body(prompt, max_tokens=tokens, stream=True) for prompt in prompts]
    for url, bodies in ((echo, one), (echo, ids), (bare, one)):
        await _latencies(url, bodies, WARM_UP_CALLS)
    ours, by_ids, bares = [], [], []
    for _ in range(rounds):  # In turns, so that a slow moment of the machine hits all.
        bares += await _latencies(bare, one, calls)
        ours += await _latencies(echo, one, calls)
        by_ids += await _latencies(echo, ids, calls)
    hop = statistics.median(bares)
    added = statistics.median(ours) - hop
    progress(f"bare hop {hop * 1e3:.2f} ms, ours adds {added * 1e3:.2f} ms")
    rates = [await _rate(echo, many, tokens) for _ in range(rounds)]
    progress(f"{statistics.median(rates):,.0f} tokens/s over {CLIENTS} streams")
    return {
        "workload": "echo",
        "prompt_tokens": PROMPT_TOKENS,
        "clients": CLIENTS,
        "answer_tokens": tokens,
        "offered_tok_s": round(CLIENTS / STEP_S),
        "stream_tok_s": round(statistics.median(rates)),
        "stream_tok_s_runs": [round(rate) for rate in rates],
        "bare_hop_ms_p50": _ms(bares),
        "ours_ms_p50": _ms(ours),
        "added_ms_p50": round(added * 1e3, 3),
        "added_ids_ms_p50": round((statistics.median(by_ids) - hop) * 1e3, 3),
    }


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _body(prompt: str | list[int], **options: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **options}).encode()


async def _latencies(url: str, bodies: list[bytes], calls: int) -> list[float]:
    """Seconds of one call after another on one connection."""
    seconds = []
    async with Connection(url) as connection:
        requests = [connection.encode("/v1/completions", body) for body in bodies]
        for number in range(calls):
            began = time.perf_counter()
            await connection.ask(requests[number % len(requests)])
            seconds.append(time.perf_counter() - began)
    return seconds


async def _rate(url: str, bodies: list[bytes], tokens: int) -> float:
    """Tokens a second of all streams together, counted where they arrive."""

    async def stream(body: bytes) -> int:
        async with Connection(url) as connection:
            chunks = await connection.stream(connection.encode("/v1/completions", body))
        return sum(choice.text == WORD for chunk in chunks for choice in chunk.choices)

    began = time.perf_counter()
    counts = await asyncio.gather(*(stream(bodies[n % len(bodies)]) for n in range(CLIENTS)))
    seconds = time.perf_counter() - began
    if set(counts) != {tokens}:
        raise RuntimeError(f"streams of {tokens} tokens had {sorted(set(counts))}")
    return CLIENTS * tokens / seconds
