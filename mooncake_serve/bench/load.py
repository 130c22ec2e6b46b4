"""The load generator: sends sessions in a closed or an open loop, and measures every request.

Closed: a number of clients, each with one request at a time. Open: sessions start at their arrival
times whatever the server does, so that queues show: the client must neither retry nor hold requests
back. A request that fails or is refused is counted, and its session goes no further.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_serve.bench.report import quantile
from mooncake_serve.bench.workloads import Session, Turn
from mooncake_serve.client import AsyncClient
from mooncake_serve.errors import APIError


@dataclass(slots=True)
class Measured:
    """All requests of a run. Seconds."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0
    wall_s: float = 0.0

    def report(self) -> dict[str, Any]:
        """The keys of every load report."""
        return {
            "requests": len(self.e2e_s) + self.failed,
            "failed": self.failed,
            "wall_s": round(self.wall_s, 3),
            "ttft_s": _summary(self.ttft_s),
            "itl_s": _summary(self.itl_s),
            "e2e_s": _summary(self.e2e_s),
            "output_tok_s": round(self.output_tokens / self.wall_s, 1) if self.wall_s else None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_share": round(self.cached_tokens / max(1, self.prompt_tokens), 4),
        }


def _summary(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    ordered = sorted(values)
    return {
        "mean": round(sum(ordered) / len(ordered), 5),
        "p50": round(quantile(ordered, 0.5), 5),
        "p99": round(quantile(ordered, 0.99), 5),
    }


async def closed_loop(
    client: AsyncClient, sessions: Sequence[Session], concurrency: int
) -> Measured:
    """`concurrency` clients take sessions one after another."""
    measured = Measured()
    waiting = iter(sessions)

    async def one_client() -> None:
        for session in waiting:
            await _session(client, session, measured)

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    measured.wall_s = time.perf_counter() - began
    return measured


async def open_loop(
    client: AsyncClient, sessions: Sequence[Session], speed: float = 1.0
) -> Measured:
    """Every session starts at its arrival, `speed` times as fast."""
    measured = Measured()
    began = time.perf_counter()

    async def arrive(session: Session) -> None:
        await asyncio.sleep(session.arrival_s / speed - (time.perf_counter() - began))
        await _session(client, session, measured)

    await asyncio.gather(*(arrive(session) for session in sessions))
    measured.wall_s = time.perf_counter() - began
    return measured


async def _session(client: AsyncClient, session: Session, measured: Measured) -> None:
    messages: list[dict[str, str]] = []
    for turn in session.turns:
        try:
            text = await _request(client, messages, turn, measured)
        except APIError:
            measured.failed += 1
            return
        messages.append({"role": "assistant", "content": text})


async def _request(
    client: AsyncClient, messages: list[dict[str, str]], turn: Turn, measured: Measured
) -> str:
    """One streamed, greedy answer of exactly `max_tokens`."""
    options: dict[str, Any] = {
        "max_tokens": turn.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = last = time.perf_counter()
    first: float | None = None
    gaps: list[float] = []
    if turn.token_ids:
        stream = await client.complete(list(turn.token_ids), stream=True, **options)
    else:
        messages.append({"role": "user", "content": turn.text})
        stream = await client.chat(messages, stream=True, **options)
    async with stream:
        async for chunk in stream:
            now = time.perf_counter()
            if chunk.text and first is None:
                first = now - began
            elif chunk.text:
                gaps.append(now - last)
            last = now
        answer = await stream.result()
    measured.e2e_s.append(time.perf_counter() - began)
    measured.ttft_s.append(first if first is not None else measured.e2e_s[-1])
    measured.itl_s += gaps
    measured.prompt_tokens += answer.usage.prompt_tokens
    measured.cached_tokens += answer.usage.cached_tokens
    measured.output_tokens += answer.usage.completion_tokens
    return answer.text
