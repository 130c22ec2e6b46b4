"""The model cache: converted weights and digests, shared by every process of the user.

Owns the folder `MOONCAKE_CACHE` (default `~/.cache/mooncake_serve`). An entry is a folder that
appears by rename once it is complete, so a reader never sees half of one; writers take a file
lock, so that two replicas that start together convert once. A crash leaves a `.partial` folder,
which the next writer of the same entry removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_dir() -> Path:
    """The cache's root; created on first use."""
    configured = os.environ.get("MOONCAKE_CACHE")
    root = Path(configured) if configured else Path.home() / ".cache" / "mooncake_serve"
    root.mkdir(parents=True, exist_ok=True)
    return root


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, built by `build(empty_folder)` if it is not there yet."""
    root = cache_dir()
    folder = root / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        build(partial)
        partial.rename(folder)
    return folder


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file; a reader sees the old text or the new, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(text)
    partial.replace(path)
