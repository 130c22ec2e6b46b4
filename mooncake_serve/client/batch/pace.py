"""How fast jobs go out: pilots before followers, and as many at once as the server takes.

`Pace` bounds what runs at the same time. It grows by one for every full round of answers and halves
when the server says it is overloaded, as TCP does with its window; between two halvings lies at
least one answer's time, so that one burst of refusals counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

START = 4
GROUPS_SHARE = 4
"""One group in flight for each of these jobs at once: prefixes stay warm until they are done."""


class Pace:
    """A limit on concurrent jobs that follows the server."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit` is never exceeded."""
        self._limit = limit
        self._clock = clock
        self._window = float(min(START, limit))
        self._running = 0
        self._halved_s = clock()
        self._free = asyncio.Condition()

    @property
    def window(self) -> int:
        """Jobs that may run at once now."""
        return max(1, int(self._window))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A place for one job."""
        async with self._free:
            await self._free.wait_for(lambda: self._running < self.window)
            self._running += 1
        try:
            yield
        finally:
            async with self._free:
                self._running -= 1
                self._free.notify_all()

    def answered(self) -> None:
        """A job was answered."""
        self._window = min(float(self._limit), self._window + 1 / self._window)

    def refused(self, started_s: float) -> None:
        """The server was overloaded when a job sent at `started_s` arrived."""
        if started_s >= self._halved_s:
            self._window = max(1.0, self._window / 2)
            self._halved_s = self._clock()


async def run_groups(
    groups: Iterable[Sequence[T]], work: Callable[[T], Awaitable[None]], limit: int
) -> None:
    """Run `work` for every member: first a group's first, then its others at once.

    `work` bounds itself with a `Pace`; groups are open for `limit` jobs at once. Raises the first
    exception of `work`, having cancelled the rest.
    """
    waiting = iter(groups)

    async def lane() -> None:
        for members in waiting:
            await work(members[0])
            async with asyncio.TaskGroup() as followers:
                for member in members[1:]:
                    followers.create_task(_run(work, member))

    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(max(2, limit // GROUPS_SHARE)):
                lanes.create_task(lane())
    except BaseExceptionGroup as many:
        raise _first(many) from None


async def _run(work: Callable[[T], Awaitable[None]], member: T) -> None:
    await work(member)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
