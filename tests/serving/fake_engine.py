"""A deterministic engine without a model: each request is answered on the engine's thread."""

from __future__ import annotations

import threading

from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    OnEvent,
    TokenEvent,
    Usage,
)


class FakeEngine:
    """Answers `max_tokens` tokens; a test holds it back with `gate`, or makes it fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.failure: Exception | None = None

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        threading.Thread(target=self._run, args=(request, on_event), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def _run(self, request: GenerationRequest, on_event: OnEvent) -> None:
        tokens = request.sampling.max_tokens
        on_event(TokenEvent(0, "0"))
        self.gate.wait(20)
        for token in range(1, tokens):
            on_event(TokenEvent(token, str(token)))
        on_event(self._end(Usage(len(request.token_ids), tokens, 0)))

    def _end(self, usage: Usage) -> Event:
        return FailEvent(self.failure) if self.failure else FinishEvent("length", usage)

    def close(self) -> None:
        """Nothing to give back."""
