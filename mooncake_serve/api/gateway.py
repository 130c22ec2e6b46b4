"""The seam between HTTP and the model: what the front needs of the rest of the system.

`Gateway` is implemented over Ray Serve in `api/ray_gateway.py`, and over a fake engine in tests.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mooncake_serve.engine.protocol import Event, GenerationRequest

Reason = Literal["least_time", "pinned", "beside", "replica_died", "elsewhere"]
"""Why a replica answers: its time to the first token is expected to be the least, the request names
it, another choice of the prompt is there, the one before died (and of the others its time is the
least), or Serve sent the request there because the planned one was gone or full."""

REROUTED: frozenset[Reason] = frozenset({"replica_died", "elsewhere"})
"""Reasons for another replica than the planned one."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of the model."""

    name: str
    max_context: int
    vocab_size: int
    exact: bool
    created: int


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of where it should go."""

    pin: int | None = None
    """The replica, by its index: for tests and demonstrations."""
    session: str | None = None
    """Among equally good replicas, the one that last answered this session."""
    beside: str | None = None
    """The replica of another choice of the same prompt, so that the prompt is computed once."""


class Codec(Protocol):
    """Text to token ids, as the model wants it. Slow: call it off the event loop."""

    @property
    def chat_template(self) -> str:
        """The template's source, or nothing."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt."""
        ...

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        ...


class Answer(Protocol):
    """A running request."""

    @property
    def route(self) -> dict[str, Any]:
        """Who answers and why: replica, `Reason`, predicted seconds, matched tokens."""
        ...

    @property
    def prefix(self) -> bytes | None:
        """Key of the prompt's first whole block, if it has one."""
        ...

    def events(self) -> AsyncGenerator[list[Event]]:
        """Batches of events; the last ends in a FinishEvent or FailEvent. Closing it cancels."""
        ...

    def abandon(self) -> None:
        """Give up a request whose events were never asked for."""
        ...


class Gateway(Protocol):
    """Plans requests and runs them."""

    async def card(self) -> ModelCard:
        """The model. Raises Unavailable while no replica runs."""
        ...

    async def codec(self) -> Codec:
        """The model's tokenizer."""
        ...

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> Answer:
        """Plan and send a request. Raises Overloaded, Unavailable or InvalidRequest."""
        ...
