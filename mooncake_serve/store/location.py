"""Where a node's store listens: one socket per Ray node in a directory only its owner may enter."""

from __future__ import annotations

import os
from pathlib import Path

from mooncake_serve.config import StoreSettings

NODE_ID_CHARS = 16
"""Of the Ray node id: enough to be unique, short enough for a socket's 108-byte path."""


def socket_dir(settings: StoreSettings) -> Path:
    """`store.socket_dir`, or a directory of this user's under the runtime directory."""
    if settings.socket_dir:
        return Path(settings.socket_dir)
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return Path(base) / f"mooncake-serve-{os.getuid()}"


def socket_path(settings: StoreSettings, node_id: str) -> Path:
    """The socket of the store on the Ray node `node_id`."""
    return socket_dir(settings) / f"{node_id[:NODE_ID_CHARS]}.sock"


def sockets(settings: StoreSettings) -> list[Path]:
    """Sockets of this machine's stores, newest first; some may have no store behind them."""
    found = socket_dir(settings).glob("*.sock")
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
