"""Long work says on stderr how far it is: a bar on a terminal, elsewhere a line now and then.

stdout belongs to `--json`. A line comes at the start and then every `EVERY_S`, so that a log shows
that something is alive without filling up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

Show = Callable[[float], None]
"""Takes how much is done, of the total that was named."""


@contextmanager
def shown(
    title: str, total: float | None = None, *, size: bool = False, announce: bool = True
) -> Iterator[Show]:
    """Show that `title` goes on, and how much of `total` is done; None says nobody knows.

    `size` says that the numbers are bytes. Without `announce` no line comes before `EVERY_S`, for
    work that is mostly quick.
    """
    if sys.stderr.isatty():
        with _bar(title, total, size) as show:
            yield show
        return
    if announce:
        say(title)
    with _lines(title, total, size) as show:
        yield show


@contextmanager
def _bar(title: str, total: float | None, size: bool) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total is not None:
        columns += [BarColumn(), TextColumn("{task.fields[far]}")]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or 1, far="")

        def show(done: float) -> None:
            bar.update(task, completed=done, far=_far(done, total, size))

        yield show
        bar.update(task, completed=total or 1, far=_far(total or 1, total, size))


@contextmanager
def _lines(title: str, total: float | None, size: bool) -> Iterator[Show]:
    far = 0.0
    ended = threading.Event()

    def show(done: float) -> None:
        nonlocal far
        far = done

    def tell() -> None:
        waited = 0.0
        while not ended.wait(EVERY_S):
            waited += EVERY_S
            said = _far(far, total, size)
            say(f"{title}: {said + ', ' if said else ''}{waited:.0f} s")

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()


def say(line: str) -> None:
    """One line of progress."""
    print(f"mooncake-serve: {line}", file=sys.stderr, flush=True)


def _far(done: float, total: float | None, size: bool) -> str:
    if total is None:
        return ""
    return f"{_amount(done, size)} of {_amount(total, size)}"


def _amount(value: float, size: bool) -> str:
    if not size:
        return f"{value:,.0f}"
    unit = 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}"
