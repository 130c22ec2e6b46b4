"""Files that a power failure leaves whole: either the old one is there, or all of the new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def place(file: IO[Any], path: Path) -> None:
    """Give an open, written file its final name, in the folder that it is in; durable on return.

    The bytes first, then the name, then the folder that holds the name. Blocking; raises OSError.
    """
    file.flush()
    os.fsync(file.fileno())
    Path(file.name).replace(path)
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
