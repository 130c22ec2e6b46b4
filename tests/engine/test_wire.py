"""Events between processes: the same values on the other side, and nothing but our errors."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from mooncake_serve.engine.wire import pack, unpack
from mooncake_serve.errors import ContextTooLong, EngineFailed, Overloaded, RateLimited


def test_events_arrive_as_they_were_sent() -> None:
    top = (TokenLogprob(7, -0.25), TokenLogprob(9, float("-inf")))
    events: list[Event] = [
        TokenEvent(7, " ünï💡\x00\n"),
        TokenEvent(8, "", TokenLogprob(8, -1e-5), top),
        FinishEvent("stop", Usage(10, 2, 8, 3, 5), "rest"),
    ]
    message = unpack(pack("model#abc", events))
    assert message.replica == "model#abc"
    assert message.events == events


@pytest.mark.parametrize(
    "error",
    [
        EngineFailed("broke", code="cancelled"),
        ContextTooLong("long", param="prompt", code="context_length_exceeded"),
        Overloaded("busy", retry_after_s=2.5),
        RateLimited("too often", retry_after_s=1.5),
    ],
)
def test_errors_keep_their_class_and_fields(error: Exception) -> None:
    [event] = unpack(pack("r", [FailEvent(error)])).events
    assert isinstance(event, FailEvent)
    assert type(event.error) is type(error)
    assert str(event.error) == str(error)
    assert vars(event.error) == vars(error)


def test_other_errors_do_not_leave() -> None:
    with pytest.raises(TypeError, match="OSError may not leave"):
        pack("r", [FailEvent(OSError("secret path"))])


@pytest.mark.parametrize("wrong", ["text", ["r"], ["r", [["token", "7", "a"]]], ["r", [["x"]]]])
def test_what_is_no_message_is_refused(wrong: object) -> None:
    with pytest.raises(EngineFailed, match="another version"):
        unpack(msgspec.msgpack.encode(wrong))
