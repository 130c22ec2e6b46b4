"""One generation request from its bytes to its answer, for HTTP and for batches alike.

Every request has one deadline. Nothing slow runs on the event loop: parsing, tokenising and writing
whole answers happen in a small pool of threads, unless they are so small that the way to a thread
and back would take longer. The first events are awaited before anything is answered, so that an
error before the first token has a status of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response

from mooncake_serve.api.gateway import Answer, Gateway, Hints
from mooncake_serve.api.middleware import new_id
from mooncake_serve.api.observe import Observation, Observer
from mooncake_serve.api.prepare import Prepared, prepare
from mooncake_serve.api.schemas import ChatBody, CompletionBody
from mooncake_serve.api.shapes import ChatShape, Shape, TextShape, total_usage
from mooncake_serve.api.stream import Batch, EventStream, collect, first_batch, merge
from mooncake_serve.api.tenancy import Tenant, salted
from mooncake_serve.engine.protocol import GenerationRequest, SamplingParams
from mooncake_serve.logs import current_request
from mooncake_serve.store import Hint

PREPARE_THREADS = 2
QUICK_BYTES = 4096
"""A body of about a thousand tokens: half a millisecond."""
QUICK_TOKENS = 64
SLOW_FIELDS = (b'"response_format"', b'"tools"')
"""Their grammars are compiled to be checked, which may take longer at any size."""

B = TypeVar("B", ChatBody, CompletionBody)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller of a generation says beside its body."""

    tenant: Tenant
    deadline: float
    """On the event loop's clock."""
    pin: int | None = None
    session: str | None = None


@dataclass(slots=True)
class Running:
    """A started request: every choice has been planned."""

    request_id: str
    prepared: Prepared[Any]
    shape: Shape
    answers: list[Answer]
    observed: Observation

    @property
    def route(self) -> dict[str, Any]:
        """Who answers the first choice, and why."""
        return self.answers[0].route

    def batches(self) -> AsyncGenerator[Batch]:
        """Events of all choices. Closing it cancels the request."""
        return merge(self.answers)


class Generator:
    """Runs generation requests on a gateway."""

    def __init__(self, gateway: Gateway, observer: Observer) -> None:
        self._gateway = gateway
        self._observer = observer
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    async def start(self, raw: bytes, kind: type[B], asked: Asked) -> Running:
        """Prepare and plan. The caller must consume `batches`, or they run for nobody."""
        started = time.perf_counter()
        card, codec = await self._gateway.card(), await self._gateway.codec()
        if _is_quick(raw):
            prepared = prepare(raw, kind, card, codec)
        else:
            prepared = await self.in_thread(prepare, raw, kind, card, codec)
        # Not the client's x-request-id, which may come twice.
        request_id = new_id()
        body = prepared.body
        choices = prepared.choices
        shape: Shape
        if isinstance(body, ChatBody):
            shape = ChatShape(
                card.name,
                codec,
                request_id,
                choices=len(choices),
                stream=body.stream,
                usage=body.include_usage,
                tools=prepared.tools,
            )
        else:
            shape = TextShape(
                card.name,
                codec,
                request_id,
                choices=len(choices),
                stream=body.stream,
                usage=body.include_usage,
            )
        answers = await self._plan(request_id, prepared, asked)
        observed = self._observer.observe(card.name, started)
        return Running(request_id, prepared, shape, answers, observed)

    async def whole(self, running: Running) -> dict[str, Any]:
        """The answer as one object, whatever `stream` says."""
        choices = len(running.answers)
        with running.observed:
            async with aclosing(running.batches()) as batches:
                gathered = await collect(batches, choices, running.observed)
        usage = total_usage([each.finish.usage for each in gathered], running.prepared.body.n)
        if usage.completion_tokens <= QUICK_TOKENS:
            return running.shape.whole(gathered, usage)
        return await self.in_thread(running.shape.whole, gathered, usage)

    async def stream(self, running: Running, deadline: float) -> Response:
        """The answer as server-sent events, once the first has come."""
        batches = running.batches()
        try:
            first = await first_batch(batches)
        except BaseException:
            running.observed.end()
            raise
        body = running.prepared.body
        return EventStream(
            running.shape,
            first,
            batches,
            deadline,
            running.observed,
            prompts=len(running.prepared.prompts),
            choices_per_prompt=body.n,
            usage=body.include_usage,
        )

    async def in_thread(self, work: Any, *args: Any) -> Any:
        """Run something slow of the same kind in the same threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def _plan(self, request_id: str, prepared: Prepared[Any], asked: Asked) -> list[Answer]:
        """Choices of one prompt go to one replica, so that it is computed once."""
        answers: list[Answer] = []
        timeout_s = asked.deadline - asyncio.get_running_loop().time()
        try:
            for number, (prompt, sampling) in enumerate(prepared.choices):
                again = number % prepared.body.n > 0
                hints = Hints(
                    pin=asked.pin,
                    session=prepared.body.session_id or asked.session,
                    beside=answers[-1].route["replica"] if again else None,
                )
                one = f"{request_id}-{number}" if number else request_id
                request = _request(one, prompt, sampling, prepared.body, asked.tenant)
                answers.append(await self._gateway.start(request, timeout_s, hints))
        except BaseException:
            for answer in answers:
                answer.abandon()
            raise
        return answers


def _is_quick(raw: bytes) -> bool:
    return len(raw) <= QUICK_BYTES and not any(field in raw for field in SLOW_FIELDS)


def _request(
    request_id: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    body: ChatBody | CompletionBody,
    tenant: Tenant,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        token_ids=prompt,
        sampling=sampling,
        tenant=tenant.name,
        tenant_salt=salted(tenant, body.cache_salt),
        priority=body.priority,
        reuse=body.reuse == "auto",
        hint=_hint(body),
        log_id=current_request(),
    )


def _hint(body: ChatBody | CompletionBody) -> Hint | None:
    if not (body.session_end or body.expected_reuse_s or body.cache_priority):
        return None
    return Hint(
        priority=body.cache_priority,
        session_end=body.session_end,
        expected_reuse_s=body.expected_reuse_s,
    )
