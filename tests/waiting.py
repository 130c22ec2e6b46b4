"""Waiting without sleeping blindly: every wait of the tests is bounded and says what it saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120.0
"""Bound of every wait; a test that reaches it has hung."""

T = TypeVar("T")


def eventually(probe: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """Poll until `probe` gives something true; a bounded wait, not a timing assertion."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {timeout_s} s")
        time.sleep(0.02)
