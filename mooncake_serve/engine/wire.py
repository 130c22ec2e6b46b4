"""Events between a replica and its ingress: MessagePack, with the types checked on arrival.

A message holds the events of one request that were ready at the same moment, and who sent it. It
crosses Ray as bytes: both ends together take a twentieth of the time that pickling it took.
Of errors only those of our tree may cross; they arrive as the same class with the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct, ValidationError, msgpack

from mooncake_serve.engine.protocol import Event
from mooncake_serve.errors import EngineFailed, RequestError


class Message(Struct, frozen=True, array_like=True):
    """Events of one request, at least one."""

    replica: str
    events: list[Event]


def pack(replica: str, events: list[Event]) -> bytes:
    """A message's bytes. Raises TypeError for a FailEvent whose error is not a RequestError."""
    return _encoder.encode(Message(replica, events))


def unpack(data: bytes) -> Message:
    """The message. Raises EngineFailed when the bytes are none."""
    try:
        return _decoder.decode(data)
    except ValidationError as err:
        raise EngineFailed(f"a replica of another version answered: {err}") from err


def _plain(error: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(error, RequestError):
        raise TypeError(f"{type(error).__name__} may not leave the replica")
    return type(error).__name__, vars(error)


def _error(kind: type, fields: Any) -> RequestError:
    assert kind is Exception
    name, values = fields
    error = RequestError.__new__(_kinds[name], values["message"])
    error.__dict__.update(values)
    return error


def _tree(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


_kinds = {kind.__name__: kind for kind in _tree(RequestError)}
_encoder = msgpack.Encoder(enc_hook=_plain)
_decoder = msgpack.Decoder(Message, dec_hook=_error)
